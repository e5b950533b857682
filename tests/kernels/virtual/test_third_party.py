"""Changes of third-party scripts: a line gets another word, or a line after it; another version is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.virtual import report, third_party
from kernels.virtual.third_party import Change, arguments_of, changed, flaw_of, smaller


def test_a_change_replaces_a_word_or_adds_a_line() -> None:
    text = "a = 1024\nb = a\nc = b\n"
    assert (
        changed(text, (Change(2, "print(b)"), Change(1, "64", "1024"))) == "a = 64\nb = a\nprint(b)\nc = b\n"
    )
    assert changed(text, ()) == text


@pytest.mark.parametrize("change", [Change(2, "64", "1024"), Change(9, "print(b)")])
def test_another_version_of_a_script_is_refused(change: Change) -> None:
    with pytest.raises(LookupError, match=f"line {change.line}"):
        changed("a = 1024\nb = a\n", (change,))


def test_what_is_known_of_a_script_goes_by_the_end_of_its_path() -> None:
    folder = Path("/somewhere/primitives")
    assert flaw_of(folder / "mapa.py") is third_party.FLAWS["primitives/mapa.py"]
    assert flaw_of(folder / "red.py") is None
    assert smaller(folder / "tutorial/03_gemm_tiled_smem.py")
    assert smaller(folder / "mapa.py") == ()
    assert arguments_of(Path("x/blackwell/kernel/dense_gemm/dense_gemm.py"))


def test_every_flaw_is_a_kind_of_finding_with_a_reason_and_a_change() -> None:
    for name, flaw in third_party.FLAWS.items():
        assert flaw.kind in report.KINDS, name
        assert flaw.changes, name
        assert flaw.why.endswith("out."), name
