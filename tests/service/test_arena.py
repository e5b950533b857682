"""Arena and its slots: sealed, lowest address first, neighbours merged, shares held."""

from __future__ import annotations

import os
import random

import pytest

from service.arena import PAGE, Arena, Slot, Slots
from service.errors import ServiceError


@pytest.fixture
def slots():
    arena = Arena.create(64 * PAGE)
    yield Slots(arena, share=32 * PAGE)
    arena.close()


def test_the_memfd_can_neither_shrink_nor_grow(slots: Slots) -> None:
    for size in (PAGE, 128 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(slots.arena.fd, size)


def test_both_mappings_see_the_same_bytes(slots: Slots) -> None:
    other = Arena(os.dup(slots.arena.fd), slots.arena.size)
    slot = slots.allocate(10)
    slot.view(10)[:] = b"0123456789"
    assert bytes(other.view(slot.offset, 10)) == b"0123456789"
    other.close()


def test_all_pages_are_taken_before_they_are_locked(slots: Slots) -> None:
    arena = slots.arena
    arena.view(0, 4)[:] = b"kept"
    assert os.fstat(arena.fd).st_blocks * 512 < arena.size
    arena.populate().join()
    assert os.fstat(arena.fd).st_blocks * 512 == arena.size
    assert bytes(arena.view(0, 5)) == b"kept\0"


def test_views_outside_the_arena_are_refused(slots: Slots) -> None:
    for offset, nbytes in ((-1, 1), (0, 64 * PAGE + 1), (64 * PAGE, 1), (0, -1)):
        with pytest.raises(ValueError, match="outside the arena"):
            slots.arena.view(offset, nbytes)


def test_random_traffic_leaves_one_free_piece(slots: Slots) -> None:
    dice = random.Random(7)
    held: list[Slot] = []
    for _ in range(2000):
        if held and dice.random() < 0.5:
            held.pop(dice.randrange(len(held))).release()
            continue
        try:
            slot = slots.allocate(dice.randrange(5 * PAGE), state="tensor")
        except ServiceError:
            continue
        end = slot.offset + slot.capacity
        assert all(end <= s.offset or s.offset + s.capacity <= slot.offset for s in held)
        held.append(slot)
        assert slots.free == slots.arena.size - sum(s.capacity for s in held)
    for slot in held:
        slot.release()
    assert slots.bytes_by_state == {"request": 0, "reply": 0, "tensor": 0}
    assert slots.allocate(64 * PAGE, state="tensor").offset == 0


def test_a_slot_lives_until_its_last_reference_is_dropped(slots: Slots) -> None:
    slot = slots.allocate(1)
    slot.hold()
    slot.release()
    assert slots.free == 63 * PAGE
    slot.release()
    assert slots.free == 64 * PAGE
    with pytest.raises(AssertionError, match="freed"):
        slot.release()


def test_one_key_cannot_take_more_than_its_share(slots: Slots) -> None:
    slot = slots.allocate(30 * PAGE, owner="ann")
    with pytest.raises(ServiceError) as refused:
        slots.allocate(3 * PAGE, owner="ann")
    assert (refused.value.code, refused.value.limit) == ("no_room", 32 * PAGE)
    slots.allocate(3 * PAGE, owner="bob")
    slot.become("tensor")
    slots.allocate(3 * PAGE, owner="ann")
    assert slots.bytes_by_state == {"request": 6 * PAGE, "reply": 0, "tensor": 30 * PAGE}


def test_what_never_fits_at_once_is_too_large_and_names_its_parts(slots: Slots) -> None:
    for own, stored, field, limit in (
        ([{"out": 20 * PAGE}, {"a": 6 * PAGE, "b": 7 * PAGE}], [], "out", 32),
        ([{"out": 20 * PAGE}], [{"a": 30 * PAGE}, {"b": 15 * PAGE}], "a", 64),
        ([{"out": 1}] * 33, [], "out", 32),  # each takes a page
    ):
        with pytest.raises(ServiceError) as refused:
            slots.check("ann", own, stored)
        error = refused.value
        assert (error.code, error.field, error.limit) == ("too_large", field, limit * PAGE)
        assert all(f"{name} {nbytes}" in error.detail for part in own for name, nbytes in part.items())
    slots.check("ann", [{"out": 32 * PAGE}], [{"a": 32 * PAGE}])
    slots.check("", [{"out": 64 * PAGE}])


def test_what_fits_once_other_requests_have_ended_is_told_of_them(slots: Slots) -> None:
    slot = slots.allocate(20 * PAGE, owner="ann")
    own = [{"out": 10 * PAGE}, {"a": 5 * PAGE}]
    with pytest.raises(
        ServiceError, match=f"hold {20 * PAGE} bytes of its share now, {15 * PAGE} more"
    ) as refused:
        slots.check("ann", own)
    assert (refused.value.code, refused.value.limit, refused.value.retry_after) == ("no_room", 32 * PAGE, 1.0)
    slots.check("bob", own)
    slot.release()
    slots.check("ann", own)
