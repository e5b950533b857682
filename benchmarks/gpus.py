"""Several GPUs of one host: links, one product over all of them, a worker on each; writes results/<machine>/gpus.json.

    python -m benchmarks.gpus --machine h200x2

Takes whatever number of GPUs there is (one will do for most of it). The machine must have the kernels built
(`python -m kernels build --arch sm_90a`).
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from benchmarks import parts, record
from benchmarks.clients import Clients
from benchmarks.gpu_service import Load, metrics, normal, put, stages, total
from benchmarks.load import OnGpus, free_port, on_gpus
from benchmarks.parts import Row
from benchmarks.transfers import Peer

GIB = 1 << 30
PACKAGES = ("torch", "numpy", "apache-tvm-ffi", "fastapi", "uvicorn", "uvloop")


# -- links ------------------------------------------------------------------------------------------------------


def links(count: int) -> list[Row]:
    """How the GPUs are linked, and what passes between them."""
    import torch

    topology = subprocess.run(
        ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False
    ).stdout
    rows: list[Row] = [{"name": "topology", "outcome": "read", "detail": topology}]
    data = [torch.ones(GIB, dtype=torch.uint8, device=f"cuda:{n}") for n in range(count)]
    for source in range(count):
        for target in range(count):
            if source == target:
                continue
            into = torch.empty_like(data[target])
            rate = GIB / _copy_seconds(into, data[source])
            can = torch.cuda.can_device_access_peer(source, target)
            detail = f"peer access: {can}"
            rows.append(
                {
                    "name": f"copy GPU {source} to {target}",
                    "bytes": GIB,
                    "bytes_per_second": rate,
                    "detail": detail,
                }
            )
    rows.append(ipc_across(count))
    return rows


def _copy_seconds(into: Any, source: Any) -> float:
    import torch

    times = []
    for _ in range(6):
        torch.cuda.synchronize(source.device)
        torch.cuda.synchronize(into.device)
        started = time.perf_counter()
        into.copy_(source)
        torch.cuda.synchronize(source.device)
        torch.cuda.synchronize(into.device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def ipc_across(count: int) -> Row:
    """Whether a process on the last GPU reads the first one's memory through a CUDA IPC handle."""
    import torch
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    child = context.Process(target=_ipc_child, args=(inbox, outbox, count - 1))
    child.start()
    mine = torch.arange(1 << 20, device="cuda:0", dtype=torch.int64)
    inbox.put(mine)
    try:
        total = outbox.get(timeout=90)
        outcome = "works" if total == int(mine.sum()) else f"wrong: {total}"
    except Exception as error:
        outcome = f"fails: {type(error).__name__}"
    inbox.put(None)
    child.join(20)
    child.kill()
    return {"name": f"CUDA IPC, GPU 0 read by a process on GPU {count - 1}", "outcome": outcome, "detail": ""}


def _ipc_child(inbox: Any, outbox: Any, gpu: int) -> None:
    import torch

    torch.cuda.set_device(gpu)
    theirs = inbox.get()
    outbox.put(int(theirs.to(f"cuda:{gpu}").sum()))
    del theirs
    inbox.get()


# -- one product over all ---------------------------------------------------------------------------------------


