"""Clients on this machine, against a real service: products in their own memory, and everything that may go wrong."""

from __future__ import annotations

import array
import asyncio
import fcntl
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from service import keys
from service.client import AsyncClient, Client, Invalid, NotAllowed, Refused
from service.client.shared import Shared
from service.local.messages import (
    MAX_PACKET,
    Borrow,
    Done,
    Hello,
    Multiply,
    Piece,
    Product,
    Share,
    ToClient,
    Unshare,
    Welcome,
    address,
    decode_answer,
    encode,
)
from service.local.messages import Refused as RefusedPacket
from tests.service.real import ROOT, Service, running

DICE = np.random.default_rng(9)
SIDE = 300  # operands of 360 kB: worth the way through shared memory
A, B = (DICE.standard_normal((SIDE, SIDE)).astype(np.float32) for _ in range(2))
WANT = A.astype(np.float64) @ B


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    # A folder deeper than the 107 bytes that a Unix socket's address has.
    data = tmp_path_factory.mktemp("local") / ("d" * 100) / "data"
    with running(data, "--local-bytes", "64MiB") as one:
        yield one.ready()


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with Client(service.url, retries=1) as one:
        yield one


def products(service: Service, code: int = 200) -> float:
    return service.metric("gemm_requests_total", route="local", code=str(code))


def at_rest(service: Service) -> bool:
    return service.metric("gemm_local_bytes") == 0


def close(d: np.ndarray, want: np.ndarray = WANT) -> bool:
    return bool(np.allclose(d, want, rtol=1e-4, atol=1e-3))


class Raw:
    """The protocol, packet by packet."""

    def __init__(self, data: Path, key: str = "", hello: bool = True) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(20)
        with address(os.fspath(data / "local.sock")) as name:
            self.sock.connect(name)
        if hello:
            self.welcome = self.ask(Hello(key=key))

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *exception: object) -> None:
        self.sock.close()

    def ask(self, message: Any, *descriptors: int) -> ToClient:
        self.send(message, *descriptors)
        return self.answer()

    def send(self, message: Any, *descriptors: int) -> None:
        rights = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        )
        self.sock.sendmsg([message if isinstance(message, bytes) else encode(message)], rights)

    def answer(self) -> ToClient:
        return decode_answer(self.sock.recv(MAX_PACKET))

    def ended(self) -> bool:
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:
            return True

    def lend(self, number: int = 1, nbytes: int = 1 << 20) -> Shared:
        """Lend fresh memory."""
        shared = Shared(nbytes)
        assert self.ask(Share(number, number), shared.descriptor) == Done(number)
        return shared


QUERY = "a_shape=4x8&b_shape=8x4&dtype=fp32"
BODY = (Piece(1, 0, 128), Piece(1, 256, 128))
OUT = Piece(1, 512, 64)


def refusal(answer: ToClient) -> tuple[int, str, str]:
    import json

    assert isinstance(answer, RefusedPacket), answer
    problem = json.loads(answer.problem)
    assert problem["status"] == answer.status
    return answer.status, problem["code"], problem.get("field", "")


# -- the client takes this way ------------------------------------------------------------------------------------


def test_the_client_takes_this_way_by_itself(service: Service, client: Client) -> None:
    before = products(service)
    assert close(client.gemm(A, B))
    out = np.zeros((SIDE, SIDE), np.float32)
    assert client.gemm(A, B, out=out) is out
    assert close(out)
    assert products(service) == before + 2


def test_arrays_in_shared_memory_are_used_where_they_are(service: Service, client: Client) -> None:
    a, b, d = (client.empty((SIDE, SIDE)) for _ in range(3))
    a[:], b[:] = A, B
    result = client.gemm_result(a, b, out=d)
    assert result.array is d
    assert close(d)
    assert result.variant
    assert result.request_id
    # What the client writes into its array now is what the service reads: there is no copy.
    a *= 2
    assert close(client.gemm(a, b, out=d), 2 * WANT)
    connection = client._transport._near._idle[-1]  # type: ignore[attr-defined]
    assert connection._staging is None, "nothing was copied"


