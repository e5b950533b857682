"""`gemm-service top`: its figures are those of /now, once and live in a real terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from service.cli import top
from tests.service.real import ROOT, Service


def document(**more: Any) -> dict[str, Any]:
    times = {"count": 5, "mean": 0.002, "p50": 0.001, "p99": 0.009}
    return {
        "status": "ready",
        "flops_per_second": 2.5e12,
        "gemms_per_second": 12.5,
        "tensor": [{"worker": 0, "active": 0.81, "source": "nvml_gpm", "detail": "", "sm_clock_mhz": 1440.0}],
        "wait": times,
        "kernel": times,
        "request": None,
        "batch": {"mean": 3.5},
        "queue": {"depth": 2, "seconds": 0.1},
        "stages": {"decode": 0.001, "kernel": 0.003},
        "rejected": {"queue_full": 3.0},
        "flops_ratio": {"0": 0.42},
        "quarantined": {"step9-128x256-2x1": "wrong"},
        "workers": [
            {"index": 0, "state": "ready", "detail": "", "pid": 7, "device": {"name": "NVIDIA H200"}}
        ],
        "arena": {"request": 1 << 20, "free": 3 << 20},
        "arena_bytes": 4 << 20,
        "store": {"memory": 0.0, "disk": 1.0 * (1 << 20)},
        "store_bytes": {"memory": 2 << 20, "disk": 4 << 20},
        **more,
    }


def shown(told: dict[str, Any], **past: list[float]) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(top.picture(told, past))
    return out.getvalue()


def test_the_picture_tells_the_document() -> None:
    text = shown(document(), flops_per_second=[0.0, 1.0, 2.0])
    for part in (
        "2.5 TFLOP/s",
        "81.0 %",
        "nvml_gpm",
        "1440 MHz",
        "12.5",
        "2.00 ms",
        "p99 9.00 ms",
        "NVIDIA H200",
    ):
        assert part in text, part
    assert "quarantined: step9-128x256-2x1 (wrong)" in text
    assert "75 %" in text
    assert "42.0 %" in text  # of the datasheet's peak, in a column of its own
    assert " ▄█" in text


def test_several_gpus_are_a_mean_and_a_row_each() -> None:
    read = [
        {"worker": n, "active": active, "source": "nvml_gpm", "detail": "no", "sm_clock_mhz": 1410.0}
        for n, active in enumerate((0.8, 0.6, None))
    ]
    workers = [
        {"index": n, "state": "ready", "detail": "", "pid": n, "device": {"name": "H200"}} for n in range(3)
    ]
    text = shown(document(tensor=read, workers=workers))
    assert "70.0 %" in text
    assert "mean of 2 GPUs, read from the hardware (nvml_gpm); 1 not readable" in text
    assert "80.0 %" in text
    assert "60.0 %" in text


def test_it_fits_a_terminal_of_80_by_24() -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(top.picture(document(), {}))
    lines = out.getvalue().splitlines()
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines)
    assert "queue_full" in out.getvalue()


def test_what_is_not_known_is_said() -> None:
    nothing = dict.fromkeys(
        ("flops_per_second", "gemms_per_second", "wait", "kernel", "batch", "stages", "rejected")
    )
    absent = {
        "worker": 0,
        "active": None,
        "source": "",
        "detail": "no tensor cores to read",
        "sm_clock_mhz": None,
    }
    text = shown(document(**nothing, tensor=[absent]))
    assert "not readable here" in text
    assert "no tensor cores to read" in text
    assert "Nothing was computed" in text


def test_once_as_json_is_what_the_service_says(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.ones((32, 32), np.float32)
    service.gemm(x, x)
    assert top.main(["--once", "--json", "--url", service.url, "--every", "0.5"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["arena_bytes"] == service.http.get("/now").json()["arena_bytes"]
    assert top.main(["--once", "--url", service.url, "--every", "0.5"]) == 0
    assert "not readable here" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--every", "0"], ["--every", "nan"], ["--json"]])
def test_wrong_flags_are_told(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main(wrong) == 2
    assert "--" in capsys.readouterr().err


def test_a_service_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main(["--once", "--url", "http://127.0.0.1:9", "--timeout", "0.1"]) == 1
    assert "gemm-service:" in capsys.readouterr().err


def test_it_lives_in_a_terminal_until_it_is_stopped(service: Service) -> None:
    ours, theirs = pty.openpty()
    # A test that a shell runs in the background inherits that an interrupt is ignored.
    heeding = ["env", "--default-signal=INT", sys.executable]
    process = subprocess.Popen(
        [*heeding, "-m", "service", "top", "--url", service.url, "--every", "0.5"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "50"},
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end and seen.count(b"products a second") < 2:
            if select.select([ours], [], [], 0.5)[0]:
                seen += os.read(ours, 65536)
        assert seen.count(b"products a second") >= 2
        process.send_signal(signal.SIGINT)
        end = time.monotonic() + 60  # whatever the first screens took
        while process.poll() is None and time.monotonic() < end:
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    seen += os.read(ours, 65536)
                except OSError:  # the other end is closed
                    break
        assert process.wait(10) == 0
        assert b"Traceback" not in seen
    finally:
        process.kill()
        process.wait()
        os.close(ours)
