"""The vendor's advice, scored against measured times."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import prior
from benchmarks.prior import Advice, nearest

NAMES = [
    "step9-128x256-2x1",
    "step9-128x128",
    "step9-64x16-halfsm-swap",
    "step9-64x64-split4",
    "reference-cublas",
]


def told(m: int, n: int, cluster: int = 1, split: int = 1) -> Advice:
    return Advice(m, n, 64, 4, cluster, 1, split, 1e-5)


@pytest.mark.parametrize(
    ("advice", "name"),
    [
        (told(128, 256, 2), "step9-128x256-2x1"),
        (told(256, 128, 2), "step9-128x256-2x1"),
        (told(128, 128), "step9-128x128"),
        (told(16, 64), "step9-64x16-halfsm-swap"),
        (told(64, 64, 1, 4), "step9-64x64-split4"),
    ],
)
def test_nearest(advice: Advice, name: str) -> None:
    assert nearest(advice, NAMES) == name


def test_losses_follow_from_measured_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kernels import family

    own = family.own("sm_100a")
    seconds = {each.name: (i + 1) * 1e-4 for i, each in enumerate(own)}
    problem = {"batch": 1, "m": 4096, "n": 4096, "k": 4096, "layout": "nt"}
    rows = [{"problem": problem, "variant": name, "seconds": {"median": s}} for name, s in seconds.items()]
    results = tmp_path / "selector.json"
    results.write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(prior, "advice", lambda gpu, layout, shapes: [told(512, 256, 2)])
    assert prior.main(["--results", str(results), "--machine", "b200", "--out", str(tmp_path)]) == 0
    row = json.loads((tmp_path / "prior.json").read_text())["rows"][0]
    assert row["best"] == own[0].name
    assert row["prior_loss"] == seconds[row["prior_variant"]] / 1e-4
    assert row["selector_loss"] == seconds[row["selector_variant"]] / 1e-4
    assert "geometric mean" in capsys.readouterr().out


@pytest.mark.skipif(find_spec("nvMatmulHeuristics") is None, reason="the vendor's package is not installed")
def test_the_package_answers_from_a_process_of_its_own() -> None:
    large, small = prior.advice("H200_SXM", "nn", [(1, 4096, 4096, 4096), (1, 16, 8192, 8192)])
    assert large.tile_m * large.tile_n > small.tile_m * small.tile_n
    assert 1e-5 < small.seconds < large.seconds < 1e-2
    with pytest.raises(OSError, match="no answer"):
        prior.advice("NO_SUCH_GPU", "nn", [(1, 64, 64, 64)])
