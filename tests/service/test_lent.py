"""Clients' memory as a GPU's worker keeps it, over stand-ins for the driver: opened once, checked, let go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from service import ipc
from service.drivers.lent import Lent
from service.messages import Map

torch: Any = pytest.importorskip("torch")
HANDLE, OTHER = bytes(64), b"\x01" * 64


class Gpu:
    """What Lent asks of torch and of the driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, index: int = 0) -> None:
        self.open: list[bytes] = []
        self.locked: dict[int, int] = {}
        self.index = index
        self.uint8 = torch.uint8
        self.frombuffer = torch.frombuffer
        self.cuda = SimpleNamespace(cudart=lambda: self)
        monkeypatch.setattr(ipc, "open_handle", self._open)
        monkeypatch.setattr(ipc, "close_handle", self._close)

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        self.locked[pointer] = nbytes
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.locked[pointer]
        return 0

    def _open(self, handle: bytes) -> tuple[int, int]:
        if handle == OTHER:
            raise ipc.IpcError("the driver refused")
        self.open.append(handle)
        return 4096, 1000

    def _close(self, pointer: int) -> None:
        assert pointer == 4096
        self.open.pop()

    def as_tensor(self, source: Any, device: str) -> Any:
        place = source.__cuda_array_interface__
        assert (device, place["data"], place["typestr"]) == ("cuda", (4096, False), "|u1")

        class Data:
            device = SimpleNamespace(index=self.index)

            def __init__(self, nbytes: int) -> None:
                self.nbytes = nbytes

            def numel(self) -> int:
                return self.nbytes

            def __getitem__(self, piece: slice) -> Data:
                return Data(piece.stop)

        return Data(*place["shape"])


def test_an_allocation_is_opened_once_and_closed_with_its_last_region(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(monkeypatch)
    lent = Lent(gpu, 0)
    lent.add_device(Map(1, 1000, HANDLE))
    lent.add_device(Map(2, 600, HANDLE))
    assert gpu.open == [HANDLE]
    assert (lent.data[1].numel(), lent.data[2].numel()) == (1000, 600)
    assert lent.on_device(1)
    lent.remove(1)
    assert gpu.open == [HANDLE]
    lent.remove(2)
    lent.remove(2)
    assert gpu.open == []
    assert not lent.data


@pytest.mark.parametrize(("nbytes", "handle", "index"), [(1001, HANDLE, 0), (10, OTHER, 0), (10, HANDLE, 1)])
def test_what_is_not_right_is_refused_and_stays_closed(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, handle: bytes, index: int
) -> None:
    gpu = Gpu(monkeypatch, index)
    lent = Lent(gpu, 0)
    with pytest.raises(ValueError, match=r"bytes|refused|GPU"):
        lent.add_device(Map(1, nbytes, handle))
    assert gpu.open == []
    assert 1 not in lent.data
    assert not lent.on_device(1)


def test_host_memory_is_page_locked_while_it_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    lent = Lent(gpu, 0)
    memory = bytearray(b"abcd")
    lent.add_host(3, memoryview(memory))
    memory[0] = ord("x")
    assert bytes(lent.data[3].numpy()) == b"xbcd"
    assert list(gpu.locked.values()) == [4]
    assert not lent.on_device(3)
    lent.remove(3)
    assert not gpu.locked
