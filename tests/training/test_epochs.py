"""A loader's accounts, without a loader."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from streamline.training.epochs import EpochPlace, Epochs, LoaderPhase

quick = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def test_an_epoch_follows_an_epoch() -> None:
    running = Epochs(EpochPlace(2)).begin()
    assert (running.phase, running.place) == (LoaderPhase.RUNNING, EpochPlace(2))
    assert running.at(0) == EpochPlace(2)
    assert running.at(3) == EpochPlace(2, 3, fresh=False)
    assert running.end() == Epochs(EpochPlace(3))
    assert Epochs(EpochPlace(3)).upcoming == EpochPlace(3)


def test_what_was_left_stays_where_it_was_until_the_next_begins() -> None:
    left = Epochs(EpochPlace(2, 1, fresh=False)).begin().leave(3)
    assert (left.phase, left.place, left.upcoming) == (LoaderPhase.LEFT, EpochPlace(2, 4, fresh=False), EpochPlace(3))
    assert left.begin().place == EpochPlace(3)


def test_what_gave_nothing_has_not_begun() -> None:
    for place in (EpochPlace(2), EpochPlace(2, 4, fresh=False)):
        assert Epochs(place).begin().leave(0) == Epochs(place)


def test_steps_go_on_and_are_full_in_time() -> None:
    running = Epochs(EpochPlace(0, 2, fresh=False), steps=5).begin()
    assert [running.full(taken) for taken in range(5)] == [False, False, False, True, True]
    assert running.at(2) == EpochPlace(0, 4, fresh=False)
    assert running.at(3) == EpochPlace(1, 0, fresh=False)
    assert running.leave(2).upcoming == EpochPlace(1, 0, fresh=False)
    full = running.leave(3)
    assert (full.phase, full.place, full.begun) == (LoaderPhase.WAITING, EpochPlace(1, 0, fresh=False), True)


def test_a_fixed_epoch_begins_at_its_beginning() -> None:
    for steps in (None, 3):
        running = Epochs(EpochPlace(4), steps, fixed=True).begin()
        assert running.end().place == running.leave(2).upcoming == EpochPlace(4)
        assert running.set_epoch(7) == running


def test_an_epoch_that_is_given_keeps_the_place_if_it_is_the_next_anyway() -> None:
    here = EpochPlace(2, 3, fresh=False)
    for steps in (None, 5):
        loaded = Epochs(here, steps)
        assert loaded.set_epoch(2) == loaded
        assert loaded.set_epoch(1).place == EpochPlace(1)
        running = loaded.begin()
        goes_on = EpochPlace(3, fresh=steps is None)
        assert running.set_epoch(3).end().place == goes_on
        assert running.set_epoch(2).end().place == EpochPlace(2)
        assert running.set_epoch(2).jumps
        assert not running.set_epoch(3).jumps
        assert running.set_epoch(0).leave(1).upcoming == EpochPlace(0)
        assert running.set_epoch(0).leave(0).upcoming == EpochPlace(0)
        assert running.set_epoch(2).leave(0).upcoming == here
        assert running.leave(1).set_epoch(3) == Epochs(goes_on, steps, begun=True)
        assert running.leave(1).set_epoch(2).upcoming == EpochPlace(2)
        assert running.set_epoch(0).end().given is None


@quick
@given(
    st.none() | st.integers(1, 5),
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(["take", "end", "leave", "set"]), st.integers(0, 4))),
)
def test_any_history_is_as_a_plain_count_of_it(steps: int | None, fixed: bool, events: list[tuple[str, int]]) -> None:
    """Against the plainest model: an epoch, a step, and what the next iteration was said to be."""
    epochs, epoch, step, given = Epochs(EpochPlace(0), steps, fixed).begin(), 0, 0, None
    taken = 0
    for event, number in events:
        if event == "take":
            more = number if steps is None else min(number, steps - step)
            taken, step = taken + more, step + more
        elif event == "set":
            epochs = epochs.set_epoch(number)
            given = given if fixed else number
        else:
            over = event == "end" or taken or epochs.full(taken)
            epochs = (epochs.end() if event == "end" else epochs.leave(taken)).begin()
            following = epoch if fixed or not over else epoch + 1
            step = step if not over and given in (None, following) else 0
            epoch, given, taken = following if given is None else given, None, 0
        assert epochs.phase is LoaderPhase.RUNNING
        if not epochs.full(taken):
            assert (epochs.at(taken).epoch, epochs.at(taken).step) == (epoch, step)
        assert epochs.full(taken) == (step == steps)
