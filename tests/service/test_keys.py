"""Keys: what opens, what doesn't, and that the file's changes take effect without a restart."""

from __future__ import annotations

import json
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from service import keys
from service.errors import ServiceError
from service.keys import ANONYMOUS, Keys, Principal, Quota
from service.settings import Settings, SettingsError, load


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def settings(path: Path) -> Settings:
    return load({"keys_file": str(path)}, environ={})


def refused(book: Keys, authorization: str | None) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        book.check(authorization)
    assert caught.value.code == "unauthorized"
    assert caught.value.headers["WWW-Authenticate"].startswith("Bearer")
    return caught.value


def test_without_a_file_everyone_is_anonymous() -> None:
    book = Keys(load(environ={}))
    assert not book.required
    assert book.check(None) is ANONYMOUS
    ANONYMOUS.require("admin")


def test_a_key_opens_and_nothing_else_does(path: Path) -> None:
    key, token = keys.add(path, "alice", scopes=["gemm"])
    book = Keys(settings(path))
    assert book.required
    principal = book.check(f"Bearer {token}")
    assert principal == Principal("alice", frozenset({"gemm"}), key.id)
    assert book.check(f"bearer  {token} ") == principal
    changed = token[:-1] + ("A" if token[-1] != "A" else "B")
    for wrong in (
        None,
        "",
        token,
        f"Basic {token}",
        "Bearer",
        "Bearer x",
        f"Bearer {changed}",
        "Bearer gemm_a_b",
    ):
        refused(book, wrong)
    refused(book, f"Bearer {token}\udcff")


def test_file_holds_no_token_and_is_private(path: Path) -> None:
    key, token = keys.add(path, "alice")
    text = path.read_text()
    assert token not in text
    assert token.split("_", 2)[2] not in text
    assert keys.digest(token) == key.sha256
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # 32 random bytes are 43 base64 digits.
    assert len(token.split("_", 2)[2]) == 43


def test_scopes() -> None:
    Principal("a", frozenset({"tensors"})).require("tensors")
    Principal("a", frozenset({"admin"})).require("tensors")
    with pytest.raises(ServiceError, match="lacks the scope 'jobs'"):
        Principal("a", frozenset({"tensors"})).require("jobs")


def test_changes_take_effect_without_a_restart(path: Path) -> None:
    first, token = keys.add(path, "alice")
    clock = Clock()
    book = Keys(settings(path), clock=clock)
    _, other = keys.add(path, "bob")
    refused(book, f"Bearer {other}")  # not looked yet
    clock.now += 1.1
    assert book.check(f"Bearer {other}").owner == "bob"
    keys.revoke(path, first.id)
    clock.now += 1.1
    refused(book, f"Bearer {token}")
    assert book.check(f"Bearer {other}").owner == "bob"


def test_a_key_is_in_force_until_it_is_revoked_or_loses_its_scope(path: Path) -> None:
    jobs, other = (keys.add(path, "alice", scopes=["jobs"])[0] for _ in range(2))
    brief, _ = keys.add(path, "alice", expires=time.time() + 0.2)
    clock = Clock()
    book = Keys(settings(path), clock=clock)
    assert all(book.in_force(key.id) for key in (jobs, other, brief))
    assert book.in_force(jobs.id, "jobs")
    assert not book.in_force(jobs.id, "gemm")
    keys.revoke(path, other.id)
    path.write_text(path.read_text().replace('"jobs"', '"tensors"'))
    clock.now += 1.1
    assert not book.in_force(other.id)
    assert book.in_force(jobs.id)
    assert not book.in_force(jobs.id, "jobs")
    time.sleep(0.25)
    assert not book.in_force(brief.id)


def test_broken_file_leaves_the_last_good_keys(path: Path) -> None:
    _, token = keys.add(path, "alice")
    clock = Clock()
    book = Keys(settings(path), clock=clock)
    path.write_text("{")
    clock.now += 2
    assert book.check(f"Bearer {token}").owner == "alice"
    path.unlink()
    clock.now += 2
    assert book.check(f"Bearer {token}").owner == "alice"


def test_rotation_keeps_owner_scopes_quota_and_an_overlap(path: Path) -> None:
    old, token = keys.add(path, "alice", scopes=["gemm"], quota=Quota(store_bytes=5))
    new, successor = keys.rotate(path, old.id, overlap_seconds=0.3)
    book = Keys(settings(path))
    assert book.check(f"Bearer {token}").key_id == old.id
    principal = book.check(f"Bearer {successor}")
    assert (principal.owner, principal.scopes, principal.quota) == (
        "alice",
        frozenset({"gemm"}),
        Quota(store_bytes=5),
    )
    assert new.id != old.id
    time.sleep(0.35)
    assert "expired" in refused(book, f"Bearer {token}").detail


def test_rate_quota_says_when_to_come_back(path: Path) -> None:
    _, token = keys.add(path, "alice", quota=Quota(requests_per_second=2))
    clock = Clock()
    book = Keys(settings(path), clock=clock)
    alice = book.check(f"Bearer {token}")
    for _ in range(2):
        book.enter(alice)
        book.leave(alice)
    with pytest.raises(ServiceError) as caught:
        book.enter(alice)
    assert (caught.value.code, caught.value.limit) == ("quota", 2)
    assert caught.value.retry_after == pytest.approx(0.5)
    clock.now += 0.5
    book.enter(alice)


