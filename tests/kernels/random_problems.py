"""A random product through kernels.gemm: shapes, strides, types, epilogues, NaN and infinities, by the bound."""

from __future__ import annotations

import random
from typing import Any

import torch

import kernels
from kernels.problem import Activation, BiasDim, DType, Epilogue, Problem
from kernels.selftest import to_host
from kernels.verify import check

TORCH = {
    DType.FP16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.FP32: torch.float32,
    DType.FP64: torch.float64,
}


def strided(x: Any, how: str) -> Any:
    """The same values in other strides."""
    if how == "transposed":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == "pitched":
        room = torch.full((*x.shape[:-1], x.shape[-1] + 24), torch.nan, dtype=x.dtype, device=x.device)
        room[..., : x.shape[-1]] = x
        return room[..., : x.shape[-1]]
    if how == "apart":
        room = torch.full((*x.shape[:-1], x.shape[-1] * 2), torch.nan, dtype=x.dtype, device=x.device)
        room[..., ::2] = x
        return room[..., ::2]
    if how == "odd start":
        room = torch.full((x.numel() + 3,), torch.nan, dtype=x.dtype, device=x.device)
        view = room[3:].view(x.shape)
        view.copy_(x)
        return view
    return x


def one(seed: int, device: str) -> None:
    """A random problem, through kernels.gemm, against the error bound."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    sizes = [1, 2, 7, 8, 16, 63, 64, 65, 100, 128, 129, 200, 256, 300, 520]
    m, n, k = draw.choice(sizes), draw.choice(sizes), draw.choice([*sizes, 0, 1000])
    batch = draw.choice([1, 1, 1, 2, 5])
    dtype = draw.choice([DType.FP16, DType.BF16, DType.FP16, DType.BF16, DType.FP32, DType.FP64])
    out_dtype = draw.choice([dtype, DType.FP32, DType.FP16, DType.BF16])
    tail = Epilogue(
        alpha=draw.choice([1.0, 1.0, -0.5, 0.0]),
        beta=draw.choice([0.0, 1.0, 2.0]),
        c=draw.random() < 0.5,
        bias=draw.choice([None, None, BiasDim.N, BiasDim.M]),
        activation=draw.choice(list(Activation)),
    )
    if not tail.c:
        tail = Epilogue(tail.alpha, 0.0, False, tail.bias, tail.activation)
    la, lb = draw.choice([1, batch]), draw.choice([1, batch])
    batch = max(la, lb, batch if tail.c else 1)
    hows = ["compact", "compact", "transposed", "pitched", "apart", "odd start"]

    def make(*shape: int, kind: DType = dtype) -> Any:
        x = torch.randn(shape, device=device).to(TORCH[kind])
        for value in (torch.nan, torch.inf, -torch.inf, 0.0):
            if x.numel() and draw.random() < 0.1:
                x.view(-1)[draw.randrange(x.numel())] = value
        return strided(x, draw.choice(hows)) if x.numel() and x.dim() > 1 else x

    a, b = make(la, m, k), make(lb, k, n)
    c = make(batch, m, n, kind=draw.choice([dtype, DType.FP32, DType.FP64])) if tail.c else None
    line = make(n if tail.bias is BiasDim.N else m) if tail.bias else None
    line = None if line is None else line.contiguous()
    out = None
    if draw.random() < 0.4:
        out = strided(torch.zeros(batch, m, n, device=device, dtype=TORCH[out_dtype]), draw.choice(hows))
    invariant = draw.random() < 0.5
    got = kernels.gemm(
        a,
        b,
        c=c,
        bias=line,
        alpha=tail.alpha,
        beta=tail.beta if tail.c else None,
        bias_dim=str(tail.bias or "n"),
        activation=str(tail.activation),
        out=out,
        out_dtype=TORCH[out_dtype],
        batch_invariant=invariant,
    )
    problem = Problem(m, n, k, batch, dtype, out_dtype, epilogue=tail, batch_invariant=invariant)
    host = [None if x is None else to_host(x) for x in (got, a, b, c, line)]
    verdict = check(problem, host[0], *host[1:])  # type: ignore[arg-type]
    assert verdict.ok, (seed, problem, a.stride(), b.stride(), got.stride(), verdict.detail)
