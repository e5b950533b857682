"""/v2 as unmodified tritonclient[http] speaks it, and its edges byte by byte, against a real service."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.service.real import Service

TYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32, "fp64": np.float64}
TOLERANCE = {"fp16": 2e-3, "bf16": 2e-2, "fp32": 1e-5, "fp64": 1e-12}
Client = triton.InferenceServerClient
RNG = np.random.default_rng(5)


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    made = Client(service.url.removeprefix("http://"))
    yield made
    made.close()


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.normal(size=shape).astype(dtype)


def tensor(name: str, x: np.ndarray, *, binary: bool = True) -> triton.InferInput:
    made = triton.InferInput(name, list(x.shape), np_to_triton_dtype(x.dtype))
    return made.set_data_from_numpy(x, binary_data=binary)


def both(a: np.ndarray, b: np.ndarray, **options: Any) -> list[triton.InferInput]:
    return [tensor("A", a, **options), tensor("B", b, **options)]


def in_json(**options: Any) -> list[triton.InferRequestedOutput]:
    return [triton.InferRequestedOutput("D", binary_data=False, **options)]


def check(d: np.ndarray, a: np.ndarray, b: np.ndarray, tolerance: float = 1e-5) -> None:
    expected = a.astype(np.float64) @ b.astype(np.float64)
    assert d.shape == expected.shape
    np.testing.assert_allclose(d.astype(np.float64), expected, rtol=tolerance, atol=tolerance * 8)


def refused(call: Callable[[], Any], status: int, *words: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        call()
    assert caught.value.status() == str(status), caught.value
    for word in words:
        assert word in caught.value.message()


# -- server and models ----------------------------------------------------------------------------------------


def test_server_and_models(client: Client) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    for dtype in TYPES:
        name, datatype = f"gemm_{dtype}", dtype.upper()
        assert client.is_model_ready(name)
        assert client.is_model_ready(name, "1")
        metadata = client.get_model_metadata(name, "1")
        assert (metadata["name"], metadata["versions"]) == (name, ["1"])
        assert [one["name"] for one in metadata["inputs"]] == ["A", "B", "C", "bias"]
        assert {one["datatype"] for one in metadata["inputs"] + metadata["outputs"]} == {datatype}
        config = client.get_model_config(name)
        assert config["max_batch_size"] == 0
        assert {one["data_type"] for one in config["input"] + config["output"]} == {f"TYPE_{datatype}"}
        assert [one["name"] for one in config["input"] if one["optional"]] == ["C", "bias"]
    assert not client.is_model_ready("gemm_int8")
    assert not client.is_model_ready("gemm", "2")
    refused(lambda: client.get_model_metadata("resnet"), 404, "resnet")
    refused(lambda: client.get_model_config("gemm", "7"), 404, "version")


def test_load_and_unload(client: Client) -> None:
    def states() -> dict[str, str]:
        return {row["name"]: row["state"] for row in client.get_model_repository_index()}

    assert states() == dict.fromkeys(["gemm", *(f"gemm_{dtype}" for dtype in TYPES)], "READY")
    client.unload_model("gemm_fp16")
    try:
        assert states()["gemm_fp16"] == "UNAVAILABLE"
        assert not client.is_model_ready("gemm_fp16")
        a = normal(2, 2, dtype=np.float16)
        refused(lambda: client.infer("gemm_fp16", both(a, a)), 503, "unloaded")
        check(client.infer("gemm", both(a, a)).as_numpy("D"), a, a, TOLERANCE["fp16"])
    finally:
        client.load_model("gemm_fp16")
    assert client.is_model_ready("gemm_fp16")
    refused(lambda: client.load_model("gemm", config='{"max_batch_size": 8}'), 501)
    refused(lambda: client.load_model("resnet"), 404)
    ready = httpx.post(f"http://{client._parsed_url.netloc}/v2/repository/index", json={"ready": True})
    assert len(ready.json()) == 5


# -- infer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(5, 7, 3), (0, 7, 3), (5, 0, 3), (5, 7, 0), (1, 1, 1)])
def test_types_and_zero_sizes(client: Client, dtype: str, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a, b = normal(m, k, dtype=TYPES[dtype]), normal(k, n, dtype=TYPES[dtype])
    for model in (f"gemm_{dtype}", "gemm"):
        result = client.infer(model, both(a, b), request_id="one")
        check(result.as_numpy("D"), a, b, TOLERANCE[dtype])
        response = result.get_response()
        assert (response["model_name"], response["model_version"], response["id"]) == (model, "1", "one")
        assert response["outputs"][0]["datatype"] == dtype.upper()
        check(client.infer(model, both(a, b), outputs=in_json()).as_numpy("D"), a, b, TOLERANCE[dtype])
        if dtype != "bf16":  # which this client doesn't write as JSON
            listed = client.infer(model, both(a, b, binary=False), outputs=in_json())
            check(listed.as_numpy("D"), a, b, TOLERANCE[dtype])


def test_batches_epilogue_and_mixed_types(client: Client) -> None:
    a, b = normal(3, 4, 5), normal(5, 2)
    check(client.infer("gemm_fp32", both(a, b)).as_numpy("D"), a, b)
    check(client.infer("gemm_fp32", both(a, normal(1, 5, 2) * 0)).as_numpy("D"), a, b * 0)
    c, bias = normal(4, 2, dtype=np.float64), normal(2, dtype=ml_dtypes.bfloat16)
    inputs = [
        tensor("bias", bias),
        tensor("B", b.T.copy()),
        tensor("C", c, binary=False),
        tensor("A", a[0]),
    ]
    parameters = {"trans_b": True, "alpha": 2, "beta": 0.5, "activation": "relu", "out_dtype": "fp64"}
    d = client.infer("gemm", inputs, parameters=parameters).as_numpy("D")
    expected = np.maximum(2 * a[0].astype(np.float64) @ b + 0.5 * c + bias.astype(np.float64), 0)
    assert d.dtype == np.float64
    np.testing.assert_allclose(d, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "text",
    [
        {
            "alpha": "0.5",
            "beta": "-1e-1",
            "trans_a": "true",
            "batch_invariant": "false",
            "deadline_ms": "60000",
        },
        {"alpha": 0.5, "beta": "-0.1", "trans_a": True, "activation": "none", "out_dtype": "fp32"},
    ],
)
def test_parameters_as_text(client: Client, text: dict[str, Any]) -> None:
    a, b, c = normal(6, 4), normal(6, 3), normal(4, 3)
    d = client.infer("gemm_fp32", [*both(a, b), tensor("C", c)], parameters=text).as_numpy("D")
    np.testing.assert_allclose(d, 0.5 * a.T @ b - 0.1 * c, rtol=1e-5, atol=1e-5)


def test_parameters_whose_text_says_nothing(client: Client) -> None:
    a = normal(2, 2)
    for name, value in (
        ("alpha", "x"),
        ("alpha", "1e9999e"),
        ("trans_a", "maybe"),
        ("deadline_ms", "soon"),
        ("foo", "1"),
    ):
        refused(lambda n=name, v=value: client.infer("gemm", both(a, a), parameters={n: v}), 400, name)
    d = client.infer("gemm_fp32", both(a, a), parameters={"alpha": "Infinity"}).as_numpy("D")
    assert np.isinf(d).all()


def test_special_numbers_both_ways(client: Client) -> None:
    a = np.array([[np.nan, 1.0], [np.inf, 1.0], [-np.inf, 1.0]], np.float32)
    b = np.eye(2, dtype=np.float32)[:, :1] + np.array([[0.0], [1.0]], np.float32)
    for binary in (True, False):
        d = client.infer("gemm_fp32", both(a, b, binary=binary), outputs=in_json()).as_numpy("D")
        np.testing.assert_array_equal(d[:, 0], [np.nan, np.inf, -np.inf])


@pytest.mark.parametrize("way", ["gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
def test_compression_both_ways(client: Client, way: str, binary: bool) -> None:
    a, b = normal(300, 200), normal(200, 300)
    options = {"request_compression_algorithm": way, "response_compression_algorithm": way}
    outputs = [triton.InferRequestedOutput("D", binary_data=binary)]
    result = client.infer("gemm_fp32", both(a, b, binary=binary), outputs=outputs, **options)
    check(result.as_numpy("D"), a, b, 1e-4)


def test_large_json_goes_by_way_of_the_arena(client: Client, service: Service) -> None:
    a, b = normal(400, 300), normal(300, 2)
    check(client.infer("gemm_fp32", both(a, b, binary=False)).as_numpy("D"), a, b, 1e-4)
    assert service.metric("gemm_arena_bytes", state="request") == 0


def test_many_at_once_and_async(client: Client, service: Service) -> None:
    url = service.url.removeprefix("http://")
    a, b = normal(64, 32), normal(32, 64)
    with Client(url, concurrency=8) as many:
        waiting = [many.async_infer("gemm_fp32", both(a * n, b)) for n in range(32)]
        for n, one in enumerate(waiting):
            check(one.get_result().as_numpy("D"), a * n, b, 1e-3)

    async def run() -> None:
        async with triton_aio.InferenceServerClient(url) as aio:
            assert await aio.is_server_ready()
            results = await asyncio.gather(*(aio.infer("gemm_fp32", both(a + n, b)) for n in range(8)))
            for n, one in enumerate(results):
                check(one.as_numpy("D"), a + n, b, 1e-3)
            packed = await aio.infer(
                "gemm_fp32",
                both(a, b),
                request_compression_algorithm="gzip",
                response_compression_algorithm="gzip",
            )
            check(packed.as_numpy("D"), a, b, 1e-3)

    asyncio.run(run())


def test_priority_timeout_and_what_has_no_meaning(client: Client) -> None:
    a = normal(4, 4)
    check(client.infer("gemm_fp32", both(a, a), priority=1, timeout=60_000_000).as_numpy("D"), a, a)
    check(client.infer("gemm_fp32", both(a, a), priority=1000).as_numpy("D"), a, a)
    refused(lambda: client.infer("gemm_fp32", both(a, a), timeout=1), 503, "deadline")
    refused(lambda: client.infer("gemm_fp32", both(a, a), sequence_id=5), 501, "sequences")
    classes = [triton.InferRequestedOutput("D", class_count=3)]
    refused(lambda: client.infer("gemm_fp32", both(a, a), outputs=classes), 501, "classification")


def test_handles_in_and_out(client: Client, service: Service) -> None:
    a, b = normal(6, 5), normal(5, 4)
    assert service.put("oip-b", b).status_code in (200, 201)
    got = client.infer("gemm_fp32", [tensor("A", a)], parameters={"b": "handle:oip-b"})
    check(got.as_numpy("D"), a, b)
    kept = client.infer("gemm_fp32", both(a, b), parameters={"out": "handle:oip-d", "durable": True})
    assert kept.get_response()["parameters"]["handle"] == "oip-d"
    assert kept.get_output("D") == {"name": "D", "datatype": "FP32", "shape": [6, 4]}
    stored = service.http.get("/tensors/oip-d", headers={"accept": "application/octet-stream"})
    check(np.frombuffer(stored.content, np.float32).reshape(6, 4), a, b)
    by_input = {
        "inputs": [
            {"name": "A", "datatype": "FP32", "shape": [1, 5], "data": [1, 0, 0, 0, 0]},
            {"name": "B", "datatype": "FP32", "shape": [5, 4], "parameters": {"handle": "oip-b"}},
        ]
    }
    reply = service.http.post("/v2/models/gemm_fp32/infer", json=by_input)
    assert reply.headers["content-type"] == "application/json"
    check(np.array(reply.json()["outputs"][0]["data"], np.float32), b[0], np.eye(4))
    refused(
        lambda: client.infer(
            "gemm_fp64", [tensor("A", a.astype(np.float64))], parameters={"b": "handle:oip-b"}
        ),
        400,
        "FP32",
    )
    refused(lambda: client.infer("gemm", [tensor("A", a)], parameters={"b": "handle:none"}), 404)
    refused(lambda: client.infer("gemm", both(a, b), parameters={"b": "handle:oip-b"}), 400, "2 times")


def test_arguments_that_do_not_fit(client: Client) -> None:
    a, b = normal(2, 3), normal(3, 2)
    wide = a.astype(np.float64)
    refused(lambda: client.infer("gemm_fp32", [tensor("A", wide), tensor("B", b)]), 400, "FP64", "FP32")
    refused(lambda: client.infer("gemm", [tensor("A", wide), tensor("B", b)]), 400, "share a dtype")
    refused(lambda: client.infer("gemm_fp32", both(a, a)), 400, "K = 2")
    refused(lambda: client.infer("gemm_fp32", [tensor("A", a)]), 400, "B is missing")
    refused(lambda: client.infer("gemm_fp32", [*both(a, b), tensor("X", b)]), 400, "'X'")
    refused(lambda: client.infer("gemm_fp32", [*both(a, b), tensor("A", a)]), 400, "2 times")
    whole = a.astype(np.int32)
    refused(lambda: client.infer("gemm", [tensor("A", whole), tensor("B", whole)]), 400, "INT32")
    refused(lambda: client.infer("gemm", both(a, b), parameters={"trans_B": True}), 400, "trans_B")
    refused(lambda: client.infer("gemm_fp32", both(a, b), parameters={"out_dtype": "fp16"}), 400, "out_dtype")
    other = [triton.InferRequestedOutput("E")]
    refused(lambda: client.infer("gemm_fp32", both(a, b), outputs=other), 400, "'E'")
    flat = normal(4)
    refused(lambda: client.infer("gemm_fp32", both(flat, flat)), 400, "dimensions")


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.get_trace_settings(),
        lambda c: c.get_trace_settings("gemm"),
        lambda c: c.update_trace_settings("gemm", {"trace_rate": "1"}),
        lambda c: c.get_log_settings(),
        lambda c: c.update_log_settings({"log_verbose_level": 1}),
    ],
)
def test_settings_of_traces_and_logging_are_not_here(client: Client, call: Callable[[Client], Any]) -> None:
    refused(lambda: call(client), 501, "when the service starts")


def test_statistics(client: Client) -> None:
    def counts() -> dict[str, Any]:
        (row,) = client.get_inference_statistics("gemm_fp64")["model_stats"]
        return row

    a = normal(8, 8, dtype=np.float64)
    before = counts()
    for _ in range(3):
        client.infer("gemm_fp64", both(a, a))
    refused(lambda: client.infer("gemm_fp64", [tensor("A", a)]), 400)
    after = counts()
    assert after["version"] == "1"
    assert after["inference_count"] - before["inference_count"] == 3
    assert 0 <= after["execution_count"] - before["execution_count"] <= 3
    grown = {
        part: one["count"] - before["inference_stats"][part]["count"]
        for part, one in after["inference_stats"].items()
    }
    assert grown == {
        **dict.fromkeys(("success", "queue", "compute_input", "compute_infer", "compute_output"), 3),
        **{"fail": 1, "cache_hit": 0, "cache_miss": 0},
    }
    parts = after["inference_stats"]
    assert parts["success"]["ns"] >= parts["compute_infer"]["ns"] > 0
    assert after["last_inference"] > 1.6e12
    everything = client.get_inference_statistics()["model_stats"]
    assert len(everything) == 5


# -- bytes ----------------------------------------------------------------------------------------------------


def post(service: Service, content: bytes, model: str = "gemm_fp32", **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"/v2/models/{model}/infer"
    return service.http.post(url, content=content, headers={"accept-encoding": "identity", **named})


def error(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    document = response.json()
    assert set(document) == {"error"}
    assert response.headers["content-type"] == "application/json"
    return document["error"]


def message(*inputs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": inputs, **more}).encode()


A = {"name": "A", "datatype": "FP32", "shape": [1, 2]}
B = {"name": "B", "datatype": "FP32", "shape": [2, 1]}
LISTED = ({**A, "data": [1, 2]}, {**B, "data": [[3], [4]]})
SIZED = tuple({**one, "parameters": {"binary_data_size": 8}} for one in (A, B))
BYTES = np.array([1, 2, 3, 4], np.float32).tobytes()


def test_health_is_told_in_words_too(service: Service) -> None:
    """To clients that look at more than the status, as KServe's do."""
    for path, told in (
        ("/v2/health/live", {"live": True}),
        ("/v2/health/ready", {"ready": True}),
        ("/v2/models/gemm_fp16/ready", {"name": "gemm_fp16", "ready": True}),
        ("/v2/models/gemm/versions/1/ready", {"name": "gemm", "ready": True}),
    ):
        reply = service.http.get(path)
        assert (reply.status_code, reply.json()) == (200, told)


