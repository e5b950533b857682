"""Shared by the commands that talk to a service: receives their arguments, hands on clients and arrays."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from service import cli
from service.client import Client, GemmError
from service.client.tensors import DTYPES

VOID_PAIR = np.dtype("V2")  # how .npy names bf16, having no name for it


def service_flags(parser: argparse.ArgumentParser) -> None:
    """Where the service is. Keys come from GEMM_KEY only: other users of the machine see arguments."""
    parser.add_argument(
        "--url", help="http://host:port, https://… or unix:/path; or GEMM_URL (http://127.0.0.1:8000)"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds for each call, retries included"
    )


def client_of(given: argparse.Namespace) -> Client:
    """A client for what the flags say."""
    return Client(given.url, timeout=given.timeout)


def guarded(work: Callable[[], int]) -> int:
    """Run a command's work: 1 where the service refused or wasn't reached, 2 where arguments are wrong."""
    try:
        return work()
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
    array = np.load(path, mmap_mode="r", allow_pickle=False)
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
    """A .npy file, complete or absent."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with fresh.open("wb") as file:
            np.save(file, array.view(VOID_PAIR) if array.dtype == DTYPES["bf16"] else array)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


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
