"""Every gate can fail: on made-up code that lacks or has one thing, and on real machine code."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from kernels import build as builder
from kernels.build import BuildError, build, modules_of
from kernels.gates import GATES, ROLES, Code, Gate, check, code_of, main, tmem_columns
from kernels.libraries import MANIFEST, Libraries, default_root
from kernels.machine_code import entries, mnemonics
from tests.kernels import samples

GOOD = Code("step1_x", frozenset(), 168, 0, 229_472, 384, roles=(40, 232), tmem=512)
BREAK: dict[str, Callable[[Code], Code]] = {
    "uses a stack": lambda c: replace(c, stack=8),
    "takes over 232,448 B of shared memory": lambda c: replace(c, smem=232_449),
    "can't be resident: registers": lambda c: replace(c, registers=255),
    "TMEM isn't 1 to 512 columns": lambda c: replace(c, tmem=513),
    ROLES: lambda c: replace(c, roles=()),
}


def named(pattern: str) -> str:
    """A name, or mnemonic, that matches a pattern."""
    return (
        pattern.replace("[1-9]", "1")
        .replace("[1-8]", "1")
        .replace("[1-7]", "1")
        .replace("[1-3]", "1")
        .replace("[4-8]", "4")
        .replace("[4-9]", "4")
        .replace("[89]", "8")
        .replace("*", "")
    )


def identity(gate: Gate) -> str:
    """Readable id of a test case."""
    return f"{gate.arch} {gate.pattern} {','.join(gate.required + gate.forbidden) or gate.because}"


@pytest.mark.parametrize("gate", GATES, ids=identity)
def test_each_gate_passes_and_can_fail(gate: Gate) -> None:
    good = replace(GOOD, function=named(gate.pattern), mnemonics=frozenset(map(named, gate.required)))
    if not gate.applies(named(gate.arch), good):
        good = replace(good, function="step9_128x256_2x1_fp16")
    assert gate.applies(named(gate.arch), good)
    assert gate.failures(good) == []
    for pattern in gate.required:
        assert gate.failures(replace(good, mnemonics=good.mnemonics - {named(pattern)})) == [f"no {pattern}"]
    for pattern in gate.forbidden:
        mnemonic = named(pattern)
        assert f"has {mnemonic}" in gate.failures(replace(good, mnemonics=good.mnemonics | {mnemonic}))
    if gate.rule is not None:
        assert gate.failures(BREAK[gate.because](good)) == [gate.because]
    assert gate.required or gate.forbidden or gate.rule


def test_roles_that_give_nothing_up_or_take_too_much() -> None:
    gate = next(g for g in GATES if g.because == ROLES)
    assert not gate.applies("sm_90a", replace(GOOD, function="step9_x", threads=256))
    for roles in ((168, 168), (40,), (24, 160), (184, 232)):
        assert ROLES in gate.failures(replace(GOOD, roles=roles))


def test_gates_are_for_their_architecture_and_step() -> None:
    missing = replace(GOOD, function="step8_cluster_fp16")
    assert any("MULTICAST" in text for text in check("sm_90a", missing))
    assert any("2CTA" in text for text in check("sm_100a", missing))
    assert check("sm_90a", replace(GOOD, function="pack")) == []


def test_mnemonics_are_read_with_modifiers() -> None:
    text = (
        "        /*0060*/               @P0 EXIT ;\n"
        "        /*0070*/              @!UP0 SYNCS.EXCH.64 URZ, [UR8+0x10000], UR4 ;\n"
        "        /*8e30*/                   HGMMA.64x128x16.F32 R88, gdesc[UR4], RZ, !UPT ;\n"
        '        /*8e40*/                   STL [R1+0x74], R11    (*"SpillRefill"*);\n'
    )
    assert mnemonics(text) == ["EXIT", "SYNCS.EXCH.64", "HGMMA.64x128x16.F32", "STL"]


def test_tmem_columns_are_summed() -> None:
    one = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4], 128;\n"
    assert tmem_columns(one) == 128
    assert tmem_columns(f"mov.b32 %r9, 256;\n{one}{one.replace('128', '%r9')}") == 384
    with pytest.raises(ValueError, match="not a constant"):
        tmem_columns(one.replace("128", "%r9"))


def test_threads_of_an_entry() -> None:
    assert entries(".visible .entry k(\n.param .b64 p\n)\n.reqntid 128, 2, 1\n{ret;}") == {"k": 256}


@pytest.mark.ci
def test_code_that_spills_is_refused_by_every_build_that_looks_and_by_the_command(tmp_path: Path) -> None:
    pytest.importorskip("cutlass")
    modules = ["tests.kernels.samples.spill"]
    with pytest.raises(BuildError, match=r"breaks a gate:\nspill: "):
        build("sm_90a", modules=modules, root=tmp_path, gated=True)
    assert not Libraries("sm_90a", tmp_path).manifest.functions
    build("sm_90a", modules=modules, root=tmp_path)  # without looking
    failed = check("sm_90a", code_of(Libraries("sm_90a", tmp_path), "spill"))
    assert "uses a stack" in failed
    assert any(text.startswith("has STL") for text in failed)
    assert any(text.startswith("has LDL") for text in failed)
    assert main(["--arch", "sm_90a", "--root", str(tmp_path)]) == 1
    with pytest.raises(BuildError, match="uses a stack"):
        build("sm_90a", modules=modules, root=tmp_path, gated=True)


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_a_sound_build_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    from tests.kernels.samples.grouped import NAMES

    library = Libraries("sm_90a", samples.built()).path(NAMES[0]).parent  # built without looking
    shutil.copytree(library, tmp_path / "sm_90a" / library.name)
    shutil.copy(library.parent / MANIFEST, tmp_path / "sm_90a")
    looked: list[str] = []
    real = builder.code_in
    monkeypatch.setattr(builder, "code_in", lambda *given: looked.append(given[1]) or real(*given))
    for _ in range(2):
        (built,) = build("sm_90a", modules=["tests.kernels.samples.grouped"], root=tmp_path, gated=True)
        assert built.cached
        assert sorted(looked) == sorted(NAMES)


@pytest.fixture(scope="module")
def hopper() -> Libraries:
    """Steps 1 to 8, compiled or from the cache."""
    pytest.importorskip("cutlass")
    build("sm_90a", only="step[1-8]_*")
    return Libraries("sm_90a")


def step9_of(arch: str) -> tuple[Path, list[str]]:
    """What a run of tests compiles of Step 9: the folder and the functions."""
    if arch == "sm_90a":
        from tests.kernels.samples import step9

        return samples.built(), [each.name for each in step9.functions()]
    (library,) = build(arch, only="step9_512x256_kk_fp16_half")
    return default_root(), [*library.functions]


@pytest.mark.ci
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_what_is_built_passes(arch: str) -> None:
    """Every step; of Step 9 each way to share a tile on Hopper, on Blackwell what the ladder is measured with."""
    pytest.importorskip("cutlass")
    steps = [name for each in build(arch, only="step[1-8]_*") for name in each.functions]
    folder, products = step9_of(arch)
    codes = [code_of(Libraries(arch), name) for name in steps]
    codes += [code_of(Libraries(arch, folder), name) for name in products]
    assert {code.function[:5] for code in codes} == {f"step{number}" for number in range(1, 10)}
    assert {code.function: failed for code in codes if (failed := check(arch, code))} == {}


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_blackwell_ultra_has_the_functions_of_blackwell_and_its_product_passes() -> None:
    """What is listed for sm_103a is what is listed for sm_100a; one library of Step 9 is really built for it."""
    pytest.importorskip("cutlass")
    modules = modules_of("sm_103a")
    assert modules == modules_of("sm_100a")
    listed = [function for name in modules for function in import_module(name).functions()]
    names = {arch: {f.name for f in listed if f.arch == arch} for arch in ("sm_100a", "sm_103a")}
    assert names["sm_103a"] == names["sm_100a"]
    product = "step9_512x256_kk_fp16_half"
    build("sm_103a", only=product, modules=["kernels.blackwell.step9_multi_consumer"])
    libraries = Libraries("sm_103a")
    assert ".target sm_103a" in libraries.path(product, "ptx").read_text()
    assert check("sm_103a", code_of(libraries, product)) == []


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_hopper_steps_pass_and_no_step_passes_for_another(hopper: Libraries) -> None:
    codes = {
        int(name[4]): code_of(hopper, name) for name in hopper.manifest.functions if name.endswith("_fp16")
    }
    codes = {number: code for number, code in codes.items() if number <= 8}
    assert set(codes) == set(range(1, 9))
    for number, code in codes.items():
        assert check("sm_90a", code) == [], f"step {number}"
    for number, other in ((3, 4), (4, 3), (7, 8), (8, 7), (8, 9)):
        posing = replace(codes[number], function=f"step{other}_posing")
        assert check("sm_90a", posing), f"the code of step {number} passes for step {other}"


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_bytes_in_docstrings_are_those_of_the_build(hopper: Libraries) -> None:
    for name, info in hopper.manifest.functions.items():
        if name.endswith("_fp16") and name[4] in "12345678":
            source = Path(*info.module.split(".")).with_suffix(".py").read_text()
            assert f"{info.smem_bytes:,} B." in source, name
