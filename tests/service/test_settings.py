"""Settings: which source wins, and that a wrong value names itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from service.settings import Settings, SettingsError, load, memory_limit, parse_bytes


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def complaint(**sources: object) -> str:
    with pytest.raises(SettingsError) as caught:
        load(**({"environ": {}} | sources))  # type: ignore[arg-type]
    return str(caught.value)


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path / "gemm.toml", 'port = 1\nqueue_requests = 2\nworkers = 3\nhost = "::1"')
    environ = {"GEMM_PORT": "4", "GEMM_QUEUE_REQUESTS": "5"}
    settings = load({"port": 6}, environ=environ, config=file)
    assert (settings.port, settings.queue_requests, settings.workers) == (6, 5, 3)
    assert (settings.host, settings.batch_requests) == ("::1", 64)


def test_config_file_named_by_environment(tmp_path: Path) -> None:
    file = write(tmp_path / "gemm.toml", "port = 77")
    assert load(environ={"GEMM_CONFIG": str(file)}).port == 77


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GiB", 4 << 30),
        ("4 gib", 4 << 30),
        ("1.5k", 1500),
        ("500MB", 500_000_000),
        ("17", 17),
        ("0", 0),
        ("2Ki", 2048),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected
    assert load({"max_json_bytes": text}, environ={}).max_json_bytes == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4 GiB more", "1e9", "0x10", "four"])
def test_sizes_refused(text: str) -> None:
    message = complaint(environ={"GEMM_ARENA_BYTES": text})
    assert message.startswith(f"arena_bytes = {text!r} from the environment variable GEMM_ARENA_BYTES: ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "65536"),
        ("port", "-1"),
        ("port", "eighty"),
        ("device", "gpu"),
        ("workers", "-1"),
        ("insecure", "perhaps"),
        ("ping_seconds", "0"),
        ("hang_seconds", "nan"),
        ("max_flops", "inf"),
        ("log_level", "loud"),
        ("otel_endpoint", "collector:4318"),
        ("batch_delay_ms", "-1"),
        ("grpc_message_bytes", "4GiB"),
    ],
)
def test_wrong_value_names_setting_source_and_what_is_allowed(name: str, value: str) -> None:
    variable = f"GEMM_{name.upper()}"
    message = complaint(environ={variable: value})
    assert "\n" not in message
    assert message.startswith(f"{name} = {value!r} from the environment variable {variable}: ")
    assert f"(allowed: {Settings.model_fields[name].description})" in message
    assert f"from the flag --{name.replace('_', '-')}: " in complaint(flags={name: value})


def test_wrong_value_in_file_names_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "gemm.toml", "port = true")
    assert f"port = True from {file}: " in complaint(config=file)


def test_unknown_names_are_refused_with_a_hint(tmp_path: Path) -> None:
    assert (
        complaint(environ={"GEMM_PROT": "1"})
        == "GEMM_PROT in the environment is no setting; did you mean GEMM_PORT?"
    )
    file = write(tmp_path / "gemm.toml", "quue_requests = 1")
    assert complaint(config=file) == f"quue_requests in {file} is no setting; did you mean queue_requests?"
    assert "no setting" in complaint(environ={"GEMM_port": "1"})


def test_unreadable_and_broken_files_are_named(tmp_path: Path) -> None:
    assert "can't read the settings file" in complaint(config=tmp_path / "absent.toml")
    assert "not a TOML file" in complaint(config=write(tmp_path / "a.toml", "port: 1"))


def test_kubernetes_service_links_are_not_settings() -> None:
    links = {
        "GEMM_PORT": "tcp://10.0.0.7:8000",
        "GEMM_SERVICE_HOST": "10.0.0.7",
        "GEMM_SERVICE_PORT": "8000",
        "GEMM_SERVICE_PORT_HTTP": "8000",
        "GEMM_PORT_8000_TCP": "tcp://10.0.0.7:8000",
        "GEMM_PORT_8000_TCP_ADDR": "10.0.0.7",
        "GEMM_BIG_PORT_8000_TCP_PROTO": "tcp",
        "GEMM_KERNELS": "/opt/kernels",
    }
    assert load(environ=links).port == 8000


def test_derived_sizes() -> None:
    settings = load({"arena_bytes": "64MiB"}, environ={})
    arena = 64 << 20
    assert settings.max_body_bytes == settings.max_output_bytes == settings.queue_bytes == arena
    assert settings.store_memory_bytes == arena // 2
    assert settings.key_bytes == arena
    assert load({"arena_bytes": arena, "keys_file": "k"}, environ={}).key_bytes == arena // 2
    default = load(environ={})
    assert default.arena_bytes == min(memory_limit() // 4, 4 << 30)


def test_settings_that_contradict_each_other() -> None:
    message = complaint(environ={"GEMM_ARENA_BYTES": "1MiB", "GEMM_STORE_MEMORY_BYTES": "2MiB"})
    assert message.startswith(
        "store_memory_bytes from the environment variable GEMM_STORE_MEMORY_BYTES: must not"
    )
    assert complaint(flags={"uds": "/" + "x" * 107}).startswith(
        "uds from the flag --uds: the path must be shorter"
    )


def test_hosts_and_paths() -> None:
    settings = load({"hosts": "a.example, b.example", "data": "~/gemm"}, environ={})
    assert settings.hosts == ("a.example", "b.example")
    assert settings.data == Path.home() / "gemm"
    assert load({"data": "d"}, environ={}).data == Path.cwd() / "d"


@pytest.mark.parametrize("host", ["gemm.example:8000", "https://gemm.example", "a b"])
def test_a_name_that_can_not_be_in_host_is_refused(host: str) -> None:
    with pytest.raises(SettingsError, match=r"hosts .*without scheme, port and path"):
        load({"hosts": f"fine.example,{host}"}, environ={})
    assert load({"hosts": "::1,[::1],*"}, environ={}).hosts == ("::1", "[::1]", "*")


def test_an_arena_without_its_unit_is_refused() -> None:
    with pytest.raises(SettingsError, match="arena_bytes = '4' from the flag --arena-bytes: 1MiB or more"):
        load({"arena_bytes": "4"}, environ={})


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        load(environ={}).port = 1


@pytest.mark.parametrize(
    ("values", "loopback"),
    [
        ({}, True),
        ({"host": "::1"}, True),
        ({"host": "127.8.9.1"}, True),
        ({"host": "localhost"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": "gemm.example"}, False),
        ({"host": "0.0.0.0", "uds": "s"}, True),
    ],
)
def test_loopback(values: dict[str, str], loopback: bool) -> None:
    assert load(values, environ={}).loopback is loopback


def test_imports_are_light() -> None:
    """The front imports settings first; what takes long to import stays out of it."""
    code = "import service.settings, sys; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"numpy", "torch", "fastapi", "httpx", "rich"} & set(modules)


def test_store_and_journal_go_together() -> None:
    shared = {"GEMM_STORE": "s3://bucket/prefix", "GEMM_JOURNAL": "postgresql://host/database"}
    assert load(environ=shared).store == "s3://bucket/prefix"
    for name, other in (("STORE", "journal"), ("JOURNAL", "store")):
        message = complaint(environ={f"GEMM_{name}": shared[f"GEMM_{name}"]})
        assert message.startswith(
            f"{name.lower()} from the environment variable GEMM_{name}: goes with {other}"
        )


@pytest.mark.parametrize("store", ["bucket/prefix", "gs://bucket", "s3://", "file://", "file://relative"])
def test_stores_refused(store: str) -> None:
    environ = {"GEMM_STORE": store, "GEMM_JOURNAL": "postgresql://host/database"}
    assert complaint(environ=environ).startswith(
        f"store = {store!r} from the environment variable GEMM_STORE: "
    )


def test_a_password_is_not_repeated() -> None:
    environ = {"GEMM_STORE": "s3://bucket", "GEMM_JOURNAL": "mysql://user:pass-word@host/database"}
    assert "pass-word" not in complaint(environ=environ)
    settings = load(environ=environ | {"GEMM_JOURNAL": "postgresql://user:pass-word@host/database"})
    assert "pass-word" not in repr(settings)


def test_without_the_extra_it_is_said_what_to_install() -> None:
    code = """
import sys
sys.modules["psycopg"] = None
from service import app
from service.settings import load
settings = load(environ={"GEMM_STORE": "s3://bucket", "GEMM_JOURNAL": "postgresql://host/database"})
app.store_of(settings, None, lambda *tensors: None)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "SettingsError" in ran.stderr
    assert "pip install 'gemm-service[cluster]'" in ran.stderr


@pytest.mark.parametrize(
    "flags", [{"ray_address": "auto"}, {"ray_ranks": 4}, {"ray_address": "a:1", "ray_ranks": 1}]
)
def test_ranks_in_a_cluster_have_its_address_and_are_two_or_more(flags: dict[str, object]) -> None:
    assert "ray_ranks" in complaint(flags=flags)
    assert "it and ray_address go together" in complaint(flags=flags)
    assert load({"ray_address": "auto", "ray_ranks": 2}, environ={}).ray_ranks == 2
