"""Requests in every form through decode: right products, refusals by field and limit, nothing held after."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.decode import decode
from service.errors import ServiceError
from service.formats import Tensor, numpy_dtype
from service.formats import safetensors as form
from service.model import EXAMPLES, GemmBody
from service.query import parse_query
from service.transfer import ClientGone, Transfer
from tests.service.stand_in import Principal, Services, app, tensor

RAW = {"content-type": "application/octet-stream"}
SAFE = {"content-type": "application/vnd.safetensors"}


@pytest.fixture
def services() -> Iterator[Services]:
    made = Services()
    yield made
    assert made.held == 0
    assert made.store.pins == 0
    made.arena.close()


@pytest.fixture
async def client(services: Services) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app(services))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as made:
        yield made


def random(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


def safe(**arrays: tuple[np.ndarray[Any, Any], str]) -> bytes:
    named = {name: tensor(*given) for name, given in arrays.items()}
    return form.emit({name: t for name, (t, _) in named.items()}) + b"".join(
        data for _, data in named.values()
    )


def problem(reply: httpx.Response, status: int, field: str | None, *, limit: float | None = None) -> None:
    assert reply.status_code == status, reply.text
    document = reply.json()
    assert document.get("field") == field, document
    assert document.get("limit") == limit, document


# -- JSON ------------------------------------


@pytest.mark.parametrize("example", EXAMPLES)
async def test_the_examples_of_the_schema_run(client: httpx.AsyncClient, example: dict[str, Any]) -> None:
    assert GemmBody.model_json_schema()["examples"] == EXAMPLES
    reply = await client.post("/gemm", json=example)
    assert reply.status_code == 200, reply.text
    assert "d" in reply.json()


async def test_json_numbers_make_an_fp32_product(client: httpx.AsyncClient) -> None:
    reply = await client.post("/gemm", json={"a": [[1, 2], [3, 4]], "b": [[5, 6], [7, 8]]})
    document = reply.json()
    assert document["d"] == [[19, 22], [43, 50]]
    assert document["dtype"] == "fp32"
    assert document["shape"] == [2, 2]


async def test_plain_numbers_take_the_other_operands_dtype(
    client: httpx.AsyncClient, services: Services
) -> None:
    services.store.keep("w", random(2, 2), "bf16")
    for body in ({"a": [[1, 2]], "b": {"handle": "w"}}, {"a": {"handle": "w"}, "b": [[1], [2]]}):
        assert (await client.post("/gemm", json=body)).json()["dtype"] == "bf16"
    data = base64.b64encode(np.ones((2, 2)).tobytes()).decode()
    body = {"a": [[1, 2]], "b": {"b64": data, "dtype": "fp64", "shape": [2, 2]}, "c": [[0.1, 0.2]]}
    document = (await client.post("/gemm", json=body)).json()
    assert document["dtype"] == "fp64"
    assert document["d"] == [[3.1, 3.2]]  # C wasn't rounded to fp32 on its way


async def test_specials_come_and_go(client: httpx.AsyncClient) -> None:
    text = b'{"a": [[NaN, 1], [-Infinity, 1]], "b": [["Infinity"], [1]], "alpha": "Infinity"}'
    reply = await client.post(
        "/gemm", content=text, headers={"content-type": "application/json; charset=utf-8"}
    )
    assert reply.json()["d"] == [["NaN"], ["-Infinity"]]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"a": [[1, 2], [3]]}, "a"),
        ({"a": [1, 2]}, "a"),
        ({"a": [[[[1]]]]}, "a"),
        ({"b": [[1]]}, "b"),
        ({"b": 7}, "b"),
        ({"b": None}, "b"),
        ({"b": {"handle": "../../etc"}}, "b.handle"),
        ({"b": {"step": "x"}}, "b"),
        ({"b": {"handle": "x", "dtype": "fp32"}}, "b.dtype"),
        (
            {
                "b": {"b64": "", "dtype": "fp16", "shape": [2, 0]},
                "a": {"b64": "", "dtype": "fp32", "shape": [0, 2]},
            },
            "b",
        ),
        ({"b": {"b64": "", "dtype": "fp16", "shape": [2, 2]}}, "b"),
        ({"c": [[1, 2, 3]]}, "c"),
        ({"c": [[[1, 2], [1, 2]]] * 2, "a": [[[1, 2], [3, 4]]] * 3}, "c"),
        ({"bias": [1, 2, 3]}, "bias"),
        ({"bias": [[1, 2]]}, "bias"),
        ({"beta": 1}, "beta"),
        ({"alpha": "1"}, "alpha"),
        ({"alpha": None}, "alpha"),
        ({"trans_a": 1}, "trans_a"),
        ({"activation": "tanh"}, "activation"),
        ({"out_dtype": "int8"}, "out_dtype"),
        ({"ttl_seconds": 9}, "ttl_seconds"),
        ({"durable": True}, "durable"),
        ({"out": {"handle": "a/b"}}, "out.handle"),
        ({"aplha": 1}, "aplha"),
    ],
)
async def test_json_that_means_nothing_is_422_by_field(
    client: httpx.AsyncClient, change: Any, field: str
) -> None:
    body = {"a": [[1, 2], [3, 4]], "b": [[5, 6], [7, 8]]} | change
    problem(await client.post("/gemm", json=body), 422, field)


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [("priority", 11, 10), ("priority", -1, 0), ("deadline_ms", -1, 0), ("ttl_seconds", 0, 0)],
)
async def test_a_bound_that_was_passed_is_told(
    client: httpx.AsyncClient, field: str, value: float, limit: float
) -> None:
    body = {"a": [[1, 2], [3, 4]], "b": [[5, 6], [7, 8]], field: value}
    problem(await client.post("/gemm", json=body), 422, field, limit=limit)


@pytest.mark.parametrize("length", [True, False])
async def test_large_json_waits_in_the_arena_and_others_go_on(length: bool) -> None:
    services = Services(max_body_bytes=1 << 23, max_json_bytes=1 << 22)
    a = random(300, 400)
    text = json.dumps({"a": a.tolist(), "b": {"b64": "", "dtype": "fp64", "shape": [400, 0]}}).encode()
    assert len(text) > 1 << 21
    kind = {"content-type": "application/json"}
    sizes = {"length": len(text) if length else None}
    requests = await asyncio.gather(*(decode_bytes(services, text, kind, **sizes) for _ in range(3)))
    for request in requests:
        np.testing.assert_array_equal(np.frombuffer(request.a.view()).reshape(300, 400), a)
        request.release()
    with pytest.raises(ServiceError) as caught:
        await decode_bytes(
            services, text + b" " * (1 << 22), kind, **sizes | ({"length": 1 << 23} if length else {})
        )
    assert (caught.value.status, caught.value.limit) == (413, 1 << 22)
    with pytest.raises(ServiceError) as caught:
        await decode_bytes(services, text[:-1], kind, **sizes)
    assert caught.value.status == 400
    assert services.held == 0
    services.arena.close()


async def test_json_that_cannot_be_parsed_is_400(client: httpx.AsyncClient) -> None:
    for text in (b"", b"{", b'{"a": [[1]]', b"\xff"):
        reply = await client.post("/gemm", content=text, headers={"content-type": "application/json"})
        problem(reply, 400, "body")


async def test_parameters_of_json_stand_in_the_body(client: httpx.AsyncClient) -> None:
    problem(await client.post("/gemm?alpha=2", json={"a": [[1]], "b": [[1]]}), 422, "alpha")


# -- binary forms ------------------------------------


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64"])
@pytest.mark.parametrize("trans", [(False, False), (True, False), (False, True), (True, True)])
async def test_raw_and_safetensors_agree_with_numpy(
    client: httpx.AsyncClient, dtype: str, trans: tuple[bool, bool]
) -> None:
    m, n, k = 5, 3, 7
    a, b = random(*((k, m) if trans[0] else (m, k))), random(*((n, k) if trans[1] else (k, n)))
    c, bias = random(m, n), random(n)
    query = {"trans_a": trans[0], "trans_b": trans[1], "alpha": 0.5, "beta": 2, "out_dtype": "fp64"}
    operands = {"a": (a, dtype), "b": (b, dtype), "c": (c, "fp32"), "bias": (bias, dtype)}
    rounded = {name: array.astype(numpy_dtype(dt)).astype("f8") for name, (array, dt) in operands.items()}
    expected = (
        0.5 * (rounded["a"].T if trans[0] else rounded["a"]) @ (rounded["b"].T if trans[1] else rounded["b"])
    )
    expected += 2 * rounded["c"] + rounded["bias"]
    shapes = {
        "a_shape": f"{a.shape[0]}x{a.shape[1]}",
        "b_shape": f"{b.shape[0]},{b.shape[1]}",
        "c_shape": f"{m}x{n}",
    }
    body = b"".join(tensor(*given)[1] for given in operands.values())
    for more in ({}, {"bias_dtype": dtype}):
        reply = await client.post(
            "/gemm",
            params=query | shapes | {"dtype": dtype, "c_dtype": "fp32"} | more,
            content=body,
            headers=RAW,
        )
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-gemm-shape"] == f"{m}x{n}"
        np.testing.assert_allclose(np.frombuffer(reply.content).reshape(m, n), expected, rtol=1e-12)
    reply = await client.post(
        "/gemm", params=query, content=safe(**operands), headers=SAFE | {"accept": RAW["content-type"]}
    )
    np.testing.assert_allclose(np.frombuffer(reply.content).reshape(m, n), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("", "68 bytes, the shapes in the query take 56 (a 24, b 32); a bias of 4 × fp32 would take 16 more"),
        ("&bias_dtype=fp32", "68 bytes, the shapes in the query take 72 (a 24, b 32, bias 16)"),
    ],
)
async def test_a_body_of_another_length_is_told_part_by_part(
    client: httpx.AsyncClient, more: str, told: str
) -> None:
    query = f"a_shape=3x2&b_shape=2x4&dtype=fp32{more}"
    reply = await client.post(f"/gemm?{query}", content=bytes(24 + 32 + 12), headers=RAW)
    problem(reply, 400, "body")
    assert reply.json()["detail"] == f"the body has {told}"


async def test_operands_lie_aligned_whatever_their_sizes(services: Services) -> None:
    arrays = {
        "bias": (random(3), "fp16"),
        "a": (random(1, 3), "fp16"),
        "c": (random(1, 3), "fp64"),
        "b": (random(3, 3), "fp16"),
    }
    body = safe(**arrays)
    request = await decode_bytes(services, body, SAFE)
    for name, (array, dtype) in arrays.items():
        bound = getattr(request, name)
        assert bound.operand.offset % 256 == 0
        assert bytes(bound.view()) == array.astype(numpy_dtype(dtype)).tobytes()
    request.release_operands()
    assert services.slots.bytes_by_state["request"] == 0
    request.release()
    request.release()


async def decode_bytes(
    services: Services, body: bytes, headers: dict[str, str], query: str = "", **more: Any
) -> Any:
    """Decode a body that arrives in two pieces."""
    pieces = [body[: len(body) // 2], body[len(body) // 2 :]]

    async def receive() -> dict[str, Any]:
        if not pieces:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: Any) -> None:
        raise AssertionError("decode sends nothing")

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    length = more.get("length", len(body))
    raw.append(
        (b"transfer-encoding", b"chunked") if length is None else (b"content-length", str(length).encode())
    )
    scope = {"type": "http", "headers": raw, "query_string": query.encode()}
    return await decode(Transfer.of(scope, receive, send), scope, services, Principal())


async def test_chunked_bodies_are_held_to_their_shapes(services: Services) -> None:
    body = np.arange(8, dtype="f4").tobytes()
    query = "a_shape=2x2&b_shape=2x2&dtype=fp32"
    request = await decode_bytes(services, body, RAW, query, length=None)
    assert (request.plan.m, request.plan.n, request.plan.k) == (2, 2, 2)
    request.release()
    for cut, word in ((body[:-1], "cut short"), (body + b"x", "goes on")):
        with pytest.raises(ServiceError, match=word) as caught:
            await decode_bytes(services, cut, RAW, query, length=None)
        assert caught.value.status == 400
        with pytest.raises(ServiceError) as caught:
            await decode_bytes(services, cut, RAW, query)
        assert caught.value.status == 400
    whole = safe(a=(random(2, 2), "fp32"), b=(random(2, 2), "fp32"))
    (await decode_bytes(services, whole, SAFE, length=None)).release()
    for cut in (whole[:-1], whole + b"x", whole[:20], whole[:5]):
        for length in (None, len(cut)):
            with pytest.raises(ServiceError) as caught:
                await decode_bytes(services, cut, SAFE, length=length)
            assert caught.value.status == 400


async def test_a_client_that_leaves_amid_its_body_leaves_nothing(services: Services) -> None:
    body = np.arange(8, dtype="f4").tobytes()
    with pytest.raises(ClientGone):
        await decode_bytes_then_leave(services, body)


async def decode_bytes_then_leave(services: Services, body: bytes) -> None:
    messages = [{"type": "http.request", "body": body[:9], "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return messages.pop(0)

    headers = [(b"content-type", RAW["content-type"].encode()), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "headers": headers, "query_string": b"a_shape=2x2&b_shape=2x2&dtype=fp32"}
    await decode(Transfer.of(scope, receive, receive), scope, services, Principal())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("b_shape=2x2&dtype=fp32", "a"),
        ("a_shape=2x2&dtype=fp32", "b"),
        ("a_shape=2x2&b_shape=2x2", "dtype"),
        ("a_shape=2y2&b_shape=2x2&dtype=fp32", "a_shape"),
        ("a_shape=2x2&b_shape=2x2&dtype=f32", "dtype"),
        ("a_shape=2x2&b_shape=2x2&dtype=fp32&dtype=fp16", "dtype"),
        ("a_shape=2x2&b_shape=2x2&dtype=fp32&alpha=two", "alpha"),
        ("a_shape=2x2&b_shape=2x2&dtype=fp32&nope=1", "nope"),
        ("a_shape=2x2&b_shape=2x2&dtype=fp32&c_dtype=fp32", "c_dtype"),
        ("a_shape=2x2&b_shape=2x2&dtype=fp32&c=handle:", "c"),
        ("a_shape=2x2&b_shape=2x2&dtype=fp32&a=handle:w", "a"),
        ("a_shape=4x1&b_shape=2x2&dtype=fp32", "b"),
        ("a_shape=8&b_shape=0x0&dtype=fp32", "a"),
        ("a_shape=2x2&b_shape=2x2&dtype=fp32&out=somewhere", "out"),
    ],
)
async def test_raw_queries_that_mean_nothing_are_422(
    client: httpx.AsyncClient, services: Services, query: str, field: str
) -> None:
    services.store.keep("w", random(2, 2), "fp32")
    problem(await client.post(f"/gemm?{query}", content=bytes(32), headers=RAW), 422, field)


def test_queries_that_cannot_be_parsed_are_400() -> None:
    assert parse_query(b"") == {}
    assert parse_query(b"a=handle%3Ax") == {"a": "handle:x"}
    for text in (b"a", b"&", b"\xff=1", b"&".join(b"%d=1" % i for i in range(100))):
        with pytest.raises(ServiceError) as caught:
            parse_query(text)
        assert caught.value.status == 400


async def test_safetensors_faults_name_the_tensor(client: httpx.AsyncClient) -> None:
    good = {"a": (random(2, 2), "fp32"), "b": (random(2, 2), "fp32")}
    cases: list[tuple[dict[str, Any], str, int, str]] = [
        ({"x": (random(2), "fp32")}, "", 422, "x"),
        ({"b": (random(2, 2), "fp16")}, "", 422, "b"),
        ({"b": (random(3, 2), "fp32")}, "", 422, "b"),
        ({"c": (random(3, 2), "fp32")}, "", 422, "c"),
        ({}, "?a_shape=2x2", 422, "a_shape"),
        ({}, "?dtype=fp32", 422, "dtype"),
    ]
    for change, query, status, field in cases:
        problem(
            await client.post(f"/gemm{query}", content=safe(**good | change), headers=SAFE), status, field
        )
    problem(await client.post("/gemm", content=safe(a=good["a"]), headers=SAFE), 422, "b")
    problem(
        await client.post("/gemm", content=b"\xff" * 100, headers=SAFE), 400, "body", limit=form.MAX_HEADER
    )


async def test_handles_stand_for_any_operand(client: httpx.AsyncClient, services: Services) -> None:
    a, b, c, bias = random(2, 3), random(3, 2), random(2, 2), random(2)
    for name, array in (("a1", a), ("b1", b), ("c1", c), ("v", bias)):
        services.store.keep(name, array, "fp64")
    expected = a @ b + c + bias
    body = {name: {"handle": h} for name, h in (("a", "a1"), ("b", "b1"), ("c", "c1"), ("bias", "v"))}
    np.testing.assert_allclose((await client.post("/gemm", json=body)).json()["d"], expected)
    query = "a=handle:a1&c=handle:c1&bias=handle:v&b_shape=3x2"
    reply = await client.post(f"/gemm?{query}", content=b.tobytes(), headers=RAW)
    np.testing.assert_allclose(np.frombuffer(reply.content).reshape(2, 2), expected)
    reply = await client.post(
        "/gemm?b=handle:b1&c=handle:c1&bias=handle:v", content=safe(a=(a, "fp64")), headers=SAFE
    )
    assert reply.status_code == 200
    problem(await client.post("/gemm", json={"a": {"handle": "a1"}, "b": {"handle": "gone"}}), 404, "b")
    problem(await client.post("/gemm?a=handle:a1&b=handle:v", headers=RAW), 422, "b")


async def test_batches_broadcast_and_empty_sizes_work(client: httpx.AsyncClient) -> None:
    for a_shape, b_shape, c_shape, out in (
        ((4, 2, 3), (3, 2), None, (4, 2, 2)),
        ((1, 2, 3), (4, 3, 2), None, (4, 2, 2)),
        ((2, 3), (1, 3, 2), None, (1, 2, 2)),
        ((2, 3), (3, 2), (4, 2, 2), (4, 2, 2)),
        ((0, 2, 3), (1, 3, 2), None, (0, 2, 2)),
        ((2, 0), (0, 2), (2, 2), (2, 2)),
        ((0, 3), (3, 2), None, (0, 2)),
        ((2, 3), (3, 0), None, (2, 0)),
    ):
        operands = {"a": (random(*a_shape), "fp64"), "b": (random(*b_shape), "fp64")}
        if c_shape:
            operands["c"] = (random(*c_shape), "fp64")
        reply = await client.post(
            "/gemm", content=safe(**operands), headers=SAFE | {"accept": RAW["content-type"]}
        )
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-gemm-shape"] == "x".join(map(str, out))
        expected = operands["a"][0] @ operands["b"][0] + (operands["c"][0] if c_shape else 0)
        np.testing.assert_allclose(np.frombuffer(reply.content).reshape(out), expected)


# -- limits ------------------------------------


async def test_bodies_above_the_limit_are_413_before_they_are_read(services: Services) -> None:
    for headers, query in (
        (RAW, "a_shape=9999x9999&b_shape=9999x9999&dtype=fp64"),
        (SAFE, ""),
        ({"content-type": "application/json"}, ""),
    ):

        async def never() -> Any:
            raise AssertionError("the body was read")

        raw = [(b"content-type", headers["content-type"].encode()), (b"content-length", b"1048577")]
        scope = {"type": "http", "headers": raw, "query_string": query.encode()}
        with pytest.raises(ServiceError) as caught:
            await decode(Transfer.of(scope, never, never), scope, services, Principal())  # type: ignore[arg-type]
        assert (caught.value.status, caught.value.field, caught.value.limit) == (413, "body", 1 << 20)


async def test_chunked_bodies_above_the_limit_are_413(services: Services) -> None:
    huge = form.emit({"a": Tensor("fp64", (1000, 1000)), "b": Tensor("fp64", (1000, 1))})
    for body, headers, query in (
        (b"[" + b" " * (1 << 20), {"content-type": "application/json"}, ""),
        (b"", RAW, "a_shape=9999x9999&b_shape=9999x9999&dtype=fp64"),
        (huge, SAFE, ""),
    ):
        with pytest.raises(ServiceError) as caught:
            await decode_bytes(services, body, headers, query, length=None)
        assert (caught.value.status, caught.value.limit) == (413, 1 << 20)


async def test_results_and_flops_are_bounded(client: httpx.AsyncClient, services: Services) -> None:
    outer = {"a": (random(400, 1), "fp32"), "b": (random(1, 800), "fp32")}
    problem(await client.post("/gemm", content=safe(**outer), headers=SAFE), 422, "out", limit=1 << 20)
    empty = "a_shape=65536x0&b_shape=0x65536&dtype=fp16"
    problem(await client.post(f"/gemm?{empty}", headers=RAW), 422, "out", limit=1 << 20)
    services.settings.max_flops = 1e4
    long = {"a": (random(1, 9000), "fp32"), "b": (random(9000, 1), "fp32")}
    problem(await client.post("/gemm", content=safe(**long), headers=SAFE), 422, "a", limit=1e4)


async def test_a_query_that_was_taken_before_is_held_to_limits_and_length_again(
    client: httpx.AsyncClient, services: Services
) -> None:
    url, body = "/gemm?a_shape=8x16&b_shape=16x8&dtype=fp32", bytes(2 * 8 * 16 * 4)
    for _ in range(2):
        assert (await client.post(url, content=body, headers=RAW)).status_code == 200
    problem(await client.post(url, content=body + bytes(4), headers=RAW), 400, "body")
    services.settings.max_flops = 2.0 * 8 * 16 * 8 - 1
    problem(await client.post(url, content=body, headers=RAW), 422, "a", limit=2047)
    services.settings.max_flops = 1e9
    services.settings.max_output_bytes = 255
    problem(await client.post(url, content=body, headers=RAW), 422, "out", limit=255)


async def test_a_full_arena_is_507_and_asks_the_store_first() -> None:
    services = Services(arena_bytes=1 << 17)
    filler = services.slots.allocate(1 << 16)
    asked: list[int] = []
    services.store.reclaim = asked.append  # type: ignore[assignment, method-assign]
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app(services)), base_url="http://test"
    ) as client:
        body = np.zeros((150, 150), "f4").tobytes()
        query = "a_shape=150x150&b_shape=150x1&dtype=fp32"
        reply = await client.post(f"/gemm?{query}", content=body + bytes(600), headers=RAW)
        assert reply.status_code == 507
        assert asked
        query = "a_shape=300x300&b_shape=300x1&dtype=fp32"
        reply = await client.post(f"/gemm?{query}", content=bytes(4 * 300 * 301), headers=RAW)
        # It never will fit.
        problem(reply, 413, "a", limit=1 << 17)
    filler.release()
    assert services.held == 0


async def test_forms_that_are_not_known_are_415(client: httpx.AsyncClient) -> None:
    for headers in (
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
    ):
        problem(await client.post("/gemm", content=b"x", headers=headers), 415, "content-type")
    reply = await client.post(
        "/gemm", content=b"x", headers={"content-type": "application/json", "content-encoding": "gzip"}
    )
    problem(reply, 415, "content-encoding")


async def test_deadline_priority_and_out_are_taken(services: Services) -> None:
    before = time.monotonic()
    query = "a_shape=1x1&b_shape=1x1&dtype=fp32"
    query += "&deadline_ms=1500&priority=3&out=handle:x&durable=true&ttl_seconds=9"
    request = await decode_bytes(services, bytes(8), RAW, query)
    assert before + 1.5 <= request.deadline <= time.monotonic() + 1.5
    assert (request.priority, request.out_handle, request.durable, request.ttl_seconds) == (3, "x", True, 9)
    request.release()


# -- whatever comes ------------------------------------


names = st.sampled_from(["a", "b", "c", "bias", "alpha", "beta", "trans_a", "out", "variant", "q"])
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | st.sampled_from(["NaN", "fp16", "handle:w", "m", "x"])
)
operands = st.lists(st.lists(leaves, max_size=3), max_size=3) | st.fixed_dictionaries(
    {"handle": st.sampled_from(["w", "q", "/"])}
)
bodies = st.dictionaries(names, operands | leaves | st.dictionaries(names, leaves, max_size=2), max_size=6)
queries = st.dictionaries(
    names | st.sampled_from(["a_shape", "b_shape", "c_shape", "dtype", "c_dtype", "bias_dtype"]),
    st.sampled_from(["2x2", "1,2", "0x2", "2", "fp32", "bf16", "handle:w", "true", "1", "NaN", "", "2x2x2"]),
    max_size=6,
)


async def run_any(body: bytes, kind: str, query: dict[str, str]) -> None:
    services = Services(arena_bytes=1 << 16)
    try:
        services.store.keep("w", random(2, 2), "fp32")
        text = str(httpx.QueryParams(query))
        for length in (None, len(body)):
            with contextlib.suppress(ServiceError):
                (await decode_bytes(services, body, {"content-type": kind}, text, length=length)).release()
        assert services.held == 0
        assert services.store.pins == 0
    finally:
        services.arena.close()


def whatever(data: bytes, document: Any, query: dict[str, str]) -> list[tuple[bytes, str, dict[str, str]]]:
    return [
        (json.dumps(document).encode(), "application/json", {}),
        (data, "application/json", query),
        (data, RAW["content-type"], query),
        (bytes(32), RAW["content-type"], {"a_shape": "2x2", "b_shape": "2x2", "dtype": "fp32"} | query),
        (data, SAFE["content-type"], query),
        (safe(a=(random(2, 2), "fp32"), b=(random(2, 2), "fp32")) + data, SAFE["content-type"], query),
    ]


@given(st.binary(max_size=100), bodies, queries)
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow], deadline=None)
async def test_any_request_ends_in_a_product_or_a_service_error(
    data: bytes, document: Any, query: Any
) -> None:
    for case in whatever(data, document, query):
        await run_any(*case)


@pytest.mark.ci
@given(st.binary(max_size=400), bodies, queries)
@settings(max_examples=2000, suppress_health_check=[HealthCheck.too_slow], deadline=None)
async def test_many_requests_end_in_a_product_or_a_service_error(
    data: bytes, document: Any, query: Any
) -> None:
    for case in whatever(data, document, query):
        await run_any(*case)
