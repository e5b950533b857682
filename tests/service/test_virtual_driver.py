"""The virtual GPU as the worker's device: real kernels execute, limits are said, the reference does the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.elementwise import NUMPY
from kernels.problem import Activation, BiasDim, DType, Epilogue, Problem
from kernels.verify import check
from service.arena import Arena
from service.drivers.base import CannotStart
from service.drivers.virtual import MOST_FLOPS, VirtualDriver
from service.memory import Memory
from service.messages import Batch, BatchDone, Item, Operand, Params

pytest.importorskip("torch")
pytest.importorskip("tvm_ffi")


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(8 << 20)
    yield made
    made.close()


class Bench:
    """Puts operands into the arena and hands batches to the driver."""

    def __init__(self, driver: VirtualDriver, arena: Arena) -> None:
        self.driver, self.arena, self.at = driver, arena, 0

    def put(self, array: np.ndarray[Any, Any], dtype: str) -> Operand:
        operand = Operand(self.at, array.nbytes, dtype, array.shape)
        self.arena.view(self.at, array.nbytes)[:] = array.tobytes()
        self.at += -(-array.nbytes // 64) * 64
        return operand

    def run(self, item: Item) -> tuple[str, str, str]:
        ended: list[BatchDone] = []
        self.driver.submit(Batch(1, (item,)), ended.append)
        only = ended[0].items[0]
        return only.code, only.variant, only.detail

    def read(self, operand: Operand) -> np.ndarray[Any, Any]:
        data = bytes(self.arena.view(operand.offset, operand.nbytes))
        return np.frombuffer(data, NUMPY[DType(operand.dtype)]).reshape(operand.shape)


def draw(dtype: DType, *shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(NUMPY[dtype])


def test_nothing_built_is_said_with_the_command(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMM_KERNELS", str(tmp_path))
    driver = VirtualDriver(Memory(arena), "numpy")
    with pytest.raises(CannotStart, match="python -m kernels build --arch sm_100a") as reason:
        driver.start(lambda _: None)
    assert reason.value.needs_person
    assert driver.device.virtual


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_kernels_execute_and_the_reference_does_the_rest(arena: Arena) -> None:
    pytest.importorskip("cutlass")
    from kernels.build import build

    build("sm_100a", only="step9_256x256_kk_fp16_plain")
    driver = VirtualDriver(Memory(arena), "numpy")
    driver.start(lambda _: None)
    assert not driver.stacking
    bench = Bench(driver, arena)
    a, b, bias = draw(DType.FP16, 2, 40, 72), draw(DType.FP16, 24, 72, seed=1), draw(DType.FP32, 24, seed=2)
    c = draw(DType.FP16, 1, 40, 24, seed=3)
    out = bench.put(np.full((2, 40, 24), np.nan, np.float32), "fp32")
    item = Item(
        1, bench.put(a, "fp16"), bench.put(b, "fp16"), out,
        Params("fp32", trans_b=True, alpha=0.5, beta=2.0, activation="relu"),
        c=bench.put(c, "fp16"), bias=bench.put(bias, "fp32"),
    )  # fmt: skip
    code, variant, detail = bench.run(item)
    assert (code, detail) == ("", "")
    assert variant.startswith("step9-"), variant  # which one depends on what else is built here
    tail = Epilogue(0.5, 2.0, True, BiasDim.N, Activation.RELU)
    problem = Problem(40, 24, 72, 2, out_dtype=DType.FP32, trans_b=True, epilogue=tail, b_broadcast=True)
    assert check(problem, bench.read(out), a, b, c, bias).ok

    x, y = draw(DType.FP32, 8, 9), draw(DType.FP32, 9, 7, seed=4)
    wide = bench.put(np.zeros((8, 7), np.float32), "fp32")
    code, variant, _ = bench.run(Item(2, bench.put(x, "fp32"), bench.put(y, "fp32"), wide, Params("fp32")))
    assert (code, variant) == ("", "reference-numpy")
    assert np.allclose(bench.read(wide), x @ y, atol=1e-5)

    long = np.zeros((600, 1600), np.float16)
    assert MOST_FLOPS < 2 * 600 * 600 * 1600
    over = bench.put(np.zeros((600, 600), np.float16), "fp16")
    item = Item(3, bench.put(long, "fp16"), bench.put(long.T.copy(), "fp16"), over, Params("fp16"))
    code, _, detail = bench.run(item)
    assert code == "unsupported"
    assert "at most" in detail

    names = [each["name"] for each in driver.ask("variants", {})["variants"]]
    assert {"step9-256x256-plain", "reference-numpy"} <= set(names)
