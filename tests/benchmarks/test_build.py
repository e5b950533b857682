"""What a build makes: the README says what the results say."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import build


def test_readme_holds_what_the_results_say() -> None:
    text = build.README.read_text()
    assert build.readme(text, build.RESULTS) == text, "run python -m benchmarks.build --readme"


def test_readme_shows_a_build(tmp_path: Path) -> None:
    row = {
        "name": "sm_90a",
        "functions": 16,
        "libraries": 8,
        "library_bytes": 1_000_000,
        "wall_seconds": 23.6,
        "cores": 2,
    }
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "build.json").write_text(json.dumps({"rows": [row]}))
    text = build.readme(build.README.read_text(), tmp_path)
    assert "- sm_90a: 16 functions in 8 libraries, 1.0 MB; 24 s to compile them all on 2 cores.\n" in text
    kept = row | {"wall_seconds": None, "core_seconds": 150.0}
    (tmp_path / "cpu" / "build.json").write_text(json.dumps({"rows": [kept]}))
    assert "1.0 MB; 2 core minutes to compile them all.\n" in build.readme(build.README.read_text(), tmp_path)
    assert "## Gates" in text
