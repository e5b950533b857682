"""The CPU references: right by the API's bound on odd problems; rows have equal bits alone and stacked."""

from __future__ import annotations

import itertools
import subprocess
import sys
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import exact, reference
from kernels.device import Device
from kernels.elementwise import NUMPY, Array, canonical_nan, narrow, quiet
from kernels.problem import Activation, BiasDim, DType, Epilogue, Problem
from kernels.reference import Backend, Converted, compute, compute_stacked
from kernels.verify import check

BACKENDS: list[Backend] = [each.backend for each in reference.variants()]
CPU = Device("test", "cpu", peak_flops={"fp32": 1e11, "fp64": 5e10})

Operands = dict[str, Any]


def operands(problem: Problem, seed: int = 0, special: bool = False) -> Operands:
    """Random operands as stored; `special` sprinkles NaN, infinities and zeros."""
    random = np.random.default_rng(seed)

    def draw(*shape: int) -> Array:
        x = random.standard_normal(shape).astype(np.float32).astype(NUMPY[problem.dtype])
        if special and x.size:
            for value in (np.nan, np.inf, -np.inf, 0.0):
                if random.random() < 0.4:
                    x.reshape(-1)[random.integers(x.size)] = value
        return x

    batch_a = 1 if problem.a_broadcast else problem.batch
    batch_b = 1 if problem.b_broadcast else problem.batch
    a = draw(batch_a, *((problem.k, problem.m) if problem.trans_a else (problem.m, problem.k)))
    b = draw(batch_b, *((problem.n, problem.k) if problem.trans_b else (problem.k, problem.n)))
    tail = problem.epilogue
    c = draw(problem.batch, problem.m, problem.n) if tail.c else None
    bias = draw(problem.n if tail.bias is BiasDim.N else problem.m) if tail.bias else None
    return {"a": a, "b": b, "c": c, "bias": bias}


def run(problem: Problem, given_: Operands, backend: Backend) -> Array:
    out = np.full((problem.batch, problem.m, problem.n), 77, NUMPY[problem.out_dtype])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compute(problem, given_["a"], given_["b"], out, given_["c"], given_["bias"], backend=backend)
    return out


problems = st.builds(
    Problem,
    m=st.sampled_from([0, 1, 2, 7, 16, 33, 65]),
    n=st.sampled_from([0, 1, 3, 16, 31, 64, 70]),
    k=st.sampled_from([0, 1, 2, 17, 64, 129, 400]),
    batch=st.sampled_from([1, 1, 2, 3]),
    dtype=st.sampled_from(list(DType)),
    out_dtype=st.sampled_from(list(DType)),
    trans_a=st.booleans(),
    trans_b=st.booleans(),
    batch_invariant=st.booleans(),
    a_broadcast=st.booleans(),
    b_broadcast=st.booleans(),
    epilogue=st.builds(
        Epilogue,
        alpha=st.sampled_from([1.0, 1.0, 0.0, -0.5, 3.25]),
        beta=st.sampled_from([0.0, 1.0, -2.5]),
        c=st.just(True),
        bias=st.sampled_from([None, BiasDim.N, BiasDim.M]),
        activation=st.sampled_from(list(Activation)),
    ),
)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(problem=problems, seed=st.integers(0, 999), special=st.booleans())
def test_every_problem_within_the_bound(backend: Backend, problem: Problem, seed: int, special: bool) -> None:
    given_ = operands(problem, seed, special)
    verdict = check(problem, run(problem, given_, backend), **given_)
    assert verdict.ok, (problem, verdict.detail)


def test_the_bound_rejects_a_wrong_element() -> None:
    problem = Problem(9, 9, 40, dtype=DType.FP32, out_dtype=DType.FP32)
    given_ = operands(problem)
    out = run(problem, given_, "numpy")
    out[0, 4, 5] *= 1 + 1e-3
    verdict = check(problem, out, **given_)
    assert not verdict.ok
    assert "(0, 4, 5)" in verdict.detail


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_read_does_not_spread(backend: Backend) -> None:
    nan = np.full((4, 4), np.nan, np.float32)
    ones = np.ones((4, 4), np.float32)
    out = np.empty((4, 4), np.float32)
    compute(
        Problem(4, 4, 4, dtype=DType.FP32, out_dtype=DType.FP32, epilogue=Epilogue(alpha=0, beta=2, c=True)),
        nan, nan, out, ones, backend=backend,
    )  # fmt: skip
    assert (out == 2).all()
    compute(
        Problem(4, 4, 4, dtype=DType.FP32, out_dtype=DType.FP32, epilogue=Epilogue(beta=0, c=True)),
        ones, ones, out, nan, backend=backend,
    )  # fmt: skip
    assert (out == 4).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("alpha", [np.inf, -np.inf, np.nan, 2.0])
