"""Kernels broken on purpose on a real GPU, in their self-test and in service: quarantined, and the answer is right."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from kernels import family
from kernels.device_file import default_folder
from kernels.problem import DType, Epilogue, Problem
from kernels.verify import check
from tests.service.real import ROOT, Service, result, running

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

#: Breaks launches in one kind of process: by variant, or for a value of alpha. A kernel that spins for minutes is a
#: hang, an index out of bounds a fault.
SITE = """
import json, os, sys
if os.environ["BREAK_IN"] in sys.orig_argv:
    from kernels import runtime
    ways = json.loads(os.environ["BREAK"])
    launch, run = runtime.Runtime.launch, runtime.Runtime.run
    def spoil(way, operands):
        import torch
        if way == "wrong":
            operands.d.add_(1)
        elif way == "hang":
            torch.cuda._sleep(1 << 40)
        elif way == "fault":
            torch.zeros(1, device=operands.d.device)[torch.tensor([1 << 20], device=operands.d.device)]
    def by_name(self, variant, problem, operands, **options):
        launch(self, variant, problem, operands, **options)
        spoil(ways.get(variant.name), operands)
    def by_alpha(self, problem, operands, variant, **options):
        choice = run(self, problem, operands, variant, **options)
        if choice.variant != "reference-cublas":
            spoil(ways.get(str(problem.epilogue.alpha)), operands)
        return choice
    runtime.Runtime.launch, runtime.Runtime.run = by_name, by_alpha
"""
FLAGS = ("--device", "cuda", "--workers", "1", "--hang-seconds", "1.5", "--ping-seconds", "0.2")


def environ(folder: Path, where: str, ways: dict[str, str]) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(SITE)
    paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "GEMM_CACHE": str(folder / "cache"),
        "BREAK_IN": where,
        "BREAK": json.dumps(ways),
    }


def variants(service: Service) -> dict[str, dict[str, str]]:
    return {each["name"]: each for each in service.http.get("/variants").json()["variants"]}


def product(service: Service, alpha: float = 1.0) -> str:
    """A product that is right; its variant."""
    a, b = (np.random.default_rng(n).standard_normal((512, 1024)).astype(np.float16) for n in (1, 2))
    answer = service.gemm(a, np.ascontiguousarray(b.T), alpha=alpha)
    problem = Problem(512, 512, 1024, dtype=DType.FP16, out_dtype=DType.FP16, epilogue=Epilogue(alpha))
    verdict = check(problem, result(answer), a, np.ascontiguousarray(b.T))
    assert verdict.ok, verdict
    return answer.headers["x-gemm-variant"]


def test_a_self_test_finds_what_is_wrong_hangs_or_faults(tmp_path: Path) -> None:
    names = [each.name for each in family.own("sm_90a")][:3]
    ways = dict(zip(names, ("wrong", "hang", "fault"), strict=True))
    with running(tmp_path / "data", *FLAGS, environ=environ(tmp_path, "kernels.probe", ways)) as service:
        service.ready(60)
        assert product(service) == "reference-cublas"  # nothing is proven yet

        def found() -> bool:
            told = variants(service)
            return not any("has not ended" in told[name]["detail"] for name in names)

        service.until(found, 120, "self-tests of the broken ones")
        for name, way in ways.items():
            assert variants(service)[name]["state"] == "barred"
            assert service.metric("gemm_variant_quarantined", variant=name, reason=way) == 1
        assert product(service) not in names


@pytest.mark.parametrize("way", ["hang", "fault"])
def test_what_breaks_in_service_is_condemned_and_answered_within_ten_seconds(
    tmp_path: Path, way: str
) -> None:
    if default_folder().is_dir():  # outcomes of self-tests; what is condemned here stays here
        shutil.copytree(default_folder(), tmp_path / "cache")
    with running(
        tmp_path / "data", *FLAGS, environ=environ(tmp_path, "service.worker", {"77.0": way})
    ) as service:
        service.ready(60)
        service.until(lambda: product(service) != "reference-cublas", 120, "an own variant is admitted")
        variant = product(service)
        began = time.monotonic()
        assert product(service, 77.0) == "reference-cublas"
        spent = time.monotonic() - began
        assert variants(service)[variant]["state"] == "barred"
        assert service.metric("gemm_variant_quarantined", variant=variant, reason=way) == 1
        assert product(service) != variant
        print(f"{way}: right, by the reference, {spent:.1f} s after it was asked")
        assert spent < 10