def test_concurrency_quota(path: Path) -> None:
    _, token = keys.add(path, "alice", quota=Quota(concurrent_requests=1))
    book = Keys(settings(path))
    alice = book.check(f"Bearer {token}")
    book.enter(alice)
    with pytest.raises(ServiceError, match="as many requests running"):
        book.enter(alice)
    book.leave(alice)
    book.enter(alice)


def test_what_goes_on_in_its_place_counts_as_a_request_all_the_same(path: Path) -> None:
    quota = Quota(requests_per_second=2, concurrent_requests=1, bytes_per_second=1000)
    _, token = keys.add(path, "alice", quota=quota)
    clock = Clock()
    book = Keys(settings(path), clock=clock)
    alice = book.check(f"Bearer {token}")
    book.enter(alice)
    book.go_on(alice, 800)  # though one runs, which is as many as may
    with pytest.raises(ServiceError, match="more requests a second"):
        book.go_on(alice)
    clock.now += 0.5
    with pytest.raises(ServiceError, match="more bytes a second"):
        book.go_on(alice, 900)
    book.go_on(alice, 100)
    book.leave(alice)
    clock.now += 0.5
    book.enter(alice)


def test_bytes_quota_counts_bodies_and_what_is_owed(path: Path) -> None:
    _, token = keys.add(path, "alice", quota=Quota(bytes_per_second=1000, concurrent_requests=1))
    clock = Clock()
    book = Keys(settings(path), clock=clock)
    alice = book.check(f"Bearer {token}")
    book.enter(alice, 600)
    book.leave(alice)
    with pytest.raises(ServiceError, match="more bytes a second") as caught:
        book.enter(alice, 600)
    assert (caught.value.code, caught.value.limit) == ("quota", 1000)
    assert caught.value.retry_after == pytest.approx(0.2)
    book.enter(alice, 400)  # who was refused doesn't count as running
    book.leave(alice)
    book.owe(alice, 1500)
    clock.now += 1.0
    with pytest.raises(ServiceError) as caught:
        book.enter(alice)
    assert caught.value.retry_after == pytest.approx(0.5)
    clock.now += 5.0
    book.enter(alice, 10_000)  # more than a second's worth passes a full bucket, and is owed
    book.leave(alice)
    with pytest.raises(ServiceError) as caught:
        book.enter(alice, 1)
    assert caught.value.retry_after == pytest.approx(9.001)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o666])
def test_file_open_to_others_is_refused(path: Path, mode: int) -> None:
    keys.add(path, "alice")
    os.chmod(path, mode)
    with pytest.raises(SettingsError, match="chmod 600"):
        Keys(settings(path))


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"keys": [{}]}',
        '{"keys": [{"id": "a", "owner": "a b", "sha256": "", "scopes": []}]}',
        '{"keys": [{"id": "a", "owner": "a", "sha256": "00", "scopes": []}]}',
        '{"keys": [{"id": "a", "owner": "a", "sha256": "%s", "scopes": ["root"]}]}' % ("0" * 64),
        '{"keys": [{"id": "a", "owner": "a", "sha256": "%s", "scopes": [], "quota": {"x": 1}}]}' % ("0" * 64),
    ],
)
def test_malformed_file_stops_start_up(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(SettingsError, match="keys_file"):
        Keys(settings(path))


def test_absent_file_stops_start_up(path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        Keys(settings(path))


def test_add_refuses_odd_owners_and_scopes(path: Path) -> None:
    for owner in ("", "a/b", "../x", "a" * 65, ".a"):
        with pytest.raises(ValueError, match="owner"):
            keys.add(path, owner)
    with pytest.raises(ValueError, match="no such scope: root"):
        keys.add(path, "a", scopes=["root"])
    keys.add(path, "a")
    with pytest.raises(ValueError, match="no key"):
        keys.revoke(path, "nobody")


@pytest.mark.parametrize(
    "quota",
    [
        {"requests_per_second": "50"},
        {"requests_per_second": 0},
        {"flops_per_second": float("nan")},
        {"bytes_per_second": -1},
        {"concurrent_requests": 1.5},
        {"store_bytes": True},
        {"requests": 1},
    ],
)
def test_a_quota_that_bounds_nothing_stops_start_up(path: Path, quota: dict[str, object]) -> None:
    keys.add(path, "alice")
    document = json.loads(path.read_text())
    document["keys"][0]["quota"] = quota
    path.write_text(json.dumps(document))
    with pytest.raises(SettingsError, match=f"keys_file: .*{next(iter(quota))}"):
        Keys(settings(path))


def test_keys_made_at_once_are_all_there(path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: keys.add(path, f"owner{number}")[0].id, range(24)))
    assert {key.id for key in keys.read(path)} == set(made)


@pytest.mark.parametrize("expires", [0.0, float("nan"), float("inf")])
def test_a_key_that_never_was_or_never_ends_by_mistake_is_refused(path: Path, expires: float) -> None:
    with pytest.raises(ValueError, match="future"):
        keys.add(path, "alice", expires=expires)
    assert not path.exists()