@pytest.mark.parametrize("dtype", list(DType))
def test_without_k_alpha_does_not_count(backend: Backend, alpha: float, dtype: DType) -> None:
    tail = Epilogue(alpha=alpha, beta=2, c=True, bias=BiasDim.N, activation=Activation.RELU)
    problem = Problem(3, 2, 0, dtype=dtype, out_dtype=DType.FP32, epilogue=tail)
    kind = NUMPY[dtype]
    a, b = np.empty((3, 0), kind), np.empty((0, 2), kind)
    c, bias = np.full((3, 2), 1, kind), np.array([-1, -3], kind)
    outs = [np.empty((3, 2), np.float32) for _ in range(3)]
    compute(problem, a, b, outs[0], c, bias, backend=backend)
    compute_stacked([problem] * 2, [a] * 2, b, outs[1:], [c] * 2, [bias] * 2, backend=backend)
    assert all((out == [1, 0]).all() for out in outs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("out_dtype", [DType.FP16, DType.FP32])
def test_overflow_is_infinity(backend: Backend, out_dtype: DType) -> None:
    a = np.full((2, 3), 3e38, np.float32)
    out = np.empty((2, 2), NUMPY[out_dtype])
    compute(
        Problem(2, 2, 3, dtype=DType.FP32, out_dtype=out_dtype), a, a.T[:, :2].copy(), out, backend=backend
    )
    assert np.isposinf(out).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_uint16_is_bfloat16_and_out_may_be_c(backend: Backend) -> None:
    problem = Problem(
        5, 6, 7, dtype=DType.BF16, out_dtype=DType.BF16, epilogue=Epilogue(beta=1, c=True, bias=BiasDim.M)
    )
    given_ = operands(problem)
    want = run(problem, given_, backend)
    bits = {name: x.view(np.uint16).copy() for name, x in given_.items()}
    compute(problem, bits["a"], bits["b"], bits["c"], bits["c"], bits["bias"], backend=backend)
    assert bits["c"].tobytes() == want.tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("invariant", [True, False])
def test_out_may_overlap_the_bias(backend: Backend, invariant: bool) -> None:
    tail = Epilogue(bias=BiasDim.N)
    problem = Problem(16, 32, 7, 1, DType.FP32, DType.FP32, epilogue=tail, batch_invariant=invariant)
    given_ = operands(problem)
    want = run(problem, given_, backend)
    out = np.zeros_like(want)
    out[0, 5] = given_["bias"]
    compute(problem, given_["a"], given_["b"], out, None, out[0, 5], backend=backend)
    assert out.tobytes() == want.tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16, DType.FP32])
def test_results_wider_than_the_compute_type(backend: Backend, dtype: DType) -> None:
    problem = Problem(33, 21, 70, dtype=dtype, out_dtype=DType.FP64)
    given_ = operands(problem)
    assert check(problem, run(problem, given_, backend), **given_).ok


@pytest.mark.parametrize("backend", BACKENDS)
def test_read_only_operands(backend: Backend) -> None:
    problem = Problem(32, 32, 32, dtype=DType.FP32, out_dtype=DType.FP32)
    given_ = operands(problem)
    for x in (given_["a"], given_["b"]):
        x.flags.writeable = False
    assert check(problem, run(problem, given_, backend), **given_).ok


def test_double_to_bfloat16_rounds_once() -> None:
    # halfway between two bfloat16 up to fp32's last bit: rounding by way of fp32 goes to even, once goes up
    x = np.array(
        [1 + 2.0**-8 + 2.0**-40, -(1 + 2.0**-8 + 2.0**-40), 1e300, -1e-300, np.nan, 1 + 2.0**-8, 0.0]
    )
    out = np.empty(x.shape, NUMPY[DType.BF16])
    with quiet():
        narrow(x, out)
    assert out[0] == np.float32(1 + 2.0**-7)
    assert out[1] == -np.float32(1 + 2.0**-7)
    assert np.isinf(out[2])
    assert out[3] == 0
    assert np.isnan(out[4])
    assert out[5] == 1
    assert out[6] == 0


