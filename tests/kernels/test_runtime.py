"""The runtime on CPU tensors: a stand-in for compiled functions takes the real calling convention's arguments."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kernels import cublas, selftest  # noqa: E402
from kernels import runtime as module  # noqa: E402
from kernels.device import Device  # noqa: E402
from kernels.elementwise import activate, narrow, quiet  # noqa: E402
from kernels.libraries import FunctionInfo, NotBuilt, UntrustedFolder  # noqa: E402
from kernels.operands import Operands, packed  # noqa: E402
from kernels.problem import Activation, BiasDim, DType, Epilogue, Problem, Unsupported  # noqa: E402
from kernels.runtime import Repeated, Runtime, resident_blocks  # noqa: E402
from kernels.selector import Reason, Variant, table_key  # noqa: E402
from kernels.verify import check  # noqa: E402

GPU = Device(
    "stand-in", "sm_90a", sms=4, smem_bytes=232_448, peak_flops={"fp16": 1e12, "bf16": 1e12, "fp32": 1e11}
)
TYPES = {1: np.float16, 2: np.uint16, 3: np.float32}
ACTIVATIONS = (Activation.NONE, Activation.RELU, Activation.GELU, Activation.SILU)


def at(address: int, kind: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Memory at an address, as the kernel would see it."""
    size = np.dtype(kind).itemsize
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * (span * size)).from_address(address)).view(kind)
    return np.lib.stride_tricks.as_strided(memory, shape, [s * size for s in strides])


def wide(x: Any) -> Any:
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x.astype(np.float32)


@quiet()
def stand_in(
    a: Any, b: Any, d: int, db: int, dr: int, dc: int, c: int, cb: int, cr: int, cc: int,
    bias: int, alpha: float, beta: float, code: int, batch: int, ctas: int, raster: int,
) -> None:  # fmt: skip
    """What kernels/call.py says a compiled function does, in numpy, with its demands asserted."""
    for x in (a, b):
        strides = [s * x.element_size() for s in x.stride()]
        inner = strides.index(x.element_size(), 1)
        assert inner in (1, 2)
        assert x.data_ptr() % 16 == 0
        assert all(s % 16 == 0 and s > 0 for i, s in enumerate(strides) if i != inner)
    m, n = a.shape[1], b.shape[2]
    tail = Epilogue(alpha, beta, c != 0, activation=ACTIVATIONS[code & 3])
    left, right = (torch.zeros_like(x) if alpha == 0 else x for x in (a, b))
    acc = np.float32(alpha) * torch.matmul(left.double(), right.double()).float().numpy()
    if code >> 2 & 3:
        acc = acc + beta * wide(at(c, TYPES[code >> 2 & 3], (batch, m, n), (cb, cr, cc)))
    if code >> 4 & 3:
        along_m = bool(code & 1 << 6)
        line = wide(at(bias, TYPES[code >> 4 & 3], (m if along_m else n,), (1,)))
        acc = acc + (line[:, None] if along_m else line)
    store(np.array(np.broadcast_to(acc, (batch, m, n))), tail, d, (db, dr, dc), code)


def store(acc: Any, tail: Epilogue, d: int, strides: tuple[int, ...], code: int) -> None:
    with quiet():
        activate(acc, tail.activation)
        narrow(acc, at(d, TYPES[code >> 7 & 3], acc.shape, strides))


@dataclass(frozen=True)
class Fake:
    """A variant whose function is the stand-in, or something broken."""

    name: str = "step9-fake"
    fixed: float = 1e-9
    step: int = 9

    def unsupported(self, problem: Problem, device: Device) -> str | None:
        lda, ldb, _, _ = problem.leading
        if problem.dtype not in (DType.FP16, DType.BF16):
            return "its inputs are halves"
        return "rows" if lda % 8 or ldb % 8 else None

    def seconds(self, problem: Problem, device: Device) -> float:
        return self.fixed

    def order(self, problem: Problem) -> str | None:
        return "k16"

    def function(self, problem: Problem) -> str:
        return self.name.replace("-", "_")

    def blocks(self, problem: Problem, resident: int) -> int:
        return resident

    def raster(self, problem: Problem, device: Device) -> int:
        return 8


