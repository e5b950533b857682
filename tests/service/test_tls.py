"""TLS: large bodies still go straight to their memory, certificates are renewed in place, strangers stay out."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
import trustme

from service.client import Client
from service.settings import SettingsError, load
from service.tls import Certificates
from tests.service.real import result, running
from tests.service.servers import serving
from tests.service.test_protocol import LIMITS, STRICT, App, eventually, post, read_reply, sha


class Pki:
    """A CA, and files of a server's and a client's certificate of it."""

    def __init__(self, folder: Path) -> None:
        self.ca = trustme.CA()
        self.ca_file, self.cert, self.key = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
        self.ca.cert_pem.write_to_path(self.ca_file)
        self.renew()

    def renew(self, *names: str) -> None:
        """Another certificate for the server."""
        leaf = self.ca.issue_cert("127.0.0.1", "localhost", *names)
        leaf.private_key_pem.write_to_path(self.key)
        self.cert.write_bytes(b"".join(pem.bytes() for pem in leaf.cert_chain_pems))

    @property
    def flags(self) -> tuple[str, ...]:
        return "--tls-cert", str(self.cert), "--tls-key", str(self.key)

    def client(self, *, certificate: bool = False) -> ssl.SSLContext:
        """A client's side that trusts the CA, with a certificate of its own if wanted."""
        context = ssl.create_default_context(cafile=str(self.ca_file))
        if certificate:
            self.ca.issue_cert("client").configure_cert(context)
        return context


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


@pytest.fixture
def served(pki: Pki) -> Iterator[tuple[App, tuple[str, int]]]:
    app = App()
    certificates = Certificates(pki.cert, pki.key, None)
    with serving(app, LIMITS, tls=certificates.context) as address:
        yield app, address
    assert app.slots.bytes_by_state == {"request": 0, "reply": 0, "tensor": 0}


def connect(pki: Pki, address: tuple[str, int]) -> ssl.SSLSocket:
    return pki.client().wrap_socket(
        socket.create_connection(address, timeout=20), server_hostname="127.0.0.1"
    )


@pytest.mark.parametrize("size", [0, 1, 65_536, 8 << 20])
def test_bodies_and_what_follows_arrive_whole(
    pki: Pki, served: tuple[App, tuple[str, int]], size: int
) -> None:
    body = os.urandom(size)
    app, address = served
    with connect(pki, address) as sock:
        for cuts in ("", "1,2,3" if size > 6 else ""):
            # The next request's head comes in the same records as the body's end.
            sock.sendall(post(f"/digest?{cuts}", body) + post("/plain", b"next"))
            assert read_reply(sock)[2] == sha(body)
            assert read_reply(sock)[2] == sha(b"next")
    assert app.bodies == [size, size]


