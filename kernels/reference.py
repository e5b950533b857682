"""The reference on a CPU: receives a `Problem` and numpy arrays (views of the arena), writes D into `out`.

Two libraries do the products: numpy's BLAS, which every installation has, and torch's where it is installed.
The epilogue is the same code for both (kernels/elementwise.py).

Bits. With `batch_invariant` a row's bits depend on neither M nor its neighbours, so requests may be stacked:

- torch: rows padded to a multiple of 16, columns of B too (a copy of B only where N is no such multiple), A
  row-major, and for fp64 B as well. Then every row meets full register tiles and one order along K.
- numpy fp32 and halves: kernels/exact.py, whatever the BLAS does. numpy fp64: rows and columns padded to 64.

Padding is an observation about a library, not a promise of it: `self_test` looks for a counter-example on
this machine, and where it finds one the library takes a slower way that can't fail: fp32 through exact.py,
fp64 a row at a time. With `batch_invariant` off the plain library call runs.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from kernels import exact
from kernels.device import Device
from kernels.elementwise import (
    NUMPY,
    Array,
    as_tensor,
    canonical_nan,
    cast_into,
    epilogue,
    narrow,
    quiet,
    typed,
    widen,
)
from kernels.problem import Activation, DType, Problem
from kernels.scratch import scratch

Backend = Literal["numpy", "torch"]
Way = Literal["plain", "exact", "padded", "rows"]
BACKENDS: tuple[Backend, ...] = ("torch", "numpy")

PAD_TORCH = 16
PAD_NUMPY = 64
KEEP_WIDE_BYTES = 1 << 27  # a B whose fp64 form is larger is converted by panels each time
# FLOPs up to which waking a second thread costs more than it brings, and takes a core from whoever serves.
SMALL_FLOPS = 40_000_000
BLOCK_ELEMENTS = 1 << 22  # of rows that are padded at a time, and of their product: bounds the copies
TAIL_ROWS = 512  # fewer rows than this are copied to be padded; above, only the last incomplete rows are


@dataclass(frozen=True, slots=True)
class Reference:
    """A CPU library as a variant of the selector."""

    backend: Backend

    @property
    def name(self) -> str:
        """reference-numpy or reference-torch."""
        return f"reference-{self.backend}"

    @property
    def step(self) -> int:
        """No rung of the ladder."""
        return 0

    def unsupported(self, problem: Problem, device: Device) -> str | None:
        """Every problem, on a CPU."""
        return None if device.arch == "cpu" else f"it computes on the CPU, not on {device.arch}"

    def seconds(self, problem: Problem, device: Device) -> float:
        """Roofline, with what each library pays for bits that don't depend on M."""
        compute = problem.dtype.compute
        peak = device.peak_flops.get(str(compute), 2e10)
        work = problem.m * problem.n * problem.batch
        rows = problem.m
        moved = problem.bytes_read + problem.bytes_written
        call = 3e-6 if self.backend == "numpy" else 6e-6
        if problem.batch_invariant and problem.epilogue.reads_ab:
            if self.backend == "numpy" and compute is DType.FP32:
                peak /= 2  # computed in fp64
                moved += 24 * work  # the passes that look for values near a rounding boundary
                call += 4e-5
            else:
                pad = PAD_TORCH if self.backend == "torch" else PAD_NUMPY
                rows = -(-problem.m // pad) * pad
        if problem.dtype.itemsize == 2:
            moved += 2 * problem.bytes_read  # widened to fp32
        flops = 2.0 * rows * problem.n * problem.k * problem.batch
        return call + flops / peak + moved / device.bandwidth

    def order(self, problem: Problem) -> str | None:
        """Each library is a class of its own; its bits don't depend on M (see the module)."""
        return f"cpu-{self.backend}"


def variants() -> tuple[Reference, ...]:
    """The references that can run here, the preferred one first."""
    return tuple(Reference(backend) for backend in BACKENDS if backend == "numpy" or has_torch())


@cache
def has_torch() -> bool:
    """Whether torch is installed; doesn't import it."""
    return find_spec("torch") is not None


class Converted:
    """Converted forms of resident B matrices, least recently used first out, within a byte budget."""

    def __init__(self, budget: int = 1 << 28) -> None:
        self.budget = budget
        self._kept: OrderedDict[tuple[str, str], Array] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes kept now."""
        return self._bytes

    def get(self, tensor: str, form: str, make: Callable[[], Array]) -> Array:
        """The kept form of a stored tensor, made on first use; what exceeds half the budget isn't kept."""
        if not tensor:
            return make()
        key = (tensor, form)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = make()
        if made.nbytes > self.budget // 2:
            return made
        with self._lock:
            if key not in self._kept:
                self._kept[key] = made
                self._bytes += made.nbytes
            while self._bytes > self.budget:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return made

    def forget(self, tensors: Iterable[str]) -> None:
        """Drop what was made of these stored tensors."""
        gone = set(tensors)
        with self._lock:
            for key in [key for key in self._kept if key[0] in gone]:
                self._bytes -= self._kept.pop(key).nbytes


def compute(
    problem: Problem,
    a: Array | None,
    b: Array | None,
    out: Array,
    c: Array | None = None,
    bias: Array | None = None,
    *,
    backend: Backend,
    tensor: str = "",
    kept: Converted | None = None,
) -> None:
    """Write D into `out`, shaped [M, N] or [batch, M, N].

    bfloat16 comes as ml_dtypes.bfloat16 or uint16. `tensor` names B's stored content, so that `kept` may hold
    its converted form. `out` may overlap C and the bias, and must not overlap A or B.
    """
    with quiet():
        if a is not None and b is not None and _is_one_call(backend, problem) and _all_dense(a, b, out):
            _MATMUL[backend](a, b, out)
            canonical_nan(out)
        else:
            _compute(problem, a, b, typed(out), c, bias, _Library.of(backend, problem, tensor, kept))


def compute_stacked(
    problems: Sequence[Problem],
    a: Sequence[Array],
    b: Array,
    out: Sequence[Array],
    c: Sequence[Array | None],
    bias: Sequence[Array | None],
    *,
    backend: Backend,
    tensor: str = "",
    kept: Converted | None = None,
) -> None:
    """One product for requests that share B: rows stacked, D scattered; each has the bits that it has alone.

    Problems have batch 1 and differ in M only, and in C and bias. Each `out` is [M, N].
    """
    first = problems[0]
    if not first.batch_invariant or not first.epilogue.reads_ab or first.n == 0:
        for problem, one_a, one_out, one_c, one_bias in zip(problems, a, out, c, bias, strict=True):
            compute(problem, one_a, b, one_out, one_c, one_bias, backend=backend, tensor=tensor, kept=kept)
        return
    kind = NUMPY[first.dtype.compute]
    with quiet():
        library = _Library.of(backend, first, tensor, kept)
        rows = [_matrices(x, first.trans_a)[0] for x in a]
        total = sum(problem.m for problem in problems)
        stacked = library.rows_scratch(total, first.k)
        start = 0
        for part in rows:
            cast_into(stacked[start : start + len(part)], part)
            start += len(part)
        product = scratch("stack", (len(stacked), first.n), kind)
        library.product(stacked, _matrices(b, first.trans_b)[0], product)
        canonical_nan(product[:total])
        start = 0
        for problem, target, one_c, one_bias in zip(problems, out, c, bias, strict=True):
            part = product[start : start + problem.m]
            start += problem.m
            epilogue(problem, part, _flat(one_c), one_bias)
            narrow(part, _flat(typed(target)))


def _is_one_call(backend: Backend, problem: Problem) -> bool:
    """Whether a product of dense operands is one call of the library: nothing is cast, padded or added."""
    return _way(backend, problem) == "padded" and _is_bare(
        problem, PAD_TORCH if backend == "torch" else PAD_NUMPY
    )


@lru_cache(4096)  # the same products come again and again
def _is_bare(problem: Problem, pad: int) -> bool:
    """Whether rows and columns are multiples of `pad`, one type serves throughout, and D is the product."""
    return (
        problem.dtype is problem.out_dtype is problem.dtype.compute
        and problem.batch == 1
        and not (problem.trans_a or problem.trans_b)
        and problem.flops > 0
        and problem.m % pad == problem.n % pad == 0
        and _plain(problem)
    )


def _all_dense(*arrays: Array) -> bool:
    """Whether each is one matrix, row after row."""
    return all(x.ndim == 2 and x.flags.c_contiguous for x in arrays)


def _flat(x: Any) -> Any:
    """[M, N] of an array shaped [M, N] or [1, M, N]."""
    return x if x is None or x.ndim == 2 else x[0]


def _compute(
    problem: Problem,
    a: Array | None,
    b: Array | None,
    out: Array,
    c: Array | None,
    bias: Array | None,
    library: _Library,
) -> None:
    if out.size == 0:
        return
    kind = NUMPY[problem.dtype.compute]
    target = out if out.ndim == 3 else out[None]
    narrower = library.way == "exact" and _plain(problem) and target.dtype.itemsize <= kind.itemsize
    later = (c if problem.epilogue.reads_c else None, bias)  # read once the product is in `acc`
    straight = (target.dtype == kind or narrower) and not any(
        x is not None and np.may_share_memory(x, out) for x in later
    )
    acc = target if straight else scratch("acc", target.shape, kind)
    if problem.epilogue.reads_ab:
        assert a is not None
        assert b is not None
        _products(problem, _matrices(a, problem.trans_a), _matrices(b, problem.trans_b), acc, library)
        if library.way in ("padded", "rows"):
            canonical_nan(acc)
    else:
        acc.fill(0)
    epilogue(problem, acc, c, bias)
    if not straight:
        narrow(acc, target)


def _plain(problem: Problem) -> bool:
    """D is the product and no more."""
    tail = problem.epilogue
    return tail.alpha == 1.0 and not tail.reads_c and tail.bias is None and tail.activation is Activation.NONE


def _matrices(x: Array, transposed: bool) -> Array:
    """[batch, rows, columns] view of op(x)."""
    x = typed(x)
    x = x if x.ndim == 3 else x[None]
    return x.transpose(0, 2, 1) if transposed else x


def _products(problem: Problem, a: Array, b: Array, acc: Array, library: _Library) -> None:
    """acc[i] = a[i] · b[i], with the batch folded into rows where all share one B."""
    batch = acc.shape[0]
    if batch > 1 and len(b) == 1 and len(a) == batch and a.flags.c_contiguous and acc.flags.c_contiguous:
        library.product(a.reshape(-1, problem.k), b[0], acc.reshape(-1, problem.n))
        return
    distinct = max(len(a), len(b))
    if not problem.batch_invariant and distinct == batch > 1:
        library.batched(a, b, acc)
        return
    for i in range(distinct):
        library.product(a[i % len(a)], b[i % len(b)], acc[i], layer=i % len(b))
    if distinct < batch:
        acc[1:] = acc[0]


class _Library:
    """Products by one library for one problem: `product` keeps the problem's promise about bits."""

    def __init__(
        self,
        backend: Backend,
        compute: DType,
        way: Way,
        tensor: str = "",
        kept: Converted | None = None,
        stored: str = "",
    ) -> None:
        self.matmul: Callable[[Array, Array, Array], None] = _MATMUL[backend]
        self.kind = NUMPY[compute]
        self.pad = PAD_TORCH if backend == "torch" else PAD_NUMPY
        self.way = way
        # MKL's fp64 product peels columns of B by their alignment: bits would depend on M where K is odd
        self.reads_columns = not (backend == "torch" and compute is DType.FP64 and way == "padded")
        self._tensor = tensor
        self._keep = kept.get if kept is not None and tensor else _make
        self._stored = stored
        self._layer = 0

    @classmethod
    def of(cls, backend: Backend, problem: Problem, tensor: str, kept: Converted | None) -> _Library:
        stored = f"{problem.dtype}{'t' if problem.trans_b else 'n'}{problem.k}x{problem.n}"
        return cls(backend, problem.dtype.compute, _way(backend, problem), tensor, kept, stored)

    def rows_scratch(self, rows: int, k: int) -> Array:
        """Room for stacked rows, padded with zeros where products want full tiles."""
        kind = np.dtype(np.float64) if self.way == "exact" else self.kind
        padded = -(-rows // self.pad) * self.pad if self.way == "padded" else rows
        room = scratch("rows", (padded, k), kind)
        room[rows:] = 0
        return room

    def batched(self, a: Array, b: Array, out: Array) -> None:
        """Plain products of a batch."""
        self.matmul(widen(a, self.kind), widen(b, self.kind), out)

    def product(self, a: Array, b: Array, out: Array, layer: int = 0) -> None:
        """out [M, N] = a [M, K] · b [K, N], in the compute type; b is that layer of a batch."""
        self._layer = layer
        if self.way == "exact":
            wide = None
            if self._tensor and b.size * 8 <= KEEP_WIDE_BYTES:
                wide = self._kept("wide", lambda: exact.wide_columns(b))
            exact.product(a, b, out, self.matmul, wide)
        elif self.way == "rows":
            self._by_rows(a, b, out)
        elif self.way == "padded":
            self._padded(a, b, out)
        else:
            self.matmul(widen(a, self.kind), self._right(b, 1), out)

    def _right(self, b: Array, pad: int) -> Array:
        """B in the compute type, its columns padded with zeros; as stored where nothing has to change."""
        k, n = b.shape
        columns = -(-n // pad) * pad
        dense = b.flags.c_contiguous or (self.reads_columns and b.T.flags.c_contiguous)
        if columns == n and dense and b.dtype == self.kind:
            return b

        def convert() -> Array:
            if columns == n and dense:
                return widen(b, self.kind)
            padded = np.zeros((k, columns), self.kind)
            padded[:, :n] = widen(b, self.kind)
            return padded

        return self._kept(f"pad{pad}", convert)

    def _kept(self, form: str, make: Callable[[], Array]) -> Array:
        """A form of the layer of B at hand, from the cache where B is stored."""
        return self._keep(self._tensor, f"{form} {self._stored} {self._layer}", make)

    def _padded(self, a: Array, b: Array, out: Array) -> None:
        m, k = a.shape
        n = b.shape[1]
        right = self._right(b, self.pad)
        exact_columns = right.shape[1] == n and out.flags.c_contiguous
        direct = exact_columns and a.flags.c_contiguous and a.dtype == self.kind
        tail = m % self.pad
        head = m - tail if direct and (tail == 0 or m >= TAIL_ROWS) else 0
        if head:
            self.matmul(a[:head], right, out[:head])
        if head == m:
            return
        step = max(TAIL_ROWS, BLOCK_ELEMENTS // max(k, right.shape[1]) // self.pad * self.pad)
        for start in range(head, m, step):
            rows = min(step, m - start)
            left = scratch("left", (-(-rows // self.pad) * self.pad, k), self.kind)
            cast_into(left[:rows], a[start : start + rows])
            left[rows:] = 0
            product = scratch("product", (len(left), right.shape[1]), self.kind)
            self.matmul(left, right, product)
            out[start : start + rows] = product[:rows, :n]

    def _by_rows(self, a: Array, b: Array, out: Array) -> None:
        """A row at a time from one scratch to another: calls that are alike in all but values."""
        right = self._right(b, 1)
        row, result = np.empty((1, a.shape[1]), self.kind), np.empty((1, b.shape[1]), self.kind)
        for i in range(len(a)):
            cast_into(row, a[i : i + 1])
            self.matmul(row, right, result)
            out[i] = result[0]


def _make(_tensor: str, _form: str, make: Callable[[], Array]) -> Array:
    return make()


def _numpy_matmul(a: Array, b: Array, out: Array) -> None:
    np.matmul(a, b, out=out)


def _torch_matmul(a: Array, b: Array, out: Array) -> None:
    """By one thread where the product is small; `self_test` compares bits across that line too."""
    import torch

    left, right, target = as_tensor(a), as_tensor(b), as_tensor(out)
    threads = torch.get_num_threads()
    own = _own_threads()
    if threads == 1 or own is None or 2 * out.size * a.shape[-1] > SMALL_FLOPS:
        torch.matmul(left, right, out=target)
        return
    of_openmp, of_mkl = own
    of_openmp(1)
    before = of_mkl(1)
    try:
        torch.matmul(left, right, out=target)
    finally:
        of_mkl(before)
        of_openmp(threads)


@cache
def _own_threads() -> tuple[Callable[[int], Any], Callable[[int], Any]] | None:
    """What sets the calling thread's number of threads in the OpenMP and the MKL that torch is linked with; None where
    it isn't linked with OpenMP.

    torch.set_num_threads is for the whole process: threads that begin meanwhile would keep the number for life.
    """
    import torch

    linked = ctypes.PyDLL(torch._C.__file__)  # symbols are looked for in all that it depends on
    of_openmp = getattr(linked, "omp_set_num_threads", None)
    if of_openmp is None:
        return None
    # Once torch was told a number MKL no longer asks OpenMP. 0, which it says at first, is: as the process has it.
    return of_openmp, getattr(linked, "MKL_Set_Num_Threads_Local", lambda _: 0)


_MATMUL: dict[Backend, Callable[[Array, Array, Array], None]] = {
    "numpy": _numpy_matmul,
    "torch": _torch_matmul,
}


def _way(backend: Backend, problem: Problem) -> Way:
    if not problem.batch_invariant:
        return "plain"
    compute = problem.dtype.compute
    if compute is DType.FP32 and (backend == "numpy" or not self_test(backend).fp32):
        return "exact"
    if compute is DType.FP64 and not self_test(backend).fp64:
        return "rows"
    return "padded"


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Whether padded products had equal bits alone and in stacks, by compute type, and what was seen."""

    backend: Backend
    fp32: bool
    fp64: bool
    detail: str

    @property
    def stacking(self) -> bool:
        """Stacked requests get the bits that they'd get alone: always, since the other ways can't fail."""
        return True


# (N, K): narrow, just off a tile, K past one and several cache blocks, a split along K where M is small
_TEST_SHAPES = ((1, 333), (7, 2048), (17, 385), (64, 385), (100, 768), (257, 1000), (512, 384), (48, 5000))


@cache
def self_test(backend: Backend) -> SelfTest:
    """Compare bits of rows alone with the same rows in stacks; about 0.1 s, once a process."""
    found = {dtype: _counter_example(backend, dtype) for dtype in (DType.FP32, DType.FP64)}
    seen = [f"{dtype}: bits depend on the stack at {where}" for dtype, where in found.items() if where]
    detail = "; ".join(seen) or "rows have equal bits alone and stacked"
    return SelfTest(backend, not found[DType.FP32], not found[DType.FP64], detail)


def _counter_example(backend: Backend, dtype: DType) -> str:
    """A shape at which bits depend on the stack; "" where none is found, or none can be."""
    if backend == "numpy" and dtype is DType.FP32:
        return ""  # computed by exact.py
    for n, k in _TEST_SHAPES:
        for stored in ("rows", "columns"):
            if not _rows_agree(backend, dtype, n, k, by_columns=stored == "columns"):
                return f"N {n}, K {k}, B stored by {stored}"
    return ""


def _rows_agree(backend: Backend, dtype: DType, n: int, k: int, *, by_columns: bool = False) -> bool:
    random = np.random.default_rng(n * 65537 + k)
    rows = TAIL_ROWS + 90 if n * k < 1 << 16 else 130
    kind = NUMPY[dtype]
    a = random.standard_normal((rows, k)).astype(kind)
    b = random.standard_normal((n, k) if by_columns else (k, n)).astype(kind)
    b = b.T if by_columns else b
    whole = np.empty((rows, n), kind)
    library = _Library(backend, dtype, "padded")
    library.product(a, b, whole)
    for start, stop in ((0, 1), (5, 8), (16, 49), (129, 130), (2, 128), (1, rows)):
        part = np.empty((stop - start, n), kind)
        library.product(a[start:stop], b, part)
        if part.tobytes() != whole[start:stop].tobytes():
            return False
    return True
