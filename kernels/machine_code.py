"""Reads machine code: receives a cubin or PTX, hands on resources and mnemonics.

The tools come as packages (nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm), or are found on PATH.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

SYSTEM_SHARED = 1024  # bytes of shared memory a CTA that ptxas adds for the system from sm_90 on
_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)")
_ENTRY = re.compile(r"\.entry\s+(\w+)\(.*?\)\s*(.*?)\{", re.DOTALL)
_THREADS = re.compile(r"\.(?:req|max)ntid\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?")


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of one kernel as ptxas gave them: registers a thread, bytes of the rest.

    `shared` is what the kernel declares statically; the 1,024 bytes that the system keeps aren't counted.
    """

    kernel: str
    registers: int
    stack: int
    shared: int
    local: int


def tool(name: str) -> str:
    """Path of a CUDA binary utility."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(Path(place).glob(f"cu*/bin/{name}")):
            return str(found)
    found_on_path = shutil.which(name)
    if found_on_path is None:
        raise FileNotFoundError(f"{name} is missing: pip install nvidia-cuda-{name}")
    return found_on_path


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def usage(cubin: Path) -> list[Usage]:
    """Resources of each kernel in a cubin."""
    text = _run(tool("cuobjdump"), "-res-usage", str(cubin))
    found = [(name, *map(int, rest)) for name, *rest in _USAGE.findall(text)]
    return [
        Usage(name, registers, stack, max(0, shared - SYSTEM_SHARED), local)
        for name, registers, stack, shared, local in found
    ]


def sass(cubin: Path) -> str:
    """Disassembly of a cubin."""
    return _run(tool("nvdisasm"), "-c", str(cubin))


def mnemonics(text: str) -> list[str]:
    """Mnemonics of a disassembly in order, with their modifiers: "UTMALDG.2D.MULTICAST"."""
    return _INSTRUCTION.findall(text)


def entries(ptx: str) -> dict[str, int]:
    """Kernels of a PTX text and the threads of their CTAs (0 where it isn't said)."""
    found = {}
    for name, directives in _ENTRY.findall(ptx):
        threads = _THREADS.search(directives)
        count = 1
        for part in threads.groups() if threads else ("0",):
            count *= int(part or 1)
        found[name] = count
    return found
