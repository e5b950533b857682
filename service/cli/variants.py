"""`gemm-service variants`: receives a problem or nothing, shows what can run, or what would run and why."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from service import cli
from service.cli.common import client_of, guarded, seconds, service_flags

_EXAMPLES = """\
  gemm-service variants                                     all that the device can run
  gemm-service variants --choose 4096 4096 4096 --dtype bf16
  gemm-service variants --choose 16 4096 4096 --activation gelu --json
"""


def main(argv: Sequence[str]) -> int:
    """`gemm-service variants`."""
    parser = cli.parser("variants", "What can run, and what would run for a problem.", _EXAMPLES)
    parser.add_argument(
        "--choose", nargs=3, type=int, metavar=("M", "N", "K"), help="a problem to choose for"
    )
    parser.add_argument("--batch", type=int)
    parser.add_argument("--dtype", choices=("fp16", "bf16", "fp32", "fp64"))
    parser.add_argument("--out-dtype", choices=("fp16", "bf16", "fp32", "fp64"))
    parser.add_argument("--trans-a", action="store_true", default=None)
    parser.add_argument("--trans-b", action="store_true", default=None)
    parser.add_argument("--activation", choices=("none", "relu", "gelu", "silu"))
    parser.add_argument("--precision", choices=("ieee", "tf32"))
    parser.add_argument("--json", action="store_true", help="the service's own document")
    service_flags(parser)
    given = parser.parse_args(argv)
    return guarded(lambda: _work(given))


_PROBLEM = ("batch", "dtype", "out_dtype", "trans_a", "trans_b", "activation", "precision")


def _work(given: argparse.Namespace) -> int:
    with client_of(given) as client:
        if given.choose is None:
            document = client.variants()
        else:
            problem = {name: value for name in _PROBLEM if (value := getattr(given, name)) is not None}
            document = client.choose(*given.choose, **problem)
    if given.json:
        print(json.dumps(document, indent=1))
    elif given.choose is None:
        _show(document)
    else:
        show_choice(document)
    return 0


def _show(document: Any) -> None:
    device = document.get("device", {})
    print(f"{device.get('name', '?')} ({device.get('arch', '?')})")
    for row in document["variants"]:
        rest = {key: value for key, value in row.items() if key not in ("name", "variant")}
        print(
            f"  {row.get('name', row.get('variant')):32}", *(f"{key}={value}" for key, value in rest.items())
        )


def show_choice(document: Any) -> None:
    """The choice, and every candidate with its time or why not."""
    print(f"{document['variant']}, for the reason {document['reason']!r}: {document['why']}")
    for row in document["candidates"]:
        if row["seconds"] is None:
            told = f"not: {row['because']}"
        else:
            told = f"{seconds(row['seconds'])} {'measured' if row['measured'] else 'estimated'}"
        print(f"  {row['variant']:32} {told}")
