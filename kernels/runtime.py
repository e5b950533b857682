"""Own kernels on a GPU: receives a `Problem` and torch tensors, chooses a variant, packs, launches.

A `Runtime` stands for one GPU of this process: its description, the libraries built for it, which variants
may run and why the others may not, a table of measured times. The service's worker has one; `kernels.gemm`
keeps one a device.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, cast

from kernels import cublas, family, group
from kernels.call import Compiled, Strides, code_of
from kernels.device import Device, describe_cuda
from kernels.group import GroupVariant
from kernels.libraries import FunctionInfo, Libraries, NotBuilt, UntrustedFolder
from kernels.problem import DType, Problem
from kernels.selector import Choice, Reason, Variant, choose, invariant_class

log = logging.getLogger("gemm.kernels")

REGISTERS = 65_536  # of an SM
THREADS = 2_048
SMEM_RESERVED = 1_024  # a block's, beside its own
PACK = "pack_16bit"  # packs 16-bit operands several times faster than a strided copy; optional
TMA_BYTES = 16  # TMA addresses rows and starts in multiples of this
PLANS = 4_096

Check = Callable[["Runtime", Variant, Problem], str | None]


class NotLoaded(RuntimeError):
    """A kernel is wanted inside a CUDA graph's capture that was never run before it."""


@dataclass(frozen=True, slots=True)
class Operands:
    """Device tensors of one product as [batch or 1, rows, columns] views; `d` may be `c`."""

    a: Any
    b: Any
    d: Any
    c: Any = None
    bias: Any = None


@dataclass(frozen=True, slots=True)
class _Ready:
    """A loaded function and the blocks of it that the GPU holds at once."""

    call: Callable[..., Any]
    ctas: int


@dataclass(frozen=True, slots=True)
class Unequal:
    """A variant whose rows were seen with other bits than its class promises on this device."""

    variant: Variant

    @property
    def name(self) -> str:
        """The variant's."""
        return self.variant.name

    @property
    def step(self) -> int:
        """The variant's."""
        return self.variant.step

    def unsupported(self, problem: Problem, device: Device) -> str | None:
        """The variant's."""
        return self.variant.unsupported(problem, device)

    def seconds(self, problem: Problem, device: Device) -> float:
        """The variant's."""
        return self.variant.seconds(problem, device)

    def order(self, problem: Problem) -> str | None:
        """None: not for batch-invariant problems."""
        return None


