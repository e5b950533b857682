"""Products that /gemm serves: what the log tells of them, and who may keep them under a handle."""

from __future__ import annotations

from pathlib import Path

import pytest

from service import keys
from service.batch import Rate
from service.errors import ServiceError
from tests.service.serving import RAW, Site, serving

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
