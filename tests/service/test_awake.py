"""Who waits awake, and for how long."""

from __future__ import annotations

import asyncio

from service.awake import SECONDS, Awake, WakefulLoop, seconds_for


def test_who_gave_work_away_stays_awake_for_its_end_but_not_for_ever() -> None:
    awake = Awake(0.002)
    assert not awake.stays(0.0)
    awake.began(10.0)
    assert awake.stays(10.0019)
    assert not awake.stays(10.0021)
    assert awake.waited(10.5) == 0.5


def test_an_idle_waiter_sleeps_unless_work_lately_came_soon() -> None:
    awake = Awake(0.002)
    awake.began(10.0)
    awake.ended(10.001, busy=False)
    assert not awake.stays(10.0015)
    awake.began(10.0025)
    awake.ended(10.003, busy=False)
    assert awake.stays(10.0049)
    assert not awake.stays(10.0051)
    awake.began(11.0)
    awake.ended(11.001, busy=False)
    assert not awake.stays(11.0015)


def test_while_other_work_is_away_its_end_is_waited_for() -> None:
    awake = Awake(0.002)
    awake.began(1.0)
    awake.began(1.0001)
    awake.ended(1.001, busy=True)
    assert awake.stays(1.0029)


def test_nobody_waits_awake_where_it_is_off_or_cores_are_few() -> None:
    awake = Awake(0.0)
    awake.began(1.0)
    assert not awake.stays(1.0)
    assert [seconds_for(workers, cores) for workers, cores in ((1, 4), (1, 3.9), (8, 17), (8, 18))] == [
        SECONDS, 0.0, 0.0, SECONDS,
    ]  # fmt: skip


async def waits(loop: WakefulLoop) -> list[float | None]:
    """How long the event loop was ready to wait for input, turn by turn, while it had nothing to do but a timer."""
    told: list[float | None] = []
    selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
    select = selector.select

    def noted(timeout: float | None) -> object:
        told.append(timeout)
        return select(timeout)

    selector.select = noted
    loop.began()
    await asyncio.sleep(0.3)
    selector.select = select
    return told


async def test_a_loop_that_is_awake_does_not_wait_for_input() -> None:
    told = await waits(WakefulLoop(600.0))
    assert len(told) > 1
    assert set(told) == {0}


async def test_a_loop_that_may_sleep_does() -> None:
    assert any(timeout is None or timeout > 0 for timeout in await waits(WakefulLoop(0.0)))
