"""The command line: what it teaches, how it refuses, and every command against a real service."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import psutil
import pytest

from service import cli
from service.cli import shadow
from service.client import Client, GemmError
from service.settings import Settings
from tests.service.real import ROOT, Service

rng = np.random.default_rng(11)


@pytest.fixture
def there(service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder to work in, with the commands pointed at the service."""
    monkeypatch.setenv("GEMM_URL", service.url)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(path: Path, *shape: int) -> np.ndarray:
    array = rng.standard_normal(shape).astype(np.float32)
    np.save(path, array)
    return array


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["--help"])
    assert done.value.code == 0
    top = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert re.search(rf"^    {command} ", top, re.M)
        with pytest.raises(SystemExit) as done:
            cli.main([command, "--help"])
        assert done.value.code == 0
        text = capsys.readouterr().out
        assert f"gemm-service {command}" in text.split("examples:")[1]


def test_every_setting_is_a_flag_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = capsys.readouterr().out
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')} " in text
    assert "Pydantic" not in text
    assert "(default: 64GiB)" in " ".join(text.split())


def test_no_or_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "commands:" in capsys.readouterr().err
    with pytest.raises(SystemExit) as done:
        cli.main(["multiply"])
    assert done.value.code == 2


def test_examples_of_the_help_parse() -> None:
    """Each example's flags exist: a parser is built and fed with it, up to the point where it would act."""
    checked = 0
    for name, (module, _) in cli.COMMANDS.items():
        loaded = importlib.import_module(f"service.cli.{module.partition(':')[0]}")
        parser = getattr(loaded, "arguments", None)
        if parser is None:
            continue
        for line in loaded._EXAMPLES.splitlines():
            command = re.split(r"\s{2,}", line.strip())[0].split()
            if command[:2] == ["gemm-service", name]:
                parser().parse_args(command[2:])
                checked += 1
    assert checked >= 10


