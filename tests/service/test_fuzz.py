"""A short run of each fuzz target; `make fuzz` runs them for an hour."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.fuzz import Stage, fuzz


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.close()


NAMES = (
    "gemm_body",
    "upload_body",
    "inference_body",
    "inference_call",
    "safetensors_header",
    "npy_header",
    "shared_memory",
    "local_protocol",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("examples", [40, pytest.param(800, marks=pytest.mark.ci)])
def test_hostile_bytes_end_as_refusals(stage: Stage, name: str, examples: int) -> None:
    assert tuple(target.__name__ for target in stage.targets) == NAMES
    fuzz(getattr(stage, name), examples, 1)