@dataclass
class FakeLibraries:
    functions: dict[str, Any]
    manifest: Any = field(init=False)

    def __post_init__(self) -> None:
        self.manifest = SimpleNamespace(functions=self.functions, build_hash="b")

    def info(self, name: str) -> FunctionInfo:
        if name not in self.functions:
            raise NotBuilt(f"{name} is not built")
        return FunctionInfo(name, "sm_90a", "m", "l", "f", ("k",), 384, 168, 0, 229_376, 0.0)

    def load(self, name: str) -> Any:
        return self.functions[name]


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a self-test one product a kind: the stand-in takes its time."""
    monkeypatch.setattr(selftest, "CASES", selftest.CASES[3:4])


def make(*variants: Variant, check_: Any = None, **functions: Any) -> Runtime:
    functions = functions or {"step9_fake": stand_in}
    return Runtime(
        GPU,
        libraries=FakeLibraries(functions),
        variants=(*variants, cublas.Cublas()),
        check=check_,
        place="cpu",
    )  # type: ignore[arg-type]


def test_resident_blocks_follow_from_what_a_block_takes() -> None:
    info = FakeLibraries({"x": 1}).info("x")
    assert resident_blocks(info, GPU) == 4
    assert resident_blocks(replace(info, smem_bytes=50_000, registers=64), GPU) == 8
    assert resident_blocks(replace(info, smem_bytes=1_000, registers=32, threads=128), GPU) == 4 * 16


@pytest.mark.parametrize("by_column", [None, False, True])
@pytest.mark.parametrize("shape", [(1, 5, 7), (2, 8, 16), (1, 1, 9), (3, 9, 1), (1, 1, 1)])
@pytest.mark.parametrize("how", ["compact", "transposed", "apart", "odd start", "expanded", "one layer"])
def test_packed_can_be_addressed_by_tma(
    shape: tuple[int, int, int], how: str, by_column: bool | None
) -> None:
    x = torch.randn(shape).half()
    if how == "transposed":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif how == "apart":
        x = torch.randn(shape[0], shape[1], shape[2] * 3).half()[..., ::3]
    elif how == "odd start":
        x = torch.randn(x.numel() + 1).half()[1:].view(shape)
    elif how == "expanded":
        x = x[:, :1].expand(shape)
    elif how == "one layer":
        x = x[:1].expand(shape)
    y = packed(x, by_column=by_column)
    assert torch.equal(x, y.expand(shape))
    strides = y.stride()
    inner = 2 if strides[2] == 1 else 1
    if by_column is not None:
        inner = 1 if by_column else 2
    assert strides[inner] == 1
    assert y.data_ptr() % 16 == 0
    assert all(s % 8 == 0 and s > 0 for i, s in enumerate(strides) if i != inner)


def test_what_tma_can_address_is_not_copied() -> None:
    x = torch.randn(2, 16, 24).half()
    assert packed(x).data_ptr() == x.data_ptr()
    assert packed(x.transpose(1, 2)).data_ptr() == x.data_ptr()
    assert packed(x[:, :1]).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
@pytest.mark.parametrize("trans", ["nn", "nt", "tn"])
@pytest.mark.parametrize("bias", list(BiasDim))
def test_launch_passes_what_the_convention_says(dtype: DType, trans: str, bias: BiasDim) -> None:
    gpu = make(Fake())
    tail = Epilogue(-0.5, 2.0, True, bias, Activation.SILU)
    for m, n, k in ((40, 24, 72), (33, 21, 35), (1, 8, 9)):
        problem = Problem(
            m,
            n,
            k,
            dtype=dtype,
            out_dtype=DType.FP32,
            trans_a=trans[0] == "t",
            trans_b=trans[1] == "t",
            epilogue=tail,
        )
        a, b, c, line = selftest.host_operands(problem)
        got = selftest.launch(gpu, Fake(), problem, a, b, c, line)
        assert check(problem, got, a, b, c, line).ok


def test_c_and_bias_of_any_type_and_batch() -> None:
    gpu = make(Fake())
    problem = Problem(8, 16, 24, 2, epilogue=Epilogue(1.0, 1.0, True, BiasDim.N))
    a, b = torch.randn(2, 8, 24).half(), torch.randn(2, 24, 16).half()
    c, bias = torch.randn(1, 8, 16).double(), torch.randn(32).double()[::2]
    d = torch.zeros(2, 8, 16).half()
    gpu.launch(Fake(), problem, Operands(a, b, d, c, bias))
    wide_c = c.expand(2, 8, 16)
    assert check(problem, d.numpy(), a.numpy(), b.numpy(), wide_c.numpy(), bias.numpy()).ok


def test_run_chooses_and_says_why() -> None:
    gpu = make(Fake())
    a, b, d = torch.randn(1, 16, 32).half(), torch.randn(1, 32, 24).half(), torch.zeros(1, 16, 24).half()
    choice = gpu.run(Problem(16, 24, 32), Operands(a, b, d))
    assert choice.variant == "step9-fake"
    assert torch.allclose(d.float(), a.float() @ b.float(), atol=0.05)
    with pytest.raises(Unsupported, match="does not exist"):
        gpu.run(Problem(16, 24, 32), Operands(a, b, d), "step9-other")


def test_what_runs_follows_what_is_barred_and_admitted() -> None:
    """Also where the same product has run before."""
    gpu = make(Fake(), Fake("step9-b", 2e-9), step9_fake=stand_in, step9_b=stand_in)
    a, b, d = torch.randn(1, 16, 32).half(), torch.randn(1, 32, 24).half(), torch.zeros(1, 16, 24).half()
    problem, operands = Problem(16, 24, 32), Operands(a, b, d)
    ran = [gpu.run(problem, operands).variant]
    gpu.bar("step9-fake", "a test")
    ran.append(gpu.run(problem, operands).variant)
    gpu.admit("step9-fake")
    ran.append(gpu.run(problem, operands).variant)
    gpu.measured({table_key("step9-fake", problem): 1.0})
    ran.append(gpu.run(problem, operands).variant)
    assert ran == ["step9-fake", "step9-b", "step9-fake", "step9-b"]
    doubled = replace(problem, epilogue=Epilogue(alpha=2.0))
    assert gpu.run(doubled, operands).variant == "step9-b"
    assert torch.allclose(d.float(), 2 * (a.float() @ b.float()), atol=0.1)


@dataclass(frozen=True)
class Counted(Fake):
    """Notes for which problems it is asked its blocks."""

    asked: list[Problem] = field(default_factory=list, hash=False, compare=False)

    def blocks(self, problem: Problem, resident: int) -> int:
        self.asked.append(problem)
        return resident


def test_what_a_launch_takes_is_found_once_whatever_alpha_is() -> None:
    variant = Counted()
    runtime = make(variant)
    a, b = torch.ones(1, 8, 16).half(), torch.ones(1, 16, 8).half()
    for alpha in (1.0, 2.0, -0.5, 3.0):
        d = torch.empty(1, 8, 8).half()
        problem = Problem(8, 8, 16, epilogue=Epilogue(alpha=alpha))
        assert runtime.run(problem, Operands(a, b, d), variant.name).variant == variant.name
        assert (d == 16 * alpha).all()
    assert len(variant.asked) == 1


@pytest.mark.parametrize("what", ["plain", "C", "C and bias in fp64", "A that is copied", "ragged"])
def test_a_repeated_product_is_of_what_its_operands_hold_now(what: str) -> None:
    rows = 9 if what == "ragged" else 16
    a, b = torch.randn(1, rows, 32).half(), torch.randn(1, 32, 24).half()
    if what == "A that is copied":  # TMA can't begin there
        a = torch.randn(rows * 32 + 1).half()[1:].view(1, rows, 32)
    kind = torch.float64 if "fp64" in what else torch.float16
    c = torch.randn(1, rows, 24).to(kind) if "C" in what else None
    bias = torch.randn(24).to(kind) if "bias" in what else None
    d = torch.zeros(1, rows, 24).half()
    tail = Epilogue(beta=float(c is not None), c=c is not None, bias=None if bias is None else BiasDim.N)
    problem = Problem(rows, 24, 32, epilogue=tail)
    gpu = make(Fake(), Fake("step9-b", 2e-9), step9_fake=stand_in, step9_b=stand_in)
    product = Repeated(problem, Operands(a, b, d, c, bias))
    marks: list[int] = []
    ran = []
    for turn in range(4):
        if turn == 2:
            gpu.bar("step9-fake", "a test")
        ran.append(gpu.repeat(product, before=lambda: marks.append(1)).variant)
        wanted = a.double() @ b.double() + (0 if c is None else c) + (0 if bias is None else bias)
        torch.testing.assert_close(d.double(), wanted, atol=0.05, rtol=0.01)
        for operand in (a, b, c, bias):
            if operand is not None:
                operand.add_(0.25)
    assert ran == ["step9-fake", "step9-fake", "step9-b", "step9-b"]
    assert len(marks) == 4


def test_that_a_repeated_product_copies_an_operand_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, d = torch.ones(1, 8, 16).half(), torch.ones(1, 16, 8).half(), torch.zeros(1, 8, 8).half()
    tail = Epilogue(beta=1.0, c=True)
    gpu = make(Fake())
    prepared: list[int] = []
    whole = gpu._prepare
    monkeypatch.setattr(gpu, "_prepare", lambda *given: prepared.append(1) or whole(*given))
    product = Repeated(Problem(8, 8, 16, epilogue=tail), Operands(a, b, d, torch.ones(1, 8, 8).double()))
    for _ in range(4):
        gpu.repeat(product)
    assert (d == 17).all()
    assert len(prepared) == 5  # once to find it, and once a launch


def test_what_a_repeated_launch_takes_is_found_once() -> None:
    a, b, d = torch.ones(1, 8, 16).half(), torch.ones(1, 16, 8).half(), torch.zeros(1, 8, 8).half()
    gpu = make(Fake())
    product = Repeated(Problem(8, 8, 16), Operands(a, b, d))
    gpu.repeat(product)
    known = product.launch
    gpu.repeat(product)
    assert known is not None
    assert product.launch is known
    gpu.measured({})
    gpu.repeat(product)
    assert product.launch is not known


def test_ragged_rows_are_packed_and_chosen_all_the_same() -> None:
    gpu = make(Fake())
    a, b, d = torch.randn(1, 9, 13).half(), torch.randn(1, 13, 11).half(), torch.zeros(1, 9, 11).half()
    assert gpu.run(Problem(9, 11, 13), Operands(a, b, d)).variant == "step9-fake"
    assert torch.allclose(d.float(), a.float() @ b.float(), atol=0.05)


def broken(*arguments: Any) -> None:
    stand_in(*arguments)
    _, _, d, db, dr, dc, *_ = arguments
    first = at(d, TYPES[arguments[13] >> 7 & 3], (1, 1, 1), (db, dr, dc))
    first[...] += 1


@pytest.mark.usefixtures("few_cases")
def test_a_wrong_function_is_quarantined_before_it_answers() -> None:
    gpu = make(
        Fake("step9-wrong", 1e-9), Fake("step9-fake", 2e-9), check_=module.check_function,
        step9_wrong=broken, step9_fake=stand_in,
    )  # fmt: skip
    a, b, d = torch.randn(1, 16, 32).half(), torch.randn(1, 32, 24).half(), torch.zeros(1, 16, 24).half()
    choice = gpu.run(Problem(16, 24, 32), Operands(a, b, d))
    assert choice.variant == "step9-fake"
    assert choice.reason is Reason.FALLBACK
    assert "wrong at" in gpu.barred["step9-wrong"]
    assert torch.allclose(d.float(), a.float() @ b.float(), atol=0.05)
    gpu.admit("step9-wrong", proven=True)
    assert gpu.choose(Problem(16, 24, 32)).variant == "step9-wrong"


@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize(("wrong", "ways"), [(1, "fp16>fp16"), (3, "fp16>fp32")])
def test_a_function_is_proven_in_every_way_that_it_writes_before_any_is_used(wrong: int, ways: str) -> None:
    def broken_in_one(*arguments: Any) -> None:
        stand_in(*arguments[:11], arguments[11] * (2 if arguments[13] >> 7 == wrong else 1), *arguments[12:])

    for out in (DType.FP16, DType.FP32):
        gpu = make(
            Fake("step9-wrong", 1e-9), Fake("step9-fake", 2e-9), check_=module.check_function,
            step9_wrong=broken_in_one, step9_fake=stand_in,
        )  # fmt: skip
        a, b = torch.randn(1, 16, 32).half(), torch.randn(1, 32, 24).half()
        d = torch.zeros(1, 16, 24, dtype=torch.float16 if out is DType.FP16 else torch.float32)
        choice = gpu.run(Problem(16, 24, 32, out_dtype=out), Operands(a, b, d))
        assert choice.variant == "step9-fake"
        assert ways in gpu.barred["step9-wrong"]


def test_bits_that_depend_on_the_stack_are_found() -> None:
    def by_rows(*arguments: Any) -> None:
        a = arguments[0]
        stand_in(
            a, arguments[1], *arguments[2:11], arguments[11] * (1 + a.shape[1] * 2.0**-23), *arguments[12:]
        )

    gpu = make(Fake(), Fake("step9-rows"), step9_fake=stand_in, step9_rows=by_rows)
    assert "other bits" in (selftest.bits_differ(gpu, Fake("step9-rows"), Fake()) or "")


def test_an_epilogue_that_rounds_otherwise_is_found() -> None:
    def contracted(*arguments: Any) -> None:
        stand_in(*arguments[:12], arguments[12] * (1 + 2.0**-22), *arguments[13:])

    gpu = make(Fake(), Fake("step9-fused"), step9_fake=stand_in, step9_fused=contracted)
    assert selftest.bits_differ(gpu, Fake(), Fake()) is None
    assert "after an epilogue" in (selftest.bits_differ(gpu, Fake("step9-fused"), Fake()) or "")


def test_what_is_not_built_is_not_chosen() -> None:
    gpu = make(Fake("step9-absent"), Fake(fixed=2e-9))
    choice = gpu.choose(Problem(16, 24, 32))
    assert choice.variant == "step9-fake"
    assert "not built" in choice.why


def test_nothing_built_leaves_the_reference() -> None:
    gpu = Runtime(GPU, libraries=FakeLibraries({}), variants=(Fake(), cublas.Cublas()), place="cpu")  # type: ignore[arg-type]
    choice = gpu.choose(Problem(16, 24, 32))
    assert choice.variant == cublas.NAME
    assert "no kernels are built" in choice.why


def test_times_change_the_choice() -> None:
    gpu = make(Fake("step9-fake", 1e-6), Fake("step9-b", 2e-6), step9_fake=stand_in, step9_b=stand_in)
    problem = Problem(16, 24, 32)
    assert gpu.choose(problem).variant == "step9-fake"
    gpu.measured({table_key("step9-b", problem): 1e-7})
    assert gpu.choose(problem).variant == "step9-b"


def test_capture_wants_what_has_run_before(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = make(Fake())
    a, b, d = torch.randn(1, 16, 32).half(), torch.randn(1, 32, 24).half(), torch.zeros(1, 16, 24).half()
    monkeypatch.setattr(module, "_capturing", lambda: True)
    with pytest.raises(module.NotLoaded, match="run once"):
        gpu.run(Problem(16, 24, 32), Operands(a, b, d))
    monkeypatch.setattr(module, "_capturing", lambda: False)
    gpu.run(Problem(16, 24, 32), Operands(a, b, d))
    monkeypatch.setattr(module, "_capturing", lambda: True)
    gpu.run(Problem(16, 24, 32), Operands(a, b, d))


def test_the_packing_kernel_is_loaded_by_who_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code would go to the device at its first call: within a capture, had an aligned product counted as one."""
    packs: list[int] = []
    gpu = make(Fake(), step9_fake=lambda *_: None, pack_16bit=lambda *_: packs.append(1))
    a, b, d = torch.randn(1, 16, 32).half(), torch.randn(1, 32, 24).half(), torch.zeros(1, 16, 24).half()
    odd = torch.randn(1, 16, 33).half()[..., 1:]
    gpu.run(Problem(16, 24, 32), Operands(a, b, d))
    gpu.run(Problem(16, 24, 32, lda=40), Operands(torch.randn(1, 16, 40).half()[..., :32], b, d))
    assert not packs
    monkeypatch.setattr(module, "_capturing", lambda: True)
    with pytest.raises(module.NotLoaded, match="pack_16bit"):
        gpu.run(Problem(16, 24, 32), Operands(odd, b, d))
    monkeypatch.setattr(module, "_capturing", lambda: False)
    gpu.run(Problem(16, 24, 32), Operands(odd, b, d))
    assert packs == [1]


