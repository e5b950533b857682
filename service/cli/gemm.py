"""`gemm-service gemm`: receives files or handles, sends one product, writes the result, tells who made it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from service import cli
from service.cli.common import check_folder, client_of, guarded, operand, save, seconds, service_flags
from service.client import Handle

_EXAMPLES = """\
  gemm-service gemm A.npy B.npy -o D.npy                           D = A · B
  gemm-service gemm A.npy B.npy                                    ... shown on the terminal
  gemm-service gemm X.npy handle:w --bias b.npy --activation gelu  against a kept matrix
  gemm-service gemm A.npy B.npy --c C.npy --alpha 2 --beta 0.5     D = 2 · A · B + 0.5 · C
  gemm-service gemm A.npy B.npy --keep d                           D stays on the service, as handle:d
  gemm-service gemm A.npy B.npy --dtype bf16 --out-dtype fp32      operands are rounded to bf16 first
"""

_CHOICES = {
    "activation": ("none", "relu", "gelu", "silu"),
    "out_dtype": ("fp16", "bf16", "fp32", "fp64"),
    "precision": ("ieee", "tf32"),
    "bias_dim": ("n", "m"),
}


def arguments() -> argparse.ArgumentParser:
    """The flags, named as the service's parameters."""
    parser = cli.parser("gemm", "Multiply: D = act(alpha · op(A) · op(B) + beta · C + bias).", _EXAMPLES)
    parser.add_argument("a", help="a .npy file, or handle:NAME")
    parser.add_argument("b", help="a .npy file, or handle:NAME")
    parser.add_argument("--c", metavar="C", help="a .npy file, or handle:NAME")
    parser.add_argument("--bias", help="a .npy file, or handle:NAME")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=".npy file for D")
    parser.add_argument("--keep", metavar="NAME", help="keep D on the service under this name instead")
    parser.add_argument(
        "--dtype", choices=("fp16", "bf16", "fp32", "fp64"), help="convert the operands to this"
    )
    parser.add_argument("--alpha", type=float)
    parser.add_argument("--beta", type=float, help="1 with --c unless given")
    parser.add_argument("--trans-a", action="store_true", help="A is stored [K, M]")
    parser.add_argument("--trans-b", action="store_true", help="B is stored [N, K]")
    for name, choices in _CHOICES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", choices=choices)
    parser.add_argument("--variant", help="a variant by name; see `gemm-service variants`")
    parser.add_argument("--deadline-ms", type=float, help="give up if not begun by then")
    parser.add_argument("--priority", type=int, help="1 is the highest")
    service_flags(parser)
    return parser


_OPTIONS = (
    *("alpha", "beta", "activation", "out_dtype", "precision", "bias_dim"),
    *("variant", "deadline_ms", "priority"),
)


def main(argv: Sequence[str]) -> int:
    """Multiply."""
    given = arguments().parse_args(argv)
    return guarded(lambda: _multiply(given))


def _multiply(given: argparse.Namespace) -> int:
    check_folder(given.output)
    a, b = operand(given.a, given.dtype), operand(given.b, given.dtype)
    c, bias = (None if text is None else operand(text, None) for text in (given.c, given.bias))
    options = {name: value for name in _OPTIONS if (value := getattr(given, name)) is not None}
    with client_of(given) as client:
        made = client.gemm_result(
            a,
            b,
            c,
            bias,
            out=None if given.keep is None else Handle(given.keep),
            trans_a=given.trans_a,
            trans_b=given.trans_b,
            **options,
        )
    told = f"by {made.variant} ({made.reason}): queued {seconds(made.queue_seconds)}"
    told += f", computed {seconds(made.compute_seconds)}"
    if made.handle is not None:
        print(f"kept as handle:{made.handle.name}, shape {made.handle.shape}", file=sys.stderr)
    elif given.output is not None:
        save(given.output, made.array)
        print(f"{given.output}: {made.array.dtype} {made.array.shape}", file=sys.stderr)
    else:
        print(made.array)
    print(told, file=sys.stderr)
    return 0
