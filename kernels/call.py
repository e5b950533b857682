"""How product kernels are called: receives a `Problem` and where its operands lie, hands on the arguments.

Every function of the Step 9 families (kernels/hopper, kernels/blackwell) has this one signature, so one
launcher serves all architectures, variants and types:

    function(a, b, d, d_batch, d_row, d_column, c, c_batch, c_row, c_column,
             bias, alpha, beta, code, batch, ctas, raster)

a, b      tensors (DLPack, on the device) of the logical operands: op(A) as [La, M, K], op(B) as [Lb, K, N],
          where La, Lb are `batch` or 1 (broadcast). One of the last two strides is 1: which one, and the
          dtype, are fixed at compile time (`Compiled.function` names the function for a problem). Sizes are
          32-bit, strides 64-bit. The operand starts at a multiple of 16 bytes and its other strides are such
          multiples too; a dimension of size 1 carries one as well, as `Strides.normal` gives it.
d, c, bias  int: addresses on the device; 0 where there is none. Strides of D and C are in their own elements;
          0 broadcasts. `code` says which types lie there. Functions that store by TMA need d_column = 1, the
          output type that they were compiled for, and d, d_row, d_batch and the length of a row in multiples
          of 16 bytes (TMA would write past a row that ends within one); those named `plain` take any.
          D may be C itself (same address and strides); it may not overlap A or B. The bias is contiguous.
alpha, beta  float (fp32). alpha = 0: neither A nor B is read. C is read only if `code` says there is one.
code      int: `Code.pack` below.
batch     int: number of products.
ctas      int: thread blocks that can be resident at once (SMs times blocks an SM); bounds a persistent grid.
raster    int: order in which tiles are visited, for L2: groups of that many rows of tiles (negative: of
          columns, where the kernel can); 0 leaves it to the kernel.

The stream is the caller's current one (tvm-ffi's environment stream, which a torch tensor among the arguments
carries in). A launch is asynchronous, allocates nothing and may be captured into a graph; it begins with
`griddepcontrol.wait`, so it may follow any other launch. M, N, K and batch are at least 1: what is empty is
the launcher's. There is no workspace: split-K adds its parts inside a cluster. M, N and K stay under
2**31 - 512.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kernels.device import Device
from kernels.problem import Activation, BiasDim, DType, Problem

_ACTIVATION = {Activation.NONE: 0, Activation.RELU: 1, Activation.GELU: 2, Activation.SILU: 3}
_TYPE = {DType.FP16: 1, DType.BF16: 2, DType.FP32: 3}

BIAS_ALONG_M = 1 << 6


class Compiled(Protocol):
    """A `kernels.selector.Variant` that is launched by the convention above."""

    @property
    def name(self) -> str:
        """Name of the variant, as `Variant.name`."""
        ...

    def function(self, problem: Problem) -> str:
        """Name, in the build's manifest, of the compiled function for a problem that the variant supports."""
        ...

    def blocks(self, problem: Problem, resident: int) -> int:
        """Value of the argument `ctas`, where `resident` blocks fit the device at once."""
        ...

    def raster(self, problem: Problem, device: Device) -> int:
        """Value of the argument `raster` that suits the problem."""
        ...


@dataclass(frozen=True, slots=True)
class Code:
    """The `code` argument, in bits: 0-1 activation, 2-3 type of C, 4-5 of the bias, 6 bias along M, 7-8 of D.

    Activations: 0 none, 1 relu, 2 gelu (erf), 3 silu. Types: 0 there is none, 1 fp16, 2 bf16, 3 fp32.
    """

    activation: Activation = Activation.NONE
    c: DType | None = None
    bias: DType | None = None
    bias_dim: BiasDim = BiasDim.N
    d: DType = DType.FP16

    def pack(self) -> int:
        """As one integer."""
        word = _ACTIVATION[self.activation] | _TYPE[self.d] << 7
        if self.c is not None:
            word |= _TYPE[self.c] << 2
        if self.bias is not None:
            word |= _TYPE[self.bias] << 4
            if self.bias_dim is BiasDim.M:
                word |= BIAS_ALONG_M
        return word


def code_of(problem: Problem, *, c: DType | None = None, bias: DType | None = None) -> int:
    """The `code` of a problem; c and bias are the types of what lies there (default: the operands' own)."""
    e = problem.epilogue
    return Code(
        activation=e.activation,
        c=(c or problem.dtype) if e.reads_c else None,
        bias=(bias or problem.dtype) if e.bias is not None else None,
        bias_dim=e.bias or BiasDim.N,
        d=problem.out_dtype,
    ).pack()


@dataclass(frozen=True, slots=True)
class Strides:
    """Strides of a 3-D view in elements."""

    batch: int
    row: int
    column: int

    def normal(self, batch: int, rows: int, columns: int, *, column_major: bool) -> Strides:
        """The same view with the strides of size-1 dimensions made what a compiled function expects.

        The contiguous dimension gets stride 1, another of size 1 the next multiple of 128 elements past what
        the view spans: a multiple of 16 bytes for every type.
        """
        row, column, layer = self.row, self.column, self.batch
        if column_major:
            row = 1 if rows == 1 else row
            column = _up(rows) if columns == 1 else column
        else:
            column = 1 if columns == 1 else column
            row = _up(columns) if rows == 1 else row
        if batch == 1:
            layer = _up(max(row * rows, column * columns))
        return Strides(layer, row, column)


def _up(elements: int) -> int:
    return -(-elements // 128) * 128
