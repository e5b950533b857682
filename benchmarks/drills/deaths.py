"""Drill: front and worker are killed in turn, every few seconds, while clients go on."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil

from benchmarks.drills.frame import check, drill
from benchmarks.drills.site import until
from benchmarks.drills.traffic import SIDE, WEIGHT, Retrying, Tally, Traffic, matrix, nothing_lost
from tests.service import shared
from tests.service.real import Service, raw

EVERY = 5.0
CLIENTS = 3
#: What a client may be told while a worker is away; anything else, and an answer without a code, is a failure.
CLEAR = {"no_worker", "draining", "queue_full", "no_room", "deadline"}


class Watcher:
    """A client that never tries again: what it is refused has to be said clearly."""

    def __init__(self, url: str, tally: Tally) -> None:
        self.http = httpx.Client(base_url=url, timeout=60)
        self.tally = tally
        self.refused: Counter[str] = Counter()
        self._count = itertools.count(5000)

    def walk(self) -> None:
        """One product. A connection that ends with its front is no answer, so nothing to be clear about."""
        a = matrix(next(self._count), 8)
        began = time.monotonic()
        try:
            reply = self.http.post("/gemm", **raw(a, WEIGHT))
        except httpx.TransportError:
            self.refused["connection"] += 1
            time.sleep(0.05)
            return
        if reply.status_code == 200:
            right = reply.content == (a @ WEIGHT).tobytes()
            self.tally.did("watched", time.monotonic() - began, "" if right else "a wrong product")
            return
        code = reply.json().get("code", "") if "json" in reply.headers.get("content-type", "") else ""
        self.refused[code] += 1
        if code not in CLEAR:
            self.tally.did("watched", 0.0, f"an unclear refusal: {reply.status_code} {reply.text[:200]}")

    def close(self) -> None:
        """Close the connection."""
        self.http.close()


@drill("kill-9", seconds=180, lasts=300)
def kill_nine(lasts: float) -> str:
    """No wrong answer, no lost tensor or accepted job, every refusal clear."""
    port = shared.free_port()
    flags = ("--port", str(port), "--log-level", "warning", "--backend", "numpy", "--arena-bytes", "128MiB")
    with tempfile.TemporaryDirectory(prefix="gemm-drill-") as folder, contextlib.ExitStack() as stack:

        def start() -> Service:
            return stack.enter_context(contextlib.closing(Service(Path(folder), *flags))).ready()

        front = start()
        front.put("weight", WEIGHT).raise_for_status()
        tally = Tally()
        watcher = Watcher(front.url, tally)
        walkers = [*(Retrying(front.url, n, tally) for n in range(CLIENTS)), watcher]
        kills: Counter[str] = Counter()
        end = time.monotonic() + lasts
        with Traffic(walkers):  # type: ignore[arg-type]
            for turn in itertools.count():
                time.sleep(EVERY)
                if time.monotonic() > end:
                    break
                if turn % 2:
                    front.kill()
                    front = start()
                    kills["front"] += 1
                else:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        front.worker().kill()
                        kills["worker"] += 1
        until(front.is_ready, 60, "ready again")
        check(not tally.failures, f"{len(tally.failures)} failures: {tally.failures[:3]}")
        check(kills["front"] and kills["worker"], f"nothing was killed: {kills}")
        looked = nothing_lost(front.url, tally)
        refused = ", ".join(f"{n} {code}" for code, n in watcher.refused.most_common())
        return (
            f"{kills['front']} fronts and {kills['worker']} workers killed in {lasts:g} s; {tally.total} requests"
            f" well ({SIDE} columns), slowest {max(tally.slowest.values()):.1f} s; {looked};"
            f" without retries refused: {refused or 'none'}"
        )