@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize("reason", [UntrustedFolder("others can write"), FileNotFoundError("x.so")])
@pytest.mark.parametrize("check_", [None, module.check_function])
def test_what_cannot_be_loaded_is_left_to_the_next(reason: Exception, check_: Any) -> None:
    gpu = make(
        Fake("step9-gone", 1e-9), Fake("step9-fake", 2e-9), check_=check_,
        step9_gone=stand_in, step9_fake=stand_in,
    )  # fmt: skip
    load = gpu.libraries.load

    def guarded(name: str) -> Any:
        if name == "step9_gone":
            raise reason
        return load(name)

    gpu.libraries.load = guarded  # type: ignore[method-assign]
    a, b, d = torch.randn(1, 16, 32).half(), torch.randn(1, 32, 24).half(), torch.zeros(1, 16, 24).half()
    assert gpu.run(Problem(16, 24, 32), Operands(a, b, d)).variant == "step9-fake"
    assert gpu.barred["step9-gone"] == str(reason)
    with pytest.raises(Unsupported, match=str(reason)):
        gpu.run(Problem(16, 24, 32), Operands(a, b, d), "step9-gone")


def test_what_is_barred_while_a_choice_is_made_is_not_chosen_again() -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Slow(Fake):
        def seconds(self, problem: Problem, device: Device) -> float:
            entered.set()
            assert go_on.wait(10)
            return 1e-9

    gpu = make(Slow("step9-hangs"), Fake("step9-fake", 2e-9), step9_hangs=stand_in, step9_fake=stand_in)
    problem = Problem(16, 24, 32, batch_invariant=False)
    asking = threading.Thread(target=gpu.choose, args=(problem,))
    asking.start()
    assert entered.wait(10)
    gpu.bar("step9-hangs", "it hung")
    go_on.set()
    asking.join(10)
    assert gpu.choose(problem).variant == "step9-fake"
    a, b, d = torch.randn(1, 16, 32).half(), torch.randn(1, 32, 24).half(), torch.zeros(1, 16, 24).half()
    assert gpu.run(problem, Operands(a, b, d)).variant == "step9-fake"


