"""Products that /gemm serves: what the log tells of them, and who may keep them under a handle."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from service import keys
from service.batch import Rate
from service.errors import ServiceError
from service.formats import Tensor, safetensors
from service.inference.decode import HEADER
from tests.service.serving import RAW, Site, serving
from tests.service.storing import tensor

SAFE = {"content-type": "application/vnd.safetensors"}

PRODUCT = {"a": [[1]], "b": [[2]]}
#: The same product as a raw body with its query, and for the inference protocol.
QUERY = "a_shape=1x1&b_shape=1x1&dtype=fp32"
INPUTS = [{"name": name, "shape": [1, 1], "datatype": "FP32", "data": [1]} for name in "AB"]


async def test_the_log_tells_a_products_time_by_stage_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as site:
        caplog.set_level("INFO", "gemm.gate")
        reply = await site.ann.post("/gemm", json={"a": [[1]], "b": [[2]]})
    assert reply.json()["d"] == [[2.0]]
    (fields,) = [vars(record)["fields"] for record in caplog.records if record.name == "gemm.gate"]
    assert (fields["batch_seconds"], fields["kernel_seconds"]) == (0.001, 0.002)  # as the worker told
    assert {"decode_seconds", "link_seconds", "reply_seconds"} <= set(fields)


async def test_the_log_tells_the_stage_that_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path) as site:

        async def full(work: object) -> None:
            work.release()  # type: ignore[attr-defined]
            refusal = ServiceError("queue_full", "full")
            refusal.stage = "admit"
            raise refusal

        site.computer.submit = full  # type: ignore[method-assign, assignment]
        caplog.set_level("INFO", "gemm.gate")
        assert (await site.ann.post("/gemm", json=PRODUCT)).status_code == 429
        assert (await site.ann.post("/gemm", json={})).status_code == 422
        assert (await site.ann.post("/v2/models/gemm/infer", json={})).status_code == 400
        assert (await site.ann.get("/nowhere")).status_code == 404
    told = [vars(record)["fields"] for record in caplog.records if record.name == "gemm.gate"]
    assert [(fields["refused"], fields.get("stage")) for fields in told] == [
        *[("queue_full", "admit"), ("invalid", "decode"), ("invalid", "decode"), ("not_found", None)]
    ]


@pytest.mark.parametrize(("scopes", "status"), [({"gemm", "jobs"}, 403), ({"gemm", "jobs", "tensors"}, 200)])
async def test_a_result_is_kept_for_who_may_write_tensors(
    tmp_path: Path, scopes: set[str], status: int
) -> None:
    async with serving(tmp_path) as site:
        token = keys.add(tmp_path / "keys.json", "ann", scopes=scopes)[1]
        ann = {"authorization": f"Bearer {token}"}
        site.services.keys._looked = float("-inf")
        keep = {"out": {"handle": "d"}}
        replies = [
            await site.bob.post("/gemm", json=PRODUCT | keep, headers=ann),
            await site.bob.post(f"/gemm?{QUERY}&out=handle:d", content=bytes(8), headers=RAW | ann),
            await site.bob.post(
                "/v2/models/gemm/infer",
                json={"inputs": INPUTS, "parameters": {"out": "handle:d"}},
                headers=ann,
            ),
        ]
        assert [reply.status_code for reply in replies] == [status] * 3, [r.text for r in replies]
        job = await site.bob.post("/jobs", json={"steps": [{"id": "s", **PRODUCT, **keep}]}, headers=ann)
        assert job.status_code == (202 if status == 200 else 403)
        if status == 403:
            assert replies[0].json()["field"] == "out"
            assert job.json()["field"] == "steps.0.out"
            assert site.computer.submitted == []
        plain = await site.bob.post("/gemm", json=PRODUCT, headers=ann)
        assert plain.status_code == 200


async def test_how_to_keep_a_result_that_is_not_kept_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as site:
        for field, value in (("durable", True), ("ttl_seconds", 5)):
            step = {"id": "s", **PRODUCT, field: value}
            inference = {"inputs": INPUTS, "parameters": {field: value}}
            raw = f"/gemm?{QUERY}&{field}={str(value).lower()}"
            for reply, name in (
                (await site.ann.post("/gemm", json=PRODUCT | {field: value}), field),
                (await site.ann.post(raw, content=bytes(8), headers=RAW), field),
                (await site.ann.post("/jobs", json={"steps": [step]}), f"steps.0.{field}"),
            ):
                assert (reply.status_code, reply.json()["field"]) == (422, name)
            refused = await site.ann.post("/v2/models/gemm/infer", json=inference)
            assert refused.status_code == 400
            assert field in refused.json()["error"]


async def test_what_never_fits_into_the_store_is_413_with_field_and_limit(tmp_path: Path) -> None:
    async with serving(tmp_path, store_disk_bytes=4096) as site:
        put = await site.ann.put("/tensors/w?shape=40x40&dtype=fp32", content=bytes(6400), headers=RAW)
        wide = {"a": [[1]] * 40, "b": [[1] * 40]}
        kept = await site.ann.post("/gemm", json={**wide, "out": {"handle": "d"}, "durable": True})
        for reply, field in ((put, "body"), (kept, "out")):
            problem = reply.json()
            told = (reply.status_code, problem["code"], problem["field"], problem["limit"])
            assert told == (413, "too_large", field, 4096)
        assert _idle(site)


#: In fp32 they have 256 KiB each, their product 4 MiB.
TALL, WIDE = tensor(1024, 64), tensor(64, 1024)


def in_every_form() -> list[tuple[str, dict[str, Any]]]:
    """The product of TALL and WIDE, as arguments of POST."""
    data = TALL.tobytes() + WIDE.tobytes()
    given = {"a": Tensor("fp32", TALL.shape), "b": Tensor("fp32", WIDE.shape)}
    encoded = {
        name: {"b64": base64.b64encode(x.tobytes()).decode(), "dtype": "fp32", "shape": list(x.shape)}
        for name, x in (("a", TALL), ("b", WIDE))
    }
    raw = "a_shape=1024x64&b_shape=64x1024&dtype=fp32"
    inputs = [
        {"name": name, "shape": x.shape, "datatype": "FP32", "data": x.reshape(-1).tolist()}
        for name, x in (("A", TALL), ("B", WIDE))
    ]
    return [
        (f"/gemm?{raw}", {"content": data, "headers": RAW}),
        ("/gemm", {"content": safetensors.emit(given) + data, "headers": SAFE}),
        ("/gemm", {"json": encoded}),
        ("/v2/models/gemm/infer", {"json": {"inputs": inputs}}),
        (f"/v2/models/gemm/infer?{raw}", {"content": data, "headers": {**RAW, HEADER.decode(): "0"}}),
    ]


async def test_operands_and_result_that_never_fit_together_are_413_in_every_form(tmp_path: Path) -> None:
    async with serving(tmp_path, key_bytes=17 << 18, arena_bytes=64 << 20) as site:
        for url, body in in_every_form():
            reply = await site.ann.post(url, **body)
            assert reply.status_code == 413, reply.text
            for part in ("out 4194304", "a 262144", "b 262144"):
                assert part in reply.text
            if url.startswith("/gemm"):
                problem = reply.json()
                assert (problem["code"], problem["field"], problem["limit"]) == ("too_large", "out", 17 << 18)
        assert _idle(site)


async def test_what_fits_when_other_requests_have_ended_is_507(tmp_path: Path) -> None:
    async with serving(tmp_path, key_bytes=6 << 20, arena_bytes=64 << 20) as site:
        other = site.services.slots.allocate(2 << 20, owner="ann")
        url, body = in_every_form()[0]
        reply = await site.ann.post(url, **body)
        problem = reply.json()
        assert (reply.status_code, problem["code"], problem["limit"]) == (507, "no_room", 6 << 20)
        assert "requests of this owner hold 2097152 bytes of its share now" in problem["detail"]
        assert int(reply.headers["retry-after"]) >= 1
        other.release()
        assert (await site.ann.post(url, **body)).status_code == 200


async def test_stored_operands_that_never_fit_beside_the_rest_are_413(tmp_path: Path) -> None:
    async with serving(tmp_path) as site:
        for name in ("v", "w"):
            put = await site.ann.put(
                f"/tensors/{name}?shape=1280x1024&dtype=fp32", content=bytes(5 << 20), headers=RAW
            )
            assert put.status_code == 201
        for b, change, field in (("v", {"trans_b": True}, "out"), ("w", {"trans_b": True}, "a")):
            product = {"a": {"handle": "v"}, "b": {"handle": b}, **change}
            reply = await site.ann.post("/gemm", json=product)
            problem = reply.json()
            told = (reply.status_code, problem["code"], problem["field"], problem["limit"])
            assert told == (413, "too_large", field, 8 << 20)
        assert _idle(site)


async def test_the_text_of_a_product_takes_nothing_from_its_share(tmp_path: Path) -> None:
    """Its place in the arena is free before operands and D take theirs; of what length nobody told, too."""
    text = b'{"a": [' + b",".join([b"[" + b",".join([b"1.0000000"] * 500) + b"]"] * 500) + b'], "b": '
    text += json.dumps([[1]] * 500).encode() + b"}"

    async def chunks() -> AsyncIterator[bytes]:
        yield text

    async with serving(tmp_path, key_bytes=3 << 20) as site:
        for content in (text, chunks()):
            headers = {"content-type": "application/json"}
            reply = await site.ann.post("/gemm", content=content, headers=headers)
            assert reply.status_code == 200, reply.text[:300]
            assert reply.json()["d"][0] == [500]


def _idle(site: Site) -> bool:
    held = site.services.slots.bytes_by_state
    return held["request"] == held["reply"] == 0


async def test_flops_are_taken_from_the_quota_of_the_key_that_asks(tmp_path: Path) -> None:
    async with serving(tmp_path) as site:
        rates = []
        for most in (1e3, 1e6):
            key, token = keys.add(tmp_path / "keys.json", "ann", quota=keys.Quota(flops_per_second=most))
            rates.append(Rate(key.id, most))
            site.services.keys._looked = float("-inf")
            reply = await site.ann.post("/gemm", json=PRODUCT, headers={"authorization": f"Bearer {token}"})
            assert reply.status_code == 200
        await site.ann.post("/gemm", json=PRODUCT)
        assert [work.rate for work in site.computer.submitted] == [*rates, None]