def test_a_product_may_go_into_its_operands_own_memory(client: Client) -> None:
    both = client.empty((2 * SIDE, SIDE))
    a, beside = both[:SIDE], both[144 : 144 + SIDE]
    assert beside.ctypes.data % 256 == 0  # so that it is a place that may be lent
    for out in (a, beside):
        a[:] = A
        assert client.gemm(a, B, out=out) is out
        assert close(out)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_every_dtype_layout_and_operand(client: Client, dtype: str) -> None:
    import ml_dtypes

    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    a, b = (DICE.standard_normal((2, 200, 400)).astype(kind) for _ in range(2))
    c, bias = DICE.standard_normal((2, 200, 200)).astype(kind), DICE.standard_normal(200).astype(kind)
    here = client.gemm(a, b.swapaxes(1, 2), c, bias, alpha=0.5, beta=2.0, activation="relu")
    with Client(f"http://{client.endpoints[0].authority}", local=False) as far:
        there = far.gemm(a, b.swapaxes(1, 2), c, bias, alpha=0.5, beta=2.0, activation="relu")
    assert here.dtype == kind
    assert here.tobytes() == there.tobytes()


def test_handles_and_results_that_stay(service: Service, client: Client) -> None:
    handle = client.put("local-b", B)
    before = products(service)
    assert close(client.gemm(A, handle))
    kept = client.gemm(A, "local-b", out=type(handle)("local-d"))
    assert kept.name == "local-d"
    assert close(client.get("local-d"))
    assert products(service) == before + 2
    with pytest.raises(Refused) as caught:
        client.gemm(A, "nowhere")
    assert (caught.value.status, caught.value.code, caught.value.field) == (404, "not_found", "b")


def test_a_result_of_unknown_size_gets_its_room(client: Client) -> None:
    wide = DICE.standard_normal((600, 1100)).astype(np.float32)
    client.put("local-wide", wide)
    tall = DICE.standard_normal((900, 600)).astype(np.float32)
    d = client.gemm(tall, "local-wide")  # 4 MB, more than is guessed
    assert close(d, tall.astype("f8") @ wide)


