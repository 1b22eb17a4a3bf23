"""What may be held between a sender and a receiver: arithmetic, without a loop."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamline.backends.hosts.item_sender import CreditCapacity
from streamline.core.capacity import LIST_ITEMS, LONG_LIST_ITEMS, QUICK_ITEM_S, Capacity
from streamline.runtime.thread_bridge import QUICK_S, STEADY_S, ConsumerCapacity


def test_a_sender_that_found_no_room_goes_on_when_a_quarter_is_free() -> None:
    capacity = Capacity(8)
    capacity.add(8)
    assert (capacity.room, capacity.is_low) == (0, False)
    capacity.free(1)
    assert (capacity.room, capacity.is_low) == (1, False)
    capacity.free(1)
    assert (capacity.room, capacity.is_low) == (2, True)


def test_under_a_byte_budget_one_item_is_always_admitted_and_the_next_one_alone() -> None:
    capacity = Capacity(100, 1000)
    assert (capacity.room, capacity.fits(5000)) == (1, True)
    capacity.add(1, 5000)
    assert (capacity.room, capacity.fits(1)) == (0, False)
    assert Capacity(100, 1000, by_list=True).room == 100


def test_it_is_wide_where_what_filled_it_took_no_time_and_only_then() -> None:
    capacity = Capacity(512, widest=2048)
    for item_s, items, longest in ((QUICK_ITEM_S / 2, 2048, LONG_LIST_ITEMS), (2 * QUICK_ITEM_S, 512, LIST_ITEMS)):
        capacity.note_room(1.0)
        added = capacity.room
        capacity.add(added)
        capacity.note_full(1.0 + added * item_s)
        assert (capacity.items, capacity.longest) == (items, longest)
        capacity.free(capacity.held)


def test_a_limit_holds_for_all_that_comes_later() -> None:
    capacity = Capacity(512, widest=2048)
    capacity.limit_to(100)
    capacity.note_room(1.0)
    capacity.add(100)
    capacity.note_full(1.0)
    capacity.resize(1000)
    assert capacity.items == 100


def test_a_quick_consumer_may_have_more_out_and_a_slow_one_less() -> None:
    capacity = ConsumerCapacity(4096)
    for _ in range(20):
        capacity.note_consumed(QUICK_S / 2, finds_none=True)
    assert (capacity.items, capacity.longest, capacity.is_quick) == (4096, LONG_LIST_ITEMS, True)
    for _ in range(20):
        capacity.note_consumed(3 * STEADY_S, finds_none=True)
    assert (capacity.items, capacity.longest, capacity.is_quick) == (2, 1, False)


def test_what_is_made_ahead_of_a_slow_consumer_is_admitted_from_its_first_item_on() -> None:
    capacity = ConsumerCapacity(4096, 512)
    assert capacity.items == 0
    capacity.begin()
    assert (capacity.items, capacity.longest) == (2, 1)
    capacity.read_ahead()
    capacity.note_consumed(3 * STEADY_S, finds_none=True)
    assert (capacity.items, capacity.longest) == (512, 256)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 10_000)), max_size=50))
def test_what_is_held_is_never_more_than_what_there_was_room_for(lists: list[tuple[int, int]]) -> None:
    for capacity in (Capacity(64), Capacity(64, 50_000, by_list=True), CreditCapacity(64, 50_000)):
        out: list[tuple[int, int]] = []
        for want, size in lists:
            items = min(want, capacity.room)
            if items < 1:
                while out:
                    capacity.free(*out.pop())
                continue
            capacity.add(items, items * size)
            out.append((items, items * size))
            assert capacity.held == sum(each for each, _ in out) <= capacity.items