STACKS = [
    (backend, dtype, n, k)
    for backend, dtype, (n, k) in itertools.product(
        BACKENDS, [DType.FP16, DType.FP32, DType.FP64], [(1, 40), (5, 513), (64, 385), (257, 300), (40, 2000)]
    )
]


@pytest.mark.parametrize(("backend", "dtype", "n", "k"), STACKS)
@pytest.mark.parametrize("trans", ["nn", "nt", "tn"])
def test_a_row_has_the_bits_that_it_has_alone(
    backend: Backend, dtype: DType, n: int, k: int, trans: str
) -> None:
    random = np.random.default_rng(n + k)
    trans_a, trans_b = trans[0] == "t", trans[1] == "t"
    tail = Epilogue(alpha=0.5, beta=2, c=True, bias=BiasDim.N, activation=Activation.SILU)
    b = random.standard_normal((n, k) if trans_b else (k, n)).astype(NUMPY[dtype])
    bias = random.standard_normal(n).astype(NUMPY[dtype])
    sizes = [int(m) for m in random.choice([1, 2, 3, 15, 17, 40, 130, 530], 8)]
    kept = Converted()

    def make(m: int) -> Problem:
        return Problem(m, n, k, dtype=dtype, out_dtype=dtype, trans_a=trans_a, trans_b=trans_b, epilogue=tail)

    everything = [make(m) for m in sizes]
    a = [random.standard_normal((k, m) if trans_a else (m, k)).astype(NUMPY[dtype]) for m in sizes]
    c = [random.standard_normal((m, n)).astype(NUMPY[dtype]) for m in sizes]
    alone = [np.empty_like(x) for x in c]
    for problem, one_a, out, one_c in zip(everything, a, alone, c, strict=True):
        compute(problem, one_a, b, out, one_c, bias, backend=backend)
        assert check(problem, out, one_a, b, one_c, bias).ok
    for order in (list(range(8)), [5, 2, 7], [1], [6, 0, 3, 4]):
        out = [np.empty_like(alone[i]) for i in order]
        compute_stacked(
            [everything[i] for i in order],
            [a[i] for i in order],
            b,
            out,
            [c[i] for i in order],
            [bias] * len(order),
            backend=backend,
            tensor="owner/b@1",
            kept=kept,
        )
        for i, got in zip(order, out, strict=True):
            assert got.tobytes() == alone[i].tobytes(), (order, i)


@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_a_product_of_full_tiles_have_the_bits_that_they_have_alone(
    backend: Backend, dtype: DType
) -> None:
    random = np.random.default_rng(2)
    a, b = (random.standard_normal(shape).astype(NUMPY[dtype]) for shape in ((192, 301), (301, 128)))
    a[7, 3] = np.array([0xFFC12345], np.uint32).view(np.float32)[0]  # a NaN with a sign and a payload
    whole = np.empty((192, 128), NUMPY[dtype])
    compute(Problem(192, 128, 301, dtype=dtype, out_dtype=dtype), a, b, whole, backend=backend)
    assert whole[7].tobytes() == np.full(128, np.nan, NUMPY[dtype]).tobytes()
    for start, stop in ((0, 5), (7, 8), (100, 163)):
        part = np.empty((stop - start, 128), NUMPY[dtype])
        alone = Problem(stop - start, 128, 301, dtype=dtype, out_dtype=dtype)
        compute(alone, a[start:stop], b, part, backend=backend)
        assert part.tobytes() == whole[start:stop].tobytes()


def test_a_bare_product_of_full_tiles_goes_straight_from_operands_to_d(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[Array, ...]] = []
    monkeypatch.setitem(reference._MATMUL, "torch", lambda *arrays: calls.append(arrays))
    monkeypatch.setattr(reference, "_way", lambda *_: "padded")
    a, b, out = (np.ones((32, 32), np.float32) for _ in range(3))
    bare = Problem(32, 32, 32, dtype=DType.FP32, out_dtype=DType.FP32)
    compute(bare, a, b, out, backend="torch")
    assert all(given is mine for given, mine in zip(calls.pop(), (a, b, out), strict=True))
    # What has more to it doesn't: another layout, a part of a larger matrix, an epilogue, rows beside full tiles.
    alpha = replace(bare, epilogue=Epilogue(alpha=2.0))
    for problem, x in ((bare, a.T), (bare, np.ones((32, 40), np.float32)[:, :32]), (alpha, a)):
        compute(problem, x, b, out, backend="torch")
        assert calls.pop()[2] is not out
    compute(replace(bare, m=30), a[:30], b, out[:30], backend="torch")
    assert calls.pop()[0].shape == (32, 32)


