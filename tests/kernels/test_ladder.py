"""The ladder's steps: their order, their reach and what their modules say."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.ladder import FOLDER, HOPPER, LADDER, Step, step
from kernels.problem import Activation, DType, Epilogue, Problem

ROOT = Path(__file__).parents[2]
TILE = Problem(128, 128, 64, trans_b=True)
SQUARE = Problem(4096, 4096, 4096, trans_b=True)


@pytest.mark.parametrize("arch", LADDER)
def test_steps_are_in_order_under_the_same_names(arch: str) -> None:
    assert [s.number for s in LADDER[arch]] == list(range(1, 10))
    assert [s.name for s in LADDER[arch]] == [s.name for s in HOPPER]
    assert all(s.name.startswith(f"step{s.number}_") for s in LADDER[arch])
    assert step(arch, 4) is LADDER[arch][3]


def test_reach() -> None:
    assert [s.number for s in HOPPER if s.unsupported(TILE) is None] == list(range(1, 9))
    assert [s.number for s in HOPPER if s.unsupported(replace(TILE, k=65, lda=72, ldb=72)) is None] == list(
        range(2, 9)
    )
    assert [s.number for s in HOPPER if s.unsupported(SQUARE) is None] == list(range(3, 9))
    assert [s.number for s in HOPPER if s.unsupported(replace(SQUARE, k=4095)) is None] == [3]
    assert [s.number for s in HOPPER if s.unsupported(replace(SQUARE, aligned=8)) is None] == [3]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": DType.FP32, "out_dtype": DType.FP32}, "16-bit"),
        ({"out_dtype": DType.FP32}, "type of its inputs"),
        ({"batch": 2}, "one product"),
        ({"trans_b": False}, "stored along K"),
        ({"trans_a": True}, "stored along K"),
        ({"epilogue": Epilogue(alpha=2.0)}, "no epilogue"),
        ({"epilogue": Epilogue(activation=Activation.RELU)}, "no epilogue"),
        ({"epilogue": Epilogue(c=True, beta=1.0)}, "no epilogue"),
        ({"k": 0}, "something to compute"),
    ],
)
def test_what_no_step_takes(changes: dict[str, object], why: str) -> None:
    for each in HOPPER:
        because = each.unsupported(replace(TILE, **changes))  # type: ignore[arg-type]
        assert because is not None
        assert each.number == 9 or why in because


@pytest.mark.parametrize("rung", HOPPER[:8], ids=lambda s: s.name)
def test_docstring_says_what_the_style_asks(rung: Step) -> None:
    path = ROOT / f"{rung.module('sm_90a').replace('.', '/')}.py"
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert doc.startswith(f"Step {rung.number}, ")
    labels = ["Adds", "Why faster", "Costs", "Roles", "Barriers", "Shared", "Limits"]
    assert re.findall(rf"^({'|'.join(labels)})\b", doc, re.MULTILINE) == labels


def test_folders_exist() -> None:
    assert all((ROOT / "kernels" / folder).is_dir() for folder in FOLDER.values())
