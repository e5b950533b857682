"""The reference on a GPU: receives a `Problem` and torch tensors on the device, writes D by cuBLAS.

Reduced-precision reductions are off, and fp32 is never TF32 unless the problem asks for it. cuBLAS picks an
algorithm by shape, so a row's bits may depend on M. With `batch_invariant` every call therefore has
the same shape: blocks of 256 rows, padded, in buffers of our own; kernels/probe.py tests their bits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kernels.device import Device
from kernels.problem import Activation, BiasDim, DType, Precision, Problem

NAME = "reference-cublas"
BLOCK_ROWS = 256
ALIGNED = 256  # bytes; what cuBLAS may choose an algorithm by

_flags = threading.RLock()


# Of one H200 (suite.json, ladder.json; tests/kernels/test_cublas.py holds the estimates against them).
EFFICIENCY = 0.685  # of the peak, sustained under the power cap
RAGGED_EFFICIENCY = 0.15  # where rows of A, B or D don't start at 16 bytes
READ_SHARE = 0.85
LAUNCH_SECONDS = 2e-6
PASS_SECONDS = 1.5e-6  # a wave's epilogue; the pass that adds the parts of a divided K
PAD_SECONDS = 8e-6  # zeros, and copies of A and D
LEAST_K = 512  # of a part
SOFT = 2.9  # of the times of memory and of products the longer counts, a little more where they are equal


def _call_seconds(problem: Problem, device: Device, m: int, batch: int) -> float:
    """Of a call with M rows: launch, then about the longer of two times, the bytes' and the products'.

    Products go in waves of 128×256 tiles. What fills no wave is computed in tiles of 64×64, which divide K until they
    occupy every SM, or a part is short.
    """
    n, k = problem.n, problem.k
    a, b, _, d = problem.leading
    ragged = (
        a * problem.dtype.itemsize | b * problem.dtype.itemsize | d * problem.out_dtype.itemsize
    ) % 16 != 0
    kind = "tf32" if problem.precision is Precision.TF32 and problem.dtype is DType.FP32 else problem.dtype
    rate = (RAGGED_EFFICIENCY if ragged else EFFICIENCY) * device.peak_flops.get(str(kind), 1e12)
    tiles = -(-m // 128) * -(-n // 256) * max(batch, 1)
    if tiles >= device.sms:
        passes = -(-tiles // device.sms)
        work = passes * device.sms * 2.0 * 128 * 256 * k / rate
    else:
        small = max(1, -(-m // 64) * -(-n // 64) * batch)
        parts = max(1, min(-(-k // LEAST_K), device.sms // small))
        passes = 2 if parts > 1 else 1
        work = max(small, device.sms / parts) * 2.0 * 64 * 64 * k / rate
    layers = 1 if problem.b_broadcast else batch
    read = ((1 if problem.a_broadcast else batch) * m * k + layers * k * n) * problem.dtype.itemsize
    moved = read + batch * m * n * problem.out_dtype.itemsize
    memory = moved / (READ_SHARE * device.bandwidth)
    return LAUNCH_SECONDS + PASS_SECONDS * passes + float((work**SOFT + memory**SOFT) ** (1 / SOFT))


@dataclass(frozen=True, slots=True)
class Cublas:
    """cuBLAS, through torch, as a variant of the selector."""

    @property
    def name(self) -> str:
        """reference-cublas."""
        return NAME

    @property
    def step(self) -> int:
        """No rung of the ladder."""
        return 0

    def unsupported(self, problem: Problem, device: Device) -> str | None:
        """Every problem, on a real GPU."""
        if not device.arch.startswith("sm_"):
            return f"it computes on a GPU, not on {device.arch}"
        return "cuBLAS does not run on the virtual GPU" if device.virtual else None

    def seconds(self, problem: Problem, device: Device) -> float:
        """One call, or one for each block of rows and the copies that pad them."""
        plain = _call_seconds(problem, device, problem.m, problem.batch)
        if not problem.batch_invariant:
            return plain
        blocks = -(-problem.m // BLOCK_ROWS) * problem.batch
        moved = problem.bytes_read + problem.bytes_written
        padding = PAD_SECONDS * problem.batch if problem.m % BLOCK_ROWS else 0.0
        calls = blocks * _call_seconds(problem, device, BLOCK_ROWS, 1)
        return max(plain, calls + padding) + 3 * moved / device.bandwidth

    def order(self, problem: Problem) -> str | None:
        """One class: calls of one shape."""
        return f"cublas-{BLOCK_ROWS}"


@contextmanager
def exact_flags(*, tf32: bool = False) -> Iterator[None]:
    """torch's process-wide settings of cuBLAS as the arithmetic wants them, put back afterwards.

    They are read when a product is queued, so they are held only that long, by one thread at a time. What other
    threads queue meanwhile by torch itself is computed by them too.
    """
    import torch

    settings: Any = torch.backends.cuda.matmul
    with _flags:
        # Those that are off stay as they are: to set one, even to what it is, sets its allow_splitk to True.
        allowed = [name for name in _REDUCTIONS if getattr(settings, name)]
        precision = settings.fp32_precision
        changes = (precision == "tf32") != tf32
        # What was inherited must go on following the wider setting. (The same value set for both looks inherited.)
        before = "none" if precision == torch.backends.cudnn.fp32_precision else precision
        for name in allowed:
            setattr(settings, name, False)
        if changes:
            # cuBLAS goes by this one alone. The older ways to say it (allow_tf32, set_float32_matmul_precision) set a
            # second value too, which they can't always put back.
            settings.fp32_precision = "tf32" if tf32 else "ieee"
        try:
            yield
        finally:
            for name in allowed:
                setattr(settings, name, True)
            if changes:
                settings.fp32_precision = before


_REDUCTIONS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


def compute(problem: Problem, a: Any, b: Any, d: Any, c: Any = None, bias: Any = None) -> None:
    """Write D into `d` on the current stream. a [La, M, K], b [Lb, K, N], c, d [batch, M, N]: any strides."""
    import torch

    if d.numel() == 0:
        return
    tail = problem.epilogue
    tf32 = problem.precision is Precision.TF32
    kind = torch.float64 if problem.dtype is DType.FP64 else torch.float32
    if not tail.reads_ab:
        acc = torch.zeros(d.shape, dtype=kind, device=d.device)
    elif problem.batch_invariant:
        acc = torch.empty(d.shape, dtype=kind, device=d.device)
        with exact_flags(tf32=tf32):
            for i in range(max(len(a), len(b))):
                _blocks(a[i % len(a)], b[i % len(b)], acc[i])
        if max(len(a), len(b)) < len(acc):
            acc[1:] = acc[0]
    else:
        batch = max(len(a), len(b))
        left, right = a.expand(batch, -1, -1), b.expand(batch, -1, -1)
        with exact_flags(tf32=tf32):
            if d.dtype == a.dtype and _plain(problem) and batch == len(d):
                _product(left, right, d)
                return
            acc = torch.empty((batch, *d.shape[1:]), dtype=kind, device=d.device)
            _product(left, right, acc)
        if batch < len(d):
            acc = acc.expand(d.shape).clone()
    d.copy_(_once(_epilogue(problem, acc, c, bias), d.dtype))


def _once(x: Any, dtype: Any) -> Any:
    """fp64 on its way to a half, as fp32 with the last bit set where inexact: torch would round it twice."""
    import torch

    if x.dtype != torch.float64 or dtype not in (torch.float16, torch.bfloat16):
        return x
    near = x.float()
    bits = near.view(torch.int32)
    bits -= (near.abs().double() > x.abs()).int()  # toward zero
    bits |= ((near.double() != x) & ~x.isnan()).int()
    return near


def _plain(problem: Problem) -> bool:
    tail = problem.epilogue
    return tail.alpha == 1.0 and not tail.reads_c and tail.bias is None and tail.activation is Activation.NONE


def _product(a: Any, b: Any, out: Any) -> None:
    """out = a·b for matrices or batches; halves may go to fp32, unrounded."""
    import torch

    name = torch.ops.aten.mm if out.dim() == 2 else torch.ops.aten.bmm
    if out.dtype == a.dtype:
        name.out(a, b, out=out)
    else:
        name.dtype_out(a, b, out.dtype, out=out)


def _blocks(a: Any, b: Any, acc: Any) -> None:
    """Products of one shape, whatever M: rows padded to blocks, every operand aligned and dense alike."""
    import torch

    m, k = a.shape
    padded = -(-m // BLOCK_ROWS) * BLOCK_ROWS
    if padded != m or not a.is_contiguous() or a.data_ptr() % ALIGNED:
        rows = torch.zeros((padded, k), dtype=a.dtype, device=a.device)
        rows[:m] = a
    else:
        rows = a
    if not (b.is_contiguous() or b.t().is_contiguous()) or b.data_ptr() % ALIGNED:
        b = b.clone(memory_format=torch.contiguous_format)
    whole = acc
    if padded != m or not acc.is_contiguous() or acc.data_ptr() % ALIGNED:
        whole = torch.empty((padded, acc.shape[1]), dtype=acc.dtype, device=acc.device)
    for start in range(0, padded, BLOCK_ROWS):
        _product(rows[start : start + BLOCK_ROWS], b, whole[start : start + BLOCK_ROWS])
    if whole is not acc:
        acc.copy_(whole[:m])


def _epilogue(problem: Problem, acc: Any, c: Any, bias: Any) -> Any:
    """act(alpha·acc + beta·C + bias) in the compute type, in place."""
    import torch

    tail = problem.epilogue
    if tail.reads_ab and tail.alpha != 1.0:
        acc.mul_(tail.alpha)
    if tail.reads_c:
        acc.add_(c.to(acc.dtype), alpha=tail.beta)
    if tail.bias is not None:
        line = bias.to(acc.dtype)
        acc.add_(line if tail.bias is BiasDim.N else line[:, None])
    if tail.activation is Activation.RELU:
        return torch.relu_(acc)
    if tail.activation is Activation.GELU:
        return acc.mul_(torch.special.erfc(acc * -(0.5**0.5)).mul_(0.5))  # erfc: accurate below 0 too
    if tail.activation is Activation.SILU:
        return torch.nn.functional.silu(acc, inplace=True)
    return acc