@pytest.mark.parametrize("invariant", [True, False])
def test_the_gpu_reference_on_fp32(invariant: bool) -> None:
    """Its code, on CPU tensors: fp32 and fp64 need no operator that only CUDA has."""
    tail = Epilogue(0.5, 2.0, True, BiasDim.M, Activation.GELU)
    for dtype, kind in ((DType.FP32, torch.float32), (DType.FP64, torch.float64)):
        for batch, broadcast in ((1, False), (3, True)):
            problem = Problem(
                300,
                20,
                33,
                batch,
                dtype,
                dtype,
                epilogue=tail,
                batch_invariant=invariant,
                b_broadcast=broadcast,
            )
            a, b = torch.randn(batch, 300, 33, dtype=kind), torch.randn(1, 33, 20, dtype=kind)
            c, bias = torch.randn(batch, 300, 20, dtype=kind), torch.randn(300, dtype=kind)
            d = torch.full((batch, 300, 20), torch.nan, dtype=kind)
            cublas.compute(problem, a, b, d, c, bias)
            assert check(problem, d.numpy(), a.numpy(), b.numpy(), c.numpy(), bias.numpy()).ok


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("alpha", [float("inf"), float("nan")])
def test_the_gpu_reference_without_k(alpha: float, invariant: bool) -> None:
    problem = Problem(
        3, 2, 0, dtype=DType.FP32, out_dtype=DType.FP32,
        epilogue=Epilogue(alpha, 2.0, True, BiasDim.N), batch_invariant=invariant,
    )  # fmt: skip
    d = torch.empty(1, 3, 2)
    cublas.compute(problem, torch.empty(1, 3, 0), torch.empty(1, 0, 2), d, torch.ones(1, 3, 2), torch.ones(2))
    assert (d == 3).all()