def sharded(count: int, size: int, rounds: int) -> list[Row]:
    """size³ fp16 over `count` GPUs, against one of them in the same run."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    port = free_port()
    ranks = [
        context.Process(target=_rank, args=(n, count, port, size, rounds, answers)) for n in range(count)
    ]
    for process in ranks:
        process.start()
    try:
        told = [answers.get(timeout=300) for _ in ranks]
    finally:
        for process in ranks:
            process.join(30)
            process.kill()
    if bad := [each for each in told if each["wrong"]]:
        raise SystemExit(f"the sharded product is wrong: {bad}")
    first = next(each for each in told if each["rank"] == 0)
    whole = [max(times) for times in zip(*(each["seconds"] for each in told), strict=True)]
    compute = statistics.median(max(t) for t in zip(*(each["compute"] for each in told), strict=True))
    exchange = statistics.median(max(t) for t in zip(*(each["exchange"] for each in told), strict=True))
    total = statistics.median(whole)
    flops = 2.0 * size**3
    return [
        {
            "name": f"sharded {size}³ fp16 over {count} GPUs",
            "problem": {"m": size, "n": size, "k": size, "batch": 1, "dtype": "fp16", "out_dtype": "fp16"},
            "seconds": record.spread(whole),
            "flops_per_second": flops / total,
            "reference": "the same product on one of them, kernels.gemm",
            "reference_seconds": record.spread(first["alone"]),
            "ratio": statistics.median(first["alone"]) / total,
            "compute_seconds": compute,
            "exchange_seconds": exchange,
            "hidden_seconds": max(0.0, compute + exchange - total),
            "largest_error_over_bound": max(each["error"] for each in told),
        }
    ]


def _rank(rank: int, world: int, port: int, size: int, rounds: int, answers: Any) -> None:
    import torch
    from torch import distributed

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl",
        f"tcp://127.0.0.1:{port}",
        timeout=timedelta(seconds=120),
        world_size=world,
        rank=rank,
        device_id=device,
    )
    own = Share(rank, world, size, device)
    _timed(own.whole, 2)
    told: Row = {"rank": rank, "seconds": _timed(own.whole, rounds)}
    told["wrong"], told["error"] = _check(own.a, own.b, own.out)
    told["compute"] = _timed(own.products, rounds)
    told["exchange"] = _timed(own.exchanges, rounds)
    told["alone"] = _whole_on_one(size, rounds) if rank == 0 else []
    distributed.barrier()
    answers.put(told)
    distributed.destroy_process_group()


def _timed(work: Callable[[], None], count: int) -> list[float]:
    """Seconds of each run, which all ranks begin together."""
    import torch
    from torch import distributed

    times = []
    for _ in range(count):
        distributed.barrier()
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return times


class Share:
    """What one rank has of a product of `size`³: rows of A and D, columns of B."""

    def __init__(self, rank: int, world: int, size: int, device: Any) -> None:
        import torch

        from kernels.sharded import split

        self._rank, self._world, self._columns = rank, world, split(size, world)
        mine = self._columns[rank]
        generator = torch.Generator(device).manual_seed(rank)

        def drawn(*shape: int) -> Any:
            return torch.randn(shape, device=device, generator=generator, dtype=torch.float16)

        self.a, self.b = drawn(mine, size), drawn(size, mine)
        self.out = torch.empty((mine, size), device=device, dtype=torch.float16)

    def whole(self) -> None:
        """The rank's part of the sharded product."""
        from kernels.sharded import gemm_sharded

        gemm_sharded(self.a, self.b, out=self.out, batch_invariant=False)

    def products(self) -> None:
        """As much computing, without moving anything."""
        from kernels import gemm

        at = 0
        for columns in self._columns:
            b = self.b[:, :columns] if columns <= self._columns[self._rank] else self.b
            gemm(self.a, b, out=self.out[:, at : at + columns], batch_invariant=False)
            at += columns

    def exchanges(self) -> None:
        """As much moving, without computing anything."""
        import torch
        from torch import distributed

        block = torch.empty_like(self.b)
        for _ in range(self._world - 1):
            moving = [
                distributed.P2POp(distributed.isend, self.b, (self._rank - 1) % self._world),
                distributed.P2POp(distributed.irecv, block, (self._rank + 1) % self._world),
            ]
            for transfer in distributed.batch_isend_irecv(moving):
                transfer.wait()