def test_every_nan_gets_the_same_bits_and_nothing_else_changes() -> None:
    for kind in (np.float32, np.float64):
        x = np.array([[1.0, -np.inf, 0.0], [-0.0, np.inf, 5e-324]], kind)
        before = x.tobytes()
        with quiet():
            canonical_nan(x)
            assert x.tobytes() == before
            canonical_nan(x[:0])
            x.view(np.uint64 if kind is np.float64 else np.uint32)[1, 1] += 3  # a NaN with a payload
            canonical_nan(x)
        assert x.tobytes() == np.array([[1.0, -np.inf, 0.0], [-0.0, np.nan, 5e-324]], kind).tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
def test_self_test_can_fail(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reference._rows_agree(backend, DType.FP64, 17, 385)
    plain = reference._MATMUL[backend]

    def depends_on_rows(a: Array, b: Array, out: Array) -> None:
        plain(a, b, out)
        out *= 1 + len(a) * np.finfo(out.dtype).eps

    monkeypatch.setitem(reference._MATMUL, backend, depends_on_rows)
    assert not reference._rows_agree(backend, DType.FP64, 17, 385)


@pytest.mark.parametrize("way", ["exact", "rows"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_slower_ways_have_equal_bits_too(backend: Backend, way: reference.Way) -> None:
    dtype = DType.FP32 if way == "exact" else DType.FP64
    random = np.random.default_rng(1)
    a = random.standard_normal((40, 300)).astype(NUMPY[dtype])
    b = random.standard_normal((300, 33)).astype(NUMPY[dtype])
    library = reference._Library(backend, dtype, way)
    whole, part = np.empty((40, 33), NUMPY[dtype]), np.empty((9, 33), NUMPY[dtype])
    library.product(a, b, whole)
    library.product(a[20:29], b, part)
    assert part.tobytes() == whole[20:29].tobytes()
    assert check(Problem(40, 33, 300, dtype=dtype, out_dtype=dtype), whole, a, b).ok


def sloppy(seed: int) -> exact.Matmul:
    """A product that errs by a random share of the bound, as another library's order of summing may."""
    random = np.random.default_rng(seed)

    def matmul(a: Array, b: Array, out: Array) -> None:
        np.matmul(a, b, out=out)
        reach = (a.shape[1] * 2.0**-53) * (np.abs(a) @ np.abs(b))
        out += np.where(np.isfinite(reach), reach * random.uniform(-1, 1, out.shape), 0)

    return matmul


@pytest.mark.parametrize(
    "kind", ["normal", "integers", "sparse", "cancelling", "ties", "special", "tiny", "zero"]
)
def test_fp32_bits_depend_on_no_library(kind: str) -> None:
    random = np.random.default_rng(7)
    a, b = random.standard_normal((60, 500)), random.standard_normal((500, 40))
    if kind == "integers":
        a, b = np.rint(a * 4), np.rint(b * 4)
    elif kind == "sparse":
        a[random.random(a.shape) < 0.98] = 0
        b[random.random(b.shape) < 0.98] = 0
    elif kind == "cancelling":
        a[:, 250:] = -a[:, :250]
        b[250:] = b[:250]
    elif kind == "ties":  # sums that lie exactly between two fp32 numbers
        a[:] = 0
        a[:, 0], a[:, 1] = 1, 2.0**-24
        b[:] = 1
    elif kind == "special":
        a[3, 4], a[10, 3], b[7, 7], b[9, 1] = np.nan, np.inf, -np.inf, np.inf
    elif kind == "tiny":
        a, b = a * 1e-25, b * 1e-20
    elif kind == "zero":
        a[:] = -0.0
    left, right = a.astype(np.float32), b.astype(np.float32)
    outs = []
    with quiet():
        for matmul in (reference._numpy_matmul, sloppy(1), sloppy(2)):
            out = np.empty((60, 40), np.float32)
            exact.product(left, right, out, matmul)
            outs.append(out.tobytes())
    assert outs[0] == outs[1] == outs[2]
    assert check(Problem(60, 40, 500, dtype=DType.FP32, out_dtype=DType.FP32), out, left, right).ok


def test_exact_product_is_what_keeps_bits_equal() -> None:
    """Without the second look, libraries would differ: the test above can fail."""
    random = np.random.default_rng(7)
    a, b = random.standard_normal((200, 2000)), random.standard_normal((2000, 200))
    one, two = np.empty((200, 200)), np.empty((200, 200))
    reference._numpy_matmul(a, b, one)
    sloppy(1)(a, b, two)
    assert one.astype(np.float32).tobytes() != two.astype(np.float32).tobytes()


def test_blocks_cover_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)
    a, b = (
        random.standard_normal((150, 90)).astype(np.float32),
        random.standard_normal((90, 170)).astype(np.float32),
    )
    whole, blocked = np.empty((150, 170), np.float32), np.empty((150, 170), np.float32)
    exact.product(a, b, whole, reference._numpy_matmul)
    monkeypatch.setattr(exact, "BLOCK_ELEMENTS", 1000)
    exact.product(a, b, blocked, reference._numpy_matmul)
    assert whole.tobytes() == blocked.tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 70)])
