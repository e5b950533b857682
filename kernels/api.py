"""`kernels.gemm`, `gemm_grouped`: receive torch tensors of a CPU or GPU, hand on act(alpha·A·B + beta·C + bias).

Any strides are taken: what TMA can't address is packed first (kernels/runtime.py). Work goes to the caller's
current stream, and may be captured into a CUDA graph once the same product has run before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

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
    `out_dtype` to A's. `out` may be `c` itself; it may not overlap A or B.

    batch_invariant: a row's bits depend neither on M nor on other rows; without it the fastest variant runs.
    Raises TypeError or ValueError for what can't be meant, kernels.problem.Unsupported where the named
    variant can't take the product. No gradients are recorded.
    """
    call = _Call(a, b, c, bias, out)
    tail = Epilogue(
        float(alpha),
        call.beta(beta),
        c is not None,
        None if bias is None else BiasDim(bias_dim),
        Activation(activation or "none"),
    )
    problem = call.prepare(tail, out_dtype, Precision(precision or "ieee"), bool(batch_invariant))
    if a.is_cuda:
        import torch

        with torch.cuda.device(a.device):
            if call.d.numel():
                _on_gpu(runtime(a.device.index), problem, call, variant)
    else:
        _on_cpu(problem, call, variant)
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
    calls = [_Call(*(None if each is None else each[i] for each in lists.values())) for i in range(len(a))]
    problems = [
        call.prepare(
            Epilogue(
                float(alpha),
                call.beta(beta),
                call.c is not None,
                None if call.bias is None else BiasDim(bias_dim),
                Activation(activation or "none"),
            ),
            out_dtype,
            Precision(precision or "ieee"),
            bool(batch_invariant),
        )
        for call in calls
    ]
    if out is not None:
        _apart(calls)
    if a and a[0].is_cuda:
        import torch

        there = [(problem, call) for problem, call in zip(problems, calls, strict=True) if call.d.numel()]
        with torch.cuda.device(a[0].device):
            runtime(a[0].device.index).run_group([(problem, call.operands) for problem, call in there])
    else:
        for problem, call in zip(problems, calls, strict=True):
            _on_cpu(problem, call, "auto")
    return [call.result for call in calls]


def _apart(calls: Sequence[_Call]) -> None:
    """Raise ValueError where a result shares memory with another product's tensors."""
    names = ("a", "b", "c", "bias", "d")
    tensors = [
        (i, name, _flat(x))
        for i, call in enumerate(calls)
        for name in names
        if (x := getattr(call, name)) is not None and x.numel()
    ]
    spans = sorted(((*_span(x), i, name, x) for i, name, x in tensors), key=lambda each: each[:4])
    for number, (_, end, i, name, x) in enumerate(spans):
        for start, _, j, other, y in spans[number + 1 :]:
            if start >= end:
                break
            if i == j or "d" not in (name, other) or not overlap(x, y):
                continue
            writer, reader, of = (i, j, other) if name == "d" else (j, i, name)
            raise ValueError(f"out of product {writer} overlaps {of} of product {reader}")


def _flat(x: Any) -> Any:
    return x if x.dim() == 3 else x.view(1, 1, -1)  # a bias


