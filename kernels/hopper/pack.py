"""Packs what TMA can't address: receives 16-bit elements at any strides, hands on rows that start at 16 bytes.

    pack_16bit(target, source, s_layer, s_line, s_element, length, blocks)

target    int16 tensor [layers, lines, pitch], contiguous, pitch a multiple of 8; what lies past `length` in a
          line becomes zero, since a product may read it.
source    int: address; the strides are in elements, along target's dimensions.
length    int: elements of a line. blocks: int, how many blocks to launch.

A thread writes 16 bytes. It reads words of 8 bytes where the line is contiguous and lies so, else elements;
neighbouring threads read neighbouring pieces, so that L1 makes whole sectors of either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Int16, Int32, Int64, cute

from kernels.hopper.epilogue import store_words
from kernels.targets import Function

THREADS = 256
PIECE = 8  # elements that a thread writes at once


def _read(kind: Any, address: Int64) -> Any:
    pointer = cute.make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=kind.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(1))[0]


@cute.kernel
def kernel(
    target: cute.Tensor,
    source: Int64,
    s_layer: Int64,
    s_line: Int64,
    s_element: Int64,
    length: Int32,
) -> None:
    """Each thread takes every so-many-th piece of the target."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    cute.arch.griddepcontrol_wait()
    layers, lines, pitch = target.shape
    pieces = pitch // PIECE
    base = target.iterator.toint()
    for number in cutlass.range(
        block * THREADS + thread, layers * lines * pieces, blocks * THREADS, unroll=1
    ):
        line = number // pieces
        first = (number - line * pieces) * PIECE
        layer = line // lines
        offset = Int64(layer) * s_layer + Int64(line - layer * lines) * s_line + Int64(first) * s_element
        address = source + offset * 2
        words = cute.make_rmem_tensor(PIECE // 2, Int32)
        words.fill(0)
        whole = first + PIECE <= length
        if whole & (s_element == 1) & (address % 8 == 0):
            for half in cutlass.range_constexpr(2):
                word = _read(Int64, address + 8 * half)
                words[2 * half] = Int32(word)
                words[2 * half + 1] = Int32(word >> 32)
        else:
            elements = cute.make_rmem_tensor(PIECE, Int32)
            elements.fill(0)
            for i in cutlass.range_constexpr(PIECE):
                if first + i < length:
                    elements[i] = Int32(_read(Int16, address + i * s_element * 2)) & 0xFFFF
            for i in cutlass.range_constexpr(PIECE // 2):
                words[i] = elements[2 * i] | (elements[2 * i + 1] << 16)
        store_words(base + Int64(number) * 16, [words[i] for i in range(PIECE // 2)])


@cute.jit
def host(
    target: cute.Tensor,
    source: Int64,
    s_layer: Int64,
    s_line: Int64,
    s_element: Int64,
    length: Int32,
    blocks: Int32,
    stream: Any,
) -> None:
    """Launch on the caller's stream."""
    kernel(target, source, s_layer, s_line, s_element, length).launch(
        grid=(blocks, 1, 1), block=(THREADS, 1, 1), use_pdl=True, stream=stream
    )


def compile_pack() -> Any:
    """Compile for the architecture in CUTE_DSL_ARCH."""
    from cutlass.cute.runtime import make_fake_compact_tensor
    from cutlass.runtime import make_fake_stream

    shape = (cute.sym_int32(), cute.sym_int32(), cute.sym_int32(divisibility=PIECE))
    target = make_fake_compact_tensor(Int16, shape, stride_order=(2, 1, 0), assumed_align=16)
    kernel.set_name_prefix("pack_16bit", remove_cutlass_symbol=True)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    scalars = [Int64(0)] * 4 + [Int32(1)] * 2
    return cute.compile(host, target, *scalars, stream, options="--enable-tvm-ffi")


def functions() -> Sequence[Function]:
    """pack_16bit."""
    return [Function("pack_16bit", "sm_90a", compile_pack)]
