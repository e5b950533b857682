"""`make demo`: starts the real service, sends it matrices in every form, checks each answer against numpy.

Read it from top to bottom: `main` lists the steps, each function is one of them. A wrong answer ends the
run with status 1. Nothing stays behind: the server is stopped and its data folder is a temporary one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from service.client import Client, Handle, Step

Array = np.ndarray[Any, Any]
rng = np.random.default_rng(2024)


def main(argv: Sequence[str] | None = None) -> int:
    """The demonstration, step by step."""
    parser = argparse.ArgumentParser(prog="python -m service.demo", description="Show the service at work.")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "virtual"), default="auto")
    device = parser.parse_args(argv).device
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gemm-demo-") as folder, server(Path(folder), device) as url:
        with Client(url) as client:
            before = counters(client.metrics())
            store_a_weight(client)
            gemm_as_json(url)
            gemm_as_safetensors(url)
            gemm_against_the_weight(client)
            job_of_eight(client)
            if device == "virtual":
                gemm_on_the_virtual_gpu(client)
            what_would_run(client)
            metrics_that_moved(before, counters(client.metrics()))
        say("Stop the service: SIGTERM, accepted work finishes, exit status 0")
    print(f"\nAll results are right. {time.perf_counter() - began:.1f} s in all.")
    print("Next: make serve, then http://127.0.0.1:8000 in a browser; README.md has more to try.")
    return 0


# The steps


def store_a_weight(client: Client) -> None:
    """Keep a 512 × 256 matrix on the service, under the name `weight`."""
    say("Store a weight: PUT /tensors/weight, 512 × 256 fp32")
    kept = client.put("weight", WEIGHT)
    print(f"  kept as handle:{kept.name}, on disk when the reply came, etag {kept.etag}")


def gemm_as_json(url: str) -> None:
    """Multiply two small matrices written as JSON numbers, as curl would."""
    say("GEMM as JSON: relu(2·A·B + bias)")
    body = {
        "a": [[1, 2], [3, -4]],
        "b": [[5, 6], [7, 8]],
        "bias": [0.5, -0.5],
        "alpha": 2,
        "activation": "relu",
    }
    print(f"  POST /gemm {json.dumps(body)}")
    reply = post(f"{url}/gemm", json.dumps(body).encode(), "application/json", "application/json")
    answer = json.loads(reply.read())
    print(f"  D = {answer['d']}")
    tell(answer["variant"], answer["reason"], answer["why"])
    a, b = np.array(body["a"]), np.array(body["b"])
    check(
        "JSON",
        np.array(answer["d"], np.float32),
        a,
        b,
        lambda product: np.maximum(2 * product + body["bias"], 0),
    )


def gemm_as_safetensors(url: str) -> None:
    """Multiply two matrices from one safetensors body; the result comes back as safetensors."""
    say("GEMM as safetensors: A 128 × 300, B 300 × 200, fp32")
    a, b = normal(128, 300), normal(300, 200)
    media = "application/vnd.safetensors"
    reply = post(f"{url}/gemm", safetensors(a=a, b=b), media, media)
    (result,) = read_safetensors(reply.read()).values()
    tell(reply.headers["X-Gemm-Variant"], reply.headers["X-Gemm-Reason"])
    check("safetensors", result, a, b)


def gemm_against_the_weight(client: Client) -> None:
    """Multiply by the stored weight: only A travels, and the result lands in an array of ours."""
    say("GEMM against the stored weight: gelu(X · handle:weight), X 64 × 512")
    x, out = normal(64, 512), np.empty((64, 256), np.float32)
    made = client.gemm_result(x, Handle("weight"), activation="gelu", out=out)
    tell(made.variant, made.reason)
    check("stored weight", out, x, WEIGHT, gelu)


def job_of_eight(client: Client) -> None:
    """Eight products in one job: six share the weight, the seventh needs the sixth's result."""
    say("A job of 8: seven products by the weight, and one that needs the result of another")
    inputs = [normal(32, 512) for _ in range(7)]
    steps = [Step(f"x{i}", x, Handle("weight")) for i, x in enumerate(inputs)]
    second = normal(256, 16)
    steps.append(Step("after-x6", steps[6], second))
    job = client.wait(client.submit(steps), progress=sys.stdout.isatty())
    print(f"  {job.id}: {job.state}, {job.steps_ended} steps; after-x6 waited for x6")
    for step in job.steps[-1:]:
        tell(step.variant, str(step.document.get("reason", "")))
    for i, x in enumerate(inputs):
        result = client.result(job, f"x{i}")
        check(f"step x{i}", result, x, WEIGHT)
    check("step after-x6", client.result(job, "after-x6"), result, second)


def gemm_on_the_virtual_gpu(client: Client) -> None:
    """Let the compiled Step 9 kernel for a B200 compute: its instructions, its TMA, its tensor memory, on the CPU."""
    say("GEMM on the virtual GPU: fp16, A 300 × 264, B 264 × 200, by the Step 9 kernel compiled for sm_100a")
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((300, 264), (264, 200)))
    began = time.perf_counter()
    result = client.gemm_result(a, b)
    tell(result.variant, result.reason)
    if not result.variant.startswith("step9"):
        raise SystemExit(f"{result.variant} computed it, not an own kernel")
    print(f"  executed in {time.perf_counter() - began:.1f} s")
    check("virtual GPU", result.array, a, b)


