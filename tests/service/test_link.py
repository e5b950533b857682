"""Frames over a real socketpair, both ways."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading

import pytest

from service.link import MAX_FRAME, FrontLink, WorkerLink, _Frames
from service.messages import Ask, Batch, Item, Operand, Params, Ping, Pong, ToFront, ToWorker
from tests.service.works import work


async def test_messages_cross_in_order_and_whole() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    worker = WorkerLink(theirs)
    got: list[ToFront] = []
    everything = asyncio.Event()
    lost = asyncio.Event()

    def received(message: ToFront) -> None:
        got.append(message)
        if len(got) == 1000:
            everything.set()

    front = FrontLink(received, lost.set)
    await front.open(ours)
    sent: list[ToWorker] = [
        Batch(7, tuple(work(c=True, bias="v@1").item() for _ in range(300)), True),
        Ask(1, "choose", {"m": 5}),
    ]
    sent += [Ping(n) for n in range(998)]
    for message in sent:
        front.send(message)

    def echo() -> list[ToWorker]:
        seen: list[ToWorker] = []
        while len(seen) < 1000:
            messages = worker.receive()
            assert messages is not None
            for message in messages:
                seen.append(message)
                worker.send(Pong(len(seen)))
        return seen

    assert await asyncio.to_thread(echo) == sent
    await asyncio.wait_for(everything.wait(), 60)
    assert got == [Pong(n + 1) for n in range(1000)]
    worker.close()
    await asyncio.wait_for(lost.wait(), 60)


def test_the_worker_sees_the_end_of_the_front() -> None:
    ours, theirs = socket.socketpair()
    worker = WorkerLink(theirs)
    threading.Timer(0.05, ours.close).start()
    assert worker.receive() is None
    worker.send(Pong(1))
    worker.close()


def test_a_length_beyond_any_message_is_an_error() -> None:
    frames: _Frames[ToFront] = _Frames(ToFront)
    with pytest.raises(ValueError, match="frame of"):
        frames.feed(struct.pack("<I", MAX_FRAME + 1))


def test_operands_and_items_are_values() -> None:
    operand = Operand(0, 4, "fp32", (1, 1))
    assert operand == Operand(0, 4, "fp32", (1, 1))
    assert Item(1, operand, operand, operand, Params("fp32")).deadline == 0.0
