"""Control flow of a kernel: receives parsed instructions, hands on basic blocks with liveness and divergence.

A register is *uniform* if all lanes of a group that executes together hold the same value; the translator
keeps such a register as one Python integer, any other as a NumPy vector of 32 lanes. A group of lanes is what
stays together after a branch, so a value computed by a single elected lane is uniform within that group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kernels.virtual.ptx import SINK, Instr, Kernel, Label, Mem, Not, Operand, Pair, PtxError, Reg, Sym, Vec

# Opcodes whose first operand is no destination.
_NO_RESULT = {
    "st", "red", "bra", "bar", "barrier", "fence", "membar", "cp", "prefetch", "prefetchu", "griddepcontrol",
    "setmaxnreg", "stmatrix", "ret", "exit", "trap", "nanosleep", "applypriority", "discard", "tensormap",
    "multimem",
    "brkpt", "pmevent", "st_async", "stackrestore",
}  # fmt: skip
_NO_RESULT_PAIRS = {
    ("mbarrier", "init"), ("mbarrier", "inval"), ("mbarrier", "expect_tx"), ("mbarrier", "complete_tx"),
    ("tcgen05", "mma"), ("tcgen05", "commit"), ("tcgen05", "cp"), ("tcgen05", "st"), ("tcgen05", "dealloc"),
    ("tcgen05", "alloc"), ("tcgen05", "fence"), ("tcgen05", "wait"), ("tcgen05", "relinquish_alloc_permit"),
    ("tcgen05", "shift"), ("wgmma", "fence"), ("wgmma", "commit_group"), ("wgmma", "wait_group"),
    ("clusterlaunchcontrol", "try_cancel"),
}  # fmt: skip

# A group may have to wait here, or has to hold all lanes: the instruction opens a block, which is run again.
_SUSPENDS = {
    ("mbarrier", "try_wait"), ("mbarrier", "test_wait"), ("tcgen05", "alloc"), ("tcgen05", "wait"),
    ("tcgen05", "dealloc"), ("wgmma", "wait_group"), ("wgmma", "mma_async"), ("wgmma", "fence"),
    ("griddepcontrol", "wait"), ("bar", "warp"),
}  # fmt: skip
_SUSPENDS_FIRST = {"bar", "barrier", "elect", "shfl", "vote", "redux", "match", "nanosleep", "setmaxnreg"}

# Results that differ from lane to lane whatever the operands are.
_LANE_REGISTERS = {
    "%tid.x",
    "%tid.y",
    "%tid.z",
    "%laneid",
    "%lanemask_lt",
    "%lanemask_le",
    "%lanemask_eq",
    "%lanemask_ge",
    "%lanemask_gt",
}


def regs_of(operand: Operand) -> Iterator[str]:
    """Every register that an operand names."""
    if isinstance(operand, Reg):
        if operand != SINK:
            yield operand.name
    elif isinstance(operand, Not):
        yield operand.reg.name
    elif isinstance(operand, Vec):
        for item in operand.items:
            yield from regs_of(item)
    elif isinstance(operand, Pair):
        yield from regs_of(operand.first)
        yield from regs_of(operand.second)
    elif isinstance(operand, Mem):
        yield from regs_of(operand.base)
        for item in operand.rest:
            yield from regs_of(item)


def has_result(instr: Instr) -> bool:
    """Whether the first operand is written."""
    parts = instr.parts
    if parts[0] in _NO_RESULT or parts[:2] in _NO_RESULT_PAIRS:
        # barrier.red and cp.reduce have none of our interest; barrier.cta.red writes its first operand
        return parts[0] in ("bar", "barrier") and "red" in parts
    if parts[:2] == ("mbarrier", "arrive") or parts[:2] == ("mbarrier", "arrive_drop"):
        return bool(instr.args) and not isinstance(instr.args[0], Mem)
    return True


def defs(instr: Instr) -> list[str]:
    """Registers written."""
    if not has_result(instr) or not instr.args:
        return []
    return list(regs_of(instr.args[0]))


def uses(instr: Instr) -> list[str]:
    """Registers read; a guarded write reads the old value too."""
    read: list[str] = []
    start = 1 if has_result(instr) else 0
    for operand in instr.args[start:]:
        read.extend(regs_of(operand))
    if instr.guard is not None:
        read.append(instr.guard.name)
    if start and (instr.guard is not None or instr.parts[:2] == ("wgmma", "mma_async")):
        read.extend(regs_of(instr.args[0]))
    return read


def suspends(instr: Instr) -> bool:
    """Whether a group can have to wait at this instruction."""
    parts = instr.parts
    if (parts[0] == "cp" and "wait_group" in parts) or parts[:3] == ("cp", "async", "wait_all"):
        return True
    return parts[:2] in _SUSPENDS or parts[0] in _SUSPENDS_FIRST


@dataclass(slots=True)
class Block:
    """Instructions that run without a jump in between. `succ` are the blocks that may follow."""

    index: int
    instrs: list[Instr] = field(default_factory=list)
    succ: list[int] = field(default_factory=list)
    live_in: set[str] = field(default_factory=set)
    live_out: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Flow:
    """Blocks of a kernel, the registers that are vectors, and the registers that outlive a block."""

    kernel: Kernel
    blocks: list[Block]
    target: dict[str, int]
    vectors: set[str]
    crossing: list[str]


def build(kernel: Kernel) -> Flow:
    """Cut the body into blocks and analyse them."""
    blocks, target = _blocks(kernel)
    _liveness(blocks)
    vectors = _divergence(blocks)
    crossing: set[str] = set()
    for block in blocks:
        crossing |= block.live_in
    return Flow(kernel, blocks, target, vectors, sorted(crossing))


def _blocks(kernel: Kernel) -> tuple[list[Block], dict[str, int]]:
    blocks = [Block(0)]
    target: dict[str, int] = {}
    for item in kernel.body:
        current = blocks[-1]
        if isinstance(item, Label):
            if current.instrs:
                blocks.append(current := Block(len(blocks)))
            target[item.name] = current.index
            continue
        if suspends(item) and current.instrs:
            blocks.append(current := Block(len(blocks)))
        current.instrs.append(item)
        if item.parts[0] in ("bra", "ret", "exit", "trap"):
            blocks.append(Block(len(blocks)))
    for block in blocks:
        block.succ = _successors(block, target, len(blocks))
    return blocks, target


def _successors(block: Block, target: dict[str, int], count: int) -> list[int]:
    following = [block.index + 1] if block.index + 1 < count else []
    if not block.instrs:
        return following
    last = block.instrs[-1]
    if last.parts[0] == "bra":
        place = last.args[0]
        if not isinstance(place, Sym) or place.name not in target:
            raise PtxError(f"jump to nowhere: {last}")
        return [target[place.name]] + (following if last.guard else [])
    if last.parts[0] in ("ret", "exit", "trap") and last.guard is None:
        return []
    return following


def _liveness(blocks: list[Block]) -> None:
    first_use: list[set[str]] = []
    written: list[set[str]] = []
    for block in blocks:
        use: set[str] = set()
        wrote: set[str] = set()
        for instr in block.instrs:
            use.update(r for r in uses(instr) if r not in wrote)
            wrote.update(defs(instr))
        first_use.append(use)
        written.append(wrote)
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            out: set[str] = set()
            for s in block.succ:
                out |= blocks[s].live_in
            live = first_use[block.index] | (out - written[block.index])
            if live != block.live_in or out != block.live_out:
                block.live_in, block.live_out = live, out
                changed = True
    for block in blocks:  # special registers are no storage
        block.live_in = {r for r in block.live_in if not is_special(r)}
        block.live_out = {r for r in block.live_out if not is_special(r)}


_SPECIAL_PREFIXES = (
    "%tid", "%ntid", "%ctaid", "%nctaid", "%cluster", "%ncluster", "%laneid", "%warpid", "%nwarpid",
    "%smid", "%nsmid",
    "%gridid", "%is_explicit", "%lanemask", "%clock", "%globaltimer", "%dynamic_smem", "%total_smem",
    "%aggr_smem",
    "%envreg", "%reserved_smem", "%current_graph",
)  # fmt: skip


def is_special(name: str) -> bool:
    """Whether the hardware, not the program, sets the register."""
    return name.startswith(_SPECIAL_PREFIXES)


def _lane_dependent(instr: Instr, vectors: set[str]) -> bool | None:
    """True: the result is a vector; False: it is uniform; None: it follows from the operands."""
    parts = instr.parts
    head = parts[0]
    if head == "elect":
        return True
    if head in ("atom", "tcgen05", "ldmatrix", "wgmma", "match", "mma") or parts[:2] == ("ld", "local"):
        return True
    if head == "shfl":
        return parts[2] != "idx" or any(r in vectors or r in _LANE_REGISTERS for r in regs_of(instr.args[2]))
    if head in ("vote", "redux", "activemask") or (head in ("bar", "barrier") and "red" in parts):
        return False
    return None


def _divergence(blocks: list[Block]) -> set[str]:
    vectors: set[str] = set()
    post = _postdominators(blocks)
    seen_branches: set[int] = set()
    changed = True
    while changed:
        changed = False
        for block in blocks:
            for instr in block.instrs:
                if _vector_result(instr, vectors):
                    new = [r for r in defs(instr) if r not in vectors]
                    vectors.update(new)
                    changed = changed or bool(new)
        for block in blocks:
            if block.index in seen_branches or len(block.succ) < 2:
                continue
            guard = block.instrs[-1].guard
            if guard is not None and guard.name in vectors:
                seen_branches.add(block.index)
                before = len(vectors)
                vectors |= _joined(blocks, block, post)
                changed = changed or len(vectors) != before
    return vectors


def _vector_result(instr: Instr, vectors: set[str]) -> bool:
    if instr.guard is not None and instr.guard.name in vectors and defs(instr):
        return True
    fixed = _lane_dependent(instr, vectors)
    if fixed is not None:
        if instr.parts[0] == "elect":  # the leader's index is the same for all
            vectors.update(regs_of(instr.args[0].second) if isinstance(instr.args[0], Pair) else [])
            return False
        return fixed
    return any(r in vectors or r in _LANE_REGISTERS for r in uses(instr))


def _joined(blocks: list[Block], branch: Block, post: list[int | None]) -> set[str]:
    """Registers that may hold different values where the two sides of a divergent branch meet again.

    The two groups run apart until the first block that both must reach (the branch's postdominator); what
    either writes before it, and is still read at a block that both can reach, needs a value a lane.
    """
    first, second = branch.succ
    meet = post[branch.index]
    stop = {meet} if meet is not None else set()
    sides = [_region(blocks, s, stop) for s in (first, second)]
    written: set[str] = set()
    for index in sides[0] | sides[1]:
        for instr in blocks[index].instrs:
            written.update(defs(instr))
    live: set[str] = set()
    for index in (sides[0] & sides[1]) | stop:
        live |= blocks[index].live_in
    return written & live


def _region(blocks: list[Block], start: int, stop: set[int]) -> set[int]:
    seen: set[int] = set()
    todo = [start]
    while todo:
        index = todo.pop()
        if index not in seen and index not in stop:
            seen.add(index)
            todo.extend(blocks[index].succ)
    return seen


def _postdominators(blocks: list[Block]) -> list[int | None]:  # noqa: PLR0912 (one algorithm)
    """The nearest block that every path to an exit passes, block by block (Cooper, Harvey and Kennedy)."""
    end = len(blocks)
    before: list[list[int]] = [[] for _ in range(end + 1)]
    succ = [b.succ or [end] for b in blocks]
    for index, following in enumerate(succ):
        for s in following:
            before[s].append(index)
    order: list[int] = []  # postorder of the reversed graph
    seen = {end}
    stack: list[tuple[int, int]] = [(end, 0)]
    while stack:
        node, child = stack[-1]
        if child < len(before[node]):
            stack[-1] = (node, child + 1)
            if (nxt := before[node][child]) not in seen:
                seen.add(nxt)
                stack.append((nxt, 0))
        else:
            stack.pop()
            order.append(node)
    rank = {node: i for i, node in enumerate(order)}
    post: dict[int, int] = {end: end}
    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            known = [s for s in succ[node] if s in post]
            new = known[0]
            for other in known[1:]:
                a, b = new, other
                while a != b:
                    if rank[a] < rank[b]:
                        a = post[a]
                    else:
                        b = post[b]
                new = a
            if post.get(node) != new:
                post[node] = new
                changed = True
    return [p if (p := post.get(i)) is not None and p != end else None for i in range(end)]


def unwaited_reads(blocks: list[Block]) -> list[tuple[Instr, Instr]]:
    """Instructions that read what a tcgen05.ld may not have delivered yet, each with that load.

    Moves don't count as reads (the compiler places them before the wait): they hand the debt on.
    """
    entry: list[dict[str, Instr]] = [{} for _ in blocks]
    found: dict[int, tuple[Instr, Instr]] = {}
    todo = [0]
    seen: set[int] = set()
    while todo:
        index = todo.pop()
        seen.add(index)
        owed = dict(entry[index])
        for instr in blocks[index].instrs:
            _owe(instr, owed, found)
        for following in blocks[index].succ:
            known = entry[following]
            new = {r: load for r, load in owed.items() if r not in known}
            if new or following not in seen:
                known.update(new)
                todo.append(following)
    return list(found.values())


def _owe(instr: Instr, owed: dict[str, Instr], found: dict[int, tuple[Instr, Instr]]) -> None:
    parts = instr.parts
    if parts[:3] == ("tcgen05", "wait", "ld"):
        owed.clear()
        return
    debts = [owed[r] for r in uses(instr) if r in owed]
    if debts and parts[0] != "mov":
        found.setdefault(id(instr), (instr, debts[0]))
    for name in defs(instr):
        owed.pop(name, None)
        if debts and parts[0] == "mov":
            owed[name] = debts[0]
        elif parts[:2] == ("tcgen05", "ld"):
            owed[name] = instr