def test_an_out_that_does_not_fit_is_a_value_error(client: Client) -> None:
    client.put("local-fits", B)
    for shape in ((SIDE, SIDE - 1), (SIDE // 2, 2 * SIDE), (2 * SIDE, SIDE), (1, 1)):
        for out in (np.zeros(shape, np.float32), client.empty(shape)):
            for b in (B, "local-fits"):
                with pytest.raises(ValueError, match="the result is fp32 of shape"):
                    client.gemm(A, b, out=out)
    assert close(client.gemm(A, B, out=client.empty((SIDE, SIDE))))


@pytest.mark.parametrize("lent", [False, True])
def test_empty_products(client: Client, lent: bool) -> None:
    a = client.empty((SIDE, 0))
    for m, n, k in itertools.product((0, 1, SIDE), repeat=3):
        x, y, d = (
            client.empty(shape) if lent else np.zeros(shape, np.float32) for shape in ((m, k), (k, n), (m, n))
        )
        x[:], d[:] = 1, np.nan
        assert client.gemm(x, y, out=d) is d
        assert (d == 0).all()
    assert client.gemm(a, client.empty((0, 5))).tolist() == np.zeros((SIDE, 5)).tolist()
    assert client.gemm(np.zeros((0, 70000), np.float32), np.zeros((70000, 3), np.float32)).shape == (0, 3)


def test_errors_are_those_of_http(client: Client) -> None:
    with pytest.raises(Invalid) as caught:
        client.gemm(A, B[:-1].copy())
    assert (caught.value.status, caught.value.code, caught.value.field) == (422, "invalid", "b")
    with pytest.raises(Refused) as caught:
        client.gemm(A, B, deadline_ms=0)
    assert (caught.value.status, caught.value.code) == (504, "deadline")
    assert close(client.gemm(A, B))


def test_threads_and_an_event_loop(service: Service, client: Client) -> None:
    def work() -> None:
        for _ in range(5):
            assert close(client.gemm(A, B))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    async def main() -> None:
        async with AsyncClient(service.url) as one:
            a = one.empty((SIDE, SIDE))
            a[:] = A
            for d in await asyncio.gather(*(one.gemm(a, B) for _ in range(8))):
                assert close(d)

    before = products(service)
    asyncio.run(main())
    assert products(service) == before + 8
    client.close()
    service.until(lambda: at_rest(service), what="what was lent is given back")


def test_memory_of_arrays_that_are_gone_is_given_back(service: Service, client: Client) -> None:
    service.until(lambda: at_rest(service))
    for _ in range(30):  # 30 × 3 MiB is more than this key may lend at once
        a = client.empty((SIDE, 2600))
        client.gemm(A, a)
        del a
    assert service.metric("gemm_local_bytes") < 12 << 20


@pytest.mark.ci
def test_what_may_not_be_lent_goes_over_http(service: Service, client: Client) -> None:
    large = client.empty((SIDE, 80_000))  # 96 MB; 64 MiB may be lent
    large[:, :SIDE] = B
    before = products(service)
    for _ in range(2):
        assert close(client.gemm(A, large)[:, :SIDE])
    assert products(service) == before


@pytest.mark.ci
def test_a_client_finds_a_service_that_came_back(tmp_path: Path) -> None:
    with running(tmp_path / "data") as one:
        one.ready()
        port = one.url.rsplit(":", 1)[1]
        client = Client(one.url)
        assert close(client.gemm(A, B))
        one.kill()
    with running(tmp_path / "data", "--port", port) as one:
        one.ready()
        for _ in range(2):  # the first learns that the old socket is gone
            assert close(client.gemm(A, B))
        assert products(one) == 1
        client.close()


@pytest.mark.ci
def test_without_it_everything_goes_over_http(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--local", "false") as one:
        one.ready()
        assert not (tmp_path / "data" / "local.sock").exists()
        with Client(one.url) as client:
            assert close(client.gemm(A, B))


# -- who may -----------------------------------------------------------------------------------------------------


def test_the_socket_is_its_owners(service: Service) -> None:
    path = service.data / "local.sock"
    assert path.stat().st_mode & 0o777 == 0o600
    told = service.http.get("/limits").json()["local"]
    assert told["socket"] == str(path)
    with Raw(service.data) as raw:
        assert raw.welcome == Welcome(told["instance"])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_another_user_is_turned_away(service: Service) -> None:
    code = (
        "import os, socket, sys\n"
        "from service.local.messages import Hello, encode, decode_answer\n"
        "sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "os.chdir(sys.argv[1])\n"
        "os.chmod('local.sock', 0o666)\n"  # so that only the check of credentials is in the way
        "os.setresuid(65534, 65534, 65534)\n"
        "try:\n"
        "    sock.connect('local.sock')\n"
        "except PermissionError:\n"
        "    sys.exit(3)\n"
        "sock.send(encode(Hello()))\n"
        "sys.exit(decode_answer(sock.recv(65536)).status == 403 and 4)\n"
    )
    try:
        run = subprocess.run(
            [sys.executable, "-c", code, str(service.data)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.chmod(service.data / "local.sock", 0o600)
    assert run.returncode in (3, 4), run.stderr  # a folder above may be closed to others already


def test_keys_scopes_and_rates(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    token = keys.add(file, "ann", quota=keys.Quota(flops_per_second=1e6))[1]
    other = keys.add(file, "bob", scopes=("tensors",))[1]
    with running(tmp_path / "data", "--keys-file", str(file)) as one:
        one.until(lambda: one.http.get("/health/ready").status_code == 200, 60)
        for wrong in ("", "gemm_000000000000_nothing"):
            with Raw(tmp_path / "data", wrong) as raw:
                assert refusal(raw.welcome) == (401, "unauthorized", "Authorization")
                assert raw.ended()
        with Raw(tmp_path / "data", other) as raw:
            shared = Shared(4096)
            assert refusal(raw.ask(Share(1, 1), shared.descriptor))[:2] == (403, "forbidden")
            shared.close()
        with Client(one.url, key=token, retries=1) as client:
            assert close(client.gemm(A, B))  # a second's worth may go into debt once
            with pytest.raises(Refused) as caught:
                client.gemm(A, B)
            assert caught.value.code == "quota"
            assert caught.value.retry_after
        with Client(one.url, key=other, retries=1) as client, pytest.raises(NotAllowed):
            client.gemm(A, B)


def test_a_tensor_borrowed_is_a_request(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    token = keys.add(file, "ann", quota=keys.Quota(requests_per_second=0.01, concurrent_requests=1))[1]
    with running(tmp_path / "data", "--keys-file", str(file)) as one, Raw(one.ready().data, token) as raw:
        assert refusal(raw.ask(Borrow(1, "none")))[1] == "not_found"
        assert refusal(raw.ask(Borrow(2, "none")))[1] == "quota"


def test_a_key_that_is_revoked_ends_what_it_asked_for_before(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key, token = keys.add(file, "ann", scopes=("gemm",))
    with running(tmp_path / "data", "--keys-file", str(file)) as one:
        one.until(lambda: one.http.get("/health/ready").status_code == 200, 60)
        with Raw(tmp_path / "data", token) as raw:
            raw.lend().close()
            assert isinstance(raw.ask(Multiply(2, QUERY, BODY, OUT)), Product)
            keys.revoke(file, key.id)

            def refused() -> bool:
                answer = raw.ask(Multiply(3, QUERY, BODY, OUT))
                return isinstance(answer, RefusedPacket) and refusal(answer)[:2] == (401, "unauthorized")

            one.until(refused, 20)


# -- what is refused -----------------------------------------------------------------------------------------------


def unsealed(seals: int, nbytes: int = 4096, flags: int = os.O_RDWR) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    if flags != os.O_RDWR:
        again = os.open(f"/proc/self/fd/{fd}", flags)
        os.close(fd)
        return again
    return fd


BOTH = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.mark.parametrize(
    "make",
    [
        lambda: unsealed(0),
        lambda: unsealed(fcntl.F_SEAL_SHRINK),
        lambda: unsealed(fcntl.F_SEAL_GROW),
        lambda: unsealed(BOTH | fcntl.F_SEAL_WRITE),
        lambda: unsealed(BOTH, nbytes=0),
        lambda: unsealed(BOTH, flags=os.O_RDONLY),
        lambda: os.open("/dev/null", os.O_RDWR),
        lambda: os.open("/dev/shm", os.O_RDONLY),
        lambda: os.pipe()[0],
    ],
    ids=["none", "shrink", "grow", "write", "empty", "read-only", "device", "folder", "pipe"],
)
def test_only_memory_that_cannot_shrink_is_taken(service: Service, make: Any) -> None:
    held = psutil.Process(service.process.pid).num_fds()
    with Raw(service.data) as raw:
        for number in range(3):
            descriptor = make()
            assert refusal(raw.ask(Share(number, 1), descriptor)) == (422, "invalid", "region")
            os.close(descriptor)
        assert refusal(raw.ask(Share(7, 1))) == (422, "invalid", "region")
    service.until(
        lambda: psutil.Process(service.process.pid).num_fds() <= held, what="descriptors are closed"
    )


def test_sparse_giants_are_bounded(service: Service) -> None:
    with Raw(service.data) as raw:
        giant = unsealed(BOTH, nbytes=1 << 42)
        assert refusal(raw.ask(Share(1, 1), giant)) == (413, "too_large", "region")
        os.close(giant)
        for number in range(64):
            fd = unsealed(BOTH)
            assert raw.ask(Share(number, number), fd) == Done(number)
            os.close(fd)
        fd = unsealed(BOTH)
        assert refusal(raw.ask(Share(99, 99), fd))[:2] == (507, "no_room")
        os.close(fd)
    service.until(lambda: at_rest(service))


BIG = 2**63 - 1


@pytest.mark.parametrize(
    ("body", "out", "wrong"),
    [
        ((BODY[0], Piece(2, 256, 128)), OUT, "b"),
        ((BODY[0], Piece(1, (1 << 20) - 64, 128)), OUT, "b"),
        ((BODY[0], Piece(1, -256, 128)), OUT, "b"),
        ((BODY[0], Piece(1, BIG - 255, 128)), OUT, "b"),
        ((BODY[0], Piece(1, 2**64 - 256, 128)), OUT, "b"),
        ((Piece(1, 4, 128), BODY[1]), OUT, "a"),
        ((Piece(0, 0, 128), BODY[1]), OUT, "a"),
        (BODY, Piece(1, 1 << 20, 64), "out"),
        (BODY, Piece(1, 512, 63), "out"),
        (BODY, Piece(1, 512, 2**64 - 1), "out"),
        (BODY, Piece(1, 0, 64), "out"),
        (BODY, Piece(1, -256, 1024), "out"),
        (BODY, None, "out"),
        ((Piece(1, 0, 2**63), BODY[1]), OUT, "body"),
        ((Piece(1, 0, -128), BODY[1]), OUT, "body"),
        ((Piece(1, 0, 256), Piece(1, 256, 0)), OUT, "body"),
        ((BODY[0],), OUT, "body"),
        ((*BODY, *BODY), OUT, "body"),
    ],
)
def test_pieces_outside_of_what_was_lent(
    service: Service, body: tuple[Piece, ...], out: Piece | None, wrong: str
) -> None:
    with Raw(service.data) as raw:
        shared = raw.lend()
        status, code, field = refusal(raw.ask(Multiply(5, QUERY, body, out)))
        assert (status, code) in {(422, "invalid"), (400, "malformed")}
        assert field == wrong
        assert isinstance(raw.ask(Multiply(6, QUERY, BODY, OUT)), Product)
        shared.close()


def test_what_was_asked_before_is_checked_again(service: Service) -> None:
    """A query is understood once; the pieces, the memory and the room for D are looked at each time."""
    with Raw(service.data) as raw:
        shared = raw.lend()

        def ask(*body: Piece, out: Piece = OUT) -> ToClient:
            return raw.ask(Multiply(9, QUERY, body, out))

        def code(answer: ToClient) -> str:
            return refusal(answer)[1]

        for _ in range(2):
            assert isinstance(ask(*BODY), Product)
            assert code(ask(BODY[0], Piece(1, 256, 64))) == "malformed"
            assert code(ask(BODY[0], Piece(1, 256, 64), Piece(1, 1024, 64))) == "malformed"
            assert code(ask(*BODY, out=Piece(1, 512, 32))) == "invalid"
            assert code(ask(*BODY, out=Piece(1, 256, 64))) == "invalid", "overlaps B"
            assert isinstance(ask(*BODY, Piece(1, 1024, 16)), Product), "longer by a bias"
        assert raw.ask(Unshare(10, 1)) == Done(10)
        assert refusal(ask(*BODY)) == (422, "invalid", "a")
        shared.close()
        shared = raw.lend(nbytes=512)
        assert refusal(ask(*BODY)) == (422, "invalid", "out"), (
            "another region of that number, which is smaller"
        )
        shared.close()


def test_the_protocol_begins_with_one_hello(service: Service) -> None:
    for first in (Multiply(1, QUERY, BODY, OUT), Share(1, 1), b"noise", b"\x81", b"\xc1" * 40):
        with Raw(service.data, hello=False) as raw:
            raw.send(first)
            assert raw.ended()
    with Raw(service.data, hello=False) as raw:
        assert refusal(raw.ask(Hello(version=9)))[:2] == (501, "not_implemented")
        assert raw.ended()
    with Raw(service.data) as raw:
        raw.send(Hello())
        assert raw.ended()


def test_too_many_descriptors_and_too_long_packets_end_the_session(service: Service) -> None:
    held = psutil.Process(service.process.pid).num_fds()
    for _ in range(3):
        with Raw(service.data) as raw:
            fds = [unsealed(BOTH) for _ in range(5)]
            raw.send(Share(1, 1), *fds)
            for fd in fds:
                os.close(fd)
            assert raw.ended()
        with Raw(service.data) as raw:
            raw.send(b"x" * (MAX_PACKET + 1))
            assert raw.ended()
    service.until(
        lambda: psutil.Process(service.process.pid).num_fds() <= held, what="descriptors are closed"
    )


def test_regions_can_be_taken_back_amid_work(service: Service) -> None:
    with Raw(service.data) as raw:
        shared = raw.lend(1, 32 << 20)
        side = 1200
        size = side * side * 4
        body = (Piece(1, 0, size), Piece(1, 6 << 20, size))
        query = f"a_shape={side}x{side}&b_shape={side}x{side}&dtype=fp32"
        for _ in range(3):
            raw.send(Multiply(1, query, body, Piece(1, 12 << 20, size)))
            raw.send(Unshare(2, 1))  # read in the same turn as the product, which it must not reach
            answers = [raw.answer(), raw.answer()]
            assert {type(answer) for answer in answers} == {Done, Product}
            assert raw.ask(Share(3, 1), shared.descriptor) == Done(3)
        assert raw.ask(Unshare(4, 1)) == Done(4)
        assert refusal(raw.ask(Multiply(3, query, body, Piece(1, 12 << 20, size)))) == (422, "invalid", "a")
        service.until(lambda: at_rest(service))
        shared.close()


# -- ends ----------------------------------------------------------------------------------------------------------


def test_a_client_that_dies_leaves_nothing(service: Service) -> None:
    """Killed amid products of a second or more; the worker unmaps its memory, the front closes it."""
    front, worker = psutil.Process(service.process.pid), service.worker()
    service.until(lambda: at_rest(service))
    held, mapped = front.num_fds(), len(worker.memory_maps(grouped=False))
    code = (
        "import sys, numpy as np\n"
        "from service.client import Client\n"
        "client = Client(sys.argv[1])\n"
        "a = client.empty((1600, 1600)); a[:] = 1\n"
        "while True:\n"
        "    client.gemm(a, a, out=client.empty((1600, 1600)))\n"
        "    print('.', flush=True)\n"
    )
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", code, service.url], cwd=ROOT, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.read(2)
        assert service.metric("gemm_local_bytes") >= 1600 * 1600 * 4
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    service.until(lambda: at_rest(service), what="what was lent is given back")
    service.until(lambda: front.num_fds() <= held, what="descriptors are closed")
    service.until(lambda: len(worker.memory_maps(grouped=False)) <= mapped + 2, what="memory is unmapped")
    assert not any("gemm-client" in one.path for one in worker.memory_maps(grouped=False))


@pytest.mark.ci
def test_a_worker_that_dies_costs_the_client_nothing(service: Service, client: Client) -> None:
    a = client.empty((1600, 1600))
    a[:] = DICE.standard_normal(a.shape)
    want = client.gemm(a, a)
    done = threading.Event()

    def kill() -> None:
        for _ in range(2):
            time.sleep(0.3)
            service.worker().kill()
            service.ready()
        done.set()

    thread = threading.Thread(target=kill)
    thread.start()
    while not done.is_set():
        np.testing.assert_array_equal(client.gemm(a, a), want)
    thread.join()
    assert products(service, 500) == 0


def test_slow_readers_hold_only_themselves_up(service: Service, client: Client) -> None:
    with Raw(service.data) as raw:
        shared = raw.lend()
        for number in range(2000):
            try:
                raw.sock.settimeout(0.2)
                raw.send(Multiply(number, QUERY, BODY, OUT))
            except TimeoutError:
                break  # nothing more is read until answers are taken
        else:
            pytest.fail("the service reads on though nobody takes its answers")
        assert close(client.gemm(A, B))
        raw.sock.settimeout(20)
        seen = {raw.answer().id for _ in range(number)}  # type: ignore[union-attr]
        assert seen == set(range(number))
        shared.close()


def test_the_service_goes_away_under_a_session(tmp_path: Path) -> None:
    with running(tmp_path / "data") as one:
        one.ready()
        with Raw(tmp_path / "data") as raw:
            assert one.stop() == 0
            assert raw.ended()
        assert not (tmp_path / "data" / "local.sock").exists()
