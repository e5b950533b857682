"""`gemm-service top`: receives a service's /now each second, shows it in the terminal until it is stopped."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from service import cli
from service.cli.common import client_of, guarded, seconds, service_flags, size
from service.metrics import STAGES

_EXAMPLES = """\
  gemm-service top                     each second, until Ctrl-C
  gemm-service top --every 5
  gemm-service top --once              one picture, for a script or a log
  gemm-service top --once --json       the document that the page gets
"""
_BARS = " ▁▂▃▄▅▆▇█"
_WIDE = 8  # of a bar, so that two panels stand side by side in 80 columns
HISTORY = 60


def main(argv: Sequence[str]) -> int:
    """`gemm-service top`."""
    parser = cli.parser("top", "What the service and its kernels do now.", _EXAMPLES)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two looks, 0.5 or more (1)")
    parser.add_argument("--once", action="store_true", help="show one picture and end")
    parser.add_argument("--json", action="store_true", help="with --once: the service's own document")
    service_flags(parser)
    given = parser.parse_args(argv)
    if given.every < 0.5 or not math.isfinite(given.every):
        return cli.complain("--every takes 0.5 or more")
    if given.json and not given.once:
        return cli.complain("--json goes with --once")
    return guarded(lambda: _work(given))


def _work(given: argparse.Namespace) -> int:
    with client_of(given) as client:
        if given.once:
            client.now()  # rates need two samples
            time.sleep(given.every)
            document = client.now()
            if given.json:
                print(json.dumps(document, indent=1))
            else:
                Console().print(picture(document, {}))
            return 0
        past: dict[str, deque[float]] = {}
        # Ctrl-C is how this ends.
        with contextlib.suppress(KeyboardInterrupt), Live(screen=True, auto_refresh=False) as live:
            while True:
                document = client.now()
                for name in ("flops_per_second", "gemms_per_second"):
                    past.setdefault(name, deque(maxlen=HISTORY)).append(document[name] or 0.0)
                live.update(picture(document, past), refresh=True)
                time.sleep(given.every)
    return 0


def picture(document: Mapping[str, Any], past: Mapping[str, Sequence[float]]) -> RenderableType:
    """The whole screen; pure."""
    state = document["status"]
    style = "bold green" if state == "ready" else "bold red"
    beside = Table.grid(padding=(0, 1))
    beside.add_row(_stages(document), _memory(document))
    return Group(
        Text.assemble("GEMM service  ", (state, style), "  ", (_devices(document), "dim")),
        _figures(document, past),
        beside,
        _workers(document),
    )


def _devices(document: Mapping[str, Any]) -> str:
    names = {w["device"]["name"] for w in document["workers"] if w["device"]}
    return ", ".join(sorted(names))


def _figures(document: Mapping[str, Any], past: Mapping[str, Sequence[float]]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, expand=False)
    table.add_column(style="dim")
    table.add_column(justify="right", style="bold")
    table.add_column()
    table.add_row(
        "arithmetic done", flops(document["flops_per_second"]), spark(past.get("flops_per_second", ()))
    )
    table.add_row("tensor cores busy", *_tensor(document["tensor"]))
    rate = document["gemms_per_second"]
    table.add_row(
        "products a second",
        "–" if rate is None else f"{rate:.1f}",
        spark(past.get("gemms_per_second", ())),
    )
    for name, label in (
        ("wait", "wait in the queue"),
        ("kernel", "computing a batch"),
        ("request", "whole request"),
    ):
        table.add_row(label, *_spread(document[name]))
    batch = document["batch"]
    told = "–" if not batch or batch["mean"] is None else f"{batch['mean']:.2f}"
    table.add_row("requests in a batch", told, Text(f"{document['queue']['depth']} waiting", "dim"))
    return table


def _tensor(tensor: Sequence[Mapping[str, Any]]) -> tuple[str, Text]:
    """All GPUs as one figure: the mean of those that can be read, and what is to be said of it."""
    read = [each for each in tensor if each["active"] is not None]
    if not read:
        return "not readable here", Text(tensor[0]["detail"] if tensor else "no worker is there", "dim")
    mean = sum(each["active"] for each in read) / len(read)
    told = f"read from the hardware ({read[0]['source']})"
    if len(tensor) > 1:
        told = f"mean of {len(read)} GPUs, {told}"
    if len(read) < len(tensor):
        told += f"; {len(tensor) - len(read)} not readable"
    return f"{100 * mean:.1f} %", Text(told, "dim")


def _spread(told: Mapping[str, float | None] | None) -> tuple[str, Text]:
    if not told or told["mean"] is None or told["p50"] is None or told["p99"] is None:
        return "–", Text("nothing in the last seconds", "dim")
    return seconds(told["mean"]), Text(f"median {seconds(told['p50'])}, p99 {seconds(told['p99'])}", "dim")


def _stages(document: Mapping[str, Any]) -> RenderableType:
    stages: Mapping[str, float] = document["stages"] or {}
    whole = sum(stages.values())
    if not whole:
        return Panel(
            Text("Nothing was computed in the last seconds.", "dim"), title="stages", title_align="left"
        )
    table = Table(box=None, pad_edge=False, show_header=False)
    for name in STAGES:
        if name in stages:
            share = stages[name] / whole
            table.add_row(
                name, seconds(stages[name]), "█" * max(1, round(_WIDE * share)), f"{100 * share:.0f} %"
            )
    return Panel(table, title="where a request's time goes", title_align="left", expand=False)


def _memory(document: Mapping[str, Any]) -> Panel:
    table = Table(box=None, pad_edge=False, show_header=False)
    whole = document["arena_bytes"]
    for state, used in document["arena"].items():
        table.add_row(f"arena {state}", size(used), "█" * round(_WIDE * used / whole) if whole else "")
    for tier, used in document["store"].items():
        limit = document["store_bytes"][tier]
        bar = "█" * round(_WIDE * used / limit) if limit else ""
        table.add_row(f"store {tier}", f"{size(used)} of {size(limit)}", bar)
    return Panel(table, title="memory", title_align="left", expand=False)


def _workers(document: Mapping[str, Any]) -> RenderableType:
    table = Table("worker", "state", "device", box=None, pad_edge=False)
    for name in ("tensor busy", "SM clock", "of datasheet (est.)", "pid"):
        table.add_column(name, justify="right")
    for worker in document["workers"]:
        state = Text(worker["state"], "green" if worker["state"] == "ready" else "red")
        if worker["detail"]:
            state.append(f": {worker['detail']}")
        device = worker["device"]["name"] if worker["device"] else "–"
        table.add_row(
            str(worker["index"]), state, device, *_read(worker, document), str(worker["pid"] or "–")
        )
    parts: list[RenderableType] = [table]
    for variant, why in document["quarantined"].items():
        parts.append(Text(f"quarantined: {variant} ({why})", "red"))
    for reason, number in (document["rejected"] or {}).items():
        parts.append(Text(f"refused in the last seconds: {number:.0f}, {reason}", "yellow"))
    return Panel(Group(*parts), title="workers", title_align="left", expand=False)


def _read(worker: Mapping[str, Any], document: Mapping[str, Any]) -> tuple[str, str, str]:
    """What the hardware counted on a worker's GPU, its clock, and beside them the estimate by datasheet."""
    found = next((each for each in document["tensor"] if each["worker"] == worker["index"]), None)
    active, clock = (found["active"], found["sm_clock_mhz"]) if found else (None, None)
    ratio = document["flops_ratio"].get(str(worker["index"]))
    return (
        "–" if active is None else f"{100 * active:.1f} %",
        f"{clock:.0f} MHz" if clock else "–",
        "–" if ratio is None else f"{100 * ratio:.1f} %",
    )


def flops(value: float | None) -> str:
    """A rate for people."""
    if value is None:
        return "–"
    for unit in ("", "k", "M", "G", "T"):
        if value < 1000:
            return f"{value:.1f} {unit}FLOP/s"
        value /= 1000
    return f"{value:.2f} PFLOP/s"


def spark(values: Sequence[float]) -> str:
    """The last values as small bars, the highest as a full one."""
    top = max(values, default=0.0)
    if top <= 0:
        return ""
    return "".join(_BARS[math.ceil((len(_BARS) - 1) * value / top)] for value in values)
