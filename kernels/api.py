"""`kernels.gemm`, `gemm_grouped`: receive torch tensors of a CPU or GPU, hand on act(alpha·A·B + beta·C + bias).

Any strides are taken: what TMA can't address is packed first (kernels/runtime.py). Work goes to the caller's
current stream, and may be captured into a CUDA graph once the same product has run before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from kernels import reference
from kernels.device import describe_cpu
from kernels.operands import Operands, dtype_of
from kernels.problem import Activation, BiasDim, DType, Epilogue, Precision, Problem, Unsupported
from kernels.runtime import Runtime, runtime
from kernels.selector import Choice, choose


def gemm(
    a: Any,
    b: Any,
    *,
    c: Any = None,
    bias: Any = None,
    alpha: float = 1.0,
    beta: float | None = None,
    bias_dim: Literal["n", "m"] = "n",
    activation: Literal["none", "relu", "gelu", "silu"] | None = None,
    out: Any = None,
    out_dtype: Any = None,
    precision: Literal["ieee", "tf32"] | None = None,
    batch_invariant: bool = True,
    variant: str = "auto",
) -> Any:
    """D = act(alpha · A·B + beta·C + bias), one rounding at the end. Returns `out`, or a new tensor.

    a [M, K] or [batch, M, K], b [K, N] or [batch, K, N], c and out [M, N] or [batch, M, N]; a batch of 1
    broadcasts. A and B share a dtype: fp16, bf16, fp32 or fp64. `beta` defaults to 1 with `c`, else 0;
    `out_dtype` to A's. `out` may be `c` itself and may overlap C and the bias, which are then copied; it may not
    overlap A or B. alpha and beta are rounded to fp32 (to fp64 where A is fp64): infinite above its range, 0 below.

    precision: "tf32" lets cuBLAS round fp32 operands to TF32 ("ieee", the default, never does). torch's setting is for
    the whole process: fp32 products that other threads queue at that moment may be TF32 too.
    batch_invariant: a row's bits depend neither on M nor on other rows; without it the fastest variant runs.
    Raises TypeError or ValueError for what can't be meant, kernels.problem.Unsupported where the named
    variant can't take the product. No gradients are recorded; a gradient that needs what `out` held is an error in
    backward, as with torch.mm.
    """
    options = _options(alpha, beta, bias_dim, activation, out_dtype, precision, batch_invariant)
    call = _Call(a, b, c, bias, out, options)
    if out is not None:
        _overwrites(out)
    if a.is_cuda:
        import torch

        with torch.cuda.device(a.device):
            if call.d.numel():
                _on_gpu(runtime(a.device.index), call.problem, call, variant)
    else:
        _on_cpu(call.problem, call, variant)
    return call.result


def choice_for(problem: Problem, device: str | int = "cpu", variant: str = "auto") -> Choice:
    """What `gemm` would run for a problem, and why: on the CPU, or on GPU number `device`."""
    if device == "cpu":
        return _cpu_choice(problem, variant)
    return runtime(int(device)).choose(problem, variant)


def gemm_grouped(
    a: Sequence[Any],
    b: Sequence[Any],
    *,
    c: Sequence[Any] | None = None,
    bias: Sequence[Any] | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    bias_dim: Literal["n", "m"] = "n",
    activation: Literal["none", "relu", "gelu", "silu"] | None = None,
    out: Sequence[Any] | None = None,
    out_dtype: Any = None,
    precision: Literal["ieee", "tf32"] | None = None,
    batch_invariant: bool = True,
) -> list[Any]:
    """As many products as `a` has, of any shapes: `gemm` of each, in as few launches as pays. Returns the results.

    Sequences hold one tensor a product, as `gemm` takes it; all lie on one device. No tensor of `out` may share
    memory with another product's tensors. Where the GPU has a grouped kernel, products of one input type and
    layout share a launch if that is expected to be quicker; such a launch is not captured into a CUDA graph.
    """
    lists = {"a": a, "b": b, "c": c, "bias": bias, "out": out}
    for name, each in lists.items():
        if each is not None and len(each) != len(a):
            raise ValueError(f"{name} has {len(each)} tensors, a has {len(a)}")
    if any(x.device != a[0].device for x in a):
        raise ValueError("all products of a group must be on one device")
    options = _options(alpha, beta, bias_dim, activation, out_dtype, precision, batch_invariant)
    tensors = zip(*([None] * len(a) if each is None else each for each in lists.values()), strict=True)
    calls = [_Call(x, y, own_c, own_bias, own_out, options) for x, y, own_c, own_bias, own_out in tensors]
    if out is not None:
        _apart(calls)
        for each in out:
            _overwrites(each)
    if a and a[0].is_cuda:
        import torch

        there = [(call.problem, call.operands) for call in calls if call.d.numel()]
        with torch.cuda.device(a[0].device):
            runtime(a[0].device.index).run_group(there)
    else:
        for call in calls:
            _on_cpu(call.problem, call, "auto")
    return [call.result for call in calls]


def _apart(calls: Sequence[_Call]) -> None:
    """Raise ValueError where a result shares memory with another product's tensors."""
    spans = sorted(
        (
            (x.data_ptr(), x.data_ptr() + nbytes, i, name, x)
            for i, call in enumerate(calls)
            for name, x, nbytes in call.spans()
        ),
        key=lambda each: each[:4],
    )
    for number, (_, end, i, name, x) in enumerate(spans):
        for start, _, j, other, y in spans[number + 1 :]:
            if start >= end:
                break
            if i == j or "d" not in (name, other) or not overlap(_flat(x), _flat(y)):
                continue
            writer, reader, of = (i, j, other) if name == "d" else (j, i, name)
            raise ValueError(f"out of product {writer} overlaps {of} of product {reader}")


