"""A team of ranks behind /gemm, as its tests ask it: receives a service and operands, hands on D and what moved."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests.service.real import Service, raw, result


def sharded(service: Service, a: np.ndarray, b: np.ndarray | str, **query: object) -> np.ndarray:
    answer = service.gemm(a, b, variant="sharded", **query)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-gemm-variant"] == "sharded"
    return result(answer)


def moved(service: Service) -> dict[str, float]:
    ways = ("copied", "exchanged", "kept")
    return {way: service.metric("gemm_shards_bytes_total", way=way) for way in ways}


def check_epilogue(service: Service, a: np.ndarray, b: np.ndarray, c: np.ndarray, bias: np.ndarray) -> None:
    """In bfloat16: A and B transposed, C and bias by handle, D kept under one."""
    kind = ml_dtypes.bfloat16
    a, b, c, bias = (x.astype(kind) for x in (a, b, c, bias))
    for name, x in (("wt", np.ascontiguousarray(b.T)), ("c", c), ("bias", bias)):
        assert service.put(name, x).status_code in (200, 201)
    query = {
        **{"trans_b": "true", "c": "handle:c", "bias": "handle:bias"},
        **{"alpha": 0.5, "beta": 2, "activation": "relu", "trans_a": "true", "out": "handle:d"},
    }
    stored = raw(np.ascontiguousarray(a.T), "wt", variant="sharded", durable="true", **query)
    answer = service.http.post("/gemm", **stored)
    assert answer.status_code == 200, answer.text
    got = service.http.get("/tensors/d", headers={"accept": "application/octet-stream"})
    d = np.frombuffer(got.content, kind).reshape(c.shape).astype(np.float64)
    wide = [x.astype(np.float64) for x in (a, b, c, bias)]
    want = np.maximum(0.5 * wide[0] @ wide[1] + 2 * wide[2] + wide[3], 0)
    np.testing.assert_allclose(d, want, rtol=2e-2, atol=2e-2)
