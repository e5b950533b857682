"""What the log tells of a product that /gemm served."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.serving import serving


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
