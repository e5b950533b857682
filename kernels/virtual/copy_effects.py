"""Translates asynchronous copies, tensor maps and launch control: receives one instruction, hands on calls."""

from __future__ import annotations

from kernels.virtual.alu import handles
from kernels.virtual.effects import address, mask_of, suspend
from kernels.virtual.emit import Emit, Unknown
from kernels.virtual.ptx import Imm, Instr, Mem, Vec


@handles("cp")
def _copy(e: Emit, i: Instr) -> None:
    parts = i.parts
    if "commit_group" in parts:
        e.line("w.bulk_commit()" if "bulk" in parts else "w.copy_commit()")
    elif "wait_group" in parts:
        name = f"w.bulk_wait({e.u(i.args[0], 32)}, {'read' in parts})"
        suspend(e, i, name if "bulk" in parts else f"w.copy_wait({e.u(i.args[0], 32)})")
    elif "wait_all" in parts:
        suspend(e, i, "w.copy_wait(0)")
    elif "tensor" in parts:
        _tensor(e, i)
    elif "bulk" in parts:
        _bulk(e, i)
    elif "mbarrier" in parts and "arrive" in parts:
        e.line(f"w.copy_arrive({address(e, i.args[0])}, {'noinc' in parts})")
    else:
        _copy_async(e, i)


def _copy_async(e: Emit, i: Instr) -> None:
    dst, src, size, *rest = i.args
    assert isinstance(size, Imm)
    if not {"shared", "global"} <= set(i.parts):
        raise Unknown(i)
    used = e.u(rest[0], 32) if rest and "L2" not in i.parts[-1] else str(size.value)
    e.line(f"w.copy_async({address(e, dst)}, {address(e, src, 64)}, {size.value}, {used}{mask_of(e)})")


def _coordinates(e: Emit, mem: Mem) -> str:
    vector = mem.rest[0]
    items = vector.items if isinstance(vector, Vec) else (vector,)
    return "(" + ", ".join(e.s(x, 32) for x in items) + ",)"


def _tensor(e: Emit, i: Instr) -> None:
    parts = i.parts
    if "im2col" in parts or "gather4" in parts or "scatter4" in parts or "w" in parts or e.guard_vec:
        raise Unknown(i)
    if "prefetch" in parts:
        mem = i.args[0]
        assert isinstance(mem, Mem)
        e.line(f"w.tma_prefetch({address(e, mem, 64)}, {_coordinates(e, mem)})")
        return
    first, second = i.args[0], i.args[1]
    assert isinstance(first, Mem)
    assert isinstance(second, Mem)
    if "mbarrier" in parts:  # global to shared
        extra = list(i.args[3:])
        mask = e.u(extra.pop(0), 16) if "multicast" in parts else "None"
        policy = e.u(extra.pop(0), 64) if "cache_hint" in parts else "0"
        pair = 2 if "cta_group::2" in i.op else 0
        e.line(
            f"w.tma_load({address(e, first)}, {address(e, second, 64)}, {_coordinates(e, second)}, "
            f"{address(e, i.args[2])}, {mask}, {pair}, {'shared::cluster' in i.op}, {policy})"
        )
    elif "bulk_group" in parts:
        op = next((p for p in parts if p in ("add", "min", "max", "inc", "dec", "and", "or", "xor")), None)
        if ("reduce" in parts) != (op is not None):
            raise Unknown(i)
        e.line(
            f"w.tma_store({address(e, first, 64)}, {_coordinates(e, first)}, {address(e, second)}, {op!r})"
        )
    else:
        raise Unknown(i)


def _bulk(e: Emit, i: Instr) -> None:
    """cp.async.bulk: bytes in a row."""
    parts = i.parts
    if "prefetch" in parts:
        return
    if "reduce" in parts or e.guard_vec:
        raise Unknown(i)
    dst, src, size = i.args[:3]
    if "bulk_group" in parts:
        e.line(f"w.bulk_store({address(e, dst, 64)}, {address(e, src)}, {e.u(size, 32)})")
        return
    bar = address(e, i.args[3])
    if "global" in parts:
        mask = e.u(i.args[4], 16) if "multicast" in parts else "None"
        e.line(f"w.bulk_load({address(e, dst)}, {address(e, src, 64)}, {e.u(size, 32)}, {bar}, {mask})")
    else:
        e.line(f"w.bulk_copy({address(e, dst)}, {address(e, src)}, {e.u(size, 32)}, {bar})")


_FIELDS = ("global_address", "rank", "box_dim", "global_dim", "elemtype", "interleave_layout", "swizzle_mode")


@handles("tensormap")
def _tensormap(e: Emit, i: Instr) -> None:
    field = next((p for p in _FIELDS if p in i.parts), None)
    if i.parts[1] != "replace" or field is None or e.guard_vec:
        raise Unknown(i)
    mem, *ordinal, value = i.args
    shared = "shared" in i.parts
    bits = 64 if i.parts[-1] == "b64" else 32
    at = e.u(ordinal[0], 32) if ordinal else "0"
    where = address(e, mem, 32 if shared else 64)
    space = "shared" if shared else "global" if "global" in i.parts else "generic"
    e.line(f"w.replace_map({space!r}, {where}, {field!r}, {at}, {e.u(value, bits)})")


# --- cluster launch control -----------------------------------------------------------------------


@handles("clusterlaunchcontrol")
def _clc(e: Emit, i: Instr) -> None:
    if "try_cancel" in i.parts:
        multicast = "multicast" in i.parts
        e.line(f"w.clc_try_cancel({address(e, i.args[0])}, {address(e, i.args[1])}, {multicast})")
        return
    response = e.u(i.args[1], 128)
    if "is_canceled" in i.parts:
        e.set(i.args[0], f"w.clc_canceled({response})", False)
        return
    call = f"w.clc_first({response})"
    if isinstance(i.args[0], Vec):
        for n, item in enumerate(i.args[0].items):
            e.set(item, f"{call}[{n}]", False)
    else:
        axis = next(p for p in i.parts if p in ("x", "y", "z"))
        e.set(i.args[0], f"{call}[{'xyz'.index(axis)}]", False)
