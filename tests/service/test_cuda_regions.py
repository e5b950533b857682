"""Memory of clients on a device: the worker's side over a stand-in for the CUDA library, and a real GPU's."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from service.arena import Arena, Slots
from service.decode import Bound
from service.drivers.cuda_regions import CudaRegions
from service.errors import ServiceError
from service.inference.cuda_memory import CudaMemory
from service.messages import Operand
from tests.service.real import running

SIZE = 256


class _Handle:
    """As the bindings have it: an address of 64 bytes."""

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self._bytes)

    def __bytes__(self) -> bytes:
        return self._bytes.raw


class _Cuda:
    """One allocation of SIZE bytes by the handle b"good…", in host memory; every other handle is foreign."""

    SUCCESS, FAULT = 0, 1

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(bytes(range(SIZE)), SIZE)
        self.opened = self.faults = 0
        self.cudaError_t = SimpleNamespace(cudaSuccess=self.SUCCESS)
        self.CUresult = SimpleNamespace(CUDA_SUCCESS=self.SUCCESS)
        self.cudaMemcpyKind = SimpleNamespace(cudaMemcpyDeviceToHost="in", cudaMemcpyHostToDevice="out")
        self.cudaIpcMemHandle_t = _Handle
        self.cudaIpcMemLazyEnablePeerAccess = self.cudaStreamNonBlocking = 1

    def cudaSetDevice(self, device: int) -> tuple[int]:
        return (self.SUCCESS if device == 0 else self.FAULT,)

    def cudaGetLastError(self) -> None:
        self.faults += 1

    def cudaIpcOpenMemHandle(self, handle: _Handle, flags: int) -> tuple[int, int]:
        if not bytes(handle).startswith(b"good"):
            return self.FAULT, 0
        self.opened += 1
        return self.SUCCESS, ctypes.addressof(self.memory)

    def cudaIpcCloseMemHandle(self, pointer: int) -> tuple[int]:
        self.opened -= 1
        return (self.SUCCESS,)

    def cuMemGetAddressRange(self, pointer: int) -> tuple[int, int, int]:
        return self.SUCCESS, ctypes.addressof(self.memory), SIZE

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, str]:
        return self.SUCCESS, "stream"

    def cudaMemcpyAsync(self, target: int, source: int, nbytes: int, kind: str, stream: str) -> tuple[int]:
        ctypes.memmove(target, source, nbytes)
        return (self.SUCCESS,)

    def cudaStreamSynchronize(self, stream: str) -> tuple[int]:
        return (self.SUCCESS,)


@contextlib.contextmanager
def regions() -> Iterator[tuple[CudaRegions, _Cuda, Arena]]:
    arena, cuda = Arena.create(4096), _Cuda()
    yield CudaRegions(arena, cuda, cuda), cuda, arena
    arena.close()


def asked(handle: bytes = b"good", device: int = 0, size: int = SIZE, **more: int) -> dict[str, Any]:
    return {"handle": handle.ljust(64, b"\0"), "device": device, "size": size, **more}


def test_bytes_go_both_ways() -> None:
    with regions() as (made, cuda, arena):
        made.ask("region_open", asked())
        made.ask("region_read", asked(offset=16, at=100, nbytes=8))
        assert bytes(arena.view(100, 8)) == bytes(range(16, 24))
        arena.view(200, 4)[:] = b"abcd"
        made.ask("region_write", asked(offset=252, at=200, nbytes=4))
        assert cuda.memory.raw[252:] == b"abcd"
        assert cuda.memory.raw[:252] == bytes(range(252))
        made.ask("region_read", asked(offset=SIZE, at=0, nbytes=0))
        made.ask("region_close", asked())
        assert cuda.opened == 0


def test_sizes_are_the_allocations() -> None:
    with regions() as (made, cuda, _):
        with pytest.raises(ValueError, match="257"):
            made.ask("region_open", asked(size=SIZE + 1))
        assert cuda.opened == 0
        made.ask("region_open", asked())
        for offset, nbytes in ((SIZE, 1), (0, SIZE + 1), (-1, 4), (4, -1), (1 << 62, 1 << 62)):
            with pytest.raises(ValueError, match="end of"):
                made.ask("region_write", asked(offset=offset, at=0, nbytes=nbytes))
        with pytest.raises(ValueError, match="outside the arena"):
            made.ask("region_read", asked(offset=0, at=4090, nbytes=100))


def test_faults_are_told_without_the_drivers_words_and_cleared() -> None:
    with regions() as (made, cuda, _):
        with pytest.raises(ValueError, match="can't be opened"):
            made.ask("region_open", asked(b"foreign"))
        with pytest.raises(ValueError, match="no such device"):
            made.ask("region_open", asked(device=7))
        assert cuda.faults == 2
        with pytest.raises(ValueError, match="can't answer"):
            made.ask("region_burn", asked())


def test_a_handle_registered_twice_is_open_once_until_both_end() -> None:
    with regions() as (made, cuda, _):
        made.ask("region_open", asked())
        made.ask("region_open", asked())
        assert cuda.opened == 1
        made.ask("region_close", asked())
        made.ask("region_read", asked(offset=0, at=0, nbytes=8))
        assert cuda.opened == 1
        made.ask("region_close", asked())
        assert cuda.opened == 0
        # A worker that was started again is asked for what it never opened.
        made.ask("region_read", asked(offset=0, at=0, nbytes=8))
        assert cuda.opened == 1
        made.close()
        assert cuda.opened == 0


class _Worker:
    """Answers as CudaRegions would, in the front's place for it; `end` lets a copy end."""

    def __init__(self, regions: CudaRegions) -> None:
        self._regions = regions
        self.end = asyncio.Event()
        self.end.set()
        self.lost = False

    async def ask(self, what: str, args: dict[str, Any], timeout: float) -> None:
        await self.end.wait()
        if self.lost:
            raise ServiceError("no_worker", "the worker did not answer")
        try:
            self._regions.ask(what, args)
        except ValueError as fault:
            raise ServiceError("invalid", str(fault)) from None

    async def tell_all(self, what: str, args: dict[str, Any], timeout: float) -> None:
        with contextlib.suppress(ServiceError):
            await self.ask(what, args, timeout)


