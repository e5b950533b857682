"""CUDA IPC over a stand-in of the driver: handles are made once an allocation, and anew for another at its place."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest

from service import ipc


class Driver(SimpleNamespace):
    """Allocations of 1000 bytes by address; handles count up."""

    def __init__(self) -> None:
        super().__init__(numbers={4096: 1, 8192: 2}, made=0, asked=0)

    def cuMemGetAddressRange_v2(self, base: Any, nbytes: Any, pointer: int) -> int:
        start = pointer // 4096 * 4096
        if start not in self.numbers:
            return 1
        base._obj.value, nbytes._obj.value = start, 1000
        return 0

    def cuPointerGetAttribute(self, into: Any, attribute: int, pointer: int) -> int:
        assert attribute == 7
        self.asked += 1
        number = self.numbers.get(pointer // 4096 * 4096)
        if number is None:
            return 1
        into._obj.value = number
        return 0

    def cuIpcGetMemHandle(self, into: Any, pointer: Any) -> int:
        self.made += 1
        ctypes.memmove(into, bytes([self.made] * ipc.HANDLE_BYTES), ipc.HANDLE_BYTES)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(ipc, "_library", lambda: driver)
    monkeypatch.setattr(ipc, "_exported", OrderedDict())
    monkeypatch.setattr(ipc, "_handles", OrderedDict())
    return driver


def test_a_handle_is_made_once_an_allocation(driver: Driver) -> None:
    first, again = ipc.export(4096), ipc.export(4096 + 256)
    assert (first.handle, first.nbytes, first.offset) == (b"\x01" * 64, 1000, 0)
    assert again == (first.handle, 1000, 256)
    assert ipc.export(8192).handle == b"\x02" * 64
    assert driver.made == 2


def test_another_allocation_at_the_same_address_has_a_handle_of_its_own(driver: Driver) -> None:
    before = ipc.export(4096).handle
    driver.numbers[4096] = 3
    assert ipc.export(4096).handle != before


def test_few_handles_are_remembered(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "_REMEMBERED", 1)
    for pointer in (4096, 8192, 4096):
        ipc.export(pointer)
    assert driver.made == 3
    assert len(ipc._exported) == len(ipc._handles) == 1


def test_what_the_driver_does_not_know_is_refused(driver: Driver) -> None:
    with pytest.raises(ipc.IpcError, match="cuPointerGetAttribute"):
        ipc.export(1 << 20)


def test_what_was_exported_costs_one_question_until_another_allocation_is_there(driver: Driver) -> None:
    assert ipc.exported(4096 + 256) is None
    first = ipc.export(4096 + 256)
    asked = driver.asked
    assert ipc.exported(4096 + 256) is first
    assert driver.asked == asked + 1
    assert ipc.exported(4096) is None, "another place in it was never exported"
    driver.numbers[4096] = 3
    assert ipc.exported(4096 + 256) is None
    assert ipc.export(4096 + 256).handle != first.handle
    del driver.numbers[4096]
    with pytest.raises(ipc.IpcError):
        ipc.exported(4096 + 256)
