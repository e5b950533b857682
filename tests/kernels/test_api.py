"""kernels.gemm on the CPU: any strides, batches, epilogues; what can't be meant is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kernels  # noqa: E402
from kernels import api  # noqa: E402
from kernels.api import choice_for, overlap  # noqa: E402
from kernels.problem import Activation, BiasDim, DType, Epilogue, Problem, Unsupported  # noqa: E402
from kernels.selftest import to_host  # noqa: E402
from kernels.verify import check  # noqa: E402

DTYPES = {
    torch.float16: DType.FP16,
    torch.bfloat16: DType.BF16,
    torch.float32: DType.FP32,
    torch.float64: DType.FP64,
}


def draw(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def views(x: Any) -> dict[str, Any]:
    """The same matrix in other strides."""
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] * 2, dtype=x.dtype)
    wide[..., ::2] = x
    pitched = torch.zeros(*x.shape[:-1], x.shape[-1] + 5, dtype=x.dtype)
    pitched[..., : x.shape[-1]] = x
    return {
        "compact": x,
        "transposed": x.transpose(-1, -2).contiguous().transpose(-1, -2),
        "apart": wide[..., ::2],
        "pitched": pitched[..., : x.shape[-1]],
    }


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("name", ["compact", "transposed", "apart", "pitched"])
def test_strides_and_types(dtype: Any, name: str) -> None:
    a, b = draw(2, 17, 30, dtype=dtype), draw(30, 19, dtype=dtype, seed=1)
    got = kernels.gemm(views(a)[name], views(b)[name], bias=draw(17, seed=2), bias_dim="m", activation="gelu")
    problem = Problem(
        17, 19, 30, 2, DTYPES[dtype], DTYPES[dtype],
        epilogue=Epilogue(bias=BiasDim.M, activation=Activation.GELU), b_broadcast=True,
    )  # fmt: skip
    assert got.shape == (2, 17, 19)
    assert check(problem, to_host(got), to_host(a), to_host(b), None, to_host(draw(17, seed=2))).ok


def test_two_dimensions_stay_two() -> None:
    a, b = draw(5, 7), draw(7, 3)
    assert kernels.gemm(a, b).shape == (5, 3)
    assert kernels.gemm(a[None], b).shape == (1, 5, 3)
    assert kernels.gemm(a, b, out_dtype=torch.float16).dtype is torch.float16


def test_out_may_be_c() -> None:
    a, b, c = draw(20, 30), draw(30, 40, seed=1), draw(20, 40, seed=2)
    want = kernels.gemm(a, b, c=c, beta=0.5)
    got = kernels.gemm(a, b, c=c, beta=0.5, out=c)
    assert got is c
    assert torch.equal(got, want)


def test_out_may_overlap_c_otherwise() -> None:
    room = draw(21, 40)
    a, b = draw(20, 30), draw(30, 40, seed=1)
    want = kernels.gemm(a, b, c=room[1:].clone())
    assert torch.equal(kernels.gemm(a, b, c=room[1:], out=room[:-1]), want)


def lying_in(out: Any, dim: str, dtype: Any) -> Any:
    """A bias of 20 in D's memory: its first row, or its first bytes as another type, or a column."""
    return out.view(dtype).flatten()[:20] if dim == "n" else out[:, 3]


@pytest.mark.parametrize("variant", ["reference-numpy", "reference-torch", "auto"])
@pytest.mark.parametrize(
    ("dim", "dtype"), [("n", torch.float32), ("n", torch.bfloat16), ("m", torch.float32)]
)
def test_out_may_overlap_the_bias(variant: str, dim: str, dtype: Any) -> None:
    a, b = draw(20, 30), draw(30, 20, seed=1)
    out = draw(20, 20, seed=2)
    want = kernels.gemm(a, b, bias=lying_in(out, dim, dtype).clone(), bias_dim=dim, variant=variant)
    got = kernels.gemm(a, b, bias=lying_in(out, dim, dtype), bias_dim=dim, out=out, variant=variant)
    assert torch.equal(got, want)


def test_each_out_of_a_group_may_overlap_its_own_bias() -> None:
    a, b = [draw(20, 30), draw(9, 30, seed=3)], [draw(30, 20, seed=1)] * 2
    out = [draw(20, 20, seed=2), draw(9, 20, seed=4)]
    want = [kernels.gemm(x, y, bias=d[0].clone()) for x, y, d in zip(a, b, out, strict=True)]
    got = kernels.gemm_grouped(a, b, bias=[d[0] for d in out], out=out)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    with pytest.raises(ValueError, match="out of product 0 overlaps bias of product 1"):
        kernels.gemm_grouped(a, b, bias=[out[0][0], out[0][1]], out=out)