def test_json_and_binary_as_bytes(service: Service) -> None:
    assert post(service, message(*LISTED)).json()["outputs"][0]["data"] == [11]
    head = message(*SIZED, parameters={"binary_data_output": True})
    reply = post(service, head + BYTES, inference_header_content_length=str(len(head)))
    length = int(reply.headers["inference-header-content-length"])
    assert json.loads(reply.content[:length])["outputs"][0]["parameters"] == {"binary_data_size": 4}
    assert np.frombuffer(reply.content[length:], np.float32) == [11]
    assert reply.headers["x-gemm-variant"]
    mixed = message(SIZED[0], LISTED[1])
    reply = post(service, mixed + BYTES[:8], inference_header_content_length=str(len(mixed)))
    assert reply.json()["outputs"][0]["data"] == [11]


def test_lengths_that_are_wrong(service: Service) -> None:
    head = message(*SIZED)

    def sent(length: object, body: bytes, **headers: str) -> str:
        return error(post(service, body, inference_header_content_length=str(length), **headers))

    assert "is said to have" in sent(len(head) + 999, head + BYTES)
    assert "JSON" in sent(len(head) - 1, head + BYTES)
    assert "JSON" in sent(len(head) + 4, head + BYTES)  # a stale header of another call
    assert "tensors" in sent(len(head), head + BYTES[:-1])
    assert "tensors" in sent(len(head), head + BYTES + b"x")
    assert "whole number" in sent("many", head + BYTES)
    assert "whole number" in sent("-1", head + BYTES)
    assert "whole number" in sent("9" * 30, head + BYTES)
    assert "ends" in sent(len(head), zlib.compress(head + BYTES[:-1]), content_encoding="deflate")
    assert "goes on" in sent(len(head), zlib.compress(head + BYTES + b"x"), content_encoding="deflate")
    error(post(service, head + BYTES))
    error(post(service, b""))
    error(post(service, b"[]"))
    error(post(service, b'{"inputs": 5}'))
    error(post(service, message({**LISTED[0], "data": [1, 2, 3]}, LISTED[1])))
    error(post(service, message({**LISTED[0], "data": [1, "x"]}, LISTED[1])))
    error(post(service, message({**LISTED[0], "shape": [-1, 2]}, LISTED[1])))
    error(post(service, message({**LISTED[0], "shape": [1 << 40, 2]}, LISTED[1])))
    error(post(service, message({**SIZED[0], "data": [1, 2]}, LISTED[1])))
    error(post(service, message({**A, "parameters": {"binary_data_size": -8}}, LISTED[1])))
    error(post(service, message({**A, "parameters": {"binary_data_size": 12}}, LISTED[1])))
    error(post(service, message(*LISTED, parameters={"binary_data_output": "yes"})))
    error(post(service, message(*LISTED, parameters={"timeout": -1})))
    assert post(service, message(*LISTED)).status_code == 200


