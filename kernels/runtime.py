"""Own kernels on a GPU: receives a `Problem` and torch tensors, chooses a variant, packs, launches.

A `Runtime` stands for one GPU of this process: its description, the libraries built for it, which variants
may run and why the others may not, a table of measured times. The service's worker has one; `kernels.gemm`
keeps one a device.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from kernels import cublas, family, together
from kernels.call import Compiled, code_of
from kernels.device import Device, describe_cuda
from kernels.group import GroupVariant
from kernels.libraries import FunctionInfo, Libraries, NotBuilt, UntrustedFolder
from kernels.operands import Operands, as_packed, maybe_dtype_of, packed, readable
from kernels.problem import Problem
from kernels.selector import Choice, Unequal, Variant, choose, invariant_class
from kernels.together import Group, Host

log = logging.getLogger("gemm.kernels")

REGISTERS = 65_536  # of an SM
THREADS = 2_048
SMEM_RESERVED = 1_024  # a block's, beside its own
PACK = "pack_16bit"  # packs 16-bit operands several times faster than a strided copy; optional
PLANS = 4_096

Check = Callable[["Runtime", Variant, Problem], str | None]


class NotLoaded(RuntimeError):
    """A kernel is wanted inside a CUDA graph's capture that was never run before it."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """A loaded function and the blocks of it that the GPU holds at once."""

    call: Callable[..., Any]
    ctas: int


@dataclass(frozen=True, slots=True)
class _Launch:
    """What a launch takes besides its operands: a function, its blocks, the order of its tiles, and the argument `code`
    where there is neither C nor bias. `packs`: A or B, whose rows TMA can't address, is packed first.
    """

    ready: _Ready
    blocks: int
    raster: int
    code: int
    packs: bool


@dataclass(frozen=True, slots=True)
class _Way:
    """How a problem is computed; without a launch by the reference."""

    choice: Choice
    launch: _Launch | None


@dataclass(slots=True)
class Repeated:
    """A product that is asked for again and again between operands that stay where they are.

    What its launch takes is found once, and kept in `launch` with the plans that it was found by.
    """

    problem: Problem
    operands: Operands
    variant: str = "auto"
    launch: _Repeat | None = None


