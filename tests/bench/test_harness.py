"""The harness judges rightly, and reports what it can't measure instead of leaving it out."""

from __future__ import annotations

import os

import pytest

from bench import harness, report
from bench.suite import (
    Case,
    Result,
    Suite,
    Tally,
    Target,
    Unit,
    at_least,
    at_most,
    items_per_second,
    within_mb,
    within_ms,
)


def right(n: int) -> Tally:
    return Tally(n, n * 2, seconds=n / 1_000)


async def right_async(n: int) -> Tally:
    return Tally(n, n * 2)


def one_short(n: int) -> Tally:
    return Tally(n - 1, n * 2)


def dies(n: int) -> Tally:
    os._exit(3)


def expected(n: int) -> Tally:
    return Tally(n, n * 2)


def suite(*cases: Case, floor: str | None = None) -> Suite:
    return Suite("Which?", "items/s", cases, smoke_items=10, floor=floor, expected=expected)


@pytest.mark.long
def test_every_case_gets_its_row_whatever_became_of_it() -> None:
    cases = (
        Case("right", right, 100),
        Case("async", right_async, 100, (at_least(0.1, "right"),)),
        Case("short", one_short, 100, (at_least(0.1, "right"),)),
        Case("dead", dies, 100),
        Case("absent", right, 100, peers=("no_such_module",)),
    )
    subject = Suite("Which?", "items/s", cases, smoke_items=10, floor="right", expected=expected)
    results = harness.measure(subject, harness.Options(rounds=2))

    assert results["right"].rounds == pytest.approx((1_000, 1_000))
    assert len(results["async"].rounds) == 2
    assert results["short"].failed
    assert "expected 100 items" in results["short"].problem
    assert results["dead"].problem == "failed: its process died with exit code 3"
    assert results["absent"] == Result(problem="not installed: no_such_module")
    text = report.table(subject, results, "Some machine")
    assert "(Some machine.)" in text
    rows = text.splitlines()[-len(cases) :]
    assert [row.split(" | ")[0] for row in rows] == ["| right", "| async", "| short", "| dead", "| absent"]
    assert "not measured" in rows[2]


def memory(n: int) -> Tally:
    return Tally(n, n * 2, mb=12.5)


def test_what_is_no_time_is_reported_as_it_is() -> None:
    subject = Suite("Which?", "MB", (Case("mine", memory, 100),), smoke_items=10, expected=expected)

    assert harness.run_once(subject, subject.cases[0], 100, use_uvloop=False) == 12.5


def test_a_smoke_test_leaves_peers_out_and_fails_on_wrong_items() -> None:
    subject = suite(Case("right", right, 100), Case("short", one_short, 100), Case("peer", dies, 100, peers=("os",)))
    results = harness.smoke(subject, harness.Options(smoke=True))

    assert {name: result.failed for name, result in results.items()} == {"right": False, "short": True}


@pytest.mark.parametrize(
    ("target", "verdict"),
    [
        (at_least(0.5, "floor"), "yes"),
        (at_least(0.51, "floor"), "**no: 0.5 \N{MULTIPLICATION SIGN} floor**"),
        (at_most(2, "other"), "yes"),
        (at_most(1, "other"), "**no: 2 \N{MULTIPLICATION SIGN} other**"),
        (at_least(1, "absent"), "no figure of absent"),
        (within_ms(50), "yes"),
        (within_ms(49), "**no: 50 ms**"),
        (within_mb(49), "**no: 50 MB**"),
        (items_per_second(5e4), "**no: 50 items/s**"),
    ],
)
def test_a_target_is_judged_within_its_run(target: Target, verdict: str) -> None:
    names = ("floor", "other", "absent")
    mine = Case("mine", right, 1, (target,))
    subject = suite(*(Case(name, right, 1) for name in names), mine, floor="floor")
    results = {
        "floor": Result((80, 100, 120)),
        "other": Result((25, 25, 30)),
        "absent": Result(problem="not installed: absent"),
        "mine": Result((40, 50, 60)),
    }

    assert report.table(subject, results, "").splitlines()[-1].endswith(f"| {verdict} |")


def test_a_target_that_refers_to_no_case_is_refused() -> None:
    with pytest.raises(ValueError, match="typo"):
        suite(Case("mine", right, 1, (at_least(1, "typo"),)))


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (7_084_000, "items/s", "7.08 M"),
        (224_800, "items/s", "224.8 k"),
        (4157.2, "items/s", "4157"),
        (0.1312, "ms", "0.131"),
        (43.26, "MB", "43.3"),
    ],
)
def test_figures_are_short(value: float, unit: Unit, text: str) -> None:
    assert report.figure(value, unit) == text


def test_some_tables_of_a_page_are_renewed_and_the_others_stay() -> None:
    before = "# Page\n\nmachine A\n\n## One\n\n1\n\n## Two\n\n2\n"
    now = "# Page\n\nmachine B\n\n## Two\n\nnew\n\n## Three\n\n3\n"
    assert report.updated(before, now) == "# Page\n\nmachine A\n\n## One\n\n1\n\n## Two\n\nnew\n\n## Three\n\n3\n"
    assert report.updated(before, now, whole=True).startswith(now.partition("\n## ")[0])
    assert "## One" in report.updated(before, now, whole=True), "a table of another machine"
    assert report.updated("", now) == now
