"""Launches without CUDA: receives a compiled function and CPU tensors, hands on a `Report`.

The function's own host code runs. A stub library in the place of the CUDA runtime hands its launches to the
virtual GPU, with parameters and tensor maps as the host code made them; CPU tensors serve as device memory.
`prepare()` has to come before the first compilation of the process.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kernels.virtual import tensormap
from kernels.virtual.launch import Launch, Options, Schedule, schedules
from kernels.virtual.machine import launch_machine
from kernels.virtual.report import Fault, Finding, Report, Run
from kernels.virtual.translate import translate

_CLUSTER = 4  # cudaLaunchAttributeClusterDimension
_SM_COUNT, _SHARED_OPTIN, _MAJOR, _MINOR = 16, 97, 75, 76  # cudaDeviceAttr
_FAILED = 719  # cudaErrorLaunchFailure
_INVALID = 1  # CUDA_ERROR_INVALID_VALUE
_SONAME = "-Wl,-soname,libcute_dsl_runtime.so"  # libraries ask for this name
_CUDA, _BFLOAT = 2, 4  # DLPack's codes


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class _Configuration(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


_Pointer = ctypes.POINTER(ctypes.c_void_p)
_LOAD = ctypes.CFUNCTYPE(ctypes.c_int, _Pointer, ctypes.c_void_p)
_KERNEL = ctypes.CFUNCTYPE(ctypes.c_int, _Pointer, ctypes.c_void_p, ctypes.c_char_p)
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Configuration), ctypes.c_void_p, _Pointer)
_MAP = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32),
    ctypes.POINTER(ctypes.c_uint32), ctypes.c_int, ctypes.c_int,
)  # fmt: skip
_ATTRIBUTE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)

Buffers = Sequence[tuple[str, int, int]]  # name, address, bytes


@dataclass(slots=True)
class _Context:
    """What a launch that comes in through the stub is to be run with."""

    ptx: str
    buffers: Buffers
    options: Options
    runs: list[Run]
    error: Exception | None = None


class Host:
    """The process's connection to the stub library."""

    def __init__(self) -> None:
        self.path = build_stub()
        self.library = ctypes.CDLL(self.path, mode=ctypes.RTLD_GLOBAL)
        self.names: list[str] = []
        self.context: _Context | None = None
        self.sms = 8
        # Callbacks must live as long as the library may call them.
        self._callbacks = (
            _LOAD(self._load),
            _KERNEL(self._kernel),
            _LAUNCH(self._launch),
            _MAP(self._map),
            _ATTRIBUTE(self._attribute),
        )
        self.library.virtual_gpu_connect(*self._callbacks)

    def _load(self, library: Any, code: int) -> int:
        library[0] = code or 1
        return 0

    def _kernel(self, kernel: Any, library: int, name: bytes) -> int:
        text = name.decode()
        if text not in self.names:
            self.names.append(text)
        kernel[0] = self.names.index(text) + 1
        return 0

    def _attribute(self, which: int) -> int:
        return {_SM_COUNT: self.sms, _SHARED_OPTIN: 232_448, _MAJOR: 10, _MINOR: 0}.get(which, 0)

    def _map(
        self, out: int, kind: int, rank: int, address: int, dims: Any, strides: Any, box: Any, steps: Any,
        interleave: int, swizzle: int,
    ) -> int:  # fmt: skip
        kind = tensormap.DRIVER_KINDS.get(kind, kind)
        try:
            if any(steps[i] != 1 for i in range(rank)):
                raise ValueError(f"steps of {tuple(steps[:rank])} elements are not modelled")
            data = tensormap.encode(
                address or 0, kind, dims[:rank], strides[: rank - 1], box[:rank], swizzle, interleave
            )
        except ValueError as error:
            if self.context:
                self.context.error = ValueError(f"cuTensorMapEncodeTiled: {error}")
            return _INVALID
        ctypes.memmove(out, data, 128)
        return 0

    def _launch(self, how: Any, kernel: int, arguments: Any) -> int:
        context = self.context
        if context is None or context.error:  # it asks for a launch whatever the call for a map has answered
            return _FAILED
        try:
            self._run(context, how.contents, self.names[kernel - 1], arguments)
        except Exception as error:
            context.error = error
            return _FAILED
        return 0

    def _run(self, context: _Context, how: _Configuration, name: str, arguments: Any) -> None:
        program = translate(context.ptx, name)
        cluster: tuple[int, int, int] = (1, 1, 1)
        explicit = False
        for i in range(how.count):
            attribute = how.attributes[i]
            if attribute.id == _CLUSTER:
                x, y, z = attribute.value[0], attribute.value[1], attribute.value[2]
                cluster, explicit = (x, y, z), True
        required = program.kernel.directives.get("reqnctapercluster")
        if required and not explicit:
            cluster, explicit = (required[0], required[1], required[2]), True
        params = tuple(
            ctypes.string_at(arguments[i], size) for i, (_, size, _) in enumerate(program.kernel.params)
        )
        launch = Launch(
            program, tuple(how.grid), tuple(how.block), cluster, int(how.shared), params, explicit
        )
        context.runs.append(launch_machine(launch, context.buffers, context.options))


