"""Hostile bytes for what parses them: receives seconds, writes benchmarks/results/<machine>/fuzz.json.

Targets: bodies of /gemm (JSON, safetensors, raw) and of inference requests (JSON, binary, compressed, raw, and
gRPC's messages), headers and contents of safetensors and .npy files, arguments of shared memory, and packets of
the local socket. Each example must end as a request or as a refusal that names its fault, never as another
exception, and leave no slot and no descriptor behind. A counterexample is shrunk by hypothesis, and ends the run
with status 1. Processes share the time: each goes through all targets, with examples of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import gzip
import json
import multiprocessing
import os
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from benchmarks import record
from benchmarks.bodies import anything, call, changed, gemm_body, message, shapes, upload_body, whole
from service import regions as lent
from service.arena import Arena, Slots
from service.decode import Operands, decode
from service.errors import ServiceError
from service.formats import npy, safetensors
from service.inference import rpc
from service.inference.decode import decode as inference_decode
from service.inference.models import MODELS
from service.inference.proto import pb
from service.inference.regions import Regions
from service.inference.registration import register
from service.inference.request import Place
from service.keys import Principal
from service.local.messages import Garbled, Multiply, Piece, decode_request, encode
from service.local.operands import bind
from service.model import validate_query
from service.transfer import Transfer
from service.upload import PutQuery, Upload

#: Codes of refusals that are nobody's fault: 5xx by nature.
_NOT_FAULTS = ("not_implemented", "no_room", "no_worker")
EXAMPLES = 500
SHM_BYTES = 4096

Target = Callable[[st.DataObject], None]

# -- targets ----------------------------------------------------------------------------------------------------


@contextmanager
def refusals() -> Iterator[None]:
    """Refusals are right, faults aren't."""
    try:
        yield
    except ServiceError as refusal:
        if refusal.status >= 500 and refusal.code not in _NOT_FAULTS:
            raise AssertionError(f"refused as {refusal.code}: {refusal.detail}") from refusal


def transfer_of(body: bytes, headers: list[tuple[bytes, bytes]], query: bytes) -> Transfer:
    """A request of that body, which comes in pieces and then ends, as a connection does."""
    pieces = [body[start : start + 100] for start in range(0, len(body), 100)] or [b""]

    async def receive() -> dict[str, Any]:
        if not pieces:
            return {"type": "http.disconnect"}
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    async def send(message: Any) -> None:
        raise AssertionError("nothing is sent before a request is decoded")

    return Transfer.of({"type": "http", "headers": headers, "query_string": query}, receive, send)


def opened() -> Counter[str]:
    """Shared memory that this process holds open, all that the targets' code opens; libraries may open other files."""
    found: Counter[str] = Counter()
    for entry in os.scandir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the folder itself
            path = os.readlink(entry.path)
            found[path] += path.startswith(("/dev/shm/", "/memfd:"))
    return found


async def _admit(tensor: object) -> None:
    """Room for everyone: what a key may still store is not what is tried here."""


