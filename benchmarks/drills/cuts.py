"""Drills: the network between fronts and S3, or PostgreSQL, is cut in two ways, and mended."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import httpx

from benchmarks.drills.frame import check, drill
from benchmarks.drills.site import SHARED_SECONDS, Site, site, until
from benchmarks.drills.traffic import ACCEPT, WEIGHT, KeepAlive, Tally, Traffic, matrix, nothing_lost, same
from tests.service.real import Service, raw, raw_tensor, result
from tests.service.shared import Cable

#: Seconds that a cut lasts: longer than a front's lease.
CUT_SECONDS = 5.0
#: Most seconds for a refusal: the limit of a request to what is shared, and a little for a busy machine.
REFUSAL_SECONDS = SHARED_SECONDS + 2


@drill("cut-s3", seconds=180)
def s3() -> str:
    """Without S3: products go on, also with what is in memory; what needs S3 is refused clearly and in time."""
    with site(proxy=False) as made:
        return _cut(made, made.to_s3, _needing_s3, handles_go_on=True)


@drill("cut-postgresql", seconds=180)
def postgresql() -> str:
    """Without PostgreSQL: products of inline operands go on; handles and jobs are refused clearly and in time."""
    with site(proxy=False) as made:
        return _cut(made, made.to_postgres, _needing_postgresql, handles_go_on=False)


@drill("restart-postgresql", seconds=180)
def restart() -> str:
    """PostgreSQL crashes and comes back under load: what was accepted is there."""
    with site(proxy=False) as made:
        tally = _prepared(made)
        with Traffic([KeepAlive(front.url, n, tally) for n, front in enumerate(made.fronts)]):
            time.sleep(1)
            made.postgres.stop(3)  # SIGQUIT: as a crash
            time.sleep(1)
            made.postgres.start()
            time.sleep(3)
        _check_refusals(tally)
        return f"{tally.total} requests, {len(tally.failures)} refused; {nothing_lost(made.fronts[1].url, tally)}"


#: Requests that are to be refused, to the front of a place.
Ask = Callable[[], httpx.Response]
Asks = Callable[[Site, int], list[Ask]]


def _needing_s3(made: Site, place: int) -> list[Ask]:
    return [partial(_put, made.fronts[place]), partial(_read_cold, made, place)]


def _needing_postgresql(made: Site, place: int) -> list[Ask]:
    front = made.fronts[place]
    return [*_needing_s3(made, place), partial(_by_handle, front), partial(_job, front)]


def _prepared(made: Site) -> Tally:
    made.fronts[0].put("weight", WEIGHT).raise_for_status()
    for place in range(2):  # in the memory of the other front alone
        made.fronts[1 - place].put(f"cold-{place}", WEIGHT).raise_for_status()
    for front in made.fronts:  # into the memory of both
        same(result(_by_handle(front)), matrix(5, 8) @ WEIGHT)
    return Tally()


def _cut(made: Site, cable: Cable, asks: Asks, *, handles_go_on: bool) -> str:
    tally = _prepared(made)
    refusals, slowest = 0, 0.0
    with Traffic([KeepAlive(front.url, n, tally) for n, front in enumerate(made.fronts)]):
        time.sleep(1)
        for how in ("refuse", "hold"):
            cable.cut(how)  # type: ignore[arg-type]
            end = time.monotonic() + CUT_SECONDS
            while time.monotonic() < end:
                for place, front in enumerate(made.fronts):
                    for ask in asks(made, place):
                        began = time.monotonic()
                        _refused(ask())
                        refusals += 1
                        slowest = max(slowest, time.monotonic() - began)
                    same(result(front.gemm(matrix(6, 8), WEIGHT)), matrix(6, 8) @ WEIGHT)
                    if handles_go_on:
                        same(result(_by_handle(front)), matrix(5, 8) @ WEIGHT)
            check(slowest < REFUSAL_SECONDS, f"a refusal took {slowest:.1f} s")
            cable.mend()
            for place, front in enumerate(made.fronts):
                until(partial(_stores, front), 10, "PUT after the cut")
                same(result(_read_cold(made, place)), WEIGHT)
            time.sleep(1)
    _check_refusals(tally)
    inline = [failure for failure in tally.failures if failure.startswith("inline")]
    check(not inline, f"products of inline operands failed: {inline[:3]}")
    looked = nothing_lost(made.fronts[1].url, tally)
    return (
        f"{tally.total} requests served, {refusals} refusals asked for, the slowest {slowest:.1f} s; {looked}"
    )


def _refused(reply: httpx.Response) -> None:
    check(
        reply.status_code == 503,
        f"{reply.request.method} {reply.request.url}: {reply.status_code} {reply.text}",
    )
    check(reply.json()["code"] == "unavailable", reply.text)
    check(float(reply.headers["retry-after"]) > 0, "no Retry-After")


def _check_refusals(tally: Tally) -> None:
    """What the traffic was refused, it was refused as unavailable."""
    other = [failure for failure in tally.failures if "unavailable" not in failure]
    check(not other, f"{len(other)} requests failed in another way: {other[:3]}")


def _put(front: Service) -> httpx.Response:
    return front.http.put("/tensors/probe", **raw_tensor(WEIGHT))


def _stores(front: Service) -> bool:
    return _put(front).status_code < 300


def _read_cold(made: Site, place: int) -> httpx.Response:
    """What isn't in this front's memory: a download doesn't bring it there."""
    return made.fronts[place].http.get(f"/tensors/cold-{place}", headers=ACCEPT)


def _by_handle(front: Service) -> httpx.Response:
    return front.http.post("/gemm", **raw(matrix(5, 8), "weight"))


def _job(front: Service) -> httpx.Response:
    return front.http.post("/jobs", json={"steps": [{"id": "s", "a": [[1]], "b": [[1]]}]})