def _whole_on_one(size: int, rounds: int) -> list[float]:
    """Seconds of the same product on this rank's GPU alone."""
    import torch

    from kernels import gemm

    a, b = (torch.randn((size, size), device="cuda", dtype=torch.float16) for _ in range(2))
    out = torch.empty((size, size), device="cuda", dtype=torch.float16)
    times = []
    for _ in range(rounds + 2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        gemm(a, b, out=out, batch_invariant=False)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return times[2:]


def _check(a: Any, b: Any, out: Any) -> tuple[str, float]:
    """Hold a sample of this rank's rows, over columns of every rank, against the API's error bound."""
    import torch
    from torch import distributed

    from kernels.problem import DType, Problem
    from kernels.verify import check

    world = distributed.get_world_size()
    every = max(1, b.shape[1] // 16)
    mine = b[:, ::every][:, :16].contiguous()
    theirs = [torch.empty_like(mine) for _ in range(world)]
    distributed.all_gather(theirs, mine)
    rows = a[:: max(1, len(a) // 32)][:32]
    got = out[:: max(1, len(a) // 32)][:32]
    columns = torch.cat(
        [got[:, n * b.shape[1] : (n + 1) * b.shape[1]][:, ::every][:, :16] for n in range(world)], 1
    )
    full_b = torch.cat(theirs, 1)
    problem = Problem(len(rows), full_b.shape[1], a.shape[1], dtype=DType.FP16, out_dtype=DType.FP16)
    result = check(problem, columns.cpu().numpy(), rows.cpu().numpy(), full_b.cpu().numpy())
    return ("" if result.ok else str(result)), float(result.worst)


#: What operands and results take.
ROOM = ("--arena-bytes", "16GiB", "--store-memory-bytes", "12GiB", "--store-disk-bytes", "64GiB")


# -- the same behind /gemm --------------------------------------------------------------------------------------


def kept(count: int, size: int, rounds: int) -> Iterator[Row]:
    """Stored operands, D kept: the first product brings shards to the GPUs, later ones find them there."""
    with on_gpus(*ROOM, devices=",".join(map(str, range(count)))) as service:
        port = service.port
        _await_workers(port, count)
        for name in "ab":
            put(port, name, normal(size, size, seed=ord(name)))
        peer = Peer(port)
        # Ranks start, kernels are loaded; a is there now, b isn't.
        peer.exchange(
            "POST", "/gemm?a=handle:a&b=handle:a&variant=sharded&out=handle:d", accept="application/json"
        )
        for turn in range(rounds):
            before = metrics(port)
            query = "/gemm?a=handle:a&b=handle:b&variant=sharded&out=handle:d"
            seconds = peer.exchange("POST", query, accept="application/json")
            after = metrics(port)
            ways = {way: f'gemm_shards_bytes_total{{way="{way}"}}' for way in ("copied", "exchanged", "kept")}
            yield {
                "name": f"/gemm sharded {size}³ fp16 over {count} GPUs, product {turn + 1} with these handles",
                "seconds": seconds,
                "flops_per_second": 2.0 * size**3 / seconds,
                "stages": stages(before, after),
                "shards_bytes": {way: after[key] - before[key] for way, key in ways.items()},
            }


# -- a worker on each -------------------------------------------------------------------------------------------


def workers(count: int, size: int, seconds: float) -> Iterator[Row]:
    """Throughput of a worker on each GPU against one, before and after; residency; a worker killed under load."""
    import numpy as np

    flops = 2.0 * size**3
    yield {
        "name": f"kernels.gemm {size}³ fp16 alone on one GPU",
        "requests_per_second": _alone(size, min(seconds, 5.0)) / flops,
    }
    x = np.random.default_rng(1).standard_normal((size, size), dtype=np.float32).astype(np.float16)
    target = "/gemm?a=handle:a&b=handle:b&batch_invariant=false&out=handle:d{}"
    rates: list[float] = []
    everything = ",".join(map(str, range(count)))
    for number, devices in ((1, "0"), (count, everything), (1, "0")):
        with on_gpus(*ROOM, devices=devices) as service:
            port = service.port
            _await_workers(port, number)
            for name in "ab":
                query = f"/tensors/{name}?shape={size}x{size}&dtype=fp16"
                Peer(port).exchange("PUT", query, memoryview(x).cast("B"), accept="application/json")
            clients = Clients(port, 6 * number, target, accept="application/json")
            clients.window(4)  # clocks settle, memory is touched for the first time
            before = metrics(port)
            windows = [clients.window(seconds / 3) for _ in range(3)]
            after = metrics(port)
            rates.append(statistics.median(seen.answers / seen.seconds for seen in windows))
            yield {
                "name": f"{number} workers at {size}³ fp16, resident operands, D kept",
                "requests_per_second": rates[-1],
                "windows": [seen.answers / seen.seconds for seen in windows],
                "p50_seconds": windows[1].p50_seconds,
                **_spent(before, after, number, sum(seen.seconds for seen in windows)),
            }
            if number == count > 1:
                yield _kill_one(service, clients, rates[-1], count, seconds)
            clients.stop()
            yield _residency(port, number)
    one = max(rates[0], rates[2])
    yield {
        "name": f"{count} workers over one at {size}³ fp16",
        "requests_per_second": rates[1],
        "one_worker_requests_per_second": one,
        "flops_per_second": rates[1] * flops,
        "ratio": rates[1] / (count * one),
    }


def _alone(size: int, seconds: float) -> float:
    """FLOPs a second of the kernel in this process."""
    import torch

    load = Load(size)
    load.run(1.0, 2.0)
    began = time.perf_counter()
    done = load.run(1.0, seconds)
    spent = time.perf_counter() - began
    del load
    torch.cuda.empty_cache()
    return done / spent


def _spent(before: dict[str, float], after: dict[str, float], number: int, seconds: float) -> Row:
    """Where the time went between two scrapes."""
    grown = {key: after[key] - before.get(key, 0.0) for key in after}
    return {
        "kernel_busy_share": total(grown, "gemm_kernel_busy_seconds_total") / seconds / number,
        "mean_batch": grown["gemm_batch_requests_sum"] / grown["gemm_batch_requests_count"],
        "stages": stages(before, after),
    }


def _await_workers(port: int, count: int) -> None:
    """Until all workers are ready and the self-tests of own variants have ended on each GPU."""
    end = time.monotonic() + 150
    while True:
        seen = metrics(port)
        untested = [
            name for name in seen if name.startswith("gemm_variant_quarantined") and "untested" in name
        ]
        if seen.get("gemm_workers_ready", 0) >= count and not untested:
            return
        if time.monotonic() > end:
            raise SystemExit(f"not {count} workers and their variants within 150 s")
        time.sleep(0.2)


def _residency(port: int, number: int) -> Row:
    seen = {key: value for key, value in metrics(port).items() if key.startswith("gemm_placements_total")}
    return {"name": f"placements with {number} workers", "outcome": "counted", "detail": seen}


def _kill_one(service: OnGpus, clients: Clients, rate: float, count: int, seconds: float) -> Row:
    """One GPU's workers are killed for a whole window, each as soon as it is started."""
    import psutil

    port, front = service.port, psutil.Process(service.process.pid)
    victim, *others = front.children()
    alive = {other.pid for other in others}
    victim.kill()
    began = time.perf_counter()
    # A process with a CUDA context takes a while to be gone; what it held runs elsewhere then.
    while metrics(port).get("gemm_workers_ready", 0) == count and time.perf_counter() - began < 30:
        time.sleep(0.02)
    gone = time.perf_counter() - began
    stop = threading.Event()

    def keep_down() -> None:
        while not stop.wait(0.05):
            for child in front.children():
                if child.pid not in alive:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()

    killer = threading.Thread(target=keep_down)
    killer.start()
    try:
        clients.window(1)  # raises where a request failed, here and below
        during = clients.window(max(10.0, seconds))
    finally:
        stop.set()
        killer.join()
    until = time.perf_counter() + 60
    while metrics(port).get("gemm_workers_ready", 0) < count and time.perf_counter() < until:
        time.sleep(0.05)
    clients.window(3)
    after = clients.window(max(10.0, seconds))
    share = rate * (count - 1) / count
    return {
        "name": "one worker killed under load, and kept down",
        "outcome": "nothing lost",
        "detail": {
            "requests_per_second_before": rate,
            "requests_per_second_without_it": during.answers / during.seconds,
            "ratio_to_the_others_share": during.answers / during.seconds / share,
            "requests_per_second_after_it_is_back": after.answers / after.seconds,
            "seconds_until_it_was_gone": gone,
            "window_seconds": [during.seconds, after.seconds],
        },
    }


def main() -> int:
    """Measure, print and write; returns the exit status."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpus", description=__doc__)
    parser.add_argument("--gpus", type=int, default=0, help="how many to use; 0: all")
    parser.add_argument("--size", type=int, default=32768, help="extent of the sharded product")
    parser.add_argument("--worker-size", type=int, default=8192, help="extent of the workers' products")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a throughput window")
    record.add_places(parser, "gpus")
    parts.add_choice(parser, ["links", "sharded", "kept", "workers"])
    options = parser.parse_args()
    count = options.gpus or torch.cuda.device_count()
    details = {
        "gpu": torch.cuda.get_device_name(0),
        "gpus": count,
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }
    measured: parts.Parts = {
        "links": lambda: links(count),
        "sharded": lambda: sharded(count, options.size, options.rounds),
        "kept": lambda: kept(count, options.size, options.rounds),
        "workers": lambda: workers(count, options.worker_size, options.seconds),
    }
    return parts.run("gpus", measured, options, details=details, packages=PACKAGES)


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