def what_would_run(client: Client) -> None:
    """Ask the selector about a large product without computing it."""
    say("What would run for 4096³: POST /variants/choose")
    choice = client.choose(4096, 4096, 4096, dtype="fp32")
    tell(choice["variant"], choice["reason"], choice["why"], verb="would be computed")
    for row in choice["candidates"]:
        told = f"not, because {row['because']}" if row["seconds"] is None else f"{row['seconds']:.3f} s"
        print(f"    {row['variant']:24} {told}")


def metrics_that_moved(before: dict[str, float], after: dict[str, float]) -> None:
    """Show which counters of /metrics went up meanwhile."""
    say("Metrics that moved")
    for name, value in after.items():
        moved = value - before.get(name, 0.0)
        if moved:
            print(f"  {name:68} +{moved:.4g}")


# The tools


@contextlib.contextmanager
def server(data: Path, device: str = "auto") -> Iterator[str]:
    """The address of a service on a free port, in a process of its own, which is ended at the end."""
    say("Start the service on a free port")
    command = [
        sys.executable,
        "-m",
        "service",
        "serve",
        "--port",
        "0",
        "--device",
        device,
        "--data",
        str(data),
        "--log-level",
        "warning",
        "--audit-file",
        str(data / "audit.log"),
    ]
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GEMM_") or name == "GEMM_KERNELS"
    }
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if "http" not in line:
                raise SystemExit(f"the service did not start: exit status {process.wait()}")
            url = line.split()[-1]
            wait_until_ready(url)
            print(f"  {url}, process {process.pid}, ready")
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(timeout=60)
    if status != 0:
        raise SystemExit(f"the service ended with status {status}")


def wait_until_ready(url: str, patience: float = 60.0) -> None:
    """Return when a worker has proven itself; end the run where none ever will."""
    until = time.monotonic() + patience
    while (told := _readiness(url))["status"] != "ready":
        workers = told["workers"]
        if workers and all(worker["state"] == "down" for worker in workers):
            raise SystemExit(f"the worker stays down: {workers[0]['detail']}")
        if time.monotonic() > until:
            raise SystemExit(f"the worker did not get ready within {patience:g} s")
        time.sleep(0.02)


def _readiness(url: str) -> dict[str, Any]:
    """What the service tells of its workers, ready or not."""
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=10) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        return dict(json.load(error))


def check(
    what: str, got: Array, a: Array, b: Array, then: Callable[[Array], Array] = lambda product: product
) -> None:
    """End the run where a result isn't what numpy computes in fp64, but for fp32's own rounding."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    expected = then(a @ b)
    if got.shape != expected.shape:
        raise SystemExit(f"  WRONG: {what} has shape {got.shape}, numpy's {expected.shape}")
    # The service's own promise, doubled for what follows the product (a slope of 2 at most), and an ulp.
    bound = 2.0**-21 * (a.shape[1] / 16 + 4) * (np.abs(a) @ np.abs(b)) + np.spacing(np.abs(got))
    error = np.abs(got - expected)
    if not np.all(error <= bound):
        raise SystemExit(f"  WRONG: {what} is up to {error.max():.3g} away from numpy")
    print(f"  right: {what} {got.shape}, at most {error.max():.2g} from numpy in fp64")


def post(url: str, body: bytes, media: str, accept: str) -> Any:
    """A plain HTTP request, with nothing of ours in it."""
    request = urllib.request.Request(url, body, {"Content-Type": media, "Accept": accept}, method="POST")
    return urllib.request.urlopen(request, timeout=60)


def safetensors(**arrays: Array) -> bytes:
    """fp32 arrays as a safetensors file: length of a JSON header, the header, the bytes."""
    header: dict[str, Any] = {}
    data = b""
    for name, array in arrays.items():
        start = len(data)
        data += array.tobytes()
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def read_safetensors(body: bytes) -> dict[str, Array]:
    """fp32 arrays of a safetensors file."""
    start = 8 + int.from_bytes(body[:8], "little")
    arrays = {}
    for name, entry in json.loads(body[8:start]).items():
        if name != "__metadata__":
            first, last = (start + offset for offset in entry["data_offsets"])
            arrays[name] = np.frombuffer(body[first:last], "<f4").reshape(entry["shape"])
    return arrays


def counters(text: str) -> dict[str, float]:
    """The service's own counters in a Prometheus exposition, and the seconds that its stages took."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("gemm_") and ("_total" in name or name.startswith("gemm_stage_seconds_sum")):
            found[name] = float(value)
    return found


def gelu(x: Array) -> Array:
    """x·Φ(x), by erf."""
    from scipy.special import erf

    result: Array = 0.5 * x * (1 + erf(x / np.sqrt(2)))
    return result


def normal(*shape: int) -> Array:
    """fp32 from a normal distribution."""
    return rng.standard_normal(shape, np.float32)


WEIGHT = normal(512, 256)


def say(title: str) -> None:
    """A step's title."""
    print(f"\n\x1b[1m{title}\x1b[0m" if sys.stdout.isatty() else f"\n{title}", flush=True)


def tell(variant: str, reason: str, why: str = "", *, verb: str = "computed") -> None:
    """What the selector chose, and why."""
    print(f"  {verb} by {variant}, reason {reason!r}" + (f": {why}" if why else ""))


if __name__ == "__main__":
    sys.exit(main())
