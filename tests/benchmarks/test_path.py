"""The split of a request's time: read from the service's log, and what is in none of its stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import path


def line(route: str, **seconds: float) -> str:
    told: dict[str, Any] = {"event": "request", "route": route}
    told |= {("seconds" if name == "whole" else f"{name}_seconds"): value for name, value in seconds.items()}
    return json.dumps(told) + "\n"


def test_stages_are_medians_of_what_was_told_since_then(tmp_path: Path) -> None:
    told = tmp_path / "log"
    told.write_text(line("/gemm", whole=9.0, kernel=9.0))
    log = path.Log(told)
    log.skip()
    with told.open("a") as file:
        file.write("not a line of the log\n" + line("local", whole=5.0))
        for kernel in (0.0001, 0.0002, 0.0009):
            file.write(line("/gemm", whole=0.001, decode=0.0001, kernel=kernel))
    assert log.stages("/gemm") == {"decode": 100.0, "kernel": 200.0, "front": 1000.0}
    assert log.stages("local") == {"front": 5e6}


def test_what_is_in_no_stage_is_http_in_the_front_and_the_client_outside() -> None:
    row = path.split({"p50_us": 1500.0}, {"decode": 100.0, "kernel": 200.0, "front": 1000.0})
    assert row["stages"] == {
        "decode_us": 100.0, "kernel_us": 200.0, "http_us": 700.0, "client_and_sockets_us": 500.0,
    }  # fmt: skip


def test_a_byte_goes_to_another_process_and_back_asleep_and_awake() -> None:
    row = path.wake_ups(rounds=20)
    assert row["asleep_us"] > 0
    assert row["awake_us"] > 0
