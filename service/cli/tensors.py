"""`gemm-service put` and `tensors`: receive files and names; keep, list, fetch and delete matrices."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from service import cli
from service.cli.common import check_folder, client_of, guarded, load, save, service_flags

_PUT_EXAMPLES = """\
  gemm-service put weights.npy                    kept as handle:weights
  gemm-service put layer1.safetensors --name w1   a file with one tensor
  gemm-service put weights.npy --dtype bf16       converted first
  gemm-service put weights.npy --ttl-seconds 3600 --new
"""
_EXAMPLES = """\
  gemm-service tensors                            list
  gemm-service tensors get weights -o W.npy
  gemm-service tensors delete weights
"""


def put(argv: Sequence[str]) -> int:
    """`gemm-service put`."""
    parser = cli.parser(
        "put", "Keep a matrix on the service; it is on disk when this returns.", _PUT_EXAMPLES
    )
    parser.add_argument("file", type=Path, help=".npy or .safetensors")
    parser.add_argument("--name", help="its name there (default: the file's, without suffix)")
    parser.add_argument("--dtype", choices=("fp16", "bf16", "fp32", "fp64"), help="convert a .npy to this")
    parser.add_argument("--ttl-seconds", type=float, help="forget it after this time")
    parser.add_argument("--new", action="store_true", help="refuse to replace one of the same name")
    service_flags(parser)
    given = parser.parse_args(argv)

    def work() -> int:
        value = given.file if given.dtype is None else load(given.file, given.dtype)
        with client_of(given) as client:
            kept = client.put(
                given.name or given.file.stem, value, ttl_seconds=given.ttl_seconds, replace=not given.new
            )
        print(f"handle:{kept.name}  {kept.dtype} {kept.shape}  etag {kept.etag}")
        return 0

    return guarded(work)


def main(argv: Sequence[str]) -> int:
    """`gemm-service tensors`."""
    parser = cli.parser("tensors", "List, fetch and delete kept matrices.", _EXAMPLES)
    commands = parser.add_subparsers(dest="do", metavar="{list,get,delete}")
    commands.add_parser("list", help="list them (also without a command)")
    get = commands.add_parser("get", help="fetch one into a .npy file")
    get.add_argument("name")
    get.add_argument("-o", "--output", type=Path, help="default: NAME.npy")
    delete = commands.add_parser("delete", help="forget one")
    delete.add_argument("name")
    service_flags(parser, *commands.choices.values())
    given = parser.parse_args(argv)
    return guarded(lambda: _work(given))


def _work(given: argparse.Namespace) -> int:
    with client_of(given) as client:
        match given.do:
            case "get":
                output = given.output or Path(f"{given.name}.npy")
                check_folder(output)
                array = client.get(given.name.removeprefix("handle:"))
                save(output, array)
                print(f"{output}: {array.dtype} {array.shape}")
            case "delete":
                client.delete(given.name.removeprefix("handle:"))
                print(f"{given.name} is deleted")
            case _:
                for kept in client.tensors():
                    print(f"{kept.name:32} {kept.dtype:5} {kept.shape!s:20} {_expiry(kept.expires)}")
    return 0


def _expiry(expires: str | float | None) -> str:
    if expires is None:
        return ""
    if isinstance(expires, str):
        return f"until {expires}"
    return f"until {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(expires))}"
