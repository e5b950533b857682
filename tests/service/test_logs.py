"""Logs: one line an event, with request and trace, without payload."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from service import logs
from service.logs import Log, Trace


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    logs._Now.sink = None
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("gemm", "service", "uvicorn"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def test_json_line_carries_stage_event_fields_and_request() -> None:
    stream = io.StringIO()
    logs.setup("json", "info", stream)
    trace = Trace.take(None)
    token = logs.bind("r-1", trace)
    Log("admit").info("taken at 100%", seconds=0.25, reason=None, share=float("nan"))
    logs.unbind(token)
    Log("admit").debug("not shown")
    (line,) = stream.getvalue().splitlines()
    document = json.loads(line)
    assert document.pop("time").endswith("Z")
    assert document == {
        "level": "info",
        "stage": "admit",
        "event": "taken at 100%",
        "request_id": "r-1",
        "trace_id": trace.trace_id,
        "span_id": trace.span_id,
        "seconds": 0.25,
        "reason": None,
        "share": None,
    }


def test_console_line_escapes_control_characters() -> None:
    stream = io.StringIO()
    logs.setup("console", "debug", stream)
    Log("gate").debug("seen", name="a\n2026 forged", seconds=0.123456789)
    (line,) = stream.getvalue().splitlines()
    assert line.split(" ", 1)[1] == r"debug gate: seen  name='a\n2026 forged' seconds=0.123457"


def test_modules_that_use_logging_itself_are_formatted_alike() -> None:
    stream = io.StringIO()
    logs.setup("json", "info", stream)
    logging.getLogger("gemm.worker").info("%d left", 3)
    logging.getLogger("uvicorn.error").info("hidden")
    logging.getLogger("uvicorn.error").error("shown")
    documents = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(d["stage"], d["event"]) for d in documents] == [("worker", "3 left"), ("uvicorn.error", "shown")]


class Body(BaseModel):
    alpha: float


def test_exceptions_tell_place_and_no_payload() -> None:
    stream = io.StringIO()
    logs.setup("json", "info", stream)
    with pytest.raises(ValidationError) as caught:
        Body.model_validate({"alpha": "SECRET"})
    Log("decode").error("unhandled", exception=caught.value)
    logging.getLogger("uvicorn.error").error("oops", exc_info=caught.value)
    text = stream.getvalue()
    assert "SECRET" not in text
    document = json.loads(text.splitlines()[0])
    assert document["error"] == "ValidationError"
    assert "test_logs.py" in document["at"]
    assert logs.describe(OSError(28, "No space left"))["text"] == "[Errno 28] No space left"


@pytest.mark.parametrize(
    "bad",
    [
        None,
        "",
        "nonsense",
        f"00-{'0' * 32}-{'1' * 16}-01",
        f"00-{'1' * 32}-{'0' * 16}-01",
        f"ff-{'1' * 32}-{'1' * 16}-01",
        f"00-{'A' * 32}-{'1' * 16}-01",
        f"00-{'1' * 32}-{'1' * 16}-01-more",
    ],
)
def test_trace_is_new_where_none_valid_came(bad: str | None) -> None:
    trace = Trace.take(bad)
    assert trace.trace_id not in {"1" * 32, "0" * 32}
    assert len(trace.traceparent) == 55


def test_trace_is_taken_and_handed_on_with_an_own_span() -> None:
    came = f"00-{'a' * 32}-{'b' * 16}-00"
    trace = Trace.take(came)
    assert (trace.trace_id, trace.flags) == ("a" * 32, "00")
    assert trace.traceparent.startswith(f"00-{'a' * 32}-")
    assert trace.span_id != "b" * 16
    assert Trace.take(f"01-{'a' * 32}-{'b' * 16}-01-later").trace_id == "a" * 32


def test_a_file_that_cannot_be_opened_again_keeps_its_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs._Now, "sink", None)
    path = tmp_path / "folder" / "audit.log"
    path.parent.mkdir()
    file = logs._File(path)
    path.unlink()
    path.parent.rmdir()
    file.write({"event": "lost"})
    os.fstat(file._descriptor)  # closed, the number might be another's by the next line
    path.parent.mkdir()
    file.write({"event": "kept"})
    assert "kept" in path.read_text()
    os.close(file._descriptor)