def test_what_a_kernel_is_given_overlaps_d_nowhere_and_is_copied_only_then() -> None:
    options = api._options(1.0, None, "n", None, None, None, True)
    a, b, out = draw(20, 30), draw(30, 20, seed=1), draw(20, 20, seed=2)
    beside = draw(20, seed=3)
    for c, bias, copied in ((out, beside, []), (out.t(), out[0], ["c", "bias"]), (None, out[5], ["bias"])):
        call = api._Call(a, b, c, bias, out, options)
        given = {name: x for name, x in (("c", c), ("bias", bias)) if x is not None}
        moved = [name for name, x in given.items() if getattr(call, name).data_ptr() != x.data_ptr()]
        assert moved == copied


@pytest.mark.parametrize(("shape", "empty"), [((0, 4, 5), True), ((4, 0, 5), True), ((4, 5, 0), False)])
def test_empty(shape: tuple[int, int, int], empty: bool) -> None:
    m, n, k = shape
    got = kernels.gemm(draw(m, k), draw(k, n), bias=torch.ones(n))
    assert got.shape == (m, n)
    assert empty or bool((got == 1).all())


@pytest.mark.parametrize("alpha", [float("inf"), float("nan")])
def test_without_k_alpha_does_not_count(alpha: float) -> None:
    got = kernels.gemm(draw(3, 0), draw(0, 2), c=torch.ones(3, 2), bias=torch.ones(2), alpha=alpha, beta=2)
    assert got.tolist() == [[3, 3]] * 3


def test_size_one_dimensions_with_odd_strides() -> None:
    a = draw(1, 9).as_strided((1, 9), (7777, 1))
    b = draw(9, 1).as_strided((9, 1), (1, 5))
    assert torch.allclose(kernels.gemm(a, b), a @ b)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"b": draw(4, 4, dtype=torch.float64)}, TypeError, "share a dtype"),
        ({"b": draw(5, 4)}, ValueError, "K = 4"),
        ({"b": [1.0]}, TypeError, "torch tensor"),
        ({"a": torch.ones(4, 4, dtype=torch.int32)}, TypeError, "not torch.int32"),
        ({"a": draw(4)}, ValueError, "dimensions"),
        ({"beta": 1.0}, ValueError, "no c"),
        ({"c": draw(3, 4)}, ValueError, "c is"),
        ({"bias": draw(5)}, ValueError, "bias has shape"),
        ({"bias_dim": "k", "bias": draw(4)}, ValueError, "'k'"),
        ({"activation": "tanh"}, ValueError, "tanh"),
        ({"out": draw(4, 4), "out_dtype": torch.float16}, TypeError, "out_dtype"),
        ({"out": draw(2, 4, 4)}, ValueError, "out has shape"),
        ({"out": draw(4, 1).expand(4, 4)}, ValueError, "share memory"),
        ({"out": draw(20).as_strided((4, 4), (3, 1))}, ValueError, "share memory"),
        ({"out": draw(20).as_strided((4, 4), (1, 2))}, ValueError, "share memory"),
        ({"a": draw(2, 4, 4), "out": draw(40).as_strided((2, 4, 4), (15, 4, 1))}, ValueError, "share memory"),
        ({"a": draw(2, 4, 4), "b": draw(3, 4, 4)}, ValueError, "batch sizes"),
        ({"variant": "step9-999x999"}, Unsupported, "does not exist"),
    ],
)
def test_refused(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        kernels.gemm(**({"a": draw(4, 4), "b": draw(4, 4)} | arguments))


def multiply_into(out: Any) -> None:
    kernels.gemm(draw(4, 4), draw(4, 4), out=out)


def multiply_into_view(out: Any) -> None:
    kernels.gemm(draw(2, 4), draw(4, 4), out=out[:2])


def multiply_together_into(out: Any) -> None:
    kernels.gemm_grouped([draw(4, 4)] * 2, [draw(4, 4)] * 2, out=[draw(4, 4), out])


@pytest.mark.parametrize("write", [multiply_into, multiply_into_view, multiply_together_into])
def test_autograd_is_told_that_out_was_written(write: Any) -> None:
    weight, out = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)
    loss = (weight * out).sum()
    write(out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_out_may_be_a_tensor_of_inference_mode() -> None:
    with torch.inference_mode():
        out = draw(4, 4)
        kernels.gemm(torch.eye(4), torch.eye(4), out=out)
        ordinary = kernels.gemm(torch.eye(4), torch.eye(4))
    assert torch.equal(out, torch.eye(4))
    assert torch.equal(ordinary, out)


def negated(x: Any) -> Any:
    """The same values as a view of memory that holds their negatives."""
    view = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert view.is_neg()
    return view


@pytest.mark.parametrize(
    "strides", [(16, 4, 1), (16, 1, 4), (4, 8, 1), (1, 2, 8), (1, 8, 2), (999, 8, 2), (20, 5, 1)]
)
def test_out_may_have_any_strides_by_which_no_elements_share_memory(strides: tuple[int, ...]) -> None:
    a, b = draw(2, 4, 9), draw(9, 4)
    out = torch.zeros(2000).as_strided((2, 4, 4), strides)
    assert torch.equal(kernels.gemm(a, b, out=out), kernels.gemm(a, b))


@pytest.mark.parametrize("name", ["a", "b", "c", "bias"])
@pytest.mark.parametrize("variant", ["reference-numpy", "reference-torch"])
def test_a_view_that_negates_its_memory_is_read_by_its_values(name: str, variant: str) -> None:
    given = {"a": draw(9, 8), "b": draw(8, 7, seed=1), "c": draw(9, 7, seed=2), "bias": draw(7, seed=3)}
    want = kernels.gemm(**given, variant=variant)
    given[name] = negated(given[name])
    assert torch.equal(kernels.gemm(**given, variant=variant), want)
    call = api._Call(*given.values(), None, api._options(1.0, None, "n", None, None, None, True))
    assert not any(x.is_neg() for x in (call.a, call.b, call.c, call.bias))  # kernels get addresses


def test_out_that_negates_its_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="is_neg"):
        kernels.gemm(draw(4, 4), draw(4, 4), out=negated(draw(4, 4)))