@dataclass(frozen=True, slots=True)
class _Repeat:
    """`plans` are the runtime's when it was found: once those are others, so may be the choice.

    call: None where more than a launch is to be done each time: the reference, a copy of an operand.
    """

    plans: object
    choice: Choice
    call: Callable[..., Any] | None = None
    arguments: tuple[Any, ...] = ()


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
        self._geometry = lru_cache(PLANS)(self._geometry_now)
        self._ways: dict[tuple[Problem, str], _Way] = {}
        self._bar_unbuilt()
        self._forget_plans()

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
        way = self._ways.get((problem, variant)) or self._find_way(problem, variant)
        if way.launch is None:
            before()
            cublas.compute(problem, operands.a, operands.b, operands.d, operands.c, operands.bias)
        else:
            self._start(way.launch, problem, operands, before=before)
        return way.choice

    def repeat(self, product: Repeated, *, before: Callable[[], object] = lambda: None) -> Choice:
        """`run`, of a product whose operands are where they were the last time."""
        known = product.launch
        if known is None or known.plans is not self._ways:
            known = product.launch = self._find_repeat(product)
        if known.call is None:
            return self.run(product.problem, product.operands, product.variant, before=before)
        before()
        known.call(*known.arguments)
        return known.choice

    def _find_repeat(self, product: Repeated) -> _Repeat:
        problem, operands = product.problem, product.operands
        with self._lock:
            way = self._ways.get((problem, product.variant)) or self._find_way(problem, product.variant)
            plans = self._ways
        if way.launch is None or way.launch.packs:
            return _Repeat(plans, way.choice)
        given = self._prepare(problem, operands)
        if any(_is_copy(getattr(given, name), getattr(operands, name)) for name in ("a", "b", "c", "bias")):
            return _Repeat(plans, way.choice)
        return _Repeat(plans, way.choice, way.launch.ready.call, self._arguments(way.launch, problem, given))

    def _find_way(self, problem: Problem, variant: str) -> _Way:
        """By a variant that is to be trusted; kept until what may run, or how long it takes, is another."""
        tidy = as_packed(problem)
        kind = _kind(tidy)
        with self._lock:  # or what is barred meanwhile would be found again
            while True:
                choice = self._plan(kind, variant)
                if choice.variant == cublas.NAME:
                    way = _Way(choice, None)
                    break
                chosen = self._by_name[choice.variant]
                try:
                    if self.trusts(chosen, tidy):
                        way = _Way(choice, self._geometry(cast(Hashable, chosen), _kind(problem)))
                        break
                except (UntrustedFolder, OSError) as reason:  # what the manifest names can't be loaded
                    log.error("variant %s can't be loaded: %s", chosen.name, reason)
                    self.bar(chosen.name, str(reason))
            if len(self._ways) >= PLANS:
                self._ways = {}
            self._ways[problem, variant] = way
        return way

    def groups(self, problems: Sequence[Problem], host: Host | None = None) -> list[Group]:
        """Which of these products, that wait together, gain by sharing a launch. Raises Unsupported.

        host: what launching takes; by default nothing, as where the device has work for longer.
        """
        return together.groups(self, problems, host or Host())

    def run_group(self, items: Sequence[tuple[Problem, Operands]]) -> list[Choice]:
        """Queue unlike products on the current stream; returns what computed each, in order. Raises Unsupported.

        Those of one input type and layout go into one launch where that is expected to be quicker than one after
        the other. No D may overlap another item's operands. While a CUDA graph is captured each is a launch of its own:
        that of a group reads a table which is gone by the replay.
        """
        choices: dict[int, Choice] = {}
        for each in () if _capturing() else self.groups([problem for problem, _ in items]):
            self.launch_group(each.variant, [items[number] for number in each.numbers])
            choices |= dict.fromkeys(each.numbers, each.choice)
        for number, (problem, operands) in enumerate(items):
            if number not in choices:
                choices[number] = self.run(problem, operands)
        return [choices[number] for number in range(len(items))]

    def may_join(self, variant: GroupVariant, tidy: Problem) -> bool:
        """Whether a problem may be computed in a group by this kernel, with the bits that were promised."""
        return self._joins(cast(Hashable, variant), _kind(tidy))

    def _may_join_now(self, kernel: Hashable, tidy: Problem) -> bool:
        variant = cast(GroupVariant, kernel)
        if variant.name in self._barred or variant.unsupported(tidy, self.device) is not None:
            return False
        if tidy.batch_invariant:
            order = self._class(replace(tidy, m=1, batch=1))
            if variant.name in self._unequal or variant.order(tidy) != order:
                return False
        return self.has(variant, tidy)

    def launch_group(
        self,
        variant: GroupVariant,
        items: Sequence[tuple[Problem, Operands]],
        *,
        blocks: int | None = None,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        """Queue products of one type and layout as one launch. Raises NotLoaded while a graph is captured.

        blocks, before: as in `launch`.
        """
        if _capturing():
            raise NotLoaded(
                "a group can't be captured into a CUDA graph: its table would be gone by the replay"
            )
        first = as_packed(items[0][0])
        ready = self._load(variant.function(first))
        prepared = [(problem, self._prepare(problem, operands)) for problem, operands in items]
        raster = variant.raster(first, self.device)
        table, tiles = together.table(prepared, variant, raster, str(self.libraries.driver), self.place)
        before()
        ready.call(table, len(items), tiles, blocks or ready.ctas)

    def _prepare(self, problem: Problem, operands: Operands) -> Operands:
        """Operands as a kernel reads them: packed where TMA can't address them, C and bias in types it knows."""
        pack = self._pack if PACK in self.libraries.manifest.functions else None
        d, tail = operands.d, problem.epilogue
        return Operands(
            packed(operands.a, pack, problem.trans_a),
            packed(operands.b, pack, problem.trans_b),
            d,
            readable(operands.c).expand(d.shape) if tail.reads_c else None,
            readable(operands.bias).contiguous() if tail.bias is not None else None,
        )

    def _pack(self, *arguments: Any) -> None:
        """The packing kernel, which no product loads that doesn't need it."""
        self._load(PACK).call(*arguments)

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
            self.launch_group(variant, [(problem, operands)], blocks=blocks, before=before)
            return
        known = self._geometry(cast(Hashable, variant), _kind(problem))
        self._start(known, problem, operands, blocks=blocks, before=before)

    def _start(
        self,
        known: _Launch,
        problem: Problem,
        operands: Operands,
        *,
        blocks: int | None = None,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        """See `launch`."""
        if known.packs:  # packing is part of the product's work
            before()
            before = _nothing
        # Held to the end: of C and the bias the arguments have no more than addresses.
        given = self._prepare(problem, operands)
        arguments = self._arguments(known, problem, given, blocks)
        before()
        known.ready.call(*arguments)

    def _arguments(
        self, known: _Launch, problem: Problem, given: Operands, blocks: int | None = None
    ) -> tuple[Any, ...]:
        """Of the function, as kernels/call.py has them. C and bias are named by their addresses."""
        a, b, c, d, bias, tail = given.a, given.b, given.c, given.d, given.bias, problem.epilogue
        plain = c is None and bias is None
        return (
            a,
            b,
            d.data_ptr(),
            *d.stride(),
            0 if c is None else c.data_ptr(),
            *((0, 0, 0) if c is None else c.stride()),
            0 if bias is None else bias.data_ptr(),
            tail.alpha,
            tail.beta,
            known.code if plain else code_of(problem, c=maybe_dtype_of(c), bias=maybe_dtype_of(bias)),
            problem.batch,
            blocks or known.blocks,
            known.raster,
        )

    def _geometry_now(self, variant: Hashable, problem: Problem) -> _Launch:
        """Of a problem of this kind; what alpha and beta are is told at the launch."""
        compiled = cast(Compiled, variant)
        fitting = as_packed(problem)
        ready = self._load(compiled.function(fitting))
        return _Launch(
            ready,
            compiled.blocks(fitting, ready.ctas),
            compiled.raster(fitting, self.device),
            code_of(problem),
            fitting is not problem,
        )

    def _load(self, name: str) -> _Ready:
        ready = self._ready.get(name)
        if ready is None:
            if _capturing():
                raise NotLoaded(f"{name} must have run once before a CUDA graph is captured with it")
            call = self.libraries.load(name)
            ready = self._ready[name] = _Ready(call, resident_blocks(self.libraries.info(name), self.device))
        return ready

    def trusts(self, variant: Variant, problem: Problem) -> bool:
        """Whether the variant's function was seen right on this device; one that wasn't is barred from now on."""
        if variant.name in self._barred:
            return False
        wrong = self._unproven(variant, problem)
        if wrong is not None:
            log.error("variant %s is quarantined: %s", variant.name, wrong)
            self.bar(variant.name, wrong)
        return wrong is None

    def _unproven(self, variant: Variant, problem: Problem) -> str | None:
        """Why the variant's function may not be trusted; None where it was seen right on this device."""
        if self._check is None or variant.name in self._proven:
            return None
        name = cast(Compiled, variant).function(problem)
        if name in self._proven:
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
        """In new caches, so that what a thread is about to find by the policy before lands in none that is read."""
        self._ways = {}
        self._plan = lru_cache(PLANS)(self._choose_now)
        self._class = lru_cache(PLANS)(self._class_now)
        self._joins = lru_cache(PLANS)(self._may_join_now)

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


def _is_copy(given: Any, own: Any) -> bool:
    """Whether a kernel is given other memory than the operand's."""
    return given is not None and given.data_ptr() != own.data_ptr()


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


def _capturing() -> bool:
    import torch

    return torch.cuda.is_available() and bool(torch.cuda.is_current_stream_capturing())


def check_function(runtime: Runtime, variant: Variant, problem: Problem) -> str | None:
    """Run the variant's function for such a problem on small operands; why it is wrong in any way, or None."""
    from kernels.selftest import everything, function_of

    return everything(runtime, variant, only=function_of(variant, problem))


@lru_cache(maxsize=16)
def runtime(index: int) -> Runtime:
    """The runtime of GPU `index` of this process, with the times that `python -m kernels tune` kept of it."""
    from kernels.tune import Times

    found = Runtime.of(index)
    found.measured(Times(found.device, found.build_hash).read())
    return found
