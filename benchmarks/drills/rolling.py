"""Drills: two fronts are restarted in turn behind HAProxy, while clients go on."""

from __future__ import annotations

import time

from benchmarks.drills.frame import check, drill
from benchmarks.drills.site import Site, site
from benchmarks.drills.traffic import WEIGHT, KeepAlive, Retrying, Tally, Traffic, nothing_lost

CLIENTS = 3
ROUNDS = 2
#: What a pod waits in preStop: the proxy learns that it leaves, and what is under way ends.
PRE_STOP_SECONDS = 1.0


@drill("rolling-restart-keep-alive", seconds=240)
def keep_alive() -> str:
    """The proxy is told first, as Kubernetes withdraws a pod's endpoint: not one request fails."""
    with site() as made:
        tally = Tally()
        made.fronts[0].put("weight", WEIGHT).raise_for_status()
        with Traffic([KeepAlive(made.proxy, n, tally) for n in range(CLIENTS)]):
            time.sleep(1)
            for _ in range(ROUNDS):
                for place in range(2):
                    made.tell_proxy(f"set server fronts/gemm-{place} state drain")
                    time.sleep(PRE_STOP_SECONDS)
                    restart(made, place)
                    made.tell_proxy(f"set server fronts/gemm-{place} state ready")
                    made.until_proxied(place)
                    time.sleep(1)
        check(not tally.failures, f"{len(tally.failures)} requests failed: {tally.failures[:3]}")
        return told(tally, nothing_lost(made.proxy, tally))


@drill("rolling-restart-retrying", seconds=240)
def retrying() -> str:
    """Nobody is told, and every second front is killed: no call of a retrying client fails."""
    with site() as made:
        tally = Tally()
        made.fronts[0].put("weight", WEIGHT).raise_for_status()
        with Traffic([Retrying(made.proxy, n, tally) for n in range(CLIENTS)]):
            time.sleep(1)
            for turn in range(ROUNDS):
                for place in range(2):
                    restart(made, place, kill=turn % 2 == 1)
                    made.until_proxied(place)
                    time.sleep(1)
        check(not tally.failures, f"{len(tally.failures)} calls failed: {tally.failures[:3]}")
        return told(tally, nothing_lost(made.proxy, tally))


@drill("rolling-restart-several-urls", seconds=240)
def several_urls() -> str:
    """Without a proxy: the client knows both fronts and goes to the other one."""
    with site(proxy=False) as made:
        tally = Tally()
        made.fronts[0].put("weight", WEIGHT).raise_for_status()
        urls = ",".join(front.url for front in made.fronts)
        with Traffic([Retrying(urls, n, tally) for n in range(CLIENTS)]):
            time.sleep(1)
            for turn in range(ROUNDS):
                for place in range(2):
                    restart(made, place, kill=turn % 2 == 1)
                    time.sleep(1)
        check(not tally.failures, f"{len(tally.failures)} calls failed: {tally.failures[:3]}")
        return told(tally, nothing_lost(made.fronts[1].url, tally))


def restart(made: Site, place: int, *, kill: bool = False) -> None:
    """End a front, by SIGTERM (its status must be 0) or kill -9, and start it anew."""
    front = made.fronts[place]
    if kill:
        front.kill()
    else:
        status = front.stop()
        check(
            status == 0, f"a front that was asked to leave ended with status {status}: {front.output[-500:]}"
        )
    front.close()
    made.fronts[place] = made.start(place)


def told(tally: Tally, looked: str) -> str:
    """One line."""
    slowest = max(tally.slowest.values())
    return f"{2 * ROUNDS} restarts, {tally.total} requests, none failed, slowest {slowest:.2f} s; {looked}"