def test_many_rows_are_padded_a_block_at_a_time(
    backend: Backend, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(n)
    a, b = random.standard_normal((2000, k)), random.standard_normal((k, n))
    whole, blocked = np.empty((2000, n)), np.full((2000, n), np.nan)
    problem = Problem(2000, n, k, dtype=DType.FP64, out_dtype=DType.FP64)
    compute(problem, a, b, whole, backend=backend)
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", 1)
    compute(problem, a, b, blocked, backend=backend)
    assert check(problem, blocked, a, b).ok
    assert whole.tobytes() == blocked.tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [DType.FP16, DType.FP32, DType.FP64])
@pytest.mark.parametrize("invariant", [True, False])
def test_each_layer_of_a_stored_batch_is_its_own(backend: Backend, dtype: DType, invariant: bool) -> None:
    kept = Converted()
    problem = Problem(5, 7, 9, 3, dtype, dtype, batch_invariant=invariant)
    given_ = operands(problem)
    for _ in range(2):
        out = np.empty((3, 5, 7), NUMPY[dtype])
        compute(problem, given_["a"], given_["b"], out, backend=backend, tensor="owner/b@1", kept=kept)
        assert check(problem, out, **given_).ok


def test_converted_keeps_within_its_budget_and_forgets() -> None:
    kept = Converted(1000)
    made = []

    def make() -> Array:
        made.append(1)
        return np.zeros(50)  # 400 bytes

    for tensor in ("x", "x", "y", "z", "x"):
        kept.get(tensor, "form", make)
    assert len(made) == 4  # x again after z pushed it out
    assert kept.nbytes <= 1000
    kept.forget(["x", "z"])
    assert kept.nbytes == 0
    assert kept.get("", "form", make) is not kept.get("", "form", make)


def test_estimate_pays_for_padding() -> None:
    one = reference.Reference("numpy")
    small = Problem(1, 64, 4096, dtype=DType.FP64, out_dtype=DType.FP64)
    assert one.seconds(small, CPU) > 10 * one.seconds(Problem(1, 64, 64, dtype=DType.FP64), CPU) / 64
    assert one.unsupported(small, Device("gpu", "sm_90a")) is not None
    assert one.unsupported(small, CPU) is None


THREADS = """
import ctypes, threading
import numpy as np, torch
from kernels import reference

torch.set_num_threads(2)  # MKL is told too
mkl = getattr(ctypes.PyDLL(torch._C.__file__), "MKL_Get_Max_Threads", torch.get_num_threads)
seen, matmul = {}, torch.matmul


def begun():
    torch.ones(300_000).sum()
    seen["a thread that began meanwhile"] = torch.get_num_threads()


def observed(*given, **named):
    seen["the product"] = torch.get_num_threads(), mkl()
    other = threading.Thread(target=begun)
    other.start()
    other.join()
    return matmul(*given, **named)


torch.matmul = observed
a = np.ones((64, 64), np.float32)
reference._torch_matmul(a, a, np.empty_like(a))
assert seen == {"the product": (1, 1), "a thread that began meanwhile": 2}, seen
assert (torch.get_num_threads(), mkl()) == (2, 2)
large = np.ones((512, 512), np.float32)
reference._torch_matmul(large, large, np.empty_like(large))
assert seen["the product"] == (2, 2), seen
"""


@pytest.mark.skipif(not reference.has_torch(), reason="torch is not installed")
def test_a_small_product_is_one_threads_and_no_other_thread_is_told_so() -> None:
    subprocess.run([sys.executable, "-c", THREADS], check=True)