def test_out_that_overlaps_an_input_is_refused() -> None:
    room = draw(8, 20)
    with pytest.raises(ValueError, match="overlaps a"):
        kernels.gemm(room[:, :8], draw(8, 8), out=room[:, 6:14])
    kernels.gemm(room[:, :8], draw(8, 8), out=room[:, 8:16])  # side by side


def test_overlap_agrees_with_counting_bytes() -> None:
    cuts = [slice(0, 3), slice(2, 6), slice(3, 6), slice(0, 6)]
    room = torch.arange(60.0).reshape(1, 6, 10)
    for rows, columns, other_rows, other_columns in itertools.product(cuts, repeat=4):
        x, y = room[:, rows, columns], room[:, other_rows, other_columns]
        shared = bool(set(x.flatten().tolist()) & set(y.flatten().tolist()))
        # views of one pitch that don't share rows may be told to overlap only where they share columns
        assert overlap(x, y) or not shared
        apart = not set(range(6)[columns]) & set(range(6)[other_columns])
        if apart:
            assert not overlap(x, y)


def test_rows_have_equal_bits_in_any_stack() -> None:
    a, b = draw(64, 333), draw(333, 21, seed=1)
    whole = kernels.gemm(a, b)
    for start, stop in ((0, 1), (5, 22), (63, 64)):
        assert torch.equal(kernels.gemm(a[start:stop], b), whole[start:stop])


def test_choice_says_what_would_run() -> None:
    choice = choice_for(Problem(64, 64, 64, dtype=DType.FP32, out_dtype=DType.FP32))
    assert choice.variant in {"reference-torch", "reference-numpy"}
    assert choice.why


def test_importing_the_package_imports_no_torch() -> None:
    import subprocess
    import sys

    modules = "kernels, kernels.selector, kernels.reference, kernels.family, kernels.verify"
    subprocess.run(
        [sys.executable, "-c", f"import {modules}, sys; assert 'torch' not in sys.modules"], check=True
    )


def test_where_tensors_lie_counts_however_often_the_product_was_asked_for() -> None:
    a, b, d = (torch.ones(16, 16) for _ in range(3))
    assert (kernels.gemm(a, b, out=d) == 16).all()
    for name, out in (("a", a), ("b", b)):
        with pytest.raises(ValueError, match=f"out overlaps {name}"):
            kernels.gemm(a, b, out=out)
    c = torch.full((16, 16), 2.0)
    for _ in range(2):
        assert (kernels.gemm(a, b, c=c, out=d) == 18).all()
        assert (kernels.gemm(a, b, c=d, out=d) == 34).all()


def test_alignment_is_of_this_result_and_not_of_one_like_it() -> None:
    options = api._options(1.0, None, "n", None, None, None, True)
    a, b = torch.ones(4, 64).half(), torch.ones(64, 64).half()
    room = torch.empty(4 * 64 + 128).half()
    start = -room.data_ptr() % 128 // 2
    found = []
    for shift in (0, 1, 4, 0):
        d = room[start + shift :][: 4 * 64].view(4, 64)
        found.append(api._Call(a, b, None, None, d, options).problem.aligned)
    assert found == [128, 2, 8, 128]