def _overwrites(out: Any) -> None:
    """Tell autograd, which doesn't see writes by address, that what it kept of `out` is gone."""
    import torch

    torch.autograd.graph.increment_version(out)


def _flat(x: Any) -> Any:
    """A bias or a matrix as a view of three dimensions."""
    return x if x.dim() == 3 else x[(None,) * (3 - x.dim())]


class _Options(NamedTuple):
    """What is asked besides the tensors."""

    alpha: float
    beta: float | None
    bias_dim: BiasDim
    activation: Activation
    out_dtype: Any
    precision: Precision
    batch_invariant: bool


def _options(
    alpha: float,
    beta: float | None,
    bias_dim: str,
    activation: str | None,
    out_dtype: Any,
    precision: str | None,
    batch_invariant: bool,
) -> _Options:
    return _Options(
        float(alpha),
        None if beta is None else float(beta),
        BiasDim(bias_dim),
        Activation(activation or "none"),
        out_dtype,
        Precision(precision or "ieee"),
        bool(batch_invariant),
    )


class _Facts(NamedTuple):
    """All of a tensor but where it lies and what it holds."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    device: Any

    @classmethod
    def of(cls, x: Any, name: str) -> _Facts:
        """Raises TypeError for what is no tensor of torch."""
        try:
            return cls(x.shape, x.stride(), x.dtype, x.device)
        except (AttributeError, TypeError):
            raise TypeError(f"{name} must be a torch tensor, not {type(x).__name__}") from None

    @property
    def three(self) -> _Facts:
        """Of the tensor as [layers, rows, columns]."""
        if len(self.shape) == 3:
            return self
        return self._replace(shape=(1, *self.shape), stride=(self.shape[0] * self.stride[0], *self.stride))

    @property
    def nbytes(self) -> int:
        """From the first byte to behind the last, at least one element's."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        size: int = self.dtype.itemsize
        return (last + 1) * size


@dataclass(frozen=True, slots=True)
class _Plan:
    """A product without its memory: `problem` lacks where C and D lie, as `described` adds it.

    `shape` is D's, three-dimensional; `flat`: the result has two dimensions; `line` is _line's; `nbytes` are what A, B,
    C, the bias and D span, as _Facts has it, by name.
    """

    problem: Problem
    shape: tuple[int, int, int]
    flat: bool
    dtype: Any
    line: int
    nbytes: Mapping[str, int]

    def described(self, d: Any, c: Any) -> Problem:
        """The whole problem."""
        bits = d.data_ptr() | self.line
        ldc = _pitch(_Facts.of(c, "c")) if self.problem.epilogue.reads_c else 0
        return _described(self.problem, ldc, bits & -bits if self.line else 1)


@lru_cache(maxsize=4096)
def _described(problem: Problem, ldc: int, aligned: int) -> Problem:
    return replace(problem, ldc=ldc, aligned=aligned)