def test_compressed_bodies_are_bounded(service: Service) -> None:
    zeros = gzip.compress(bytes(1 << 20), 1) * 300  # the arena, and so the largest body, has 256 MiB
    head = message({**A, "shape": [1, 75 << 20], "parameters": {"binary_data_size": 300 << 20}}, SIZED[1])
    bomb = gzip.compress(head) + zeros
    for length in (str(len(head)), None):
        headers = {"content_encoding": "gzip"}
        if length:
            headers["inference_header_content_length"] = length
        error(post(service, bomb, **headers), 400 if length else 413)
    error(post(service, gzip.compress(message(*LISTED))[:-9], content_encoding="gzip"))
    error(post(service, message(*LISTED), content_encoding="gzip"))
    error(post(service, message(*LISTED), content_encoding="br"))
    packed = zlib.compress(message(*LISTED))
    error(post(service, packed + b"more", content_encoding="deflate"))
    twice = gzip.compress(message(*LISTED)[:20]) + gzip.compress(message(*LISTED)[20:])
    assert post(service, twice, content_encoding="gzip").json()["outputs"][0]["data"] == [11]
    assert service.metric("gemm_arena_bytes", state="request") == 0


def test_a_list_of_encodings_is_answered_as_it_is(service: Service) -> None:
    for accept, expected in (
        ("gzip, deflate", None),
        ("gzip", "gzip"),
        ("deflate;q=1", "deflate"),
        ("gzip;q=0", None),
    ):
        reply = post(service, message(*LISTED), accept_encoding=accept)
        assert reply.headers.get("content-encoding") == expected
        assert reply.json()["outputs"][0]["data"] == [11]