class _Call:
    """The tensors of one call, checked, as three-dimensional views."""

    def __init__(self, a: Any, b: Any, c: Any, bias: Any, out: Any) -> None:
        given = {"a": a, "b": b, "c": c, "bias": bias, "out": out}
        for name, x in given.items():
            if x is None and name not in ("a", "b"):
                continue
            if not hasattr(x, "data_ptr"):
                raise TypeError(f"{name} must be a torch tensor, not {type(x).__name__}")
            if x.device != a.device:
                raise ValueError(f"{name} is on {x.device}, a on {a.device}")
            if name != "bias" and x.dim() not in (2, 3):
                raise ValueError(f"{name} must have 2 or 3 dimensions, not {x.dim()}")
            dtype_of(x)
        if a.dtype != b.dtype:
            raise TypeError(f"a is {a.dtype} and b is {b.dtype}; they must share a dtype")
        self.flat = all(x is None or x.dim() == 2 for x in (a, b, c, out))
        self.a, self.b = _three(a), _three(b)
        self.c: Any = None if c is None else _three(c)
        self.bias: Any = None if bias is None else bias.detach().contiguous()
        self.out = out
        self.d: Any
        self.result: Any

    @property
    def operands(self) -> Operands:
        """As the runtime takes them, once prepared."""
        return Operands(self.a, self.b, self.d, self.c, self.bias)

    def beta(self, beta: float | None) -> float:
        """The factor of C."""
        if beta is None:
            return 0.0 if self.c is None else 1.0
        if beta and self.c is None:
            raise ValueError(f"beta is {beta}, but there is no c")
        return float(beta)

    def prepare(self, tail: Epilogue, out_dtype: Any, precision: Precision, invariant: bool) -> Problem:
        """Check shapes, make D, describe the product."""
        (_, m, k), n = self.a.shape, self.b.shape[2]
        if self.b.shape[1] != k:
            raise ValueError(f"a has K = {k}, b has K = {self.b.shape[1]}")
        batch = _batch(self.a, self.b, self.c)
        if self.c is not None and tuple(self.c.shape[1:]) != (m, n):
            raise ValueError(f"c is {tuple(self.c.shape[1:])}, D is {(m, n)}")
        if self.bias is not None:
            want = (n if tail.bias is BiasDim.N else m,)
            if tuple(self.bias.shape) != want:
                raise ValueError(
                    f"bias has shape {tuple(self.bias.shape)}; bias_dim {tail.bias} wants {want}"
                )
        self._place((batch, m, n), out_dtype)
        if self.c is not None:
            self._separate_c(tail)
        return self._describe(tail, batch, precision, invariant)

    def _place(self, shape: tuple[int, int, int], out_dtype: Any) -> None:
        """Make D, or check what was given for it."""
        import torch

        if self.out is None:
            kind = out_dtype or self.a.dtype
            self.result = torch.empty(shape[1:] if self.flat else shape, dtype=kind, device=self.a.device)
            self.d = _three(self.result)
            return
        self.result, self.d = self.out, _three(self.out)
        if out_dtype not in (None, self.d.dtype):
            raise TypeError(f"out is {self.d.dtype}, out_dtype {out_dtype}")
        if tuple(self.d.shape) != shape:
            raise ValueError(f"out has shape {tuple(self.d.shape)}, D is {shape}")
        if any(step == 0 and size > 1 for step, size in zip(self.d.stride(), shape, strict=True)):
            raise ValueError("elements of out share memory (an expanded tensor)")
        for name, x in (("a", self.a), ("b", self.b)):
            if overlap(self.d, x):
                raise ValueError(f"out overlaps {name}")

    def _separate_c(self, tail: Epilogue) -> None:
        """C as D's shape; copied where D overwrites it before it is read."""
        c = self.c.expand(self.d.shape)
        same = c.data_ptr() == self.d.data_ptr() and c.stride() == self.d.stride() and c.dtype == self.d.dtype
        self.c = c.clone() if tail.reads_c and not same and overlap(self.d, c) else c

    def _describe(self, tail: Epilogue, batch: int, precision: Precision, invariant: bool) -> Problem:
        (la, m, k), (lb, _, n) = self.a.shape, self.b.shape
        trans_a, lda = _layout(self.a)
        trans_b, ldb = _layout(self.b)
        return Problem(
            m, n, k, batch, dtype_of(self.a), dtype_of(self.d), trans_a, trans_b, tail,
            precision, invariant,
            a_broadcast=batch > 1 and la == 1,
            b_broadcast=batch > 1 and lb == 1,
            lda=lda,
            ldb=ldb,
            ldc=_pitch(self.c) if tail.reads_c else 0,
            ldd=_pitch(self.d),
            aligned=_aligned(self.d),
        )  # fmt: skip


def _three(x: Any) -> Any:
    x = x.detach() if x.requires_grad else x
    return x if x.dim() == 3 else x.unsqueeze(0)


def _batch(*operands: Any) -> int:
    sizes = {x.shape[0] for x in operands if x is not None} - {1}
    if len(sizes) > 1:
        raise ValueError(f"batch sizes differ: {', '.join(map(str, sorted(sizes)))}")
    return sizes.pop() if sizes else 1


def _layout(x: Any) -> tuple[bool, int]:
    """Whether a [layers, rows, columns] view is stored by columns, and its leading dimension (0: compact)."""
    _, rows, columns = x.shape
    _, row, column = x.stride()
    if column != 1 and (row == 1 or rows == 1) and columns > 1:
        return True, column if column > rows else 0
    return False, row if column in (0, 1) and row > columns and rows > 1 else 0


def _pitch(x: Any) -> int:
    """Leading dimension of D or C in elements; 0 where it is compact or has no rows to tell."""
    row = int(x.stride(1))
    return row if x.shape[1] > 1 and row > x.shape[2] else 0


def _aligned(d: Any) -> int:
    """Largest power of two up to 128 that divides the address of each row of D; 1 where columns are apart."""
    if d.shape[2] > 1 and d.stride(2) != 1:
        return 1
    size = d.element_size()
    offsets = [d.data_ptr(), 128]
    offsets += [d.stride(0) * size] if d.shape[0] > 1 else []
    offsets += [d.stride(1) * size] if d.shape[1] > 1 else []
    together = 0
    for each in offsets:
        together |= each
    return together & -together


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
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


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


__all__ = ["DType", "Unsupported", "choice_for", "gemm", "gemm_grouped", "overlap"]