class Stage:
    """What the targets run on: an arena, a region that is registered, and a store that holds nothing."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        fd, path = tempfile.mkstemp(prefix="gemmfuzz-", dir="/dev/shm")
        os.truncate(fd, SHM_BYTES)
        os.close(fd)
        self.file = Path(path)
        limits = {"max_body_bytes": 1 << 20, "max_json_bytes": 1 << 18, "max_output_bytes": 1 << 20}
        self.arena = Arena.create(1 << 22)
        self.slots = Slots(self.arena)
        self.regions = Regions(3600, lambda key: True)
        self.owner = Principal("fuzz")
        self.contents = SimpleNamespace(check_room=lambda nbytes: None)
        shared = {"shared_memory": True, "shared_memory_keys": (self.file.name,)}
        self.services: Any = SimpleNamespace(
            settings=SimpleNamespace(**limits, max_flops=1e12, **shared),
            slots=self.slots,
            store=self,
            inference=SimpleNamespace(regions=self.regions),
            supervisor=self,
        )
        document = {"key": self.file.name, "byte_size": SHM_BYTES}
        self.runner.run(register(self.services, self.owner, "system", "r", document))
        gc.collect()  # what objects before this one hold would close amid an example
        self.open = opened()

    async def pin(self, owner: str, name: str) -> Any:
        """The store's: it holds nothing."""
        raise ServiceError("not_found", "no such tensor")

    def reclaim(self, nbytes: int) -> int:
        """The store's: it has nothing to give."""
        return 0

    async def ask(self, what: str, args: dict[str, Any], timeout: float) -> None:
        """The supervisor's: a worker that knows no device."""
        raise ServiceError("invalid", "CUDA shared memory can't be opened")

    def check(self) -> None:
        """Nothing was left behind."""
        assert not self.slots.bytes_by_state["request"]
        assert not self.slots.bytes_by_state["reply"]
        left = opened() - self.open
        assert not left, f"left open: {left}"

    def close(self) -> None:
        """Give all back."""
        self.runner.run(self.regions.close())
        self.runner.close()
        self.arena.close()
        self.file.unlink()

    # -- what is fuzzed ------------------------------------------------------------------------------------------

    def inference_body(self, data: st.DataObject) -> None:
        """Bodies as clients send them, and as they don't."""
        body, length = message(data.draw)
        headers = []
        length += data.draw(st.sampled_from([0, 0, 0, -1, 1, -length, 1 << 40]))
        if data.draw(st.integers(0, 9)):
            headers.append((b"inference-header-content-length", str(length).encode()))
        encoding = data.draw(st.sampled_from([None, None, "gzip", "deflate"]))
        if encoding is not None:
            body = gzip.compress(body, 1) if encoding == "gzip" else zlib.compress(body, 1)
            body = body[: data.draw(st.integers(0, len(body)))] if data.draw(st.booleans()) else body
            headers.append((b"content-encoding", encoding.encode()))
        if data.draw(st.booleans()):
            headers.append((b"content-length", str(len(body)).encode()))
        else:
            headers.append((b"transfer-encoding", b"chunked"))
        query = data.draw(
            st.sampled_from([b"", b"a_shape=1x2&b_shape=2x1", b"b=handle:x", b"a_shape=9999999999x9", b"%00"])
        )
        model = data.draw(st.sampled_from(list(MODELS.values())))
        with refusals():
            self.runner.run(self._decode(body, headers, query, model))
        self.check()

    async def _decode(
        self, body: bytes, headers: list[tuple[bytes, bytes]], query: bytes, model: Any
    ) -> None:
        operands = Operands(self.services, self.owner.owner, 0.0)
        try:
            transfer = transfer_of(body, headers, query)
            _, request = await inference_decode(transfer, operands, self.regions, model)
            for bound in (request.a, request.b, request.out):
                assert len(bound.view()) == bound.operand.nbytes
        finally:
            operands.release()

    def inference_call(self, data: st.DataObject) -> None:
        """Messages of gRPC that its library takes."""
        try:
            message = pb.ModelInferRequest.FromString(call(data.draw))
        except DecodeError:
            return
        model = data.draw(st.sampled_from(list(MODELS.values())))
        with refusals():
            self.runner.run(self._called(message, model))
        self.check()

    async def _called(self, message: Any, model: Any) -> None:
        operands = Operands(self.services, self.owner.owner, 0.0)
        try:
            _, request = await rpc.decode(message, operands, self.regions, model)
            for bound in (*request.held, request.out):
                assert len(bound.view()) == bound.operand.nbytes
        finally:
            operands.release()

    def gemm_body(self, data: st.DataObject) -> None:
        """Products as POST /gemm takes them."""
        media, query, body = gemm_body(data.draw)
        transfer = self._sent(data, media, body, query)
        with refusals():
            request = self.runner.run(decode(transfer, transfer.scope, self.services, self.owner))
            for bound in (*request.held, request.out):
                assert len(bound.view()) == bound.operand.nbytes
            request.release()
        self.check()

    def upload_body(self, data: st.DataObject) -> None:
        """Tensors as PUT /tensors takes them."""
        media, query, body = upload_body(data.draw)
        transfer = self._sent(data, media, body)
        with refusals():
            fields = validate_query(PutQuery, query)
            upload = Upload(transfer, self.services, self.owner.owner, fields, _admit)
            slot, tensor = self.runner.run(upload.receive())
            assert len(slot.view(tensor.nbytes)) == tensor.nbytes
            slot.release()
        self.check()

    def _sent(self, data: st.DataObject, media: str, content: bytes, query: bytes = b"") -> Transfer:
        """A body as it comes: changed or not, its length told or not, and told wrongly."""
        body = changed(data.draw, content)
        headers = [(b"content-type", media.encode())]
        told = data.draw(st.sampled_from([len(body), len(body), None, len(content), len(body) + 1]))
        if told is not None:
            headers.append((b"content-length", str(told).encode()))
        return transfer_of(body, headers, query)

    def safetensors_header(self, data: st.DataObject) -> None:
        """Headers that say anything."""
        entry = st.one_of(
            st.fixed_dictionaries(
                {
                    "dtype": st.one_of(st.sampled_from(["F16", "BF16", "F32", "F64", "I8"]), anything),
                    "shape": shapes,
                    "data_offsets": st.one_of(st.lists(whole, max_size=3), anything),
                }
            ),
            anything,
        )
        keys = st.sampled_from(["a", "b", "c", "bias", "__metadata__", "x"])
        document = data.draw(st.one_of(st.dictionaries(keys, entry, max_size=4), anything))
        text = bytearray(json.dumps(document).encode())
        if text and data.draw(st.booleans()):
            text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
        with refusals():
            header = safetensors.parse(bytes(text), names=("a", "b", "c", "bias"))
            assert header.nbytes == sum(one.tensor.nbytes for one in header.entries)
        with refusals():
            safetensors.header_length(data.draw(st.binary(min_size=8, max_size=8)))

    def npy_header(self, data: st.DataObject) -> None:
        """Headers close to right ones, and far from them."""
        sizes = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple).map(str)
        text = data.draw(
            st.one_of(
                st.builds(
                    "{{'descr': {!r}, 'fortran_order': {}, 'shape': {}, }}".format,
                    st.sampled_from(["<f4", ">f8", "|V2", "O", "<c8", "f2"]),
                    st.sampled_from(["True", "False", "False", "0"]),
                    st.one_of(
                        sizes, sizes, st.lists(whole, max_size=9).map(tuple).map(str), st.text(max_size=20)
                    ),
                ),
                st.text(max_size=80),
            )
        ).encode("latin-1", "replace")
        version = data.draw(st.sampled_from([1, 1, 2, 3, 0, 4]))
        size = len(text) + data.draw(st.sampled_from([0, 0, 0, 0, 1, -1, 60000]))
        length = max(0, size).to_bytes(2 if version < 2 else 4, "little")
        content = npy.MAGIC + bytes([version, 0]) + length + text
        with refusals():
            header = npy.parse(content, dtype=data.draw(st.sampled_from([None, "bf16", "fp32"])))
            assert all(dim >= 0 for dim in header.tensor.shape)

    def shared_memory(self, data: st.DataObject) -> None:
        """Registrations and places."""
        name = data.draw(st.one_of(st.sampled_from(["r", "a/b", "", "..", "x"]), st.text(max_size=6)))
        kind = data.draw(st.sampled_from(["system", "cuda"]))
        document = data.draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "key": st.one_of(
                        st.sampled_from([self.file.name, f"/{self.file.name}", "../etc/passwd", "\0"]),
                        anything,
                    ),
                    "offset": st.one_of(whole, anything),
                    "byte_size": st.one_of(st.sampled_from([1, SHM_BYTES, SHM_BYTES + 1]), whole, anything),
                    "raw_handle": st.one_of(st.fixed_dictionaries({"b64": st.text(max_size=90)}), anything),
                    "device_id": st.one_of(whole, anything),
                },
            )
        )
        # Before anything is opened: a draw may end the example.
        place = Place(
            name, data.draw(whole.filter(lambda n: n >= 0)), data.draw(whole.filter(lambda n: n >= 0))
        )
        with refusals():
            self.runner.run(register(self.services, self.owner, kind, name, document))
            assert name != "r"
        with refusals(), self.regions.use(self.owner.owner, place) as use:
            assert use.offset + use.nbytes <= use.memory.nbytes <= SHM_BYTES
        if name not in ("r", ""):  # no name ends all
            self.runner.run(self.regions.unregister(self.owner.owner, kind, name))
        self.check()

    def local_protocol(self, data: st.DataObject) -> None:
        """Packets of clients on this machine: pieces that pass lie in what was lent."""
        number = st.one_of(
            st.integers(0, 600), st.sampled_from([-256, 4096, 1 << 31, (1 << 63) - 256, (1 << 64) - 1])
        )
        piece = st.builds(Piece, st.integers(0, 2), st.sampled_from([0, 256, 512, 4]) | number, number)
        queries = [
            "a_shape=2x3&b_shape=3x4&dtype=fp32",
            "a_shape=0x7&b_shape=7x2&dtype=fp16&bias_dim=m",
            "a=handle:x",
        ]
        if data.draw(st.booleans()):  # right but for places: beyond the region, or one upon another
            places = [256 * data.draw(st.integers(0, SHM_BYTES // 256)) for _ in range(3)]
            pieces = [Piece(1, at, nbytes) for at, nbytes in zip(places, (24, 48, 32), strict=True)]
            packet = bytearray(encode(Multiply(1, queries[0], tuple(pieces[:2]), pieces[2])))
        else:
            asked = Multiply(
                data.draw(number.filter(lambda n: n >= 0)),
                data.draw(st.sampled_from(queries) | st.text(max_size=30)),
                data.draw(st.lists(piece, max_size=5).map(tuple)),
                data.draw(st.none() | piece),
            )
            packet = bytearray(encode(asked))
            for _ in range(data.draw(st.integers(0, 2))):
                packet[data.draw(st.integers(0, len(packet) - 1))] = data.draw(st.integers(0, 255))
        region = lent.Region(7, SHM_BYTES, "fuzz", lambda gone: None)
        with refusals(), suppress(Garbled):
            message = decode_request(bytes(packet))
            if isinstance(message, Multiply):
                self.runner.run(self._bind(message, region))
        self.check()

    async def _bind(self, message: Multiply, region: lent.Region) -> None:
        operands = Operands(self.services, self.owner.owner, 0.0)
        try:
            request = await bind(operands, message, {1: region})
            for bound in (*request.held, request.out):
                operand = bound.operand
                if operand.region:
                    assert 0 <= operand.offset <= operand.offset + operand.nbytes <= region.nbytes
        finally:
            operands.release()
            assert region.uses == 1

    @property
    def targets(self) -> tuple[Target, ...]:
        """All of them."""
        return (
            self.gemm_body,
            self.upload_body,
            self.inference_body,
            self.inference_call,
            self.safetensors_header,
            self.npy_header,
            self.shared_memory,
            self.local_protocol,
        )


def fuzz(target: Target, examples: int, number: int) -> None:
    """Give the target `examples` examples; raises with the smallest that fails."""

    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        target(data)

    run()


class Reached(NamedTuple):
    """What one process did of a target."""

    target: str
    examples: int
    seconds: float
    #: Of a core; fewer where others use the machine too.
    core_seconds: float


def work(number: int, processes: int, seconds: float) -> list[Reached]:
    """All targets for so many seconds together, with examples that no other process has."""
    stage = Stage()
    reached = []
    try:
        for target in stage.targets:
            began, spent, rounds = time.monotonic(), time.process_time(), 0
            while time.monotonic() - began < seconds / len(stage.targets):
                fuzz(target, EXAMPLES, rounds * processes + number)
                rounds += 1
            took = time.monotonic() - began, time.process_time() - spent
            reached.append(Reached(target.__name__, rounds * EXAMPLES, *took))
    finally:
        stage.close()
    return reached


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    record.add_places(parser)
    parser.add_argument("--seconds", type=float, default=3600, help="of all targets and processes together")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    share = arguments.seconds / arguments.processes
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, context) as pool:
        futures = [
            pool.submit(work, number, arguments.processes, share) for number in range(arguments.processes)
        ]
        reached = [one for future in as_completed(futures) for one in future.result()]
    rows = []
    for name in dict.fromkeys(one.target for one in reached):
        own = [one for one in reached if one.target == name]
        examples, seconds = sum(one.examples for one in own), sum(one.seconds for one in own)
        detail = f"{examples} examples in {seconds:.0f} s of {len(own)} processes together"
        row = {"name": name, "outcome": "ok", "detail": detail, "examples": examples, "seconds": seconds}
        rows.append({**row, "core_seconds": sum(one.core_seconds for one in own)})
        print(f"{name}: {detail}")
    print(record.write_here(arguments, "fuzz", rows, ("hypothesis", "numpy")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
