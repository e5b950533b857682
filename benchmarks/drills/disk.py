"""Drills: the data folder's disk is full, and it is slow."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.drills.frame import Failed, check, drill
from benchmarks.drills.traffic import WEIGHT, matrix, same
from tests.service.real import Service, result, running

MIB = 1 << 20
#: Seconds that each fsync takes on the slow disk.
SLOW = 1.0


@contextlib.contextmanager
def small_disk(megabytes: int) -> Iterator[Path]:
    """A file system in memory. Needs root."""
    with tempfile.TemporaryDirectory(prefix="gemm-drill-") as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder]
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(f"can't mount a small disk: {done.stderr.strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=False)


@drill("full-disk", seconds=90)
def full() -> str:
    """Stores are refused with 507, what was stored and products without it go on; room that is made is used."""
    large = np.random.default_rng(1).standard_normal((256, 1024)).astype(np.float32)
    with small_disk(16) as disk, running(disk / "data", "--arena-bytes", "64MiB") as service:
        service.ready()
        service.put("weight", WEIGHT).raise_for_status()
        kept, code = 0, 0
        while kept < 64:
            answer = service.put(f"t{kept}", large)
            if answer.status_code >= 400:
                code, kind = answer.status_code, answer.json()["code"]
                break
            kept += 1
        check(code == 507 and kind == "no_room", f"after {kept} MiB: {code}")
        a = matrix(3, 8)
        same(result(service.gemm(a, WEIGHT)), a @ WEIGHT)
        same(result(service.gemm(a, "weight")), a @ WEIGHT)
        steps = [{"id": "s", "a": large.tolist()[:64], "b": large.T.tolist()}]
        job = service.http.post("/jobs", json={"steps": steps})
        check(job.status_code in (503, 507), f"a job with inputs that don't fit: {job.status_code}")
        got = service.http.get(f"/tensors/t{kept - 1}", headers={"accept": "application/octet-stream"})
        check(got.content == large.tobytes(), "what was stored is not what was read")
        for n in range(2):
            service.http.delete(f"/tensors/t{n}").raise_for_status()
        service.until(
            lambda: service.put("again", large).status_code == 201, 20, "room that was made is used"
        )
        check(service.stop() == 0, "it doesn't leave with status 0")
        return f"{kept} tensors of 1 MiB, then 507 no_room; products, reads and deletes went on; room was used again"


@drill("slow-disk", seconds=120)
def slow() -> str:
    """While every fsync takes its time, products that store nothing don't wait for any."""
    if shutil.which("strace") is None:
        raise Failed("strace, which slows system calls down, isn't installed")
    with tempfile.TemporaryDirectory(prefix="gemm-drill-") as folder, running(Path(folder)) as service:
        service.ready()
        usual = slowest(service, 2.0)
        delay = f"inject=fsync,fdatasync:delay_enter={int(SLOW * 1e6)}"
        command = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync,fdatasync", "-e", delay]
        tracer = subprocess.Popen([*command, "-p", str(service.process.pid)])
        try:
            time.sleep(1.0)
            began = time.monotonic()
            service.put("weight", WEIGHT).raise_for_status()
            stored = time.monotonic() - began
            check(stored > SLOW, f"a PUT took {stored:.2f} s: the disk isn't slow")
            stop = time.monotonic() + 6
            puts = 0
            worst = 0.0
            with Puts(service) as writer:
                while time.monotonic() < stop:
                    worst = max(worst, slowest(service, 0.5))
            puts = writer.done
        finally:
            tracer.terminate()
            tracer.wait(10)
        check(puts > 0, "no PUT ended")
        check(worst < SLOW, f"a product waited {worst:.2f} s for the disk (usually {usual:.3f} s)")
        return (
            f"fsync slowed to {SLOW:g} s: a PUT took {stored:.2f} s, {puts} more ended; products that store nothing"
            f" took {worst * 1e3:.0f} ms at most (before: {usual * 1e3:.0f} ms)"
        )


def slowest(service: Service, seconds: float) -> float:
    """The slowest of small products, one after the other for `seconds`."""
    a, worst, end = matrix(4, 8), 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        same(result(service.gemm(a, WEIGHT)), a @ WEIGHT)
        worst = max(worst, time.monotonic() - began)
    return worst


class Puts:
    """PUTs one after the other on a connection of their own, for the length of a block."""

    def __init__(self, service: Service) -> None:
        import threading

        import httpx

        self.done = 0
        self._stop = threading.Event()
        self._http = httpx.Client(base_url=service.url, timeout=60)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        from tests.service.real import raw_tensor

        while not self._stop.is_set():
            self._http.put(f"/tensors/p{self.done % 4}", **raw_tensor(WEIGHT)).raise_for_status()
            self.done += 1

    def __enter__(self) -> Puts:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        self._http.close()
