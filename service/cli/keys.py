"""`gemm-service keys`: receives who and what for, edits the keys file, which a running service rereads."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from service import cli, keys
from service.cli.common import size
from service.settings import SettingsError, parse_bytes

_EXAMPLES = """\
  gemm-service keys add alice --file keys.json                        prints the token, once
  gemm-service keys add ci --scopes gemm --requests-per-second 50 --expires-days 90
  gemm-service keys list
  gemm-service keys rotate 1f2e3d4c5b6a --overlap-seconds 3600        a successor; the old one lasts an hour
  gemm-service keys revoke 1f2e3d4c5b6a

The file is --file, else GEMM_KEYS_FILE, else keys.json. It holds digests only: a lost token stays lost.
A running service takes changes up within a second or two.
"""


def arguments() -> argparse.ArgumentParser:
    """The commands about keys."""
    parser = cli.parser("keys", "Make, list, rotate and revoke API keys.", _EXAMPLES)
    commands = parser.add_subparsers(dest="do", required=True, metavar="{add,list,rotate,revoke}")
    add = commands.add_parser("add", help="make a key and print its token")
    add.add_argument("owner", help="whom it is for; handles and jobs belong to the owner, not to the key")
    add.add_argument(
        "--scopes",
        default="gemm,tensors,jobs",
        help="comma-separated: gemm, tensors, jobs, admin (default: all but admin)",
    )
    add.add_argument("--expires-days", type=float, help="days until it ends")
    add.add_argument("--requests-per-second", type=float, help="quota")
    add.add_argument("--concurrent-requests", type=int, help="quota")
    add.add_argument("--flops-per-second", type=float, help="quota")
    add.add_argument(
        "--bytes-per-second", type=_size, help="quota of bodies in and out; 100MB and the like are taken"
    )
    add.add_argument(
        "--store-bytes", type=_size, help="quota for stored tensors; 4GiB and the like are taken"
    )
    commands.add_parser("list", help="show the keys, without their tokens")
    rotate = commands.add_parser("rotate", help="make a successor of a key")
    rotate.add_argument("id")
    rotate.add_argument(
        "--overlap-seconds", type=float, default=3600.0, help="how long the old key still works"
    )
    revoke = commands.add_parser("revoke", help="take a key out of force")
    revoke.add_argument("id")
    for command in commands.choices.values():
        command.add_argument(
            "--file",
            type=Path,
            default=Path(os.environ.get("GEMM_KEYS_FILE", "keys.json")),
            help="the keys file",
        )
    return parser


def _size(text: str) -> int:
    try:
        return int(str(parse_bytes(text)))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(argv: Sequence[str]) -> int:
    """Edit or show the file."""
    given = arguments().parse_args(argv)
    try:
        match given.do:
            case "add":
                key, token = keys.add(
                    given.file,
                    given.owner,
                    scopes=[scope.strip() for scope in given.scopes.split(",")],
                    quota=keys.Quota(
                        given.requests_per_second,
                        given.concurrent_requests,
                        given.flops_per_second,
                        given.store_bytes,
                        given.bytes_per_second,
                    ),
                    expires=None if given.expires_days is None else time.time() + given.expires_days * 86400,
                )
                _show(key, token)
            case "rotate":
                _show(*keys.rotate(given.file, given.id, overlap_seconds=given.overlap_seconds))
            case "revoke":
                keys.revoke(given.file, given.id)
                print(f"{given.id} is revoked")
            case "list":
                _list(keys.read(given.file))
    except (SettingsError, ValueError) as error:
        return cli.complain(error)
    except OSError as error:
        return cli.complain(f"--file {given.file}: {error.strerror}")
    return 0


def _show(key: keys.Key, token: str) -> None:
    """The token alone goes to the output, so that a script can take it; what a reader needs goes beside it."""
    print(token, flush=True)
    print(
        f"key {key.id} of {key.owner}: {', '.join(sorted(key.scopes))}. The token is shown this once.",
        file=sys.stderr,
    )


def _list(rows: Sequence[keys.Key]) -> None:
    print(f"{'id':14}{'owner':20}{'scopes':26}{'expires':21}quotas")
    for key in rows:
        ends = (
            "never"
            if key.expires is None
            else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(key.expires))
        )
        quotas = ((name, getattr(key.quota, name)) for name in key.quota.__slots__)
        told = ", ".join(f"{name} {_bound(name, value)}" for name, value in quotas if value is not None)
        print(f"{key.id:14}{key.owner:20}{','.join(sorted(key.scopes)):26}{ends:21}{told or 'none'}")


def _bound(name: str, value: float) -> str:
    return size(value) if "bytes" in name else f"{value:g}"
