"""Replies in every form: what Accept chooses, what each carries, slots back only when drained."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from service.errors import ServiceError
from service.formats import Tensor, numbers, numpy_dtype
from service.reply import MEDIA, NPY, negotiate
from service.transfer import EXTENSION, Transfer
from tests.service.stand_in import Services, app

JSON, SAFE, RAW = "application/json", "application/vnd.safetensors", "application/octet-stream"


@pytest.fixture
def services() -> Iterator[Services]:
    made = Services(max_output_bytes=1 << 23)
    yield made
    assert made.held == 0
    made.arena.close()


@pytest.fixture
async def client(services: Services) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app(services))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as made:
        yield made


@pytest.mark.parametrize(
    ("accept", "default", "form"),
    [
        (None, "raw", "raw"),
        ("", "safetensors", "safetensors"),
        (", ,", "raw", "raw"),
        ("*/*", "json", "json"),
        ("application/*", "raw", "raw"),
        ("text/html, */*;q=0.1", "raw", "raw"),
        (f"{JSON};q=0.5, {RAW}", "json", "raw"),
        (f"{RAW};q=0.5, */*;q=0.4", "json", "raw"),
        (f"*/*, {JSON};q=0", "json", "safetensors"),
        (f"{JSON};Q=0.1, {NPY};q=0.2", "raw", "npy"),
        ("application/x-numpy", "json", "npy"),
        ("APPLICATION/JSON", "raw", "json"),
        (f"{RAW};q=nan, {JSON};q=0.1", "raw", "json"),
    ],
)
def test_accept_chooses_the_form(accept: str | None, default: Any, form: str) -> None:
    assert negotiate(accept, default) == form


@pytest.mark.parametrize(
    "accept", ["text/html", "*/*;q=0", "image/*", f"{JSON};q=0", ";", "application/json;q=x"]
)
def test_what_cannot_be_given_is_406(accept: str) -> None:
    with pytest.raises(ServiceError) as caught:
        negotiate(accept, "json")
    assert (caught.value.status, caught.value.field) == (406, "accept")


@given(st.text(max_size=60), st.sampled_from(sorted(MEDIA)))
def test_any_accept_ends_in_a_form_or_406(accept: str, default: Any) -> None:
    try:
        assert negotiate(accept, default) in MEDIA
    except ServiceError as error:
        assert error.status == 406  # noqa: PT017


async def product(client: httpx.AsyncClient, accept: str, out_dtype: str = "fp32") -> httpx.Response:
    body = {"a": [[1, 2], [3, 4]], "b": [[0.5, 1], [1, "Infinity"]], "out_dtype": out_dtype}
    return await client.post("/gemm", json=body, headers={"accept": accept})


async def test_every_form_carries_the_same_product(client: httpx.AsyncClient) -> None:
    expected = np.array([[2.5, np.inf], [5.5, np.inf]], "f4")
    reply = await product(client, RAW)
    assert (reply.headers["x-gemm-shape"], reply.headers["x-gemm-dtype"]) == ("2x2", "fp32")
    np.testing.assert_array_equal(np.frombuffer(reply.content, "f4").reshape(2, 2), expected)
    reply = await product(client, NPY)
    np.testing.assert_array_equal(np.load(io.BytesIO(reply.content)), expected)
    reply = await product(client, SAFE)
    [(name, value)] = safetensors.deserialize(reply.content)
    assert (name, value["dtype"], value["shape"]) == ("d", "F32", [2, 2])
    assert bytes(value["data"]) == expected.tobytes()
    reply = await product(client, JSON)
    assert reply.json()["d"] == [[2.5, "Infinity"], [5.5, "Infinity"]]


async def test_every_reply_tells_variant_reason_and_times(client: httpx.AsyncClient) -> None:
    for accept in (JSON, SAFE, NPY, RAW):
        headers = (await product(client, accept)).headers
        assert headers["x-gemm-variant"] == "numpy"
        assert headers["x-gemm-reason"] == "only_one"
        assert headers["server-timing"] == "queue;dur=1.000, compute;dur=2.000"
        assert headers["content-type"] == accept
        assert int(headers["content-length"]) > 0
    document = (await product(client, JSON)).json()
    assert (document["variant"], document["reason"], document["request_id"]) == ("numpy", "only_one", "r")


async def test_bf16_leaves_in_all_forms_but_npy(client: httpx.AsyncClient, services: Services) -> None:
    reply = await product(client, NPY, "bf16")
    assert reply.status_code == 406
    assert reply.json()["field"] == "accept"
    reply = await product(client, RAW, "bf16")
    assert np.frombuffer(reply.content, ml_dtypes.bfloat16).tolist() == [2.5, np.inf, 5.5, np.inf]
    assert (await product(client, JSON, "bf16")).json()["d"][0][0] == 2.5
    assert services.held == 0


async def test_large_results_leave_whole(client: httpx.AsyncClient) -> None:
    a, b = np.arange(700.0).reshape(700, 1), np.linspace(0, 1, 900).reshape(1, 900)
    query = "a_shape=700x1&b_shape=1x900&dtype=fp64"
    body = a.tobytes() + b.tobytes()
    for accept in (RAW, JSON, SAFE):
        headers = {"content-type": RAW, "accept": accept}
        reply = await client.post(f"/gemm?{query}", content=body, headers=headers)
        if accept == JSON:
            np.testing.assert_array_equal(reply.json()["d"], a * b)
        else:
            assert reply.content[-a.size * b.size * 8 :] == (a * b).tobytes()
            assert len(reply.content) == int(reply.headers["content-length"])


async def test_empty_results_are_replies_too(client: httpx.AsyncClient) -> None:
    for accept, content in ((RAW, b""), (JSON, None), (NPY, None), (SAFE, None)):
        headers = {"content-type": RAW, "accept": accept}
        reply = await client.post("/gemm?a_shape=0x2&b_shape=2x0&dtype=fp16", content=b"", headers=headers)
        assert reply.status_code == 200
        if content is not None:
            assert reply.content == content
            assert reply.headers["content-length"] == "0"
        if accept == NPY:
            assert np.load(io.BytesIO(reply.content)).shape == (0, 0)


async def test_a_kept_result_is_told_by_handle_and_etag(
    client: httpx.AsyncClient, services: Services
) -> None:
    reply = await client.post("/gemm", json={"a": [[2]], "b": [[3]], "out": {"handle": "kept"}})
    document = reply.json()
    assert document["out"] == {"handle": "kept", "etag": "e1", "durable": False}
    assert (document["dtype"], document["shape"]) == ("fp32", [1, 1])
    assert reply.headers["etag"] == '"e1"'
    assert (await client.post("/gemm", json={"a": {"handle": "kept"}, "b": [[1]]})).json()["d"] == [[6]]


class HeldNative:
    """A server side whose socket never drains by itself."""

    def __init__(self) -> None:
        self.gone = False
        self.callbacks: list[Any] = []
        self.aborted = False

    def on_drained(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def abort(self) -> None:
        self.aborted = True


async def test_the_slot_is_held_until_the_socket_has_drained(services: Services) -> None:
    native = HeldNative()
    sent = await reply_through(services, native)
    assert isinstance(sent[-1]["body"], memoryview)
    assert services.slots.bytes_by_state == {"request": 0, "reply": 4096, "tensor": 0}
    for callback in native.callbacks:
        callback()
    assert services.held == 0


async def test_a_reply_that_fails_midway_is_cut_off_not_ended(services: Services) -> None:
    native = HeldNative()
    with pytest.raises(OSError, match="broken"):
        await reply_through(services, native, fail=True)
    assert native.aborted
    assert services.held == 4096
    native.callbacks[0]()


async def reply_through(services: Services, native: HeldNative, *, fail: bool = False) -> list[Any]:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": bytes(8), "more_body": False}

    async def send(message: Any) -> None:
        if fail and message["type"] == "http.response.body":
            raise OSError("broken")
        sent.append(message)

    headers = [(b"content-type", RAW.encode()), (b"transfer-encoding", b"chunked")]
    query = b"a_shape=1x1&b_shape=1x1&dtype=fp32"
    scope = {"type": "http", "headers": headers, "query_string": query, "extensions": {EXTENSION: native}}
    assert Transfer.of(scope, receive, send).content_length is None
    await app(services)(scope, receive, send)
    return sent


def read_back(reply: httpx.Response, accept: str, dtype: str) -> np.ndarray[Any, Any]:
    """D as fp64, whatever form it came in."""
    kind = numpy_dtype(dtype)
    if accept == JSON:
        document = reply.json()
        return numbers.array(document["d"], "fp64", field="d").reshape(document["shape"])
    if accept == NPY:
        return np.load(io.BytesIO(reply.content)).astype("f8")
    if accept == SAFE:
        [(_, value)] = safetensors.deserialize(reply.content)
        return np.frombuffer(bytes(value["data"]), kind).reshape(value["shape"]).astype("f8")
    shape = [int(dim) for dim in reply.headers["x-gemm-shape"].split("x")]
    return np.frombuffer(reply.content, kind).reshape(shape).astype("f8")


@pytest.mark.ci
@given(
    st.lists(st.integers(0, 40), min_size=2, max_size=3),
    st.sampled_from(["fp16", "bf16", "fp32", "fp64"]),
    st.lists(st.sampled_from([np.nan, np.inf, -np.inf, -0.0, 1e-45, 65504.0]), max_size=4),
)
@settings(max_examples=300, deadline=None)
async def test_any_result_reads_back_equal_from_every_form(
    shape: list[int], dtype: str, specials: list[float]
) -> None:
    services = Services()
    values = np.random.default_rng(len(specials)).standard_normal(shape)
    flat = values.reshape(-1)[: len(specials)]
    flat[:] = specials[: len(flat)]
    values = values.astype(numpy_dtype(dtype))
    # alpha = 0 and beta = 1: D is C.
    operands = [Tensor(dtype, (*shape[:-2], shape[-2], 0)), Tensor(dtype, (*shape[:-2], 0, shape[-1]))]
    query = {"alpha": "0", "dtype": dtype, "c_shape": "x".join(map(str, shape))}
    query |= {f"{name}_shape": "x".join(map(str, t.shape)) for name, t in zip("ab", operands, strict=True)}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app(services)), base_url="http://test"
    ) as client:
        for accept in (JSON, SAFE, NPY, RAW):
            headers = {"content-type": RAW, "accept": accept}
            reply = await client.post("/gemm", params=query, content=values.tobytes(), headers=headers)
            if accept == NPY and dtype == "bf16":
                assert reply.status_code == 406
                continue
            assert reply.status_code == 200, reply.text
            if accept == JSON and 0 in shape[:-1]:
                continue  # nested lists can't tell an empty tensor's inner sizes
            np.testing.assert_array_equal(read_back(reply, accept, dtype), values.astype("f8"))
    assert services.held == 0
    services.arena.close()


async def test_others_have_a_turn_between_the_pieces_of_a_long_reply() -> None:
    sent: list[tuple[bytes, bool, int]] = []
    turns = 0

    async def send(message: Any) -> None:  # to a client that takes all at once: it never waits
        sent.append((message["body"], message["more_body"], turns))

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    transfer = Transfer.of({"type": "http", "headers": []}, receive, send)
    task = asyncio.create_task(other())
    await transfer.write_pieces([b"1", b"2", b"3"], b"4")
    task.cancel()
    assert [(body, more) for body, more, _ in sent] == [
        (b"1", True),
        (b"2", True),
        (b"3", True),
        (b"4", False),
    ]
    before = [seen for *_, seen in sent]
    assert before == sorted(set(before)), "pieces left without a turn of others between them"
