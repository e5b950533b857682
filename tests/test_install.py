"""From a clean checkout: the light install, the demo, the Dockerfile's steps and the README's commands."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.load import free_port
from tests.build_context import let_through
from tests.service.real import running

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.ci


def run(command: list[str] | str, cwd: Path, *, seconds: float = 600, **environ: str) -> str:
    """Run in an environment without this one's virtual environment; the output, also of a failure.

    What is installed isn't compiled to bytecode, most of which no test would load.
    """
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in ("VIRTUAL_ENV", "PYTHONPATH", "MAKEFLAGS")
    }
    env["PIP_COMPILE"] = "0"
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**env, **environ},
        shell=isinstance(command, str),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def tracked() -> list[str]:
    names = run(["git", "ls-files", "-z"], ROOT).split("\0")
    return [name for name in names if name and ((ROOT / name).is_file() or (ROOT / name).is_symlink())]


def copy(names: Iterable[str], target: Path) -> None:
    """Files of this folder, links as links: one to a folder is no file, and yet git has it."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files as they are now, elsewhere."""
    target = tmp_path_factory.mktemp("clone") / "gemm"
    copy(tracked(), target)
    return target


@pytest.fixture(scope="module")
def demo(clone: Path) -> str:
    """`make demo` on a fresh machine."""
    return run(["make", "demo", f"PYTHON={sys.executable}"], clone)


def test_make_demo_installs_no_torch_and_multiplies(clone: Path, demo: str) -> None:
    listed = run([str(clone / ".venv/bin/python"), "-m", "pip", "list"], clone)
    assert not re.search(r"^(torch|nvidia-\S+) ", listed, re.MULTILINE)
    assert "gemm-service" in listed
    assert "reference-numpy" in demo


def test_a_second_demo_installs_nothing(clone: Path, demo: str) -> None:
    assert "pip install" in demo
    again = run(["make", "demo", f"PYTHON={sys.executable}"], clone)
    assert "pip install" not in again
    assert "reference-numpy" in again


def test_the_installed_command_serves_from_any_folder(clone: Path, demo: str, tmp_path: Path) -> None:
    command = str(clone / ".venv/bin/gemm-service")
    assert re.search(r"\d+\.\d+", run([command, "--version"], tmp_path))
    assert "--port" in run([command, "serve", "--help"], tmp_path)


def test_the_wheel_holds_what_the_service_needs(clone: Path, demo: str, tmp_path: Path) -> None:
    python = str(clone / ".venv/bin/python")
    run([python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), "."], clone)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(run([python, "-m", "zipfile", "-l", str(wheel)], tmp_path).split())
    for needed in ("service/app.py", "service/py.typed", "kernels/selector.py", "kernels/py.typed"):
        assert needed in names
    assert "service/page/results/h200/ladder.json" in names
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)


def test_the_bill_of_materials_names_everything_that_is_installed(
    clone: Path, demo: str, tmp_path: Path
) -> None:
    python = str(clone / ".venv/bin/python")
    tool = str(Path(sys.executable).parent / "cyclonedx-py")
    project = ["--pyproject", str(clone / "pyproject.toml")]
    run([tool, "environment", *project, "-o", str(tmp_path / "sbom.json"), python], tmp_path)
    bill = json.loads((tmp_path / "sbom.json").read_text())
    listed = json.loads(run([python, "-m", "pip", "list", "--format", "json"], tmp_path))
    installed = {(each["name"].lower().replace("_", "-"), each["version"]) for each in listed}
    named = {(each["name"].lower().replace("_", "-"), each["version"]) for each in bill["components"]}
    named.add((bill["metadata"]["component"]["name"], bill["metadata"]["component"]["version"]))
    assert installed <= named
    assert all(each.get("purl") for each in bill["components"])


def test_the_dockerfile_is_clean() -> None:
    run([str(Path(sys.executable).parent / "hadolint"), "Dockerfile"], ROOT)


def stage(name: str) -> str:
    """A stage of the Dockerfile, its lines that go on joined."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    _, _, rest = text.partition(f" AS {name}\n")
    return re.split(r"^FROM ", rest, maxsplit=1, flags=re.MULTILINE)[0]


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    """What `COPY` brings and `RUN` does on the way to target cpu, in a folder for `/opt`; without torch's download."""
    opt = Path(tempfile.mkdtemp(prefix="gemm-image-"))
    opt.chmod(0o755)
    context = opt / "context"
    copy(let_through(tracked()), context)
    source = opt / "src"
    source.mkdir()
    for line in re.findall(r"^(?:COPY|RUN) .+$", stage("build") + stage("build-cpu"), re.MULTILINE):
        word, _, rest = line.partition(" ")
        if word == "COPY":
            *names, target = rest.split()
            for name in names:
                into = source / target if target != "./" else source / name
                if (context / name).is_dir():  # links stay links, as in an image
                    shutil.copytree(context / name, into, symlinks=True)
                else:
                    shutil.copy2(context / name, into)
            continue
        rest = (
            rest.replace("'.[torch,", "'.[")
            .replace("/opt/", f"{opt}/")
            .replace("python -m venv", "PY -m venv")
        )
        run(rest.replace("PY ", f"{sys.executable} "), source, TORCH_ARGS="")
    yield opt
    shutil.rmtree(opt)