def test_a_reply_of_16_mib_is_whole_though_its_slot_is_wiped_when_drained(
    pki: Pki, served: tuple[App, tuple[str, int]]
) -> None:
    size = 16 << 20
    with connect(pki, served[1]) as sock:
        sock.sendall(f"GET /reply?{size} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        body = read_reply(sock)[2]
    assert hashlib.sha256(body).digest() == hashlib.sha256(bytes([size % 251]) * size).digest()


def test_a_refused_body_s_answer_arrives_though_its_client_still_sends(
    pki: Pki, served: tuple[App, tuple[str, int]]
) -> None:
    with connect(pki, served[1]) as sock:
        sock.sendall(b"POST /refuse HTTP/1.1\r\nHost: x\r\nContent-Length: 50000000\r\n\r\n")
        sock.sendall(bytes(1 << 20))
        assert read_reply(sock)[0] == 413


def test_a_client_that_reads_nothing_is_cut_off(pki: Pki) -> None:
    app, certificates = App(), Certificates(pki.cert, pki.key, None)
    with serving(app, STRICT, tls=certificates.context) as address, connect(pki, address) as sock:
        sock.sendall(b"GET /reply?%d HTTP/1.1\r\nHost: x\r\n\r\n" % (48 << 20))
        eventually(lambda: app.slots.bytes_by_state["reply"] > 0)
        eventually(lambda: app.slots.bytes_by_state["reply"] == 0)


def test_a_client_that_leaves_is_noticed(pki: Pki, served: tuple[App, tuple[str, int]]) -> None:
    app, address = served
    with connect(pki, address) as sock:
        sock.sendall(b"GET /slow?10 HTTP/1.1\r\nHost: x\r\n\r\n")
    eventually(lambda: app.left == ["/slow"])


def test_a_renewed_certificate_is_shown_to_new_connections_and_a_torn_pair_is_not(pki: Pki) -> None:
    certificates = Certificates(pki.cert, pki.key, None)

    def shown(address: tuple[str, int]) -> bytes:
        with connect(pki, address) as sock:
            return sock.getpeercert(binary_form=True) or b""

    with serving(App(), LIMITS, tls=certificates.context) as address:
        first = shown(address)
        assert not certificates.look()
        pki.renew()
        whole = pki.key.read_bytes()
        pki.key.write_bytes(trustme.CA().issue_cert("other").private_key_pem.bytes())
        assert not certificates.look()
        assert shown(address) == first
        pki.key.write_bytes(whole)
        assert certificates.look()
        assert shown(address) != first


def test_mutual_tls_on_a_real_service(pki: Pki, tmp_path: Path) -> None:
    a = np.random.default_rng(1).standard_normal((300, 400)).astype(np.float32)
    b = np.random.default_rng(2).standard_normal((400, 200)).astype(np.float32)
    flags = (*pki.flags, "--tls-client-ca", str(pki.ca_file), "--grpc-port", "0")
    with running(tmp_path / "data", *flags, tls=pki.client(certificate=True)) as service:
        service.ready()
        assert service.url.startswith("https://")
        np.testing.assert_allclose(result(service.gemm(a, b)), a @ b, rtol=1e-4, atol=1e-3)
        with Client(service.url, verify=pki.client(certificate=True)) as client:
            weight = client.put("weight", b)
            np.testing.assert_allclose(client.gemm(a, weight), a @ b, rtol=1e-4, atol=1e-3)
        with httpx.Client(verify=pki.client()) as stranger, pytest.raises(httpx.TransportError):
            stranger.get(f"{service.url}/health/live")
        with httpx.Client() as plain, pytest.raises(httpx.TransportError):
            plain.get(service.url.replace("https", "http"))
        found = re.search(r"speaks gRPC on port (\d+)", service.output)
        assert found
        _speak_grpc(pki, f"localhost:{found[1]}")


def _speak_grpc(pki: Pki, address: str) -> None:
    leaf = pki.ca.issue_cert("client")
    pair = (leaf.private_key_pem.bytes(), b"".join(pem.bytes() for pem in leaf.cert_chain_pems))
    ca = pki.ca_file.read_bytes()
    known = triton.InferenceServerClient(address, creds=grpc.ssl_channel_credentials(ca, *pair))
    assert known.is_server_live()
    known.close()
    with (
        grpc.secure_channel(address, grpc.ssl_channel_credentials(ca)) as stranger,
        pytest.raises(grpc.FutureTimeoutError),
    ):
        grpc.channel_ready_future(stranger).result(1)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tls_cert": "c.pem"}, "tls_cert"),
        ({"tls_client_ca": "ca.pem"}, "tls_client_ca"),
        ({"tls_cert": "c.pem", "tls_key": "k.pem", "uds": "/tmp/s"}, "uds"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(given: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=f"^{named} "):
        load(given, environ={})


def test_files_that_cannot_be_used_stop_the_start(pki: Pki, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="tls_cert"):
        Certificates(tmp_path / "absent.pem", pki.key, None)
    pki.key.write_text("no key")
    with pytest.raises(SettingsError, match="tls_cert"):
        Certificates(pki.cert, pki.key, None)


def test_handshakes_at_once_do_not_hold_each_other_up(pki: Pki, served: tuple[App, tuple[str, int]]) -> None:
    """One that never finishes its handshake costs the others nothing."""
    _, address = served
    with socket.create_connection(address) as silent:
        silent.sendall(b"\x16\x03\x01")
        done: list[int] = []

        def ask() -> None:
            with connect(pki, address) as sock:
                sock.sendall(b"GET /empty HTTP/1.1\r\nHost: x\r\n\r\n")
                done.append(read_reply(sock)[0])

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert done == [200] * 8
