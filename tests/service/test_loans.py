"""Stored tensors lent on a GPU: whose bytes they are, how loans end, what is refused."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.client import AsyncClient, Borrowed, Client, GemmError, NotFound, Refused
from service.client.local import LocalConnection, Place, open_session
from service.client.shared import Arrays
from service.client.transport import wait
from service.local.loans import MOST_LOANS
from service.local.messages import Loan
from tests.service import cuda_stand_in
from tests.service.real import Service, running

torch: Any = pytest.importorskip("torch")
X = np.arange(60, dtype=np.float32).reshape(6, 10)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("loans")
    environ = {"PYTHONPATH": cuda_stand_in.folder(folder), "GEMM_CACHE": str(folder / "cache")}
    with running(folder / "data", "--device", "cuda", "--workers", "1", environ=environ) as one:
        one.ready().put("x", X).raise_for_status()
        yield one


def session(service: Service) -> LocalConnection:
    place = Place.of(json.dumps(service.http.get("/limits").json()).encode())
    assert place is not None
    made: LocalConnection = wait(open_session(place, "", Arrays()), time.monotonic() + 60)
    return made


def borrow(connection: LocalConnection, name: str) -> Loan:
    loan: Loan = wait(connection.borrow(name), time.monotonic() + 60)
    return loan


def lent(service: Service, loan: Loan) -> np.ndarray:
    """What lies at the loan's address in the worker's process."""
    with open(f"/proc/{service.worker().pid}/mem", "rb", buffering=0) as memory:
        memory.seek(int.from_bytes(loan.handle, "little"))
        return np.frombuffer(memory.read(loan.nbytes), np.float32).reshape(loan.shape)


def test_a_loan_is_a_copy_and_ends_with_its_session(service: Service) -> None:
    one, two = session(service), session(service)
    first, second = borrow(one, "x"), borrow(two, "x")
    assert (first.dtype, first.shape, first.nbytes, first.device) == ("fp32", (6, 10), 240, "stand-in-0")
    assert first.etag == service.http.head("/tensors/x").headers["etag"].strip('"').partition(".")[0]
    assert first.handle != second.handle
    np.testing.assert_array_equal(lent(service, first), X)
    one.close()
    service.until(lambda: not lent(service, first).any(), 60, "freed")
    np.testing.assert_array_equal(lent(service, second), X)
    two.close()


@pytest.fixture
def opens(service: Service, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Loans are opened by way of the worker's memory, as no GPU is here; addresses of those that are open."""
    opened: list[int] = []

    def open_loan(self: Borrowed, loan: Loan) -> None:
        self.etag, self.value = loan.etag, lent(service, loan)
        self._pointer = int.from_bytes(loan.handle, "little")
        opened.append(self._pointer)

    monkeypatch.setattr(Borrowed, "_open", open_loan)
    monkeypatch.setattr(Borrowed, "_let_go", lambda self: opened.remove(self._pointer))
    return opened


def test_both_clients_borrow(service: Service, opens: list[int]) -> None:
    with Client(service.url) as client:
        with client.borrow("x") as one, client.borrow(client.head("x")) as two:
            np.testing.assert_array_equal(one.value, X)
            np.testing.assert_array_equal(two.value, X)
            assert len(set(opens)) == 2
        one.close()  # again is no harm
        assert not opens
        with pytest.raises(NotFound):
            client.borrow("nothing")

    async def run() -> None:
        async with AsyncClient(service.url) as client:
            borrowed = await asyncio.gather(*(client.borrow("x") for _ in range(3)))
            assert len(set(opens)) == 3
            for one in borrowed:
                async with one as lent_here:
                    np.testing.assert_array_equal(lent_here.value, X)
            assert not opens
            with pytest.raises(NotFound):
                await client.borrow("nothing")
        async with AsyncClient(service.url, local=False) as far:
            with pytest.raises(GemmError, match="on this machine"):
                await far.borrow("x")

    asyncio.run(run())


async def test_who_is_cancelled_borrows_nothing(
    service: Service, opens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on, right = threading.Event(), threading.Event(), Borrowed._open

    def slowly(self: Borrowed, loan: Loan) -> None:
        began.set()
        go_on.wait(10)
        right(self, loan)

    monkeypatch.setattr(Borrowed, "_open", slowly)
    closed = asyncio.Event()
    loop, let_go = asyncio.get_running_loop(), Borrowed._let_go

    def noted(self: Borrowed) -> None:
        let_go(self)
        loop.call_soon_threadsafe(closed.set)

    monkeypatch.setattr(Borrowed, "_let_go", noted)
    async with AsyncClient(service.url) as client:
        asked = asyncio.ensure_future(client.borrow("x"))
        await asyncio.to_thread(began.wait, 10)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        go_on.set()
        async with asyncio.timeout(60):
            await closed.wait()
    assert not opens


def test_a_loan_that_cannot_be_opened_is_over(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Loan] = []

    def refuse(self: Borrowed, loan: Loan) -> None:
        seen.append(loan)
        raise GemmError("no such GPU here")

    monkeypatch.setattr(Borrowed, "_open", refuse)
    with Client(service.url) as client, pytest.raises(GemmError, match="no such GPU"):
        client.borrow("x")
    service.until(lambda: not lent(service, seen[0]).any(), 60, "freed")


def test_a_result_that_only_the_device_has_is_lent(service: Service) -> None:
    assert service.gemm(X, np.ascontiguousarray(X.T), out="handle:d").status_code == 200
    connection = session(service)
    np.testing.assert_allclose(lent(service, borrow(connection, "d")), X @ X.T)
    connection.close()


def test_what_cannot_be_lent_is_refused(service: Service, tmp_path: Path) -> None:
    connection = session(service)
    with pytest.raises(NotFound):
        borrow(connection, "nothing")
    large = np.zeros((512, 256), np.float32)  # more than a quarter of the stand-in's budget
    service.put("large", large).raise_for_status()
    with pytest.raises(Refused) as caught:
        borrow(connection, "large")
    assert caught.value.status == 507
    for _ in range(MOST_LOANS):
        borrow(connection, "x")
    with pytest.raises(Refused, match="borrows no more"):
        borrow(connection, "x")
    connection.close()
    with pytest.raises(GemmError, match="on this machine"), Client(service.url, local=False) as client:
        client.borrow("x")
    with running(tmp_path / "cpu") as cpu:
        cpu.ready().put("x", X).raise_for_status()
        connection = session(cpu)
        with pytest.raises(Refused) as caught:
            borrow(connection, "x")
        assert caught.value.status == 501
        connection.close()
