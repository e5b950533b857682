"""A product over several processes, by gloo: right, with the bits of one process, and clear when a rank dies."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from kernels import gemm
from kernels.sharded import Gathered, Layout, RankLost, gemm_sharded, split


def test_parts_are_multiples_of_a_tile_and_cover_everything() -> None:
    assert split(32768, 2) == (16384, 16384)
    assert split(1000, 3) == (384, 384, 232)
    assert split(100, 4) == (100, 0, 0, 0)
    for extent in (0, 1, 127, 128, 129, 4097):
        for world in (1, 2, 3, 7):
            assert sum(split(extent, world)) == extent


def test_each_rank_meets_every_block_once() -> None:
    for world in (1, 2, 5):
        for rank in range(world):
            layout = Layout(rank, (4,) * world, tuple(range(1, world + 1)), 8)
            assert sorted(layout.owner(step) for step in range(world)) == list(range(world))
        spans = [layout.columns_of(rank) for rank in range(world)]
        assert [s.start for s in spans[1:]] == [s.stop for s in spans[:-1]]


def operands(dtype: torch.dtype) -> dict[str, Any]:
    random = torch.Generator().manual_seed(4)
    shapes = {"a": (150, 70), "b": (70, 101), "c": (150, 101), "bias": (101,)}
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}


ROWS, COLUMNS = (90, 60, 0), (33, 40, 28)


def rank_main(rank: int, port: int, job: str, answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", timeout=timedelta(seconds=10), world_size=3, rank=rank
    )
    x = operands(torch.float32)
    rows = slice(sum(ROWS[:rank]), sum(ROWS[: rank + 1]))
    columns = slice(sum(COLUMNS[:rank]), sum(COLUMNS[: rank + 1]))
    a, b = x["a"][rows], x["b"][:, columns]
    try:
        if job == "whole":
            # D lies where C does, 7 elements on: no block of it may change what the next one reads.
            room = torch.empty(len(a) * 101 + 101 + 7)
            d, c, bias = (
                room[: len(a) * 101].view(-1, 101),
                room[7:][: len(a) * 101].view(-1, 101),
                room[-101:],
            )
            c[:], bias[:] = x["c"][rows], x["bias"]
            gemm_sharded(a, b, c=c, bias=bias, out=d, alpha=0.5, beta=2.0, activation="relu")
            answers.put((rank, d.numpy()))
        elif job == "again":
            gathered, told = Gathered(), []
            for turn in range(4):
                if turn == 2 and rank == 1:
                    gathered.blocks.clear()  # as one whose memory was needed
                told.append((gemm_sharded(a, b, gathered=gathered).numpy(), gathered.received))
            answers.put((rank, told))
        elif job == "unfit":
            gemm_sharded(a if rank != 1 else a[:, :-1], b)
        elif rank == 1:
            os._exit(1)
        else:
            gemm_sharded(a, b)
    except (RankLost, ValueError) as error:
        answers.put((rank, type(error).__name__))
    torch.distributed.destroy_process_group()


def run(job: str, count: int) -> dict[int, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=rank_main, args=(rank, port, job, answers)) for rank in range(3)]
    for process in ranks:
        process.start()
    try:
        return dict(answers.get(timeout=60) for _ in range(count))
    finally:
        for process in ranks:
            process.join(20)
            process.kill()


def test_three_ranks_with_uneven_shards_give_what_one_process_gives_bit_for_bit() -> None:
    answers = run("whole", 3)
    x = operands(torch.float32)
    want = gemm(x["a"], x["b"], c=x["c"], bias=x["bias"], alpha=0.5, beta=2.0, activation="relu")
    got = torch.cat([torch.from_numpy(answers[rank]) for rank in range(3)])
    assert torch.equal(got, want)


@pytest.mark.ci
def test_blocks_that_were_gathered_do_not_move_again_unless_a_rank_lacks_one() -> None:
    answers = run("again", 3)
    x = operands(torch.float32)
    want = gemm(x["a"], x["b"]).numpy()
    for turn in range(4):
        assert np.array_equal(np.concatenate([answers[rank][turn][0] for rank in range(3)]), want)
    of_others = [4 * 70 * (sum(COLUMNS) - own) for own in COLUMNS]
    for rank in range(3):
        received = [nbytes for _, nbytes in answers[rank]]
        assert received == [of_others[rank], 0, of_others[rank], 0]


@pytest.mark.ci
def test_a_rank_that_dies_is_a_clear_error_within_the_time_limit() -> None:
    assert run("dies", 2) == {0: "RankLost", 2: "RankLost"}


@pytest.mark.ci
def test_shapes_that_do_not_fit_are_refused_on_every_rank() -> None:
    assert run("unfit", 3) == {0: "ValueError", 1: "ValueError", 2: "ValueError"}