def test_the_gpu_reference_takes_factors_beyond_fp32() -> None:
    """torch refuses them as they are."""
    tail = Epilogue(1e-46, 1e39, True)
    d, ones = torch.empty(1, 2, 2), torch.ones(1, 2, 2)
    problem = Problem(2, 2, 2, dtype=DType.FP32, out_dtype=DType.FP32, epilogue=tail)
    cublas.compute(problem, ones * torch.nan, ones, d, ones)
    assert torch.isposinf(d).all()


def test_the_gpu_reference_rounds_fp64_once() -> None:
    x = torch.tensor([1 + 2.0**-8 + 2.0**-40, -(1 + 2.0**-8 + 2.0**-40), 1e300, torch.nan, 1 + 2.0**-8, 0.0])
    x = x.double()
    x[:2] = torch.tensor([1 + 2.0**-8 + 2.0**-40, -(1 + 2.0**-8 + 2.0**-40)], dtype=torch.float64)
    near = cublas._once(x, torch.bfloat16).bfloat16().double()
    assert near[0] == 1 + 2.0**-7
    assert near[1] == -(1 + 2.0**-7)
    assert near[2].isinf()
    assert near[3].isnan()
    assert near[4:].tolist() == [1.0, 0.0]


class Choosy(Fake):
    """As own kernels are: what is empty or fp64 is the reference's."""

    def unsupported(self, problem: Problem, device: Device) -> str | None:
        if problem.out_dtype is DType.FP64 or min(problem.m, problem.n, problem.k) < 1:
            return "it isn't for this"
        return super().unsupported(problem, device)


def test_random_problems_on_the_way_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """kernels.gemm's packing, choosing and calling, and the GPU reference's code, on CPU tensors."""
    from kernels import api
    from tests.kernels.random_problems import one

    gpu = make(Choosy())
    ran: set[str] = set()

    def run(problem: Problem, call: Any, variant: str) -> None:
        if call.d.numel():
            operands = Operands(call.a, call.b, call.d, call.c, call.bias)
            ran.add(gpu.run(problem, operands, variant).variant)

    monkeypatch.setattr(api, "_on_cpu", run)
    for seed in range(150):
        one(seed, "cpu")
    assert ran == {"step9-fake", cublas.NAME}


def test_random_problems_on_the_cpu() -> None:
    from tests.kernels.random_problems import one

    for seed in range(1000, 1100):
        one(seed, "cpu")
