"""The order of events and the judgement, with stand-ins for the trainer; `test_end_to_end` has the real one."""

import gzip
import io
import signal
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from streamline.demo import run
from streamline.demo.children import DemoError, TrainerRun
from streamline.demo.feed import BATCH_SIZE
from streamline.demo.report import RunEnd, TrainStep

Change = Callable[[TrainerRun], TrainerRun]


class FakeTrainers:
    """Reports what a faultless trainer would, but for one run that `change` makes wrong."""

    def __init__(self, change: dict[int, Change]) -> None:
        self.change = change
        self.calls = 0

    def __call__(self, arguments: list[str], *, errors: Path, on_step: Callable[[TrainStep], None]) -> TrainerRun:
        self.calls += 1
        folder = Path(arguments[1])
        self.records = count_records(folder.parent / "shards")
        self.batches = -(-self.records // BATCH_SIZE)
        die_at = int(arguments[arguments.index("--die-at") + 1]) if "--die-at" in arguments else None
        every = int(arguments[arguments.index("--save-every") + 1])
        first = 1 if self.calls < 3 else self.batches // 2 // every * every + 1
        steps = tuple(self.step(n) for n in range(first, (die_at or self.batches) + 1))
        for step in steps:
            on_step(step)
        end = None if die_at else RunEnd(100.0, "model", 0.1, "weights", 500)
        made = TrainerRun(steps, end, -signal.SIGKILL if die_at else 0, "the trainer's traceback")
        return self.change[self.calls](made) if self.calls in self.change else made

    def step(self, n: int) -> TrainStep:
        return TrainStep(n, min(n * BATCH_SIZE, self.records), 5 / n, f"chain {n}", 100.0, "model", 0.1)


def count_records(folder: Path) -> int:
    return sum(gzip.decompress(path.read_bytes()).count(b"\n") for path in folder.iterdir())


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[dict[int, Change]], tuple[int, str]]:
    """Run the quick demo over stand-ins; return its exit code and all that it printed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def go(change: dict[int, Change]) -> tuple[int, str]:
        monkeypatch.setattr(run, "training", FakeTrainers(change))
        out = io.StringIO()
        code = run.run_demo(quick=True, console=Console(file=out, width=100))
        assert list(tmp_path.iterdir()) == []
        return code, out.getvalue()

    return go


Demo = Callable[[dict[int, Change]], tuple[int, str]]


def test_equal_runs_succeed_and_are_shown_side_by_side(demo: Demo) -> None:
    code, out = demo({})
    assert code == 0
    assert "bit for bit" in out
    for word in ("uninterrupted", "killed", "resumed", "by SIGKILL", "standard library", "limit: model"):
        assert word in out


def test_a_batch_that_differs_fails_and_is_named(demo: Demo) -> None:
    def other(made: TrainerRun) -> TrainerRun:
        steps = tuple(replace(step, chain="other") if step.step >= 25 else step for step in made.steps)
        return replace(made, steps=steps)

    code, out = demo({3: other})
    assert code == 1
    assert "FAILED: the digest of what was delivered differs from batch 25 on" in out
    assert "bit for bit" not in out


def test_a_model_that_differs_fails(demo: Demo) -> None:
    code, out = demo({3: lambda made: replace(made, end=RunEnd(1.0, "model", 0.1, "others", 500))})
    assert code == 1
    assert "FAILED: the digest of the model differs: others != weights" in out


@pytest.mark.parametrize(
    ("call", "change", "message"),
    [
        (
            1,
            lambda made: replace(made, exit_code=1),
            "uninterrupted run ended with exit code 1\nthe trainer's traceback",
        ),
        (1, lambda made: replace(made, steps=made.steps[:-1]), "the uninterrupted run delivered"),
        (1, lambda made: replace(made, steps=()), "and began with none"),
        (2, lambda made: replace(made, exit_code=0), "expected death by SIGKILL at batch"),
        (2, lambda made: replace(made, steps=made.steps[:3]), "got exit code -9 at batch 3"),
        (3, lambda made: replace(made, end=None), "the resumed run ended with exit code 0"),
        (3, lambda made: replace(made, steps=made.steps[1:]), "the resumed run was to begin with batch"),
    ],
)
def test_a_run_that_ends_otherwise_than_planned_fails_with_its_errors(
    demo: Demo, call: int, change: Change, message: str
) -> None:
    code, out = demo({call: change})
    assert code == 1
    assert message in out


def test_an_interrupt_is_told_apart_from_a_failure(demo: Demo) -> None:
    def interrupt(made: TrainerRun) -> TrainerRun:
        raise KeyboardInterrupt

    code, out = demo({2: interrupt})
    assert code == 130
    assert "interrupted" in out


def test_sigterm_is_an_interrupt_too_and_its_handler_is_put_back(demo: Demo) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def terminate(made: TrainerRun) -> TrainerRun:
        signal.raise_signal(signal.SIGTERM)
        return made

    assert demo({1: terminate})[0] == 130
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(("batches", "save_every", "step"), [(382, 25, 191), (100, 25, 51), (37, 8, 18)])
def test_the_kill_is_half_way_with_work_to_redo(batches: int, save_every: int, step: int) -> None:
    assert run.kill_step(batches, save_every) == step
    assert step % save_every


def test_too_few_batches_to_resume_are_refused() -> None:
    with pytest.raises(DemoError, match="too few"):
        run.kill_step(16, 8)