def test_the_images_bill_of_materials_and_command(image: Path, tmp_path: Path) -> None:
    assert re.search(r"\d+\.\d+", run([str(image / "venv/bin/gemm-service"), "--version"], tmp_path))
    named = {each["name"] for each in json.loads((image / "venv/sbom.json").read_text())["components"]}
    assert {"uvicorn", "numpy", "grpcio", "opentelemetry-sdk"} <= named
    assert "cyclonedx-bom" not in named


def test_the_image_holds_the_ladder_as_it_was_measured(image: Path) -> None:
    measured = [path.parent.name for path in (image / "venv").rglob("service/page/results/*/ladder.json")]
    assert "h200" in measured


#: As a container runs it: a read-only root, a folder for data, any user of group 0. A tmpfs over /root lets that user
#: reach an interpreter that lies there.
CONTAINED = """
mount -t tmpfs tmpfs /mnt && mkdir /mnt/python /mnt/data
mount --bind {python} /mnt/python
case {python} in /root/*)
  mount -t tmpfs -o mode=755 tmpfs /root && mkdir -p {python} && mount --bind /mnt/python {python};;
esac
chgrp 0 /mnt/data && chmod 1770 /mnt/data
mount -o remount,bind,ro /
exec setpriv --reuid 54321 --regid 0 --clear-groups --no-new-privs --bounding-set -all \
  env -i {environ} {image}/venv/bin/{command}
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="another root needs root")
def test_the_image_runs_read_only_as_any_user_and_says_how_it_is(image: Path, tmp_path: Path) -> None:
    environ = dict(re.findall(r"(GEMM_\w+)=(\S+)", stage("runtime") + stage("cpu")))
    port = free_port()
    environ |= {
        "GEMM_DATA": "/mnt/data",
        "TMPDIR": "/mnt/data",
        "GEMM_PORT": str(port),
        "GEMM_INSECURE": "true",
    }
    environ |= {"GEMM_ARENA_BYTES": "64MiB", "PYTHONDONTWRITEBYTECODE": "1", "PATH": "/usr/bin:/bin"}
    entry = json.loads(re.findall(r"^ENTRYPOINT (.+)$", stage("runtime"), re.MULTILINE)[0])
    entry += json.loads(re.findall(r"^CMD (.+)$", stage("runtime"), re.MULTILINE)[0])
    script = CONTAINED.format(
        python=sys.base_prefix,
        environ=" ".join(f"{name}={value}" for name, value in environ.items()),
        image=image,
        command=" ".join(entry),
    )
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(["unshare", "--mount", "sh", "-ec", script], stdout=log, stderr=log)
        try:
            (check,) = re.findall(r"HEALTHCHECK .*CMD (\[.+\])$", stage("runtime"), re.MULTILINE)
            command = [sys.executable if word == "python" else word for word in json.loads(check)]
            command = [word.replace("127.0.0.1:8000", f"127.0.0.1:{port}") for word in command]
            end = time.monotonic() + 60
            while subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode:
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < end, (tmp_path / "log").read_text()
                time.sleep(0.3)
            product = {"a": [[1, 2]], "b": [[3], [4]], "out": {"handle": "d"}, "durable": True}
            answer = httpx.post(f"http://127.0.0.1:{port}/gemm", json=product, timeout=30)
            assert answer.status_code == 200, answer.text
            assert httpx.get(f"http://127.0.0.1:{port}/tensors/d", timeout=30).status_code == 200
            assert Path(f"/proc/{process.pid}/status").read_text().count("54321") == 4
            with pytest.raises(OSError, match="Read-only"):
                Path(f"/proc/{process.pid}/root/tmp/written").write_text("no")
            process.send_signal(signal.SIGTERM)
            assert process.wait(40) == 0, (tmp_path / "log").read_text()
        finally:
            process.kill()
            process.wait()


def blocks(language: str) -> list[str]:
    """Code blocks of the README."""
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )


def test_the_readmes_curl_commands_answer(tmp_path: Path) -> None:
    import numpy as np

    (commands,) = [block for block in blocks("sh") if "curl" in block]
    with running(tmp_path / "data") as service:
        service.ready()
        script = commands.replace("http://127.0.0.1:8000", service.url).replace(
            "curl -s", "curl -sS --fail-with-body"
        )
        script = script.replace(".venv/bin/python", sys.executable)
        output = run("set -e\n" + script, tmp_path)
    assert '"d":[[2.0,4.0],[6.0,8.0]]' in output
    a = np.fromfile(tmp_path / "a.bin", np.float32).reshape(8, 256)
    weight = np.load(tmp_path / "weight.npy")
    d = np.fromfile(tmp_path / "d.bin", np.float32).reshape(8, 32)
    np.testing.assert_allclose(d, a @ weight, rtol=1e-4, atol=1e-4)
    assert "candidates" in output


def test_the_readmes_python_runs(tmp_path: Path) -> None:
    import numpy as np

    code = "\n".join(blocks("python"))
    names: dict[str, Any] = {}
    with running(tmp_path / "data") as service:
        service.ready()
        here = code.replace("127.0.0.1:8000", service.url.removeprefix("http://"))
        exec(compile(here, "README.md", "exec"), names)
    np.testing.assert_allclose(names["d"], names["a"] @ names["b"], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(names["y"], names["a"] @ names["b"] @ names["b"], rtol=1e-9, atol=1e-9)


def test_every_make_target_that_the_readme_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert named <= targets, named - targets


def test_every_file_that_the_readme_links_exists() -> None:
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert "://" in target or (ROOT / target).exists(), target