def test_raw_binary_mode(service: Service) -> None:
    def raw(content: bytes, query: str, model: str = "gemm_fp32") -> httpx.Response:
        return service.http.post(
            f"/v2/models/{model}/infer?{query}",
            content=content,
            headers={"inference-header-content-length": "0"},
        )

    def values(reply: httpx.Response) -> list[float]:
        assert reply.status_code == 200, reply.text
        length = int(reply.headers["inference-header-content-length"])
        return np.frombuffer(reply.content[length:], np.float32).tolist()

    b = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    service.put("raw-b", b)
    assert values(raw(BYTES, "a_shape=1x2&b_shape=2x1")) == [11]
    # The one input that is sent needs no shape: the stored one leaves it one.
    assert values(raw(BYTES, "b=handle:raw-b")) == [9, 12, 15, 19, 26, 33]
    assert values(raw(BYTES[:8], "a=handle:raw-b&trans_a=true")) == [9, 12, 15]
    assert "rows of 2" in error(raw(BYTES[:12], "b=handle:raw-b"))
    error(raw(BYTES, ""))
    error(raw(BYTES, "a_shape=1x2&b_shape=2x1&dtype=fp64"))
    error(raw(BYTES, "a_shape=1x2&b_shape=2x2"))


def test_errors_have_one_form(service: Service) -> None:
    for method, path, status in (
        ("GET", "/v2/nowhere", 404),
        ("GET", "/v2/models/gemm/infer", 405),
        ("POST", "/v2/models/none/infer", 404),
        ("POST", "/v2/models/gemm/versions/3/infer", 404),
        ("POST", "/v2/repository/models/none/unload", 404),
    ):
        error(service.http.request(method, path), status)
    error(service.http.post("/v2/repository/index", content=b"{"))


@pytest.mark.ci
def test_one_connection_survives_every_refusal(service: Service) -> None:
    """A client's pooled connection is used again after each error, and nothing stays held."""
    head = message(*SIZED)
    with httpx.Client(base_url=service.url, limits=httpx.Limits(max_connections=1)) as http:
        for cut in range(0, len(head) + len(BYTES), 7):
            body = (head + BYTES)[:cut]
            headers = {"inference-header-content-length": str(min(len(head), cut))}
            http.post("/v2/models/gemm/infer", content=body, headers=headers)
            assert http.post("/v2/models/gemm/infer", content=message(*LISTED)).status_code == 200
    assert service.metric("gemm_arena_bytes", state="request") == 0
    assert service.metric("gemm_arena_bytes", state="reply") == 0
