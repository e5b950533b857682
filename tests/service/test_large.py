"""Bodies above 2 GiB in and out, over HTTP and in lent memory: sizes that don't fit 31 bits.

Not batch-invariant: for that the reference pads the one column of D to 64, which takes 64 times the time.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from service.client import Client
from tests.service.real import Service, running

#: Rows of an A with one column: 2 GiB and 4 KiB of fp64, as D has.
ROWS = (1 << 28) + 512
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(psutil.virtual_memory().available < 12 << 30, reason="needs 12 GiB of memory"),
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    data: Path = tmp_path_factory.mktemp("large")
    with running(data, "--arena-bytes", "5GiB", "--local-bytes", "6GiB", "--hang-seconds", "120") as one:
        yield one.ready()


def check(a: np.ndarray, d: np.ndarray) -> None:
    """D = 2·A, in pieces, so that no third array is needed."""
    for start in range(0, ROWS, 1 << 24):
        assert np.array_equal(d[start : start + (1 << 24)], 2 * a[start : start + (1 << 24)])


def test_over_http(service: Service) -> None:
    a = np.arange(ROWS, dtype=np.float64).reshape(ROWS, 1)
    d = np.zeros_like(a)
    with Client(service.url, local=False, timeout=500) as client:
        assert client.gemm(a, np.array([[2.0]]), out=d, batch_invariant=False) is d
    check(a, d)
    assert service.metric("gemm_requests_total", route="/gemm", code="200") == 1


def test_over_v2(service: Service) -> None:
    """By hand: tritonclient holds a body three times."""
    a, b = np.arange(ROWS, dtype=np.float64).reshape(ROWS, 1), np.array([[2.0]])
    d = np.zeros_like(a)
    inputs = [
        {
            "name": name,
            "datatype": "FP64",
            "shape": list(x.shape),
            "parameters": {"binary_data_size": x.nbytes},
        }
        for name, x in (("A", a), ("B", b))
    ]
    parameters = {"binary_data_output": True, "batch_invariant": False}
    head = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
    connection = http.client.HTTPConnection(service.url.removeprefix("http://"), timeout=500)
    connection.putrequest("POST", "/v2/models/gemm_fp64/infer")
    connection.putheader("inference-header-content-length", str(len(head)))
    connection.putheader("content-length", str(len(head) + a.nbytes + b.nbytes))
    connection.endheaders()
    for part in (head, memoryview(a.reshape(-1).view("u1")), b.tobytes()):
        connection.send(part)
    reply = connection.getresponse()
    assert reply.status == 200
    told = json.loads(reply.read(int(reply.headers["inference-header-content-length"])))
    assert told["outputs"][0]["parameters"]["binary_data_size"] == d.nbytes > 1 << 31
    view = memoryview(d.reshape(-1).view("u1"))
    while view:
        view = view[reply.readinto(view) :]
    connection.close()
    check(a, d)


def test_in_lent_memory(service: Service) -> None:
    with Client(service.url, timeout=500) as client:
        a, d = client.empty((ROWS, 1), np.float64), client.empty((ROWS, 1), np.float64)
        a[:, 0] = np.arange(ROWS)
        assert client.gemm(a, np.array([[2.0]]), out=d, batch_invariant=False) is d
        check(a, d)
    assert service.metric("gemm_requests_total", route="local", code="200") == 1
