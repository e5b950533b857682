"""Self-tests in a process of their own: receives variants, hands on how each ended: right, wrong, hung, faulted.

A kernel that hangs or faults takes its process and its CUDA context along, so the tests run in a child with a
time limit a variant; after a death the rest goes on in a new one. Outcomes are kept by device, driver and build,
and hold for the very device only.

    python -m kernels.probe kernels.probe:gpu 0 step9-128x256-2x1 …      (the child)
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from kernels import cublas
from kernels.device_file import DeviceFile, default_folder

if TYPE_CHECKING:
    from kernels.runtime import Runtime

log = logging.getLogger("gemm.kernels")

LIMIT_SECONDS = (
    8.0  # of silence: a child says that it is alive after each product, which takes the host longer
)
START_SECONDS = 60.0  # importing torch and opening a context on a cold machine
GPU = "kernels.probe:gpu"
ALIVE = b"alive"  # a line of a child between outcomes
WAITING = "its self-test has not ended yet"

Tester = Callable[[str], "Outcome"]


class Ended(StrEnum):
    """How a self-test ended: a closed set, fit for a metric label."""

    RIGHT = "right"
    WRONG = "wrong"  # beyond the error bound
    BITS = "bits"  # right, but not with the bits of its class: not for batch-invariant problems
    HANG = "hang"
    FAULT = "fault"


GOOD = (Ended.RIGHT, Ended.BITS)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one variant's self-test ended on a device."""

    variant: str
    ended: Ended
    detail: str = ""


def probe(
    names: Sequence[str],
    *,
    subject: str = GPU,
    index: int = 0,
    limit: float = LIMIT_SECONDS,
    start: float = START_SECONDS,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
) -> dict[str, Outcome]:
    """Test variants one after the other; a child that says nothing for `limit` seconds hangs in one.

    `on_outcome` is called as each ends.
    """
    outcomes: dict[str, Outcome] = {}
    waiting = list(names)
    while waiting:
        for outcome in _one_child(tuple(waiting), subject, index, limit, start):
            outcomes[outcome.variant] = outcome
            waiting.remove(outcome.variant)
            on_outcome(outcome)
    return outcomes


def _one_child(
    names: Sequence[str], subject: str, index: int, limit: float, start: float
) -> Iterator[Outcome]:
    """Outcomes of one child until it has tested all or is dead; at least one."""
    command = [sys.executable, "-m", "kernels.probe", subject, str(index), *names]
    package = str(Path(__file__).resolve().parent.parent)
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, env=environment
        )
        assert child.stdout is not None
        try:
            yield from _outcomes(child, names, limit, start, errors)
        finally:
            child.kill()
            child.wait()
            child.stdout.close()


def _outcomes(
    child: subprocess.Popen[bytes], names: Sequence[str], limit: float, start: float, errors: IO[bytes]
) -> Iterator[Outcome]:
    assert child.stdout is not None
    lines = _lines(child.stdout)
    ready = lines(start)
    for name in names:
        line = lines(limit) if ready else ready
        while line == ALIVE:
            line = lines(limit)
        if line is None:
            waited = limit if ready else start
            yield Outcome(name, Ended.HANG, f"no answer within {waited:g} s")
            return
        if not line:
            child.wait()
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines()
            detail = f"the probe ended with status {child.returncode}" + (f": {said[-1]}" if said else "")
            yield Outcome(name, Ended.FAULT, detail)
            return
        told = json.loads(line)
        outcome = Outcome(told["variant"], Ended(told["ended"]), told["detail"])
        yield outcome
        if outcome.ended is Ended.FAULT:
            return  # that child is gone, or in doubt


