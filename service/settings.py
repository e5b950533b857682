"""How the service is run: receives flags, GEMM_* variables and a TOML file, hands on one frozen `Settings`.

Sources, the first that names a setting wins: command-line flags, environment (`GEMM_PORT` for `port`), TOML
file (`--config FILE` or `GEMM_CONFIG`), defaults. A wrong value or an unknown name raises `SettingsError`,
whose one line names the setting, where it came from and what is allowed. Sizes take "4GiB", "500 MB",
bytes.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

PREFIX = "GEMM_"

#: Variables of the same prefix that are not settings of the server, and who reads them.
OTHER_VARIABLES = {
    "GEMM_CONFIG": "path of the TOML file",
    "GEMM_URL": "the client's service",
    "GEMM_KEY": "the client's API key",
    "GEMM_KERNELS": "folder of compiled kernels",
    "GEMM_CACHE": "folder of self-test outcomes and measured times",
    "GEMM_COMMIT": "commit named in results files",
}

#: What Kubernetes injects for Services whose names begin with "gemm" (enableServiceLinks).
_SERVICE_LINK = re.compile(
    r"GEMM_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_GIB = 1 << 30
_LEAST_ARENA = 1 << 20
#: Settings that may hold a password: a complaint doesn't repeat them.
_SECRET = frozenset({"journal"})


class SettingsError(Exception):
    """Start-up stops: each line names a setting, its source and what is allowed."""


def parse_bytes(value: object) -> object:
    """Bytes of "4GiB" (1024³), "4GB" (1000³), "4096"; other values pass unchanged to the type check."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError('not a size; write "4GiB", "500MB" or a number of bytes')
    number, unit, binary = match.groups()
    base = 1024 if binary else 1000
    return int(float(number) * base ** " kmgt".index(unit.lower() or " "))


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def memory_limit() -> int:
    """Bytes this process may use: the cgroup's limit where one is set, else the machine's memory."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def _data_folder() -> Path:
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "gemm-service"


class Settings(BaseModel):
    """All settings of a front and its workers. Where 0 means "derived", the field holds the derived value."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    # Where it listens.
    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="TCP port, 0 to 65535; 0 takes a free one")
    uds: Path | None = Field(
        None, description="Unix socket (mode 0600) to listen on instead of host and port"
    )
    local: bool = Field(
        True, description="Serve clients on this machine through shared memory too: true or false"
    )
    hosts: Annotated[tuple[str, ...], BeforeValidator(_split)] = Field(
        (),
        description='Names taken in Host, comma-separated, without port; "*" takes all; loopback always is',
    )
    metrics_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="Port of /metrics and /health/* alone, never with TLS, 1 to 65535; unset: the service's port",
    )
    grpc_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of the inference protocol over gRPC, 0 to 65535; 0 takes a free one; unset: none",
    )

    # Who may.
    keys_file: Path | None = Field(None, description="File of API keys, made by `gemm-service keys add`")
    insecure: bool = Field(False, description="Listen beyond loopback without keys: true or false")

    audit_file: Path | None = Field(
        None, description="File that takes who stored and deleted what, a line each; unset: the log"
    )
    tls_cert: Path | None = Field(
        None,
        description="Certificate chain (PEM) to speak TLS with; read again when it changes; needs tls_key",
    )
    tls_key: Path | None = Field(None, description="Private key (PEM) of tls_cert")
    tls_client_ca: Path | None = Field(
        None,
        description="CA (PEM) that clients' certificates must come from (mTLS); unset: clients need none",
    )

    # Where it computes and keeps.
    data: Path = Field(
        default_factory=_data_folder,
        description="Folder of tensors and jobs; unset: gemm-service in $XDG_DATA_HOME or ~/.local/share",
    )
    store: str | None = Field(
        None,
        pattern=r"^(s3://[^/]+(/.*)?|file:///.+)$",
        description="Tensors of fronts that share them: s3://bucket/prefix, or file:///folder; goes with journal",
    )
    journal: str | None = Field(
        None,
        pattern=r"^postgres(ql)?://",
        repr=False,
        description="Jobs and names of fronts that share them: postgresql://…; unset: SQLite in data",
    )
    shared_seconds: Seconds = Field(
        10, description="Seconds that a request to store or journal may take, above 0; then 503"
    )
    lease_seconds: Seconds = Field(
        10, description="Seconds without a sign of life after which others run a front's jobs, above 0"
    )
    device: Literal["auto", "cpu", "cuda", "virtual"] = Field(
        "auto", description="auto, cpu, cuda or virtual"
    )
    backend: Literal["auto", "numpy", "torch"] = Field(
        "auto", description="Reference on a CPU: auto (torch where it is installed), numpy or torch"
    )
    workers: int = Field(
        0, ge=0, le=64, description="Worker processes, 1 to 64; 0: one a visible GPU, or one on a CPU"
    )

    shard_bytes: Bytes = Field(
        0,
        description="Stored tensors that each rank of sharded products keeps; 0: a quarter of its device's memory",
    )
    ray_address: str | None = Field(
        None,
        min_length=1,
        description="Ray cluster that places the ranks of sharded products: auto or HOST:PORT; goes with ray_ranks",
    )
    ray_ranks: int = Field(
        0,
        ge=0,
        le=1024,
        description="Ranks there, 2 to 1024, each with a GPU (with a CPU where device is cpu)",
    )

    # Memory and bodies.
    arena_bytes: Bytes = Field(
        0,
        description="Shared memory for operands and results; 0: a quarter of the memory limit, 4GiB at most",
    )
    max_body_bytes: Bytes = Field(0, description="Largest request body; 0: the arena's size")
    max_json_bytes: Bytes = Field(64 << 20, description="Largest JSON body (it is parsed on the heap)")
    grpc_message_bytes: Bytes = Field(
        256 << 20, description="Largest message over gRPC (it is held on the heap); 2GiB at most"
    )
    grpc_compression: Literal["none", "deflate", "gzip"] = Field(
        "none",
        description="How replies over gRPC are compressed, to clients that take it: none, deflate or gzip",
    )
    max_output_bytes: Bytes = Field(0, description="Largest result of one product; 0: the arena's size")
    max_flops: float = Field(
        1e14, gt=0, allow_inf_nan=False, description="Most FLOPs (2·M·N·K·batch) of one product, above 0"
    )
    key_bytes: Bytes = Field(
        0,
        description="Arena bytes one owner may hold at once; 0: half the arena with keys, all of it without",
    )
    store_memory_bytes: Bytes = Field(0, description="Stored tensors kept in the arena; 0: half the arena")
    store_disk_bytes: Bytes = Field(64 * _GIB, description="Stored tensors kept on disk")

    local_bytes: Bytes = Field(
        0, description="Memory that local clients of one owner may lend at once; 0: half the memory limit"
    )

    # Queue and batches.
    queue_requests: int = Field(1024, ge=1, description="Requests that may wait, 1 or more; then 429")
    queue_bytes: Bytes = Field(0, description="Operand bytes that may wait; 0: the arena's size; then 429")
    batch_requests: int = Field(64, ge=1, le=4096, description="Most requests in a batch, 1 to 4096")
    batch_delay_ms: float = Field(
        0, ge=0, le=1000, allow_inf_nan=False, description="Wait for a fuller batch, milliseconds, 0 to 1000"
    )

    awake_ms: float | None = Field(
        None,
        ge=0,
        le=100,
        allow_inf_nan=False,
        description="Milliseconds that front and a GPU's worker wait awake for each other, 0 to 100; unset: 2 where"
        " there are two cores for each of them, else 0",
    )

    # Jobs.
    job_steps: int = Field(256, ge=1, le=65536, description="Most steps of a job, 1 to 65536")
    job_bytes: Bytes = Field(4 * _GIB, description="Most bytes of inline operands and results of a job")
    result_ttl_seconds: Seconds = Field(86400, description="Seconds that results of a job are kept, above 0")

    # Memory of clients on this host.
    shared_memory: bool = Field(
        False, description="Let keys with scope admin register shared memory: true or false"
    )
    shared_memory_keys: Annotated[tuple[str, ...], BeforeValidator(_split)] = Field(
        (), description="Names in /dev/shm that may be registered, comma-separated; `name*` takes a beginning"
    )
    shared_memory_lease_seconds: Seconds = Field(
        3600, description="Seconds without use after which registered memory is let go, above 0"
    )

    # Slow and dead peers.
    header_bytes: int = Field(
        32768,
        ge=1024,
        le=1 << 20,
        description="Most bytes of request line and headers, 1024 to 1048576; then 431",
    )
    header_seconds: Seconds = Field(
        10, description="Seconds for a request's headers to arrive, above 0; then 408"
    )
    body_bytes_per_second: float = Field(
        1024,
        ge=0,
        allow_inf_nan=False,
        description="Least rate of an arriving body, bytes/s, 0 or more; then 408",
    )
    write_stall_seconds: Seconds = Field(
        30, description="Seconds a reply may make no progress, above 0; then cut off"
    )
    keep_alive_seconds: Seconds = Field(75, description="Seconds an idle connection is kept, above 0")
    grace_seconds: float = Field(
        30,
        ge=0,
        allow_inf_nan=False,
        description="Seconds after SIGTERM for accepted work to finish, 0 or more",
    )

    # Worker's health.
    start_seconds: Seconds = Field(120, description="Seconds for a worker to get ready, above 0")
    ping_seconds: Seconds = Field(1, description="Seconds between pings to a worker, above 0")
    hang_seconds: Seconds = Field(
        10, description="Seconds without an answer after which a worker is killed, above 0"
    )

    # What it tells.
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="auto (console on a terminal, else json), console or json"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="debug, info, warning or error"
    )
    otel_endpoint: str | None = Field(
        None, pattern=r"^https?://", description="URL of an OTLP/HTTP collector; unset: no traces are sent"
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and info.field_name not in ("insecure", "local", "shared_memory"):
            raise ValueError("true and false aren't taken here")
        return value

    @field_validator(
        "data", "uds", "keys_file", "audit_file", "tls_cert", "tls_key", "tls_client_ca", mode="after"
    )
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser().absolute()

    @field_validator("hosts", mode="after")
    @classmethod
    def _names(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        """What can't be in Host would never match, and the service would refuse all under that name."""
        for host in hosts:
            if "/" in host or (host.count(":") == 1) or any(map(str.isspace, host)):
                raise ValueError(f"{host!r} is no name: without scheme, port and path")
        return hosts

    @field_validator("arena_bytes", mode="after")
    @classmethod
    def _arena(cls, size: int) -> int:
        if 0 < size < _LEAST_ARENA:
            raise ValueError("1MiB or more, with its unit")
        return size or min(memory_limit() // 4, 4 * _GIB)

    @field_validator("grpc_message_bytes", mode="after")
    @classmethod
    def _message(cls, size: int) -> int:
        if size > 2 * _GIB:
            raise ValueError("2GiB at most, as gRPC counts in 32 bits")
        return size

    @field_validator("max_body_bytes", "max_output_bytes", "queue_bytes", mode="after")
    @classmethod
    def _whole_arena(cls, size: int, info: ValidationInfo) -> int:
        return size or info.data.get("arena_bytes", 0)

    @field_validator("store_memory_bytes", mode="after")
    @classmethod
    def _half_arena(cls, size: int, info: ValidationInfo) -> int:
        return size or info.data.get("arena_bytes", 0) // 2

    @field_validator("local_bytes", mode="after")
    @classmethod
    def _half_the_machine(cls, size: int) -> int:
        return size or memory_limit() // 2

    @field_validator("key_bytes", mode="after")
    @classmethod
    def _key_share(cls, size: int, info: ValidationInfo) -> int:
        arena = info.data.get("arena_bytes", 0)
        return size or (arena if info.data.get("keys_file") is None else arena // 2)

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.store_memory_bytes > self.arena_bytes:
            raise ValueError("store_memory_bytes: must not exceed arena_bytes, of which it is a part")
        if (self.store is None) != (self.journal is None):
            name, other = ("journal", "store") if self.store is None else ("store", "journal")
            raise ValueError(
                f"{name}: goes with {other}: fronts share both, or each keeps its own in its data folder"
            )
        if (self.ray_address is None) != (self.ray_ranks == 0) or self.ray_ranks == 1:
            raise ValueError(
                "ray_ranks: it and ray_address go together, and a product is shared by 2 ranks or more"
            )
        if self.uds is not None and len(os.fsencode(self.uds)) > 107:
            raise ValueError("uds: the path must be shorter than 108 bytes, as the kernel has it")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert: it and tls_key go together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca: needs tls_cert and tls_key")
        if self.uds is not None and self.tls_cert is not None:
            raise ValueError("uds: a Unix socket takes no TLS")
        return self

    @property
    def loopback(self) -> bool:
        """Whether only this machine's own users can reach the service."""
        if self.uds is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    config: Path | None = None,
) -> Settings:
    """Settings from all sources. `flags` holds what was given on the command line, by field name."""
    environ = os.environ if environ is None else environ
    if config is None and environ.get("GEMM_CONFIG"):
        config = Path(environ["GEMM_CONFIG"])
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    problems: list[str] = []
    for name, value, source in [
        *_from_file(config, problems),
        *_from_environment(environ, problems),
        *((name, value, f"the flag --{name.replace('_', '-')}") for name, value in (flags or {}).items()),
    ]:
        values[name] = value
        sources[name] = source
    if problems:
        raise SettingsError("\n".join(problems))
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise SettingsError("\n".join(_explain(error, sources))) from None


def _from_environment(environ: Mapping[str, str], problems: list[str]) -> list[tuple[str, Any, str]]:
    found = []
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if _SERVICE_LINK.fullmatch(variable) and (name not in Settings.model_fields or "://" in value):
            continue
        if name in Settings.model_fields and variable.isupper():
            found.append((name, value, f"the environment variable {variable}"))
        else:
            problems.append(f"{variable} in the environment is no setting{_nearest(name, PREFIX, str.upper)}")
    return found


def _from_file(path: Path | None, problems: list[str]) -> list[tuple[str, Any, str]]:
    if path is None:
        return []
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: can't read the settings file: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path}: not a TOML file: {error}") from None
    found = []
    for name, value in document.items():
        if name in Settings.model_fields:
            found.append((name, value, str(path)))
        else:
            problems.append(f"{name} in {path} is no setting{_nearest(name)}")
    return found


def _nearest(name: str, prefix: str = "", case: Any = str) -> str:
    near = get_close_matches(name, Settings.model_fields, n=1)
    return f"; did you mean {prefix}{case(near[0])}?" if near else "; `gemm-service serve --help` lists all"


def _explain(error: ValidationError, sources: Mapping[str, str]) -> list[str]:
    lines: dict[str, str] = {}
    for one in error.errors(include_url=False):
        if not one["loc"]:
            name, _, complaint = str(one["ctx"]["error"]).partition(": ")
            lines[name] = f"{name} from {sources.get(name, 'the defaults')}: {complaint}"
            continue
        name = str(one["loc"][0])
        complaint = one["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        value = "(not shown)" if name in _SECRET else repr(one["input"])
        given = f"{name} = {value} from {sources.get(name, 'the defaults')}"
        lines.setdefault(name, f"{given}: {complaint} (allowed: {Settings.model_fields[name].description})")
    return list(lines.values())
