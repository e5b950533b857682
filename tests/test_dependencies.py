"""Pinned versions against the database of advisories: what is known of is a failure, no answer is said to be none."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci
ROOT = Path(__file__).resolve().parents[1]

#: `make audit`'s own command.
COMMAND = re.findall(r"^\t\$\(BIN\)/(pip-audit .+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[
    0
].split()


def audit(*more: str, pins: Path = ROOT / "constraints.txt") -> subprocess.CompletedProcess[str]:
    """pip-audit, as `make audit` runs it."""
    tool, *arguments = [str(pins) if word == "constraints.txt" else word for word in COMMAND]
    command = [str(Path(sys.executable).parent / tool), *arguments, "--timeout", "10", *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def unasked(done: subprocess.CompletedProcess[str]) -> str:
    """Why the database wasn't asked; "" where it was, or where something else went wrong."""
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return last if done.returncode and re.match(r"[\w.:]*(Connection|Timeout|HTTP|Service)\w*", last) else ""


def test_no_pinned_version_is_known_to_be_weak() -> None:
    done = audit()
    if why := unasked(done):
        pytest.skip(f"NOT AUDITED: the database of advisories can't be asked from here: {why[:200]}")
    assert done.returncode == 0, done.stdout + done.stderr


class Advisories(ThreadingHTTPServer):
    """A database that knows of one weak version."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked: set[str] = set()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Advisories)
        query = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.add(query["package"]["name"].lower())
        weak = (query["package"]["name"], query["version"]) == ("weak", "1.0")
        known = {"id": "GHSA-test", "summary": "Made up", "affected": [{"package": query["package"]}]}
        body = json.dumps({"vulns": [known]} if weak else {}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def advisories() -> Iterator[Advisories]:
    made = Advisories()
    yield made
    made.shutdown()
    made.server_close()


def test_the_audit_asks_about_every_pin_and_fails_on_a_weak_one(
    advisories: Advisories, tmp_path: Path
) -> None:
    here = ("--osv-url", f"http://127.0.0.1:{advisories.server_port}/v1/query")
    done = audit(*here)
    assert (done.returncode, unasked(done)) == (0, ""), done.stdout + done.stderr
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert {re.sub(r"[-_.]+", "-", name.lower()) for name in pinned} <= {
        re.sub(r"[-_.]+", "-", name) for name in advisories.asked
    }
    pins = tmp_path / "pins.txt"
    pins.write_text("weak==1.0\nstrong==1.0\n")
    done = audit(*here, pins=pins)
    assert (done.returncode, unasked(done)) == (1, "")
    assert "GHSA-test" in done.stdout


def test_a_database_that_does_not_answer_is_told_from_one_that_knows_nothing(tmp_path: Path) -> None:
    pins = tmp_path / "pins.txt"
    pins.write_text("strong==1.0\n")
    done = audit("--osv-url", "http://127.0.0.1:9/v1/query", pins=pins)
    assert done.returncode == 1
    assert unasked(done)
