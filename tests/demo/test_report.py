from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from streamline.demo.report import RunEnd, TrainStep, difference, parse, send

NONE: Mapping[int, Any] = MappingProxyType({})


def steps(
    first: int, last: int, *, chain: Mapping[int, str] = NONE, loss: Mapping[int, float] = NONE
) -> list[TrainStep]:
    """What a faultless run reports, but for the values given by step."""
    return [
        TrainStep(n, n * 32, loss.get(n, 1 / n), chain.get(n, f"chain {n}"), 10.0, "model", 0.1)
        for n in range(first, last + 1)
    ]


def test_a_line_comes_back_as_it_was_sent(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[TrainStep | RunEnd] = [
        TrainStep(1, 32, 0.1 + 0.2, "ab", 1e6 / 3, "input", 0.5),
        RunEnd(5.0, "model", 0.1, "cd", 300),
    ]
    for line in lines:
        send(line)
    assert [parse(line) for line in capsys.readouterr().out.splitlines()] == lines


@pytest.mark.parametrize("line", ["", "hello", "{}", "[1]", "17", '{"step": {}}', '{"step": 1}', '{"other": {}}'])
def test_any_other_line_is_refused_and_shown(line: str) -> None:
    with pytest.raises(ValueError, match=r"expected a line of the trainer's report") as refused:
        parse(line)
    assert repr(line) in str(refused.value)


def test_a_resumed_run_that_repeats_some_batches_equals_the_whole_one() -> None:
    assert difference(steps(1, 20), steps(1, 10) + steps(8, 20)) is None


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        (
            steps(1, 10) + steps(8, 20, chain={12: "other", 13: "other too"}),
            "delivered differs from batch 12 on: other",
        ),
        (steps(1, 10, chain={9: "other"}) + steps(8, 20), "delivered differs from batch 9 on"),
        (steps(1, 10) + steps(8, 20, loss={15: 7.0}), "the loss differs at batch 15"),
        (steps(1, 10) + steps(8, 21), "batch 21 is one too many"),
        (steps(1, 10) + steps(8, 18), "batch 19 was never delivered, and 1 more"),
        (steps(1, 10) + steps(12, 20), "batch 11 was never delivered"),
    ],
)
def test_the_first_difference_is_named(seen: list[TrainStep], message: str) -> None:
    found = difference(steps(1, 20), seen)
    assert found is not None
    assert message in found
