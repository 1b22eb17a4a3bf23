import pytest

from streamline.demo.meter import Meter, Part


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def spend(meter: Meter, clock: Clock, part: Part, seconds: float) -> None:
    with meter.spent(part):
        clock.now += seconds


def test_it_names_the_part_that_takes_longest_and_the_share_of_waiting() -> None:
    clock = Clock()
    meter = Meter(clock)
    spend(meter, clock, "input", 3.0)
    spend(meter, clock, "model", 1.0)
    meter.add_items(8)
    assert meter.whole.limit() == "input"
    assert meter.whole.waiting() == pytest.approx(0.75)
    assert meter.whole.items_per_s() == pytest.approx(2.0)


def test_what_is_recent_follows_a_change_that_the_whole_run_does_not() -> None:
    clock = Clock()
    meter = Meter(clock)
    for part, batches in (("input", 300), ("model", 100)):
        for _ in range(batches):
            spend(meter, clock, "input" if part == "input" else "model", 0.1)
            meter.add_items(1)
    assert (meter.whole.limit(), meter.recent.limit()) == ("input", "model")
    assert meter.recent.items_per_s() == pytest.approx(10.0)


def test_a_part_that_fails_is_counted_all_the_same() -> None:
    clock = Clock()
    meter = Meter(clock)

    def fail() -> None:
        with meter.spent("saving"):
            clock.now += 2.0
            raise OSError

    with pytest.raises(OSError):  # noqa: PT011
        fail()
    assert meter.whole.seconds["saving"] == 2.0


def test_nothing_counted_yet_divides_by_nothing() -> None:
    assert (Meter().whole.items_per_s(), Meter().whole.waiting()) == (0.0, 0.0)
