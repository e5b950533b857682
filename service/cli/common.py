"""Shared by the commands that talk to a service: receives their arguments, hands on clients and arrays."""

from __future__ import annotations

import argparse
import contextlib
import errno
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from service import cli
from service.client import Client, ConnectionFailed, GemmError
from service.client.tensors import DTYPES

VOID_PAIR = np.dtype("V2")  # how .npy names bf16, having no name for it


def service_flags(*parsers: argparse.ArgumentParser) -> None:
    """Where the service is, before or after a subcommand: `parsers` are a command's and its subcommands'.

    Keys come from GEMM_KEY only: other users of the machine see arguments.
    """
    for number, parser in enumerate(parsers):
        # A subcommand's own default would overwrite what was said before it.
        absent: dict[str, Any] = {} if number == 0 else {"default": argparse.SUPPRESS}
        parser.add_argument(
            "--url",
            help="http://host:port, https://… or unix:/path; or GEMM_URL (http://127.0.0.1:8000)",
            **absent,
        )
        parser.add_argument(
            "--timeout",
            type=positive,
            help="seconds for each call, retries included (600)",
            **({"default": 600.0} | absent),
        )


def positive(text: str) -> float:
    """A number above 0, for argparse."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError("a number above 0 is taken")
    return value


def client_of(given: argparse.Namespace) -> Client:
    """A client for what the flags say."""
    return Client(given.url, timeout=given.timeout)


def guarded(work: Callable[[], int]) -> int:
    """Run a command's work: 1 where the service refused or wasn't reached, 2 where arguments are wrong."""
    try:
        return work()
    except ConnectionFailed as error:
        cli.complain(error if error.sent else f"{error}; --url or GEMM_URL says where the service is")
        return 1
    except GemmError as error:
        cli.complain(error)
        return 1
    except (ValueError, TypeError) as error:
        return cli.complain(error)
    except BrokenPipeError:  # the reader of our output left; nor can Python's exit flush to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return cli.complain(f"{error.filename or ''}: {error.strerror or error}".lstrip(": "))


def operand(text: str, dtype: str | None) -> Any:
    """`handle:NAME`, or the array in a .npy file, whose pages are read as they are sent."""
    if text.startswith("handle:"):
        return text
    return load(Path(text), dtype)


def load(path: Path, dtype: str | None) -> np.ndarray[Any, Any]:
    """An array from a .npy file; objects are refused. `dtype` "bf16" says what two-byte void means."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError):  # whose words advise to load pickled objects
        raise ValueError(f"{path} isn't a .npy file of numbers") from None
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path} is an archive, not one array")
    if array.dtype == VOID_PAIR:
        if dtype != "bf16":
            raise ValueError(f"{path} holds two-byte void, which .npy writes for bf16; say --dtype bf16")
        return array.view(DTYPES["bf16"])
    if dtype is not None and array.dtype != DTYPES[dtype]:
        return array.astype(DTYPES[dtype])
    return array


def save(path: Path, array: np.ndarray[Any, Any]) -> None:
    """A .npy file, complete or absent. OSError names it."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with fresh.open("wb") as file:
            np.save(file, array.view(VOID_PAIR) if array.dtype == DTYPES["bf16"] else array)
        os.replace(fresh, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)


def check_folder(path: Path | None) -> None:
    """OSError where a file couldn't be written there: better said before the work than after it."""
    if path is not None and not os.access(path.absolute().parent, os.W_OK):
        code = errno.EACCES if path.absolute().parent.is_dir() else errno.ENOENT
        raise OSError(code, os.strerror(code), str(path))


def seconds(value: float) -> str:
    """A duration for people."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


def size(value: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