@lru_cache(maxsize=4096)  # the same products are asked for again and again
def _plan(
    a: _Facts, b: _Facts, c: _Facts | None, bias: _Facts | None, out: _Facts | None, options: _Options
) -> _Plan:
    """Check all that doesn't hang on where tensors lie, describe the product."""
    for name, x in {"a": a, "b": b, "c": c, "bias": bias, "out": out}.items():
        if x is None:
            continue
        if x.device != a.device:
            raise ValueError(f"{name} is on {x.device}, a on {a.device}")
        if name != "bias" and len(x.shape) not in (2, 3):
            raise ValueError(f"{name} must have 2 or 3 dimensions, not {len(x.shape)}")
        dtype_of(x)
    if a.dtype != b.dtype:
        raise TypeError(f"a is {a.dtype} and b is {b.dtype}; they must share a dtype")
    flat = all(x is None or len(x.shape) == 2 for x in (a, b, c, out))
    tail = Epilogue(
        options.alpha,
        _beta(options.beta, c),
        c is not None,
        None if bias is None else options.bias_dim,
        options.activation,
    )
    a, b, c = a.three, b.three, c and c.three
    (la, m, k), (lb, _, n) = a.shape, b.shape
    if b.shape[1] != k:
        raise ValueError(f"a has K = {k}, b has K = {b.shape[1]}")
    batch = _batch(a, b, c)
    if c is not None and tuple(c.shape[1:]) != (m, n):
        raise ValueError(f"c is {tuple(c.shape[1:])}, D is {(m, n)}")
    if bias is not None and tuple(bias.shape) != (want := (n if tail.bias is BiasDim.N else m,)):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; bias_dim {tail.bias} wants {want}")
    d = _d((batch, m, n), a, out and out.three, options.out_dtype)
    trans_a, lda = _layout(a)
    trans_b, ldb = _layout(b)
    problem = Problem(
        m, n, k, batch, dtype_of(a), dtype_of(d), trans_a, trans_b, tail,
        options.precision, options.batch_invariant,
        a_broadcast=batch > 1 and la == 1,
        b_broadcast=batch > 1 and lb == 1,
        lda=lda,
        ldb=ldb,
        ldd=_pitch(d),
    )  # fmt: skip
    spans = {"a": a, "b": b, "c": c, "bias": bias, "d": d}
    nbytes = {name: x.nbytes for name, x in spans.items() if x is not None}
    return _Plan(problem, (batch, m, n), flat, d.dtype, _line(d), nbytes)


def _beta(beta: float | None, c: _Facts | None) -> float:
    """The factor of C."""
    if beta is None:
        return 0.0 if c is None else 1.0
    if beta and c is None:
        raise ValueError(f"beta is {beta}, but there is no c")
    return beta


def _d(shape: tuple[int, int, int], a: _Facts, out: _Facts | None, dtype: Any) -> _Facts:
    """D as it will be, or what was given for it."""
    if out is None:
        return _Facts(shape, (shape[1] * shape[2], shape[2], 1), dtype or a.dtype, a.device)
    if dtype not in (None, out.dtype):
        raise TypeError(f"out is {out.dtype}, out_dtype {dtype}")
    if tuple(out.shape) != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, D is {shape}")
    if not _is_apart(out):
        raise ValueError(f"elements of out share memory, or lie between each other's: strides {out.stride}")
    return out


def _is_apart(x: _Facts) -> bool:
    """Whether each dimension's stride steps over all that the dimensions of smaller strides span."""
    span = 1
    for step, size in sorted(zip(x.stride, x.shape, strict=True)):
        if size > 1 and step < span:
            return False
        span += (size - 1) * step
    return True


class _Call:
    """The tensors of one call, checked, as three-dimensional views, and the product that they are of."""

    def __init__(self, a: Any, b: Any, c: Any, bias: Any, out: Any, options: _Options) -> None:
        a, b, c, bias = _resolved(a), _resolved(b), _resolved(c), _resolved(bias)
        plan = _plan(
            _Facts.of(a, "a"),
            _Facts.of(b, "b"),
            None if c is None else _Facts.of(c, "c"),
            None if bias is None else _Facts.of(bias, "bias"),
            None if out is None else _Facts.of(out, "out"),
            options,
        )
        if out is not None and out.is_neg():
            raise ValueError("out is a view that negates what lies there (is_neg)")
        self.nbytes = plan.nbytes
        self.a, self.b = _three(a), _three(b)
        self.bias: Any = None if bias is None else bias.detach().contiguous()
        self.result: Any = out
        if out is None:
            import torch

            self.result = torch.empty(
                plan.shape[1:] if plan.flat else plan.shape, dtype=plan.dtype, device=a.device
            )
        self.d: Any = _three(self.result)
        self.c: Any = None if c is None else _three(c).expand(self.d.shape)
        if out is not None:
            self._part(plan.problem.epilogue)
        self.problem = plan.described(self.d, self.c)

    @property
    def operands(self) -> Operands:
        """As the runtime takes them."""
        return Operands(self.a, self.b, self.d, self.c, self.bias)

    def spans(self) -> Iterator[tuple[str, Any, int]]:
        """Each tensor that has elements, its name, and how many bytes it spans."""
        for name, nbytes in self.nbytes.items():
            if (x := getattr(self, name)).numel():
                yield name, x, nbytes

    def _part(self, tail: Epilogue) -> None:
        """Copy C and the bias where D would overwrite them; refuse a D that overwrites A or B."""
        start = self.d.data_ptr()
        end = start + self.nbytes["d"]
        for name, nbytes in self.nbytes.items():
            x = getattr(self, name)
            begins = x.data_ptr()
            if name == "d" or begins >= end or start >= begins + nbytes:
                continue
            if name == "bias" or (name == "c" and tail.reads_c):
                setattr(self, name, separate(x, self.d))
            elif name != "c" and overlap(self.d, x):
                raise ValueError(f"out overlaps {name}")