class Runtime:
    """One GPU: chooses and runs products. Safe for threads; work goes to the caller's current stream."""

    def __init__(
        self,
        device: Device,
        *,
        libraries: Libraries | None = None,
        variants: Sequence[Variant] | None = None,
        check: Check | None = None,
        place: str = "cuda",
    ) -> None:
        self.device = device
        self.place = place
        self.libraries = libraries or Libraries(device.arch)
        self.variants: tuple[Variant, ...] = tuple(variants or family.variants(device.arch))
        self.grouped: tuple[GroupVariant, ...] = () if variants else family.grouped(device.arch)
        self._by_name: dict[str, Variant] = {each.name: each for each in (*self.variants, *self.grouped)}
        self._barred: dict[str, str] = {}
        self._table: dict[str, float] = {}
        self._ready: dict[str, _Ready] = {}
        self._proven: set[str] = set()
        self._unequal: set[str] = set()
        self._check = check
        self._lock = threading.RLock()
        self._plan = lru_cache(PLANS)(self._choose_now)
        self._class = lru_cache(PLANS)(self._class_now)
        self._bar_unbuilt()

    @classmethod
    def of(cls, index: int, root: Path | None = None) -> Runtime:
        """The GPU `index`, with its own kernels where they are built and may be loaded."""
        device = describe_cuda(index)
        libraries = Libraries(device.arch, root)
        return cls(device, libraries=libraries, check=check_function, place=f"cuda:{index}")

    @property
    def build_hash(self) -> str:
        """Changes with every library that is built."""
        return self.libraries.manifest.build_hash

    @property
    def barred(self) -> Mapping[str, str]:
        """Variants that may not run, and why."""
        return dict(self._barred)

    def bar(self, variant: str, because: str) -> None:
        """Keep a variant from running: it was wrong, hung, faulted, or has not been proven yet."""
        with self._lock:
            self._barred[variant] = because
            self._forget_plans()

    def admit(self, variant: str, *, proven: bool = False, equal_bits: bool = True) -> None:
        """Let a variant run. `proven`: a self-test on this device was passed, so none is made before use.

        equal_bits: whether that found the bits of its class; without them it is not for invariant problems.
        """
        with self._lock:
            self._barred.pop(variant, None)
            if proven:
                self._proven.add(variant)
            if not equal_bits:
                each = self._by_name[variant]
                self.variants = tuple(Unequal(v) if v is each else v for v in self.variants)
                self._unequal.add(variant)
            self._forget_plans()

    def measured(self, table: Mapping[str, float]) -> None:
        """Use these times, in seconds by `selector.table_key`, in place of estimates."""
        with self._lock:
            self._table = dict(table)
            self._forget_plans()

    def choose(self, problem: Problem, variant: str = "auto") -> Choice:
        """The variant to run, and why. Raises Unsupported."""
        return self._plan(_kind(as_packed(problem)), variant)

    def run(
        self,
        problem: Problem,
        operands: Operands,
        variant: str = "auto",
        *,
        before: Callable[[], object] = lambda: None,
    ) -> Choice:
        """Queue D on the current stream. `problem` describes the operands as they lie. Raises Unsupported.

        before: called once all is chosen and checked, right before the launch; a place to record an event.
        """
        tidy = as_packed(problem)
        while True:
            choice = self.choose(tidy, variant)
            if choice.variant == cublas.NAME:
                before()
                cublas.compute(problem, operands.a, operands.b, operands.d, operands.c, operands.bias)
                return choice
            chosen = self._by_name[choice.variant]
            wrong = self._unproven(chosen, tidy)
            if wrong is None:
                self.launch(chosen, problem, operands, before=before)
                return choice
            log.error("variant %s is quarantined: %s", choice.variant, wrong)
            self.bar(choice.variant, wrong)

    def run_group(
        self,
        items: Sequence[tuple[Problem, Operands]],
        *,
        before: Callable[[], object] = lambda: None,
    ) -> list[Choice]:
        """Queue unlike products on the current stream; returns what computed each, in order. Raises Unsupported.

        Those of one input type and layout go into one launch where that is expected to be quicker than one after
        the other. No D may overlap another item's operands. Not to be captured into a CUDA graph: the launch reads
        a table that lives until it has run. before: as in `run`.
        """
        choices: dict[int, Choice] = {}
        for variant, numbers in self._groups([problem for problem, _ in items]):
            wrong = self._unproven(variant, as_packed(items[numbers[0]][0]))
            if wrong is not None:
                log.error("variant %s is quarantined: %s", variant.name, wrong)
                self.bar(variant.name, wrong)
                continue
            before()
            before = _nothing
            self.launch_group(variant, [items[number] for number in numbers])
            seconds = variant.seconds_together([items[n][0] for n in numbers], self.device)
            why = f"one launch for {len(numbers)} products, {seconds * 1e6:.1f} µs estimated"
            choices |= dict.fromkeys(
                numbers, Choice(variant.name, Reason.ESTIMATE, why, seconds / len(numbers))
            )
        for number, (problem, operands) in enumerate(items):
            if number not in choices:
                choices[number] = self.run(problem, operands, before=before)
                before = _nothing
        return [choices[number] for number in range(len(items))]

    def _groups(self, problems: Sequence[Problem]) -> list[tuple[GroupVariant, list[int]]]:
        """Sets of at least two problems, by number, that gain by sharing a launch, and by which kernel."""
        alike: dict[tuple[DType, bool, bool], list[int]] = {}
        for number, problem in enumerate(problems):
            alike.setdefault((problem.dtype, problem.trans_a, problem.trans_b), []).append(number)
        found = []
        for numbers in alike.values():
            if len(numbers) < 2:
                continue
            tidy = {n: as_packed(problems[n]) for n in numbers}
            alone = {n: self.choose(each).seconds for n, each in tidy.items()}
            best: tuple[float, GroupVariant, list[int]] | None = None
            for variant in self.grouped:
                able = [n for n in numbers if self._may_join(variant, tidy[n])]
                if len(able) < 2:
                    continue
                together = variant.seconds_together([tidy[n] for n in able], self.device)
                saved = sum(alone[n] for n in able) - together
                if saved > 0 and (best is None or saved > best[0]):
                    best = saved, variant, able
            if best is not None:
                found.append(best[1:])
        return found

    def _may_join(self, variant: GroupVariant, tidy: Problem) -> bool:
        """Whether a problem may be computed in a group by this kernel, with the bits that were promised."""
        if variant.name in self._barred or variant.unsupported(tidy, self.device) is not None:
            return False
        if tidy.batch_invariant:
            order = self._class(replace(_kind(tidy), m=1, batch=1))
            if variant.name in self._unequal or variant.order(tidy) != order:
                return False
        return self.has(variant, tidy)

    def launch_group(
        self, variant: GroupVariant, items: Sequence[tuple[Problem, Operands]], *, blocks: int | None = None
    ) -> None:
        """Queue products of one type and layout as one launch. Raises NotLoaded while a graph is captured."""
        import torch

        if _capturing():
            raise NotLoaded(
                "a group can't be captured into a CUDA graph: its table would be gone by the replay"
            )
        first = as_packed(items[0][0])
        ready = self._load(variant.function(first))
        prepared = [self._prepare(problem, operands) for problem, operands in items]
        data, total = group.table(
            [_product(problem, each) for (problem, _), each in zip(items, prepared, strict=True)],
            *variant.tile,
            variant.raster(first, self.device),
            group.encoder(str(self.libraries.driver)),
        )
        host = torch.frombuffer(bytearray(data), dtype=torch.int64)
        # Page-locked, so that the copy waits for nothing; torch keeps both until the stream is through with them.
        table = host if self.place == "cpu" else host.pin_memory().to(self.place, non_blocking=True)
        ready.call(_aligned_table(table), len(items), total, blocks or ready.ctas)

    def _prepare(self, problem: Problem, operands: Operands) -> Operands:
        """Operands as a kernel reads them: packed where TMA can't address them, C and bias in types it knows."""
        pack = self._load(PACK).call if PACK in self.libraries.manifest.functions else None
        d, tail = operands.d, problem.epilogue
        return Operands(
            packed(operands.a, pack, problem.trans_a),
            packed(operands.b, pack, problem.trans_b),
            d,
            _readable(operands.c).expand(d.shape) if tail.reads_c else None,
            _readable(operands.bias).contiguous() if tail.bias is not None else None,
        )

    def launch(
        self,
        variant: Variant,
        problem: Problem,
        operands: Operands,
        *,
        blocks: int | None = None,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        """Queue one own variant, packing A and B where TMA can't address them.

        blocks: how many a persistent kernel may use, by default as many as the device holds. before: as in `run`.
        """
        if variant in self.grouped:
            before()
            self.launch_group(variant, [(problem, operands)], blocks=blocks)
            return
        compiled = cast(Compiled, variant)
        fitting = as_packed(problem)
        if fitting is not problem:  # packing is part of the product's work
            before()
            before = _nothing
        given = self._prepare(problem, operands)
        a, b, c, d, bias, tail = given.a, given.b, given.c, given.d, given.bias, problem.epilogue
        ready = self._load(compiled.function(fitting))
        arguments = (
            a,
            b,
            d.data_ptr(),
            *d.stride(),
            0 if c is None else c.data_ptr(),
            *((0, 0, 0) if c is None else c.stride()),
            0 if bias is None else bias.data_ptr(),
            tail.alpha,
            tail.beta,
            code_of(problem, c=_dtype_of(c), bias=_dtype_of(bias)),
            problem.batch,
            blocks or compiled.blocks(fitting, ready.ctas),
            compiled.raster(fitting, self.device),
        )
        before()
        ready.call(*arguments)

    def _load(self, name: str) -> _Ready:
        ready = self._ready.get(name)
        if ready is None:
            if _capturing():
                raise NotLoaded(f"{name} must have run once before a CUDA graph is captured with it")
            call = self.libraries.load(name)
            ready = self._ready[name] = _Ready(call, resident_blocks(self.libraries.info(name), self.device))
        return ready

    def _unproven(self, variant: Variant, problem: Problem) -> str | None:
        """Why the variant's function may not be trusted; None where it was seen right on this device."""
        name = cast(Compiled, variant).function(problem)
        if self._check is None or variant.name in self._proven or name in self._proven:
            return None
        if _capturing():
            raise NotLoaded(f"{name} must have run once before a CUDA graph is captured with it")
        with self._lock:
            because = self._check(self, variant, problem)
            if because is None:
                self._proven.add(name)
            return because

    def _bar_unbuilt(self) -> None:
        functions = self.libraries.manifest.functions
        for each in (*self.variants, *self.grouped):
            if each.name == cublas.NAME:
                continue
            if not functions:
                self._barred[each.name] = f"no kernels are built for {self.device.arch}"

    def _forget_plans(self) -> None:
        self._plan.cache_clear()
        self._class.cache_clear()

    def _class_now(self, problem: Problem) -> str | None:
        return invariant_class(problem, self.device, variants=self.variants, barred=self._barred)

    def _choose_now(self, problem: Problem, variant: str) -> Choice:
        order = None
        if problem.batch_invariant and variant == "auto":
            order = self._class(replace(problem, m=1, batch=1))
        barred = dict(self._barred)
        while True:
            choice = choose(
                problem,
                self.device,
                self._table,
                variants=self.variants,
                barred=barred,
                invariant_order=order,
                variant=variant,
            )
            missing = self._missing(choice.variant, problem)
            if missing is None:
                return choice
            barred[choice.variant] = missing

    def has(self, variant: Variant, problem: Problem) -> bool:
        """Whether the function that the variant would run is built and may be loaded; cuBLAS is always there."""
        return self._missing(variant.name, problem) is None

    def _missing(self, variant: str, problem: Problem) -> str | None:
        """Why the library can't serve a variant for this problem, if so: not built, or not to be trusted."""
        if variant == cublas.NAME:
            return None
        try:
            name = cast(Compiled, self._by_name[variant]).function(problem)
            self.libraries.info(name)
        except (NotBuilt, UntrustedFolder) as reason:
            return str(reason)
        return None


def _nothing() -> None:
    pass


def _product(problem: Problem, given: Operands) -> group.Product:
    """A product as a table of a group describes it."""
    a, b, c, d, bias = given.a, given.b, given.c, given.d, given.bias
    return group.Product(
        problem,
        group.Place(a.data_ptr(), a.shape[0], *a.stride()),
        group.Place(b.data_ptr(), b.shape[0], b.stride(0), b.stride(2), b.stride(1)),
        d.data_ptr(),
        d.stride(),
        0 if c is None else c.data_ptr(),
        (0, 0, 0) if c is None else c.stride(),
        0 if bias is None else bias.data_ptr(),
        code_of(problem, c=_dtype_of(c), bias=_dtype_of(bias)),
    )


def _aligned_table(table: Any) -> Any:
    """The table at a multiple of 128 bytes, where the driver wants tensor maps: as it is on a GPU."""
    import torch

    if table.data_ptr() % 128 == 0:
        return table
    room = torch.empty(table.numel() + 16, dtype=table.dtype, device=table.device)
    start = -room.data_ptr() % 128 // 8
    placed = room[start : start + table.numel()]
    placed.copy_(table)
    return placed


def resident_blocks(info: FunctionInfo, device: Device) -> int:
    """Thread blocks of a function that the device holds at once."""
    per_sm = min(
        REGISTERS // max(info.registers * info.threads, 1),
        THREADS // max(info.threads, 1),
        (device.smem_bytes + SMEM_RESERVED) // (info.smem_bytes + SMEM_RESERVED),
    )
    return device.sms * max(1, per_sm)


def _kind(problem: Problem) -> Problem:
    """What the choice depends on: of alpha and beta, whether they are 0, and 1."""
    tail = problem.epilogue
    if tail.alpha in (0.0, 1.0) and tail.beta in (0.0, 1.0):
        return problem
    plain = replace(tail, alpha=min(abs(tail.alpha), 1.0) and 1.0, beta=1.0 if tail.reads_c else 0.0)
    return replace(problem, epilogue=plain)


def as_packed(problem: Problem) -> Problem:
    """The problem that an own kernel sees: leading dimensions of A and B in multiples of 16 bytes."""
    lda, ldb, _, _ = problem.leading
    step = TMA_BYTES // problem.dtype.itemsize or 1
    if lda % step or ldb % step:
        return replace(problem, lda=-(-lda // step) * step, ldb=-(-ldb // step) * step)
    return problem


def packed(x: Any, pack: Callable[..., Any] | None = None, by_column: bool | None = None) -> Any:
    """`x` [layers, rows, columns] as a kernel takes it: itself where TMA can address it, else a copy with row
    pitch in multiples of 16 bytes. Strides of size-1 dimensions are made regular.

    by_column: which of the last two dimensions the function wants contiguous (True: rows); by default the one
    that is. pack: the packing kernel, if it is built. An expanded batch becomes one layer.
    """
    import torch

    if x.stride(0) == 0:
        x = x[:1]
    layers, rows, columns = x.shape
    batch, row, column = x.stride()
    size = x.element_size()
    if by_column is None:
        regular = columns == 1 and row % (TMA_BYTES // size) == 0
        by_column = column != 1 and (row == 1 or rows == 1) and not regular
    strides = Strides(batch, row, column).normal(layers, rows, columns, column_major=by_column)
    inner, outer = (strides.row, strides.column) if by_column else (strides.column, strides.row)
    whole = not any(value * size % TMA_BYTES for value in (outer, strides.batch))
    if inner == 1 and outer > 0 and whole and not x.data_ptr() % TMA_BYTES:
        wanted = (strides.batch, strides.row, strides.column)
        return x if wanted == (batch, row, column) else x.as_strided(x.shape, wanted)
    pitch = -(-(rows if by_column else columns) * size // TMA_BYTES) * TMA_BYTES // size
    lines = columns if by_column else rows
    room = torch.empty((layers, lines, pitch), dtype=x.dtype, device=x.device)
    copy = room[..., :rows].transpose(1, 2) if by_column else room[..., :columns]
    if pack is not None and size == 2:
        line, element = (column, row) if by_column else (row, column)
        length = rows if by_column else columns
        pack(room.view(torch.int16), x.data_ptr(), batch, line, element, length, _pack_blocks(room.numel()))
    else:
        copy.copy_(x)
    return packed(copy, by_column=by_column)


def _pack_blocks(elements: int) -> int:
    """Blocks of 256 threads that write 8 elements each at a time, up to eight times an SM of the largest chips."""
    return max(1, min(1184, elements // 2048))


def _readable(x: Any) -> Any:
    """C or bias in a type that kernels read: fp64 is rounded to the compute type first, as they'd do."""
    import torch

    return x.float() if x.dtype == torch.float64 else x


def _capturing() -> bool:
    import torch

    return torch.cuda.is_available() and bool(torch.cuda.is_current_stream_capturing())


def _dtype_of(x: Any) -> DType | None:
    return None if x is None else dtype_of(x)


def dtype_of(x: Any) -> DType:
    """The service's name of a torch tensor's dtype."""
    found = _names().get(x.dtype)
    if found is None:
        raise TypeError(f"there are fp16, bf16, fp32 and fp64, not {x.dtype}")
    return found


@cache
def _names() -> Mapping[Any, DType]:
    import torch

    return {
        torch.float16: DType.FP16,
        torch.bfloat16: DType.BF16,
        torch.float32: DType.FP32,
        torch.float64: DType.FP64,
    }


def check_function(runtime: Runtime, variant: Variant, problem: Problem) -> str | None:
    """Run the variant's function for such a problem on small operands; why it is wrong, or None."""
    from kernels.selftest import failure

    return failure(runtime, variant, problem)


@lru_cache(maxsize=16)
def runtime(index: int) -> Runtime:
    """The runtime of GPU `index` of this process, with the times that `python -m kernels tune` kept of it."""
    from kernels.tune import Times

    found = Runtime.of(index)
    found.measured(Times(found.device, found.build_hash).read())
    return found