def serve(*flags: str, under: Sequence[str] = (), **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GEMM_")}
    command = [*under, sys.executable, "-m", "service", "serve", *flags]
    return subprocess.run(
        command, cwd=ROOT, env=clean | environ, capture_output=True, text=True, timeout=60, check=False
    )


def test_wrong_setting_stops_start_up_in_one_line() -> None:
    done = serve(GEMM_PORT="99999")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("gemm-service: port = '99999' from the environment variable GEMM_PORT: ")


def test_open_to_the_network_without_keys_is_refused() -> None:
    done = serve("--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 2
    assert "--insecure" in done.stderr


def test_port_in_use_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = serve("--port", str(taken.getsockname()[1]), "--data", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("gemm-service: port = ")
    assert "Address already in use" in done.stderr


def test_metrics_port_in_use_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = serve("--port", "0", "--metrics-port", port, "--data", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith(f"gemm-service: metrics_port = {port}: can't listen on ")


def test_too_few_descriptors_are_said(tmp_path: Path) -> None:
    done = serve("--port", "0", "--data", str(tmp_path), under=("sh", "-c", 'ulimit -n 30; exec "$0" "$@"'))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "ulimit -n allows 30" in line


def test_what_the_system_does_not_give_is_said_by_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for flags, told in (
        (("--arena-bytes", "1000000000GiB"), "arena_bytes = "),
        (("--arena-bytes", "2000TiB"), "arena_bytes = "),
        (("--data", str(tmp_path / "file")), f"data = '{tmp_path / 'file'}': can't be the data folder: "),
    ):
        done = serve("--port", "0", "--data", str(tmp_path / "data"), *flags)
        assert done.returncode == 3
        assert told in done.stderr
        assert "Traceback" not in done.stderr


def test_data_folder_in_use_is_said(service: Service) -> None:
    done = serve("--port", "0", "--data", str(service.data))
    assert done.returncode == 3
    assert "held by another front" in done.stderr
    assert "Traceback" not in done.stderr


def test_shadowed_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shadow.complaint() is None
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "kernels"]:
        monkeypatch.delitem(sys.modules, name)
    told = shadow.complaint()
    assert told is not None
    assert str(tmp_path / "kernels") in told


def test_shadowed_start_stops_with_2(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; from service.cli import main; "
    code += "sys.exit(main(['serve', '--port', '0']))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "isn't this project's" in done.stderr


def test_gemm_from_files_to_a_file(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = save(there / "A.npy", 30, 40), save(there / "B.npy", 40, 20)
    bias = save(there / "bias.npy", 20)
    argv = ["gemm", "A.npy", "B.npy", "-o", "D.npy", "--bias", "bias.npy", "--activation", "relu"]
    assert cli.main([*argv, "--alpha", "2"]) == 0
    np.testing.assert_allclose(np.load("D.npy"), np.maximum(2 * a @ b + bias, 0), rtol=1e-4, atol=1e-4)
    assert "by reference-" in capsys.readouterr().err
    assert cli.main(["gemm", "A.npy", "B.npy"]) == 0
    first = float(capsys.readouterr().out.lstrip("[").split()[0])
    assert first == pytest.approx((a @ b)[0, 0], rel=1e-3, abs=1e-3)


def test_gemm_in_bf16(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (save(there / f"{n}.npy", 16, 16).astype(ml_dtypes.bfloat16) for n in "AB")
    assert cli.main(["gemm", "A.npy", "B.npy", "--dtype", "bf16", "-o", "D.npy"]) == 0
    d = np.load("D.npy").view(ml_dtypes.bfloat16)
    expected = a.astype(np.float32) @ b.astype(np.float32)
    np.testing.assert_allclose(d.astype(np.float32), expected, rtol=0.01, atol=0.05)
    assert cli.main(["gemm", "D.npy", "B.npy"]) == 2
    assert "say --dtype bf16" in capsys.readouterr().err
    assert cli.main(["gemm", "D.npy", "B.npy", "--dtype", "bf16", "-o", "E.npy"]) == 0


def test_put_multiply_keep_get_delete(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, w = save(there / "X.npy", 8, 40), save(there / "w.npy", 40, 20)
    assert cli.main(["put", "w.npy"]) == 0
    assert "handle:w  fp32 (40, 20)" in capsys.readouterr().out
    assert cli.main(["put", "w.npy", "--new"]) == 1
    assert "precondition_failed" in capsys.readouterr().err
    assert cli.main(["gemm", "X.npy", "handle:w", "--keep", "d"]) == 0
    assert cli.main(["tensors"]) == 0
    assert {"w", "d"} <= {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert cli.main(["tensors", "get", "d", "-o", "D.npy"]) == 0
    np.testing.assert_allclose(np.load("D.npy"), a @ w, rtol=1e-4, atol=1e-4)
    for name in ("w", "d"):
        assert cli.main(["tensors", "delete", name]) == 0
    assert cli.main(["tensors", "get", "d"]) == 1
    assert "404 not_found" in capsys.readouterr().err


def test_jobs(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = save(there / "A.npy", 8, 40), save(there / "B.npy", 40, 20)
    c = save(there / "C.npy", 20, 4)
    job = {
        "steps": [
            {"id": "h", "a": "A.npy", "b": "B.npy", "activation": "relu"},
            {"id": "y", "a": {"step": "h"}, "b": "C.npy"},
        ]
    }
    (there / "job.json").write_text(json.dumps(job))
    assert cli.main(["jobs", "submit", "job.json", "--wait", "--results", "out"]) == 0
    out = capsys.readouterr().out
    job_id = out.split()[0]
    assert re.search(r"y +done", out)
    np.testing.assert_allclose(np.load("out/y.npy"), np.maximum(a @ b, 0) @ c, rtol=1e-3, atol=1e-3)
    assert cli.main(["jobs"]) == 0
    assert f"{job_id} " in capsys.readouterr().out
    assert cli.main(["jobs", "show", job_id]) == 0
    assert cli.main(["jobs", "result", job_id, "h", "-o", "h.npy"]) == 0
    np.testing.assert_allclose(np.load("h.npy"), np.maximum(a @ b, 0), rtol=1e-4, atol=1e-4)
    assert cli.main(["jobs", "show", "nobody"]) == 1
    (there / "bad.json").write_text('{"steps": [{"id": "x", "a": {"step": "later"}, "b": "B.npy"}]}')
    assert cli.main(["jobs", "submit", "bad.json"]) == 2
    assert "no earlier step" in capsys.readouterr().err
    assert cli.main(["jobs", "cancel", job_id]) == 0
    assert capsys.readouterr().out == f"{job_id} is done\n"  # it had ended


@pytest.mark.parametrize(
    ("job", "told"),
    [
        ('["steps"]', "list"),
        ('{"steps": 1}', "list of objects"),
        ('{"steps": ["x"]}', "list of objects"),
        ('{"steps": [{"id": "x", "a": "handle:w"}]}', "lacks 'b'"),
        ('{"steps": [{"id": "x", "a": "handle:w", "b": "handle:w", "out": "y"}]}', "handle:NAME"),
        (
            '{"steps": [{"id": "x", "a": "handle:w", "b": "handle:w"},'
            ' {"id": "x", "a": "handle:w", "b": "handle:w"}]}',
            "two steps",
        ),
    ],
)
def test_a_wrong_job_file_is_told_apart(
    job: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.json"
    file.write_text(job)
    assert cli.main(["jobs", "submit", str(file), "--url", "http://127.0.0.1:1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_files_that_can_not_be_read_or_written_are_named(
    there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(there / "A.npy", 2, 2)
    (there / "junk.npy").write_bytes(b"junk")
    np.save(there / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    for arguments, told in (
        (["gemm", "A.npy", "junk.npy"], "junk.npy isn't a .npy file of numbers"),
        (["gemm", "A.npy", "objects.npy"], "objects.npy isn't a .npy file of numbers"),
        (["gemm", "A.npy", "A.npy", "-o", "none/D.npy"], "none/D.npy: No such file or directory"),
        (["tensors", "get", "w", "-o", "none/W.npy"], "none/W.npy: No such file or directory"),
        (["jobs", "result", "x", "y", "-o", "none/D.npy"], "none/D.npy: No such file or directory"),
    ):
        assert cli.main(arguments) == 2
        assert capsys.readouterr().err == f"gemm-service: {told}\n"


@pytest.mark.parametrize("value", ["nan", "0", "-1", "inf", "x"])
def test_a_timeout_that_is_no_time_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["tensors", "--timeout", value])
    assert "--timeout" in capsys.readouterr().err


def test_results_without_waiting_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["jobs", "submit", "job.json", "--results", "out"]) == 2
    assert "--wait" in capsys.readouterr().err


def test_variants_and_choice(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["variants"]) == 0
    assert "reference-numpy" in capsys.readouterr().out
    assert cli.main(["variants", "--choose", "64", "64", "64", "--dtype", "fp64"]) == 0
    assert "for the reason" in capsys.readouterr().out
    assert cli.main(["variants", "--choose", "64", "64", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["candidates"]


def test_bench(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "-m", "16", "-n", "16", "-k", "16", "--seconds", "0.3", "--clients", "2"]
    assert cli.main([*argv, "--keep-b", "--keep-d"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"[\d,]+ requests/s", out)
    assert "p50" in out
    assert "p99" in out
    assert cli.main(["tensors"]) == 0
    assert "bench" not in capsys.readouterr().out
    assert cli.main(["bench", "-m", "0"]) == 2


def test_service_that_is_not_there(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(there / "A.npy", 2, 2)
    assert cli.main(["gemm", "A.npy", "A.npy", "--url", "http://127.0.0.1:9", "--timeout", "0.5"]) == 1
    told = capsys.readouterr().err
    assert "can't connect to 127.0.0.1 port 9: " in told
    assert "GEMM_URL" in told
    assert cli.main(["gemm", "A.npy", "absent.npy"]) == 2
    assert "absent.npy: No such file" in capsys.readouterr().err


def test_keys_command(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys", "add", "alice", "--scopes", "gemm", "--expires-days", "1"]) == 0
    shown = capsys.readouterr()
    (token,) = shown.out.splitlines()  # alone, so that a script can take it
    told = shown.err
    key_id = token.split("_")[1]
    assert f"key {key_id} of alice: gemm" in told
    assert stat.S_IMODE(os.stat("keys.json").st_mode) == 0o600
    assert cli.main(["keys", "rotate", key_id]) == 0
    successor = capsys.readouterr().out.split("_")[1]
    assert cli.main(["keys", "revoke", successor]) == 0
    capsys.readouterr()
    assert cli.main(["keys", "list"]) == 0
    out = capsys.readouterr().out
    assert key_id in out
    assert successor not in out
    assert token not in out
    assert cli.main(["keys", "revoke", "nobody"]) == 2
    assert cli.main(["keys", "add", "al ice"]) == 2
    assert cli.main(["keys", "add", "carol", "--store-bytes", "4GiB", "--file", "carol.json"]) == 0
    (row,) = json.loads((there / "carol.json").read_text())["keys"]
    assert row["quota"] == {"store_bytes": 4 << 30}
    capsys.readouterr()
    assert cli.main(["keys", "list", "--file", "carol.json"]) == 0
    assert "store_bytes 4.0 GiB" in capsys.readouterr().out
    for wrong in (
        ["--requests-per-second", "0"],
        ["--expires-days", "-1"],
        ["--file", "carol.json/keys.json"],
    ):
        assert cli.main(["keys", "add", "dan", *wrong]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("gemm-service: ")


def refusal(client: Client) -> str:
    """Why the service won't talk to this client; "" where it does."""
    try:
        client.limits()
    except GemmError as error:
        return str(error)
    return ""


def test_serve_on_a_unix_socket_with_keys(tmp_path: Path) -> None:
    """Mode 0600, keys needed, a new key taken up without a restart, SIGTERM ends with 0 and removes the socket."""
    path = tmp_path / "s"
    keys = tmp_path / "keys.json"
    assert cli.main(["keys", "add", "alice", "--file", str(keys)]) == 0
    command = [sys.executable, "-m", "service", "serve", "--uds", str(path), "--keys-file", str(keys)]
    command += [
        "--data",
        str(tmp_path / "data"),
        "--backend",
        "numpy",
        "--arena-bytes",
        "64MiB",
        "--log-level",
        "warning",
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert f"unix:{path}" in process.stdout.readline()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with Client(f"unix:{path}", retries=1) as nobody:
            while not nobody.ready():
                time.sleep(0.05)
            assert "401 unauthorized" in refusal(nobody)
        from service import keys as book

        _, token = book.add(keys, "bob", scopes=["gemm"])
        with Client(f"unix:{path}", key=token) as bob:
            until = time.monotonic() + 60
            while "401" in refusal(bob):  # the file is looked at each second
                assert time.monotonic() < until
                time.sleep(0.05)
            a = rng.standard_normal((4, 4)).astype(np.float32)
            np.testing.assert_allclose(bob.gemm(a, a), a @ a, rtol=1e-4, atol=1e-5)
            with pytest.raises(Exception, match="403 forbidden"):
                bob.tensors()
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        process.stdout.close()
    assert not path.exists()


def test_started_in_a_folder_with_packages_of_the_same_names(tmp_path: Path) -> None:
    """The worker imports this project's packages, not what lies where the front was started."""
    for name in ("service", "kernels", "numpy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('foreign')")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from service.cli import main; "
    code += "sys.exit(main(['serve', '--port', '0', '--data', 'data', '--log-level', 'warning',"
    code += " '--backend', 'numpy', '--arena-bytes', '64MiB']))"
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            with Client(process.stdout.readline().split()[-1], retries=1) as client:
                until = time.monotonic() + 60
                while not client.ready():
                    assert time.monotonic() < until
                    time.sleep(0.05)
        finally:
            process.send_signal(signal.SIGTERM)


def test_metrics_on_their_own_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    made = Service(tmp_path, "--metrics-port", str(port), "--arena-bytes", "64MiB", "--log-level", "warning")
    try:
        with Client(f"http://127.0.0.1:{port}") as client:
            assert "gemm_queue_depth" in client.metrics()
    finally:
        made.close()


def test_live_soon_after_start(tmp_path: Path) -> None:
    """In processor time, since others use this computer too: at most three times what importing FastAPI takes.

    benchmarks/serving.py measures the seconds.
    """
    before = os.times()
    subprocess.run([sys.executable, "-c", "import fastapi, uvicorn"], check=True)
    after = os.times()
    bare = after.children_user + after.children_system - before.children_user - before.children_system
    made = Service(tmp_path, "--arena-bytes", "64MiB", "--log-level", "warning")
    try:
        assert made.http.get("/health/live").status_code == 200
        spent = psutil.Process(made.process.pid).cpu_times()
        assert spent.user + spent.system < 3 * bare
    finally:
        made.close()
