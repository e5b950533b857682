"""The command line: receives arguments, hands them to one command's module, returns the exit status.

A command's module is imported when its command runs, so that `--help` and `serve` stay quick.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

_EXAMPLES = """\
examples:
  gemm-service serve                            serve on http://127.0.0.1:8000
  gemm-service serve --port 0 --workers 1       serve on a free port, which is printed
  gemm-service gemm A.npy B.npy -o C.npy        multiply two files
  gemm-service put weights.npy --name w         keep a matrix on the service ...
  gemm-service gemm X.npy handle:w -o Y.npy     ... and multiply by it
  gemm-service variants --choose 4096 4096 4096 see what would run, and why
  gemm-service top                              watch it at work
  gemm-service bench -m 256 -n 256 -k 256       requests a second, p50, p99, GFLOP/s

Clients find the service at --url or GEMM_URL (http://127.0.0.1:8000 unless set), and send the API key in
GEMM_KEY. `gemm-service COMMAND --help` explains a command.
"""

#: Command → module here (or `module:function`) and what it does, in the order of the help.
COMMANDS = {
    "serve": ("serve", "run the service"),
    "gemm": ("gemm", "multiply matrices from files or handles"),
    "put": ("tensors:put", "keep a matrix on the service, under a name"),
    "tensors": ("tensors", "list, fetch and delete kept matrices"),
    "jobs": ("jobs", "submit jobs, wait for them, fetch their results"),
    "variants": ("variants", "what can run, and what would run for a problem"),
    "top": ("top", "what the service does now, in this terminal"),
    "keys": ("keys", "make, list, rotate and revoke API keys"),
    "bench": ("bench", "a small load generator"),
}


def parser(command: str, summary: str, examples: str) -> argparse.ArgumentParser:
    """A command's parser: what it does on top, examples below."""
    return argparse.ArgumentParser(
        prog=f"gemm-service {command}",
        description=summary,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 0, 1 where the work failed, 2 where the command was wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    top = argparse.ArgumentParser(
        prog="gemm-service",
        description="Multiply matrices on tensor cores, as a service.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="store_true", help="print the version and exit")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, (_, summary) in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    known = top.parse_args(argv[:1])
    if known.version:
        from service.version import version

        print(version())
        return 0
    if known.command is None:
        top.print_help(sys.stderr)
        return 2
    return _command(known.command)(argv[1:])


def _command(name: str) -> Callable[[Sequence[str]], int]:
    module, _, function = COMMANDS[name][0].partition(":")
    run: Callable[[Sequence[str]], int] = getattr(
        importlib.import_module(f"service.cli.{module}"), function or "main"
    )
    return run


def complain(message: Any) -> int:
    """Say on stderr what was wrong; the status of a wrong command."""
    for line in str(message).splitlines():
        print(f"gemm-service: {line}", file=sys.stderr)
    return 2
