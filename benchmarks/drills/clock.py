"""Drill: the wall clock of front and worker jumps forth and back while clients go on."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.drills.frame import Failed, check, drill
from benchmarks.drills.traffic import WEIGHT, KeepAlive, Tally, Traffic, nothing_lost
from tests.service.real import raw_tensor, running

LIBRARY = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
JUMPS = ("+2h", "-26h", "+400d", "+0")
STAY = 4.0


@drill("clock-jumps", seconds=120)
def jumps() -> str:
    """Nothing fails, no worker is taken for hung, nothing without a time to live expires."""
    if not LIBRARY.exists():
        raise Failed("libfaketime, which moves the clock of a process, isn't installed")
    with tempfile.TemporaryDirectory(prefix="gemm-drill-") as folder:
        shift = Path(folder, "shift")
        shift.write_text("+0\n")
        environ = {
            **{"LD_PRELOAD": str(LIBRARY), "FAKETIME_TIMESTAMP_FILE": str(shift), "FAKETIME_NO_CACHE": "1"},
            # A clock that is set moves CLOCK_REALTIME; CLOCK_MONOTONIC goes on.
            **{"FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"},
        }
        # Results of jobs have a time to live too, a day by default: here longer than any jump.
        flags = ("--arena-bytes", "128MiB", "--result-ttl-seconds", "1e9")
        with running(Path(folder, "data"), *flags, environ=environ) as service:
            service.ready()
            service.put("weight", WEIGHT).raise_for_status()
            tally = Tally()
            shown = []
            with Traffic([KeepAlive(service.url, n, tally) for n in range(3)]):
                for jump in JUMPS:
                    put = raw_tensor(WEIGHT)
                    put["params"]["ttl_seconds"] = 3600
                    service.http.put("/tensors/short", **put).raise_for_status()
                    shift.write_text(f"{jump}\n")
                    time.sleep(STAY)
                    left = service.http.get("/tensors/short").status_code
                    shown.append(f"{jump}: {left}")
                    later = jump.startswith("+") and jump != "+0"
                    check(
                        left == (404 if later else 200),
                        f"a tensor with an hour to live, after {jump}: {left}",
                    )
            check(not tally.failures, f"{len(tally.failures)} failures: {tally.failures[:3]}")
            restarts = service.metric("gemm_worker_restarts_total")
            check(restarts == 0, f"{restarts:g} restarts of the worker")
            looked = nothing_lost(service.url, tally)
            with httpx.Client(base_url=service.url) as http:
                check(http.get("/health/ready").status_code == 200, "not ready")
        return f"jumps {', '.join(JUMPS)}: {tally.total} requests well, no restart; {looked}"