def _lines(stream: IO[bytes]) -> Callable[[float], bytes | None]:
    """A reader of lines with a time limit: None where it passed, b"" at the end."""
    held = bytearray()

    def read(limit: float) -> bytes | None:
        until = time.monotonic() + limit
        while b"\n" not in held:
            ready, _, _ = select.select([stream], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return None
            piece = os.read(stream.fileno(), 65_536)
            if not piece:
                return b""
            held.extend(piece)
        line, _, rest = bytes(held).partition(b"\n")
        held[:] = rest
        return line

    return read


def alive() -> None:
    """Of a child: tell that its device still answers."""
    print(ALIVE.decode(), flush=True)


def gpu(index: int) -> Tester:
    """The tester of own variants and of cuBLAS on GPU `index`."""
    import torch

    from kernels import selftest
    from kernels.runtime import Runtime

    runtime = Runtime.of(index)
    # The context, cuBLAS and the first launch take their time, which is no variant's.
    warm = torch.ones((64, 64), dtype=torch.float16, device=runtime.place)
    (warm @ warm).sum().item()
    by_name = {each.name: each for each in (*runtime.variants, *runtime.grouped)}

    def test(name: str) -> Outcome:
        variant = by_name[name]
        because = selftest.everything(runtime, variant, alive=alive)
        if because is not None:
            return Outcome(name, Ended.WRONG, because)
        kind = selftest.bits_problem()
        order = variant.order(kind)
        like = next(each for each in runtime.variants if each.order(kind) == order)
        alive()
        because = None if order is None else selftest.bits_differ(runtime, variant, like)
        return Outcome(name, Ended.RIGHT if because is None else Ended.BITS, because or "")

    return test


def admit(
    runtime: Runtime,
    index: int,
    *,
    folder: Path | None = None,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
    on_known: Callable[[], None] = lambda: None,
) -> dict[str, Outcome]:
    """Let the variants run that were seen right on this device, driver and build; test those not seen yet.

    Own variants stay barred until their test has ended, so this may run on a thread beside the service, which
    may begin at `on_known`: what was known is settled then, and the rest is barred.
    """
    kept = Kept(folder or default_folder(), runtime.device.key, runtime.build_hash)
    known = kept.read()
    every = (*runtime.variants, *runtime.grouped)
    names = [each.name for each in every if each.name not in runtime.barred]
    for name in names:
        if name != cublas.NAME and name not in known:
            runtime.bar(name, WAITING)

    def settle(outcome: Outcome) -> None:
        apply(runtime, outcome)
        on_outcome(outcome)

    for name in names:
        if name in known:
            settle(known[name])
    on_known()

    def tested(outcome: Outcome) -> None:
        known[outcome.variant] = kept.add(outcome)
        settle(known[outcome.variant])

    probe([name for name in names if name not in known], index=index, on_outcome=tested)
    return {name: known[name] for name in names}


def apply(runtime: Runtime, outcome: Outcome) -> None:
    """Admit or bar a variant by how its self-test ended."""
    if outcome.ended in GOOD:
        runtime.admit(outcome.variant, proven=True, equal_bits=outcome.ended is Ended.RIGHT)
        return
    log.error("variant %s is quarantined: %s: %s", outcome.variant, outcome.ended, outcome.detail)
    if outcome.variant != cublas.NAME:
        runtime.bar(outcome.variant, f"its self-test on this device ended: {outcome.ended}: {outcome.detail}")


def condemn(
    runtime: Runtime, variant: str, detail: str, folder: Path | None = None, *, ended: Ended = Ended.FAULT
) -> None:
    """Quarantine a variant that faulted or hung in service, for this process and those that follow."""
    outcome = Outcome(variant, ended, detail)
    Kept(folder or default_folder(), runtime.device.key, runtime.build_hash).add(outcome)
    apply(runtime, outcome)


class Kept:
    """Outcomes on disk of one device, driver and build."""

    def __init__(self, folder: Path, device: str, build: str) -> None:
        self._file = DeviceFile(folder, "selftest", device, build)
        self.path = self._file.path

    def read(self) -> dict[str, Outcome]:
        """What is known by variant."""
        return {
            name: Outcome(name, Ended(each["ended"]), each["detail"])
            for name, each in self._file.read().items()
        }

    def add(self, outcome: Outcome) -> Outcome:
        """Keep an outcome; returns the one that stands. A test that went well doesn't outweigh a fault in service.

        A folder that can't be written costs the next start a test, no more.
        """
        standing = [outcome]

        def change(known: dict[str, Any]) -> Mapping[str, Any]:
            before = known.get(outcome.variant)
            if before is not None and outcome.ended in GOOD and before["ended"] not in GOOD:
                standing[0] = Outcome(outcome.variant, Ended(before["ended"]), before["detail"])
            return known | {outcome.variant: asdict(standing[0])}

        try:
            self._file.update(change)
        except OSError as error:
            log.warning("outcomes of self-tests are not kept: %s", error)
        return standing[0]


def main(argv: Sequence[str]) -> int:
    """The child: test the named variants, a JSON line each."""
    subject, index, *names = argv
    module, _, function = subject.partition(":")
    test: Tester = getattr(import_module(module), function)(int(index))
    print("ready", flush=True)
    for name in names:
        try:
            outcome = test(name)
        except Exception as error:
            # whatever it was, the device's state is in doubt: say so and let a new process go on
            outcome = Outcome(name, Ended.FAULT, f"{type(error).__name__}: {error}")
        print(json.dumps(asdict(outcome)), flush=True)
        if outcome.ended is Ended.FAULT:
            os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
