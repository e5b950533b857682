"""kernels.gemm on a real GPU, by the kernels built for it: right, equal in bits, on streams, threads and graphs."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import kernels  # noqa: E402
from kernels import cublas, probe, selftest, tune  # noqa: E402
from kernels.problem import DType, Precision, Problem  # noqa: E402
from kernels.runtime import Runtime, runtime  # noqa: E402
from kernels.selector import Reason, table_key  # noqa: E402
from kernels.selftest import to_host  # noqa: E402
from kernels.verify import check  # noqa: E402
from tests.kernels.random_problems import one  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> Iterator[Runtime]:
    """The runtime that kernels.gemm uses."""
    found = runtime(0)
    if not found.libraries.manifest.functions:
        pytest.fail(f"nothing is built: python -m kernels build --arch {found.device.arch}")
    yield found
    assert not found.barred, "a variant was quarantined on the way"


@pytest.mark.parametrize("block", range(10))
def test_random_problems_within_the_bound(gpu: Runtime, block: int) -> None:
    for seed in range(block * 60, block * 60 + 60):
        one(seed, "cuda")


def test_every_function_of_every_variant(gpu: Runtime) -> None:
    for each in gpu.variants:
        assert selftest.everything(gpu, each) is None, each.name


def test_the_probe_finds_everything_right(gpu: Runtime) -> None:
    names = [each.name for each in gpu.variants]
    outcomes = probe.probe(names, index=0)
    assert {name: outcome.ended for name, outcome in outcomes.items()} == dict.fromkeys(
        names, probe.Ended.RIGHT
    ), [outcome for outcome in outcomes.values() if outcome.ended is not probe.Ended.RIGHT]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(1024, 1024), (2048, 520), (264, 4096), (8192, 256), (100, 333)])
def test_rows_have_equal_bits_in_random_stacks(gpu: Runtime, dtype: Any, n: int, k: int) -> None:
    draw = random.Random(n)
    rows = 2000
    a = torch.randn(rows, k, device="cuda").to(dtype)
    b = torch.randn(k, n, device="cuda").to(dtype)
    bias = torch.randn(n, device="cuda").to(dtype)
    whole = kernels.gemm(a, b, bias=bias, activation="silu")
    for _ in range(100):
        m = draw.choice([1, 2, 3, 8, 16, 17, 64, 100, 128, 200, 500, 1000])
        picked = torch.randperm(rows, device="cuda")[:m]
        assert torch.equal(kernels.gemm(a[picked], b, bias=bias, activation="silu"), whole[picked]), m


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_reference_has_equal_bits_too(gpu: Runtime, dtype: Any) -> None:
    a, b = (
        torch.randn(900, 700, device="cuda", dtype=dtype),
        torch.randn(700, 300, device="cuda", dtype=dtype),
    )
    whole = kernels.gemm(a, b)
    for start, stop in ((0, 1), (7, 300), (513, 514), (100, 900)):
        assert torch.equal(kernels.gemm(a[start:stop], b), whole[start:stop])


def test_repeats_have_equal_bits(gpu: Runtime) -> None:
    for m, n, k in ((1024, 1024, 1024), (16, 4096, 4096), (100, 264, 3000)):
        a, b = torch.randn(m, k, device="cuda").half(), torch.randn(k, n, device="cuda").half()
        for invariant in (True, False):
            first = kernels.gemm(a, b, batch_invariant=invariant)
            for _ in range(100):
                assert torch.equal(kernels.gemm(a, b, batch_invariant=invariant), first)


def test_own_kernels_run_where_they_are_meant_to(gpu: Runtime) -> None:
    for shape in ((4096, 4096, 4096), (16, 8192, 8192), (4095, 4097, 4100), (1000, 3000, 500)):
        from kernels.operands import as_packed

        for invariant in (True, False):
            choice = gpu.choose(as_packed(Problem(*shape, batch_invariant=invariant)))
            assert choice.variant.startswith("step9"), (shape, choice)


def test_fp32_is_not_tf32_unless_asked(gpu: Runtime) -> None:
    a, b = torch.randn(300, 2000, device="cuda"), torch.randn(2000, 200, device="cuda")
    ieee = Problem(300, 200, 2000, dtype=DType.FP32, out_dtype=DType.FP32)
    tf32 = Problem(300, 200, 2000, dtype=DType.FP32, out_dtype=DType.FP32, precision=Precision.TF32)
    for invariant in (True, False):
        plain = to_host(kernels.gemm(a, b, batch_invariant=invariant))
        asked = to_host(kernels.gemm(a, b, precision="tf32", batch_invariant=invariant))
        assert check(ieee, plain, to_host(a), to_host(b)).ok
        assert check(tf32, asked, to_host(a), to_host(b)).ok
        assert not check(ieee, asked, to_host(a), to_host(b)).ok


def test_out_may_be_c_and_may_not_be_a(gpu: Runtime) -> None:
    a, b, c = (torch.randn(512, 512, device="cuda").half() for _ in range(3))
    want = kernels.gemm(a, b, c=c, beta=0.5)
    assert torch.equal(kernels.gemm(a, b, c=c, beta=0.5, out=c), want)
    with pytest.raises(ValueError, match="overlaps a"):
        kernels.gemm(a, b, out=a)


def test_streams_and_threads(gpu: Runtime) -> None:
    operands = [
        (torch.randn(300 + 64 * i, 520, device="cuda").half(), torch.randn(520, 1024, device="cuda").half())
        for i in range(8)
    ]
    want = [kernels.gemm(a, b) for a, b in operands]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(i: int) -> None:
        a, b = operands[i]
        streams = [torch.cuda.Stream() for _ in range(3)]
        for turn in range(50):
            with torch.cuda.stream(streams[turn % 3]):
                got = kernels.gemm(a, b)
                same = torch.equal(got, want[i])
            if not same:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(512, 512, 512), (16, 4096, 4096), (100, 331, 205)])
def test_graph_capture(gpu: Runtime, dtype: Any, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = torch.randn(m, k, device="cuda").to(dtype), torch.randn(k, n, device="cuda").to(dtype)
    out = torch.empty(m, n, device="cuda", dtype=dtype)
    kernels.gemm(a, b, out=out)  # loads what the capture needs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.gemm(a, b, out=out)
    a.normal_()
    want = kernels.gemm(a, b)
    out.zero_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def test_more_than_two_to_the_31_elements(gpu: Runtime) -> None:
    m, n, k = 70_000, 32_768, 264  # D has 2.3e9 elements
    a, b = torch.randn(m, k, device="cuda").half(), torch.randn(k, n, device="cuda").half()
    d = kernels.gemm(a, b)
    for rows in (slice(0, 64), slice(m - 64, m), slice(65_500, 65_564)):
        problem = Problem(64, n, k)
        assert check(problem, to_host(d[rows]), to_host(a[rows]), to_host(b)).ok
    del d
    m, k = 40_000, 65_536  # A has 2.6e9
    a = torch.randn(m, k, device="cuda", dtype=torch.half)
    b = torch.randn(k, 64, device="cuda").half()
    d = kernels.gemm(a, b)
    rows = slice(m - 64, m)
    assert check(Problem(64, 64, k), to_host(d[rows]), to_host(a[rows]), to_host(b)).ok


def test_a_wrong_variant_is_quarantined_and_the_answer_is_right(
    gpu: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = Runtime.of(0)
    problem = Problem(256, 256, 256)
    first = fresh.choose(problem).variant
    assert first != cublas.NAME
    launch = Runtime.launch

    def off_by_one(self: Runtime, variant: Any, problem: Problem, operands: Any, **rest: Any) -> None:
        launch(self, variant, problem, operands, **rest)
        if variant.name == first:
            operands.d.add_(1)

    monkeypatch.setattr(Runtime, "launch", off_by_one)
    a, b = torch.randn(1, 256, 256, device="cuda").half(), torch.randn(1, 256, 256, device="cuda").half()
    d = torch.empty(1, 256, 256, device="cuda", dtype=torch.half)
    from kernels.operands import Operands

    choice = fresh.run(problem, Operands(a, b, d))
    assert choice.variant != first
    assert "wrong at" in fresh.barred[first]
    assert check(problem, to_host(d), to_host(a), to_host(b)).ok


def test_measured_times_decide(gpu: Runtime) -> None:
    problem = tune.problem_of("512x512x512", DType.FP16, "nn", invariant=False)
    (timed,) = tune.tune_gpu(gpu, [problem])
    gpu.measured({table_key(name, problem): seconds for name, seconds in timed.seconds.items()})
    try:
        choice = gpu.choose(problem)
    finally:
        gpu.measured({})
    assert (choice.variant, choice.reason) == (timed.best, Reason.MEASURED)


def test_numpy_is_the_judge() -> None:
    """The bound rejects what a GPU could get wrong: one element off by what a lost K step costs."""
    random_ = np.random.default_rng(0)
    a, b = (random_.standard_normal((64, 64)).astype(np.float16) for _ in range(2))
    d = a.astype(np.float32) @ b.astype(np.float32)
    d[3, 3] -= a[3, 48:].astype(np.float32) @ b[48:, 3].astype(np.float32)
    assert not check(Problem(64, 64, 64), d.astype(np.float16), a, b).ok
