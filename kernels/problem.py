"""What is to be computed: receives shapes, dtypes and layouts, hands on a frozen `Problem`.

D = act(alpha · op(A) · op(B) + beta · C + bias), row-major. Nothing here imports numpy or torch, so every
process may use it.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field, replace
from enum import StrEnum

_FP32 = struct.Struct("<f")


class DType(StrEnum):
    """Element types of the service, named as in its API."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"
    FP64 = "fp64"

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}[self.value]

    @property
    def compute(self) -> DType:
        """Type of the accumulator and of the epilogue's arithmetic: fp64 for fp64, else fp32."""
        return DType.FP64 if self is DType.FP64 else DType.FP32


class Activation(StrEnum):
    """Function applied to each element after bias: relu keeps a NaN, gelu is the erf form."""

    NONE = "none"
    RELU = "relu"
    GELU = "gelu"
    SILU = "silu"


class Precision(StrEnum):
    """`ieee`: fp32 products are exact fp32; `tf32`: fp32 operands may be cut to 10 mantissa bits."""

    IEEE = "ieee"
    TF32 = "tf32"


class BiasDim(StrEnum):
    """Which dimension of D a bias vector runs along."""

    N = "n"
    M = "m"


class Unsupported(Exception):
    """A variant can't take a problem; the text says why and reads on from "because"."""

    def __init__(self, because: str) -> None:
        super().__init__(because)
        self.because = because


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What follows the product. `bias` None means no bias; `c` says whether a C is given."""

    alpha: float = 1.0
    beta: float = 0.0
    c: bool = False
    bias: BiasDim | None = None
    activation: Activation = Activation.NONE

    @property
    def reads_c(self) -> bool:
        """C is read only where it counts: a NaN in it doesn't spread through beta = 0."""
        return self.c and self.beta != 0.0

    @property
    def reads_ab(self) -> bool:
        """A and B are not read where alpha is 0."""
        return self.alpha != 0.0


@dataclass(frozen=True, slots=True)
class Problem:
    """One GEMM, or `batch` of them with the same shapes.

    Stored shapes: A [M, K] ([K, M] with trans_a), B [K, N] ([N, K] with trans_b), C and D [M, N], each with a
    leading batch where batch > 1 (`a_broadcast` and so on: that operand has batch 1). Leading dimensions are
    in elements; 0 means compact. `aligned` is the largest power of two, up to 128, that divides the addresses
    of D's rows in bytes (1: columns are apart too). Where A and B lie matters to Steps 4 to 8 alone: what TMA
    can't address of them is packed before it reaches the Step 9 family.

    The epilogue becomes the one that is computed: alpha and beta are rounded to the compute type (a kernel takes
    them as fp32), and with K = 0 alpha is 0, whatever was given.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: DType = DType.FP16
    out_dtype: DType = DType.FP16
    trans_a: bool = False
    trans_b: bool = False
    epilogue: Epilogue = field(default_factory=Epilogue)
    precision: Precision = Precision.IEEE
    batch_invariant: bool = True
    a_broadcast: bool = False
    b_broadcast: bool = False
    lda: int = 0
    ldb: int = 0
    ldc: int = 0
    ldd: int = 0
    aligned: int = 128

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "batch"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        compute, tail = self.dtype.compute, self.epilogue
        # Without K the product is 0, also where IEEE's alpha · 0 would be NaN.
        alpha = _rounded(tail.alpha, compute) if self.k else 0.0
        beta = _rounded(tail.beta, compute)
        if (alpha, beta) != (tail.alpha, tail.beta):
            object.__setattr__(self, "epilogue", replace(tail, alpha=alpha, beta=beta))

    @property
    def flops(self) -> int:
        """Floating-point operations of the product: 2·M·N·K·batch."""
        return 2 * self.m * self.n * self.k * self.batch

    @property
    def bytes_read(self) -> int:
        """The fewest bytes to read: each operand once."""
        a = self.m * self.k * (1 if self.a_broadcast else self.batch)
        b = self.k * self.n * (1 if self.b_broadcast else self.batch)
        c = self.m * self.n * self.batch if self.epilogue.reads_c else 0
        return (a + b + c) * self.dtype.itemsize

    @property
    def bytes_written(self) -> int:
        """Bytes of D."""
        return self.m * self.n * self.batch * self.out_dtype.itemsize

    @property
    def leading(self) -> tuple[int, int, int, int]:
        """Leading dimensions of A, B, C, D in elements, compact ones filled in."""
        return (
            self.lda or (self.m if self.trans_a else self.k),
            self.ldb or (self.k if self.trans_b else self.n),
            self.ldc or self.n,
            self.ldd or self.n,
        )


def _rounded(x: float, compute: DType) -> float:
    """`x` in the compute type, to nearest even: infinite or 0 beyond its range."""
    if compute is DType.FP64:
        return x
    try:
        return float(_FP32.unpack(_FP32.pack(x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)
