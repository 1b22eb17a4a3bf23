"""One budget of bytes for a process, however many threads its workers run in."""

from pathlib import Path

import pytest

import streamline as sl
from streamline.core import byte_budget as budget
from streamline.core.tasks import Session


@pytest.mark.parametrize(("threads", "each"), [(1, 4096), (3, 1365), (4, 1024)])
def test_threads_share_what_may_be_read_ahead(threads: int, each: int) -> None:
    hosting = sl.Threads(threads)
    plan = sl.from_items(range(9)).shard(threads).merge().plan
    assert hosting.payload(plan, Session(budget=budget.Budget(4096)), hosting.hosts_for(threads)).memory == each


async def test_a_budget_smaller_than_the_threads_still_lets_each_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(budget, "MIN_PART_BYTES", 1)
    lines = [str(number) for number in range(40)]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    pipe = sl.read_lines(str(tmp_path / "lines.txt")).shard(3).merge("best_effort")
    with pipe.open(backend=sl.Threads(3), memory=1) as stream:
        assert sorted(stream, key=int) == lines