_HOST: list[Host] = []


def host() -> Host:
    """The one host of the process."""
    if not _HOST:
        _HOST.append(Host())
    return _HOST[0]


def prepare() -> None:
    """Make the compiler link what it compiles against the stub. Call before it compiles anything."""
    os.environ["CUTE_DSL_LIBS"] = host().path


def build_stub() -> str:
    """Compile the stub library, once for its text; the folder is the user's own."""
    source = Path(__file__).with_name("stub.c")
    digest = hashlib.sha256(source.read_bytes() + _SONAME.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gemm-service"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = folder / f"virtual-gpu-stub-{digest}.so"
    if not target.exists():
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".so", delete=False) as temporary:
            pass
        subprocess.run(
            ["cc", "-O1", "-shared", "-fPIC", _SONAME, "-o", temporary.name, str(source)], check=True
        )
        os.replace(temporary.name, target)
    return str(target)


def buffer_of(name: str, value: Any) -> tuple[str, int, int] | None:
    """Where an argument's bytes lie: torch tensors and NumPy arrays."""
    if isinstance(value, np.ndarray):
        if value.size == 0:
            return None
        strides: Sequence[int] = value.strides
        shape, item, address = value.shape, value.itemsize, value.ctypes.data
    elif hasattr(value, "data_ptr"):
        if value.numel() == 0:
            return None
        item = value.element_size()
        shape, address = tuple(value.shape), value.data_ptr()
        strides = [s * item for s in value.stride()]
    else:
        return None
    return name, address, sum((d - 1) * s for d, s in zip(shape, strides, strict=True)) + item


def run(
    call: Callable[[], object],
    buffers: Mapping[str, Any],
    ptx: str,
    *,
    schedules_: int | Sequence[Schedule] = 3,
    options: Options | None = None,
) -> Report:
    """Make the call under each schedule; all must leave the same bytes in the buffers.

    `buffers` are the tensors that the kernel may touch, by name; `ptx` is the text that its code was made
    from. Every run starts from the same bytes. After the last one the buffers hold what it wrote.
    """
    options = options or Options()
    plan = schedules(schedules_) if isinstance(schedules_, int) else list(schedules_)
    places = [b for name, value in buffers.items() if (b := buffer_of(name, value)) is not None]
    before = [ctypes.string_at(address, size) for _, address, size in places]
    report = Report()
    first: list[bytes] | None = None
    owner = host()
    for number, schedule in enumerate(plan):
        if number:
            for (_, address, _), data in zip(places, before, strict=True):
                ctypes.memmove(address, data, len(data))
        _once(owner, call, _Context(ptx, places, replace(options, schedule=schedule), []), report)
        after = [ctypes.string_at(address, size) for _, address, size in places]
        if first is None:
            first = after
        elif report.ok:
            _compare(places, first, after, str(plan[0]), str(schedule), report)
    return report


def _once(owner: Host, call: Callable[[], object], context: _Context, report: Report) -> None:
    owner.context, owner.sms = context, context.options.sms
    try:
        call()
    except Exception:
        if context.error is None:
            raise
    finally:
        owner.context = None
    report.runs.extend(context.runs)
    if isinstance(context.error, Fault):
        report.findings.append(context.error.finding)
    elif context.error is not None:
        raise context.error


def _compare(
    places: Buffers, first: list[bytes], after: list[bytes], name: str, other: str, report: Report
) -> None:
    for (buffer, _, _), a, b in zip(places, first, after, strict=True):
        if a != b:
            differ = np.flatnonzero(np.frombuffer(a, np.uint8) != np.frombuffer(b, np.uint8))
            text = (
                f"{buffer}: {differ.size} bytes differ between {name} and {other}, first at byte {differ[0]}"
            )
            report.findings.append(Finding("disagreement", text))


class _OnDevice:
    """An array of the host that says of itself that it lies on CUDA device 0."""

    def __init__(self, array: Any) -> None:
        self.bf16 = getattr(array, "dtype", None) == ml_dtypes.bfloat16
        self.array = array.view(np.uint16) if self.bf16 else array

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self.array.__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        managed = get(capsule, b"dltensor")
        # DLTensor: data (8 bytes), device type and number (4 each), dimensions (4), type code (1)
        ctypes.c_int32.from_address(managed + 8).value = _CUDA
        if self.bf16:  # NumPy's own types have none
            ctypes.c_uint8.from_address(managed + 20).value = _BFLOAT
        return capsule


def on_device(array: Any) -> Any:
    """A NumPy array or CPU tensor as compiled functions take it: as one of device 0. Memory is shared."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(_OnDevice(array))