async def test_the_front_copies_through_the_worker() -> None:
    with regions() as (made, cuda, arena):
        worker, slots = _Worker(made), Slots(arena)
        memory = await CudaMemory.open(worker, b"good".ljust(64, b"\0"), 0, 32)
        assert memory.told() == {"device_id": 0, "byte_size": 32}
        slot = slots.allocate(8)
        bound = Bound(Operand(slot.offset, 8, "fp64", (1,)), slot, slot.release)
        await memory.read(4, bound)
        assert bytes(bound.view()) == bytes(range(4, 12))
        await memory.write(24, bound)
        assert cuda.memory.raw[24:32] == bytes(range(4, 12))
        # A copy that is under way is waited for, though its request was cancelled.
        worker.end.clear()
        copy = asyncio.ensure_future(memory.read(0, bound))
        await asyncio.sleep(0)
        copy.cancel()
        await asyncio.sleep(0.01)
        assert not copy.done()
        worker.end.set()
        with pytest.raises(asyncio.CancelledError):
            await copy
        assert bytes(bound.view()) == bytes(range(8))
        # Where nobody knows whether a copy goes on, its slot is never used again.
        worker.lost = True
        with pytest.raises(ServiceError):
            await memory.read(0, bound)
        bound.release()
        assert slots.bytes_by_state["request"] == slot.capacity
        await memory.close()  # the worker is gone: so is what it had open
        worker.lost = False
        await memory.close()
        assert cuda.opened == 0
        with pytest.raises(ServiceError):
            await CudaMemory.open(worker, bytes(64), 0, 32)


@pytest.mark.gpu
def test_tritonclients_cuda_shared_memory(tmp_path: Path) -> None:
    """A client process hands device memory over by handle, and finds D in its own device memory."""
    import tritonclient.http as triton
    import tritonclient.utils.cuda_shared_memory as cudashm

    rng = np.random.default_rng(3)
    a, b = (rng.normal(size=(256, 256)).astype(np.float32) for _ in range(2))
    with running(tmp_path, "--device", "cuda", "--shared-memory") as service:
        service.ready(120)
        client = triton.InferenceServerClient(service.url.removeprefix("http://"))
        operands = cudashm.create_shared_memory_region("operands", 2 * a.nbytes, 0)
        result = cudashm.create_shared_memory_region("result", a.nbytes, 0)
        try:
            cudashm.set_shared_memory_region(operands, [a, b])
            for name, made, nbytes in (("operands", operands, 2 * a.nbytes), ("result", result, a.nbytes)):
                client.register_cuda_shared_memory(name, cudashm.get_raw_handle(made), 0, nbytes)
            assert {one["name"] for one in client.get_cuda_shared_memory_status()} == {"operands", "result"}
            inputs = [triton.InferInput(name, [256, 256], "FP32") for name in "AB"]
            inputs[0].set_shared_memory("operands", a.nbytes)
            inputs[1].set_shared_memory("operands", b.nbytes, offset=a.nbytes)
            output = triton.InferRequestedOutput("D")
            output.set_shared_memory("result", a.nbytes)
            expected = a.astype(np.float64) @ b
            for kill in (False, True):
                if kill:  # the next worker opens the handles again
                    service.worker().kill()
                    service.until(lambda: not service.is_ready(), 60)
                    service.ready(120)
                cudashm.set_shared_memory_region(result, [np.zeros_like(a)])
                client.infer("gemm_fp32", inputs, outputs=[output])
                d = cudashm.get_contents_as_numpy(result, np.float32, [256, 256])
                np.testing.assert_allclose(d, expected, rtol=1e-4, atol=1e-3)
            with pytest.raises(Exception, match="byte_size"):
                client.register_cuda_shared_memory("big", cudashm.get_raw_handle(result), 0, 1 << 40)
            client.unregister_cuda_shared_memory()
            assert client.get_cuda_shared_memory_status() == []
        finally:
            for made in (operands, result):
                cudashm.destroy_shared_memory_region(made)
            client.close()
