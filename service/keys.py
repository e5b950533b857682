"""API keys: receives a bearer token, hands on the `Principal` it stands for; edits the file that holds them.

A token is `gemm_<id>_<secret>` with 256 random bits of secret; the file keeps the SHA-256 of the whole
token, so who reads the file can't use it. The file is read again when its modification time changes (looked
at no more than once a second), so keys come and go without a restart; an unreadable file leaves the last
good keys in force.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from service import audit
from service.batch import Rate
from service.errors import ServiceError
from service.logs import Log
from service.settings import Settings, SettingsError
from service.stamp import stamp

SCOPES = frozenset({"gemm", "tensors", "jobs", "admin"})

_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LOOK_SECONDS = 1.0
_log = Log("keys")


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds on one key; None is no bound beyond the service's own.

    The gate holds `requests_per_second` (with a burst of one second's worth), `concurrent_requests` and
    `bytes_per_second` of bodies in and out (a second's worth may be owed: what a reply takes is known when it has
    left); admission holds `flops_per_second`, for which steps of jobs wait, the store `store_bytes` (of all keys of the
    owner).
    """

    requests_per_second: float | None = None
    concurrent_requests: int | None = None
    flops_per_second: float | None = None
    store_bytes: int | None = None
    bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        """ValueError where a bound isn't one: the file may have been written by hand."""
        for name in self.__slots__:
            value = getattr(self, name)
            if value is None:
                continue
            kind = int if name in ("concurrent_requests", "store_bytes") else (int, float)
            if isinstance(value, bool) or not isinstance(value, kind):
                raise ValueError(f"quota {name}: {'a whole' if kind is int else 'a'} number is needed")
            if not (0 < value < math.inf or (name == "store_bytes" and value == 0)):
                raise ValueError(f"quota {name}: a number above 0 is needed")


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a request acts for. Handles and jobs belong to `owner`, so they outlive a key that is rotated."""

    owner: str
    scopes: frozenset[str] = SCOPES
    key_id: str = ""
    quota: Quota = Quota()

    @property
    def rate(self) -> Rate | None:
        """Its quota on FLOPs a second, which admission holds."""
        most = self.quota.flops_per_second
        return None if most is None else Rate(self.key_id, most)

    def may(self, scope: str) -> bool:
        """Whether the key has `scope`; admin has them all."""
        return scope in self.scopes or "admin" in self.scopes

    def require(self, scope: str, *, field: str = "Authorization") -> None:
        """Raises ServiceError forbidden where the key lacks `scope`, which `field` asks for."""
        if not self.may(scope):
            raise ServiceError("forbidden", f"this key lacks the scope {scope!r}", field=field)


#: Who acts where no keys are configured.
ANONYMOUS = Principal("local")


@dataclass(frozen=True, slots=True)
class Key:
    """One row of the file. Times are Unix seconds; `expires` None is never."""

    id: str
    owner: str
    sha256: str
    scopes: frozenset[str]
    quota: Quota = field(default_factory=Quota)
    created: float = 0.0
    expires: float | None = None


@dataclass(slots=True)
class _Use:
    """Of one key: requests and bytes left in its buckets, when that was, requests in flight."""

    left: float
    at: float
    bytes_left: float
    bytes_at: float
    running: int = 0

    def refill(self, rate: float, now: float) -> float:
        """Bytes that may pass now; below 0 they are owed."""
        self.bytes_left = min(rate, self.bytes_left + (now - self.bytes_at) * rate)
        self.bytes_at = now
        return self.bytes_left


class Keys:
    """The keys in force. Without a keys file there are none and everyone is `ANONYMOUS`."""

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.monotonic) -> None:
        path = self.path = settings.keys_file
        self._clock = clock
        self._keys: dict[str, tuple[Key, Principal]] = {}
        self._uses: dict[str, _Use] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._looked = clock()
        if path is not None:
            self._stamp = stamp(path)
            self._take(read(path))

    @property
    def required(self) -> bool:
        """Whether a request needs a key."""
        return self.path is not None

    def check(self, authorization: str | None) -> Principal:
        """The principal of an Authorization header, for whom this task acts from here on (see service.audit).

        ServiceError unauthorized where it names no valid key.
        """
        if self.path is None:
            return ANONYMOUS
        self._look()
        if authorization is None:
            raise _unauthorized("an API key is needed: Authorization: Bearer gemm_…")
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise _unauthorized("the Authorization scheme must be Bearer")
        token = token.strip()
        parts = token.split("_", 2)
        known = self._keys.get(parts[1]) if len(parts) == 3 else None
        # An unknown id costs the same digest and comparison as a known one.
        right = hmac.compare_digest(digest(token), known[0].sha256 if known else digest(""))
        if known is None or not right:
            raise _unauthorized("this API key isn't valid")
        key, principal = known
        if key.expires is not None and key.expires <= time.time():
            raise _unauthorized("this API key has expired")
        audit.acting(key.id)
        return principal

    def in_force(self, key_id: str, scope: str | None = None) -> bool:
        """Whether a key that was valid once, for `scope` where that is told, still is.

        What it leased ends with it, and so does what it watches.
        """
        if self.path is None:
            return True
        self._look()
        if key_id not in self._keys:
            return False
        key, principal = self._keys[key_id]
        return (key.expires is None or key.expires > time.time()) and (scope is None or principal.may(scope))

    def enter(self, principal: Principal, nbytes: int = 0) -> None:
        """A request begins, with a body of `nbytes`; ServiceError quota where the key has used up its share.

        Pair with `leave`.
        """
        most = principal.quota.concurrent_requests
        if most is None:
            self.go_on(principal, nbytes)
            return
        use = self._use(principal, self._clock())
        if use.running >= most:
            raise ServiceError(
                "quota", "this key has as many requests running as it may", limit=most, retry_after=1.0
            )
        self.go_on(principal, nbytes)
        use.running += 1

    def go_on(self, principal: Principal, nbytes: int = 0) -> None:
        """A further request of `nbytes` on what has entered, in whose place it runs: a message of a stream.

        ServiceError quota where the key sends more requests or bytes a second than it may.
        """
        rate = principal.quota.requests_per_second
        if rate is None:
            self.spend(principal, nbytes)
            return
        now = self._clock()
        use = self._use(principal, now)
        use.left = min(max(rate, 1.0), use.left + (now - use.at) * rate)
        use.at = now
        if use.left < 1.0:
            raise ServiceError(
                "quota",
                "this key sends more requests a second than it may",
                limit=rate,
                retry_after=(1.0 - use.left) / rate,
            )
        self.spend(principal, nbytes)
        use.left -= 1.0

    def leave(self, principal: Principal) -> None:
        """A request that entered has ended."""
        use = self._uses.get(principal.key_id)
        if use is not None and use.running > 0:
            use.running -= 1

    def owe(self, principal: Principal, nbytes: int) -> None:
        """`nbytes` passed that nobody asked for before: a reply, a body of unknown length."""
        rate = principal.quota.bytes_per_second
        if rate is not None:
            now = self._clock()
            use = self._use(principal, now)
            use.bytes_left = use.refill(rate, now) - nbytes

    def spend(self, principal: Principal, nbytes: int) -> None:
        """`nbytes` are to pass; ServiceError quota where the key has used up its bytes a second.

        More than a second's worth passes a full bucket, and is paid for by waiting.
        """
        rate = principal.quota.bytes_per_second
        if rate is None:
            return
        now = self._clock()
        use = self._use(principal, now)
        left, wanted = use.refill(rate, now), min(float(nbytes), rate)
        if left < wanted or left < 0:
            raise ServiceError(
                "quota",
                "this key sends and receives more bytes a second than it may",
                limit=rate,
                retry_after=(wanted - left) / rate,
            )
        use.bytes_left -= nbytes

    def _use(self, principal: Principal, now: float) -> _Use:
        quota = principal.quota
        full = _Use(max(quota.requests_per_second or 0.0, 1.0), now, quota.bytes_per_second or 0.0, now)
        return self._uses.setdefault(principal.key_id, full)

    def _look(self) -> None:
        """Read the file again where it changed; keep the last good keys where it can't be read."""
        assert self.path is not None
        now = self._clock()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        seen = stamp(self.path)
        if seen == self._stamp:
            return
        self._stamp = seen
        try:
            keys = read(self.path)
        except SettingsError as error:
            _log.error(
                "keys file unreadable, the last good keys stay in force", file=self.path, why=str(error)
            )
            return
        self._take(keys)
        _log.info("keys read again", keys=len(keys))

    def _take(self, keys: Iterable[Key]) -> None:
        self._keys = {key.id: (key, Principal(key.owner, key.scopes, key.id, key.quota)) for key in keys}
        self._uses = {name: use for name, use in self._uses.items() if name in self._keys}