def _resolved(x: Any) -> Any:
    """The tensor; copied where memory holds its values negated, since kernels read by address. What is no tensor is
    for _Facts to refuse.
    """
    if x is None:
        return None
    try:
        return x.resolve_neg() if x.is_neg() else x
    except AttributeError:
        return x


def _three(x: Any) -> Any:
    x = x.detach() if x.requires_grad else x
    return x if x.dim() == 3 else x.unsqueeze(0)


def _batch(*operands: _Facts | None) -> int:
    sizes = {x.shape[0] for x in operands if x is not None} - {1}
    if len(sizes) > 1:
        raise ValueError(f"batch sizes differ: {', '.join(map(str, sorted(sizes)))}")
    return sizes.pop() if sizes else 1


def _layout(x: _Facts) -> tuple[bool, int]:
    """Whether a [layers, rows, columns] view is stored by columns, and its leading dimension (0: compact)."""
    _, rows, columns = x.shape
    _, row, column = x.stride
    if column != 1 and (row == 1 or rows == 1) and columns > 1:
        return True, column if column > rows else 0
    return False, row if column in (0, 1) and row > columns and rows > 1 else 0


def _pitch(x: _Facts) -> int:
    """Leading dimension of D or C in elements; 0 where it is compact or has no rows to tell."""
    row = x.stride[1]
    return row if x.shape[1] > 1 and row > x.shape[2] else 0


def _line(d: _Facts) -> int:
    """Bits of 128 and of the strides, in bytes, that tell how each row of D is aligned; 0 where columns are apart."""
    if d.shape[2] > 1 and d.stride[2] != 1:
        return 0
    size = d.dtype.itemsize
    bits = 128
    for extent, stride in zip(d.shape[:2], d.stride[:2], strict=True):
        bits |= stride * size if extent > 1 else 0
    return bits


def separate(x: Any, d: Any) -> Any:
    """C or a bias, copied where writing D would change it before it is read; C may be D itself."""
    same = x.data_ptr() == d.data_ptr() and x.stride() == d.stride() and x.dtype == d.dtype
    return x if same or not overlap(_flat(d), _flat(x)) else x.clone()


def overlap(x: Any, y: Any) -> bool:
    """Whether two views share a byte. Views of one pitch that lie side by side in its rows don't."""
    if x.numel() == 0 or y.numel() == 0:
        return False
    (x0, x1), (y0, y1) = _span(x), _span(y)
    if x1 <= y0 or y1 <= x0:
        return False
    pitch = x.stride(-2) * x.element_size()
    lined = x.stride(-1) == 1 and y.stride(-1) == 1 and x.stride(-2) > 0
    layers = [v.stride(0) * v.element_size() for v in (x, y) if v.shape[0] > 1]
    if not lined or y.stride(-2) * y.element_size() != pitch or any(layer % pitch for layer in layers):
        return True
    gap = (y.data_ptr() - x.data_ptr()) % pitch
    return bool(gap < x.shape[-1] * x.element_size() or gap + y.shape[-1] * y.element_size() > pitch)


def _span(x: Any) -> tuple[int, int]:
    """Addresses from the first byte to behind the last."""
    start = x.data_ptr()
    return start, start + _Facts.of(x, "x").nbytes


def _on_gpu(gpu: Runtime, problem: Problem, call: _Call, variant: str) -> None:
    gpu.run(problem, call.operands, variant)


@lru_cache(maxsize=1024)
def _cpu_choice(problem: Problem, variant: str) -> Choice:
    return choose(problem, describe_cpu(), variants=reference.variants(), variant=variant)


def _on_cpu(problem: Problem, call: _Call, variant: str) -> None:
    chosen = _cpu_choice(problem, variant)
    backend: reference.Backend = "torch" if chosen.variant == "reference-torch" else "numpy"
    stored = replace(problem, trans_a=False, trans_b=False, lda=0, ldb=0)  # the views are of op(A) and op(B)
    a, b, d, c, bias = (_array(x) for x in (call.a, call.b, call.d, call.c, call.bias))
    reference.compute(stored, a, b, d, c, bias, backend=backend)


def _array(x: Any) -> Any:
    """numpy's view of a CPU tensor's memory; bfloat16 by its bits."""
    import torch

    if x is None:
        return None
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


__all__ = ["DType", "Unsupported", "choice_for", "gemm", "gemm_grouped", "overlap", "separate"]