def digest(token: str) -> str:
    """SHA-256 of a token, as the file has it."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def read(path: Path) -> list[Key]:
    """All rows of the file; SettingsError where it is absent, malformed or open to other users."""
    try:
        mode = path.stat().st_mode
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"keys_file: can't read {path}: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"keys_file: {path} isn't JSON: {error}") from None
    # Group may read: orchestrators mount secrets that way. Nobody else may, and only the owner may write.
    if mode & (stat.S_IWGRP | stat.S_IRWXO):
        raise SettingsError(f"keys_file: {path} is open to other users; chmod 600 {path}")
    try:
        return [_key(row) for row in document["keys"]]
    except (KeyError, TypeError, ValueError) as error:
        raise SettingsError(f"keys_file: {path}: a row is malformed: {error}") from None


def add(
    path: Path,
    owner: str,
    *,
    scopes: Iterable[str] = ("gemm", "tensors", "jobs"),
    quota: Quota | None = None,
    expires: float | None = None,
) -> tuple[Key, str]:
    """A new key for `owner`: its row, now in the file (made if absent), and the token, kept nowhere."""
    if not _OWNER.fullmatch(owner):
        raise ValueError("an owner is 1 to 64 letters, digits, dots, dashes and underscores")
    unknown = set(scopes) - SCOPES
    if unknown:
        raise ValueError(
            f"no such scope: {', '.join(sorted(unknown))}; there are {', '.join(sorted(SCOPES))}"
        )
    if expires is not None and not time.time() < expires < math.inf:
        raise ValueError("a key must end in the future")
    key_id = secrets.token_hex(6)
    token = f"gemm_{key_id}_{secrets.token_urlsafe(32)}"
    key = Key(key_id, owner, digest(token), frozenset(scopes), quota or Quota(), time.time(), expires)
    with _alone(path):
        _write(path, [*(read(path) if path.exists() else []), key])
    return key, token


def revoke(path: Path, key_id: str, *, after_seconds: float = 0.0) -> Key:
    """Take a key out of force, at once or after a time that lets its successor be handed out."""
    if not 0 <= after_seconds < math.inf:
        raise ValueError("the time until a key ends is 0 seconds or more")
    with _alone(path):
        keys = read(path)
        found = next((key for key in keys if key.id == key_id), None)
        if found is None:
            raise ValueError(f"there is no key {key_id} in {path}")
        others = [key for key in keys if key.id != key_id]
        if after_seconds > 0:
            until = time.time() + after_seconds
            expires = until if found.expires is None else min(until, found.expires)
            others.append(replace(found, expires=expires))
        _write(path, others)
    return found


def rotate(path: Path, key_id: str, *, overlap_seconds: float = 3600.0) -> tuple[Key, str]:
    """A successor with the same owner, scopes and quota; the old key works for `overlap_seconds` more."""
    old = revoke(path, key_id, after_seconds=overlap_seconds)
    return add(path, old.owner, scopes=old.scopes, quota=old.quota, expires=old.expires)


def _unauthorized(detail: str) -> ServiceError:
    return ServiceError(
        "unauthorized", detail, field="Authorization", headers={"WWW-Authenticate": 'Bearer realm="gemm"'}
    )


def _key(row: dict[str, Any]) -> Key:
    key = Key(
        id=str(row["id"]),
        owner=str(row["owner"]),
        sha256=str(row["sha256"]),
        scopes=frozenset(row["scopes"]),
        quota=Quota(**row.get("quota", {})),
        created=float(row.get("created", 0.0)),
        expires=None if row.get("expires") is None else float(row["expires"]),
    )
    if key.expires is not None and not math.isfinite(key.expires):
        raise ValueError(f"key {key.id}: expires {key.expires}")
    if not _OWNER.fullmatch(key.owner):
        raise ValueError(f"key {key.id}: owner {key.owner!r}")
    if not re.fullmatch(r"[0-9a-f]{64}", key.sha256):
        raise ValueError(f"key {key.id}: sha256 isn't 64 hexadecimal digits")
    if key.scopes - SCOPES:
        raise ValueError(f"key {key.id}: scopes {sorted(key.scopes - SCOPES)}")
    return key


def _row(key: Key) -> dict[str, Any]:
    quota = {name: value for name in Quota.__slots__ if (value := getattr(key.quota, name)) is not None}
    row: dict[str, Any] = {
        "id": key.id,
        "owner": key.owner,
        "sha256": key.sha256,
        "scopes": sorted(key.scopes),
        "created": key.created,
    }
    if quota:
        row["quota"] = quota
    if key.expires is not None:
        row["expires"] = key.expires
    return row


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """While the file is edited nobody else edits it: its folder is locked, for the file itself is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _write(path: Path, keys: Iterable[Key]) -> None:
    """Replace the file in one step, mode 0600, synced, so that a reader sees the old rows or the new."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump({"keys": [_row(key) for key in keys]}, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
