"""What may change between a snapshot and its resume: each row of the table in docs/resume.md is run here."""

from __future__ import annotations

import gzip
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import streamline as sl
from streamline.core.flow import Site
from streamline.errors import CodeChangedWarning, PlanError, ResumeError
from streamline.pipeline import Pipeline
from streamline.transforms.shuffle import permutation

DOCS = Path(__file__).parents[2] / "docs" / "resume.md"

Make = Callable[[Path], Pipeline[Any]]


def double(x: int) -> int:
    return 2 * x


def triple(x: int) -> int:
    return 3 * x


def odd(x: int) -> bool:
    return x % 2 == 1


def big(x: int) -> bool:
    return x > 4


def twice(x: int) -> list[int]:
    return [x, x]


def thrice(x: int) -> list[int]:
    return [-x, -x, -x]


def sizes(given: Any) -> Any:
    """How long the list is, for each of its items; 0: of no list."""
    return [len(given)] * len(given) if isinstance(given, list) else 0


def rolled(x: int, *, rng: Any) -> tuple[int, int]:
    return x, int(rng.integers(10**9))


async def wait(x: int) -> int:
    return x


def fixed(sign: int) -> Callable[[int], int]:
    """Two functions of one name: before and behind a fix."""
    if sign < 0:

        def fn(x: int) -> int:
            return -x
    else:

        def fn(x: int) -> int:
            return x

    return fn


@sl.stage(state=dict, snapshot_every=1)
async def totals(items: AsyncIterator[int], *, state: dict[str, Any], times: int = 1) -> AsyncIterator[int]:
    async for x in items:
        state["sum"] = state.get("sum", 0) + x
        yield times * state["sum"]


@sl.stage(state=dict, snapshot_every=1)
async def negated(items: AsyncIterator[int], *, state: dict[str, Any]) -> AsyncIterator[int]:
    async for x in items:
        state["sum"] = state.get("sum", 0) + x
        yield -state["sum"]


def one(x: int) -> int:
    return 1


def two(x: int) -> int:
    return 2


def half(x: int) -> int:
    return x // 2


def third(x: int) -> int:
    return x // 3


def added(total: int, x: int) -> tuple[int, int]:
    return total + x, total + x


def taken(total: int, x: int) -> tuple[int, int]:
    return total - x, total - x


def items(n: int = 10) -> Pipeline[int]:
    return sl.from_items(list(range(n)))


def lines(folder: Path) -> Pipeline[str]:
    return sl.read_lines(str(folder / "*.txt")).shard(2)


def in_turn(folder: Path, count: int) -> Pipeline[str]:
    return sl.read_lines(str(folder / "*.txt")).shard(1, mode="file", interleave=count)


def write(folder: Path, names: str, count: int = 3) -> None:
    for name in names:
        (folder / f"{name}.txt").write_text("".join(f"{name}{n}\n" for n in range(count)))


def append(folder: Path) -> None:
    with (folder / "a.txt").open("a") as file:
        file.write("a3\n")


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
      take: items before the snapshot.
      head: they.
      rest: what comes behind it; None: it is refused whatever is accepted, and the text says `why`.
      accept: what has to be accepted; empty: nothing.
      change: what happens to the files in between.
    """

    before: Make
    after: Make
    take: int
    rest: list[Any] | None
    accept: tuple[str, ...] = ()
    why: str = ""
    change: Callable[[Path], object] = lambda folder: None
    warns: bool = False
    ranks: tuple[int, int] = (1, 1)


def plain(before: Pipeline[Any], after: Pipeline[Any], take: int, rest: Sequence[Any], *accept: str) -> Row:
    return Row(lambda _: before, lambda _: after, take, list(rest), accept)


def refused(before: Pipeline[Any], after: Pipeline[Any], why: str, take: int = 3) -> Row:
    return Row(lambda _: before, lambda _: after, take, None, why=why)


def of_files(change: Callable[[Path], object], rest: list[str] | None, *accept: str, why: str = "") -> Row:
    return Row(lines, lines, 3, rest, accept, why, change)


def one_file(folder: Path) -> Pipeline[str]:
    return sl.read_lines(str(folder / "a.txt")).shard(2)


def middle(size: int) -> Pipeline[Any]:
    return items().batch(size, collate=None).shuffle(window=3)


def zipped(folder: Path, count: int) -> Pipeline[str]:
    """A gzip file of other lines each time, made when it is asked for."""
    (folder / "z.gz").write_bytes(gzip.compress("".join(f"{n}\n" for n in range(count)).encode(), mtime=0))
    return sl.read_lines(str(folder / "z.gz"))


def listed(folder: Path, names: str) -> Pipeline[str]:
    return sl.read_lines([folder / f"{name}.txt" for name in names]).shard(2)


def windows(items: Sequence[int], size: int, seed: int = 0, number: int = 0) -> list[int]:
    """What a window shuffle of one shard makes of items, from window `number` on."""
    site: Any = Site(None)  # type: ignore[arg-type]  # no task is started
    found = []
    for start in range(0, len(items), size):
        window = items[start : start + size]
        found += [window[at] for at in permutation(len(window), seed, site, number + start // size)]
    return found


ADDED = ("double.added", "batch.added")
REMOVED = ("take.removed", "batch.removed")

ROWS: dict[str, Row] = {
    "batch: another size": plain(
        items().batch(2, collate=None), items().batch(3, collate=None), 2, [[4, 5, 6], [7, 8, 9]], "batch.size"
    ),
    "batch: `drop_remainder`": plain(
        items(7).batch(2, collate=None),
        items(7).batch(2, drop_remainder=True, collate=None),
        2,
        [[4, 5]],
        "batch.drop_remainder",
    ),
    "batch: another `collate`": plain(
        items(6).batch(2, collate=None), items(6).batch(2, collate=tuple), 1, [(2, 3), (4, 5)], "batch.collate"
    ),
    "a function is fixed": Row(
        lambda _: items(6).map(fixed(1)), lambda _: items(6).map(fixed(-1)), 3, [-3, -4, -5], warns=True
    ),
    "map: another function": plain(
        items(6).map(double, name="f"), items(6).map(triple, name="f"), 3, [9, 12, 15], "f.fn"
    ),
    "map: a renamed function": plain(
        items(6).map(double), items(6).map(triple), 3, [9, 12, 15], "triple.name", "triple.fn"
    ),
    "batch(max_cost=): another cost, or function of it": plain(
        items().shard(1).batch(max_cost=2, cost=one, collate=None),
        items().shard(1).batch(max_cost=6, cost=two, collate=None),
        1,
        [[2, 3, 4], [5, 6, 7], [8, 9]],
        "batch.max_cost",
        "batch.cost",
    ),
    "group_by: another key": plain(
        items().shard(1).group_by(half),
        items().shard(1).group_by(third),
        2,
        [(1, [4, 5]), (2, [6, 7, 8]), (3, [9])],
        "group_by.key",
    ),
    "window: another size or stride": plain(
        items().shard(1).window(2, 2),
        items().shard(1).window(3, 3),
        1,
        [[2, 3, 4], [5, 6, 7]],
        "window.size",
        "window.stride",
    ),
    "scan: another function": plain(
        items(5).shard(1).scan(added, 0, name="s"), items(5).shard(1).scan(taken, 0, name="s"), 3, [0, -4], "s.fn"
    ),
    "enumerate: another start": plain(
        items(5).shard(1).enumerate(), items(5).shard(1).enumerate(10), 3, [(13, 3), (14, 4)], "enumerate.start"
    ),
    "sample: anything": refused(items().sample(), items().sample(seed=1), "another place"),
    "filter: another function": plain(
        items().filter(odd, name="keep"), items().filter(big, name="keep"), 1, [5, 6, 7, 8, 9], "keep.fn"
    ),
    "flat_map: another function": plain(
        items(4).flat_map(twice, name="f"),
        items(4).flat_map(thrice, name="f"),
        3,
        [-1, -1, -2, -2, -2, -3, -3, -3],
        "f.fn",
    ),
    "map: another `batched`": plain(
        items().map(sizes, batched=2), items().map(sizes, batched=3), 4, [3, 3, 3, 3, 3, 3], "sizes.batched"
    ),
    "map: `batched` is added": plain(
        items(5).map(sizes), items(5).map(sizes, batched=2), 1, [2, 2, 2, 2], "sizes.batched"
    ),
    "map: `batched` is removed": plain(items(4).map(sizes, batched=2), items(4).map(sizes), 2, [0, 0], "sizes.removed"),
    "map: another `batched`, or none, in the middle of a list": refused(
        items().map(sizes, batched=2), items().map(sizes, batched=3), "unfolds one input again"
    ),
    "map(seed=): another seed": plain(
        items(4).map(rolled, seed=1),
        items(4).map(rolled, seed=2),
        2,
        list(items(4).map(rolled, seed=2))[2:],
        "rolled.seed",
    ),
    "map: `ordered`": refused(items().map(wait), items().map(wait, ordered=False), "says nothing of the order"),
    "take: another count": plain(items().shard(1).take(5), items().shard(1).take(7), 3, [3, 4, 5, 6], "take.count"),
    "take before the shard: another count": plain(
        items().take(5).shard(2), items().take(7).shard(2), 3, [3, 4, 5, 6], "take.count"
    ),
    "skip: another count": refused(items().shard(1).skip(2), items().shard(1).skip(3), "before this snapshot already"),
    "repeat: another number of passes": plain(
        items(3).shard(1).repeat(1), items(3).shard(1).repeat(2), 2, [2, 0, 1, 2], "repeat.times"
    ),
    "shuffle(window=): another window": plain(
        items(12).shard(1).shuffle(window=4),
        items(12).shard(1).shuffle(window=3),
        6,
        [*windows(range(12), 4)[6:8], *windows(range(8, 12), 3, number=2)],
        "shuffle.window",
    ),
    "shuffle(window=): another seed": plain(
        items(12).shard(1).shuffle(window=4),
        items(12).shard(1).shuffle(window=4, seed=7),
        6,
        [*windows(range(12), 4)[6:8], *windows(range(8, 12), 4, seed=7, number=2)],
        "shuffle.seed",
    ),
    "shuffle before the shard: another seed": refused(items().shuffle(), items().shuffle(seed=1), "another place"),
    "shuffle_files: another seed": Row(
        lambda folder: sl.read_lines(str(folder / "*.txt")).shuffle_files().shard(2),
        lambda folder: sl.read_lines(str(folder / "*.txt")).shuffle_files(seed=1).shard(2),
        3,
        None,
        why="in another shard",
    ),
    "through: other parameters": plain(
        items(5).through(totals), items(5).through(totals, times=10), 3, [60, 100], "totals.params"
    ),
    "through: another function": plain(
        items(5).through(totals, name="f"), items(5).through(negated, name="f"), 3, [-6, -10], "f.fn"
    ),
    "a renamed stage": plain(items().shard(1).take(5), items().shard(1).take(5, name="t"), 3, [3, 4], "t.name"),
    "a renamed source": plain(items(), sl.from_items(list(range(10)), name="x"), 7, [7, 8, 9], "x.name"),
    "a stage is added": plain(items(6), items(6).map(double).batch(2, collate=None), 2, [[4, 6], [8, 10]], *ADDED),
    "a stage is removed": plain(
        items(6).shard(1).take(3).batch(2, collate=None), items(6).shard(1), 1, [2, 3, 4, 5], *REMOVED
    ),
    "a stage is removed that is in the middle": refused(
        items().shuffle(window=4), items(), "at this snapshot it reads the 4 items of window 0 again"
    ),
    "a stage is removed that keeps a state of its own": refused(items().through(totals), items(), "keeps a state"),
    "a repeat is added or removed": refused(items().shard(1).repeat(), items().shard(1), "in another pass"),
    "a stage before the shard is added or removed": refused(items().take(9).shard(2), items().shard(2), "which item"),
    "a change before a stage in the middle": Row(
        lambda _: middle(2), lambda _: middle(3), 1, None, why="downstream of it reads the 3 items of window 0 again"
    ),
    "another number of shards": refused(items().shard(2), items().shard(3), "keep the number of shards"),
    "another mode": refused(items().shard(2), items().shard(2, "contiguous"), "every item would be in another shard"),
    "shard: `drop_remainder`": plain(
        items(9).shard(2), items(9).shard(2, drop_remainder=True), 3, [3, 4, 5, 6, 7], "shard.drop_remainder"
    ),
    "shard: `interleave`": Row(
        lambda folder: in_turn(folder, 2),
        lambda folder: in_turn(folder, 3),
        1,
        None,
        why="where each of its files stands",
    ),
    "another source": refused(items(), sl.from_iterable(lambda: range(10), name="items"), "items come from elsewhere"),
    "another number of ranks": Row(
        lambda _: items().shard(4), lambda _: items().shard(4), 1, [2, 4, 6, 8], ranks=(1, 2)
    ),
    "another number of ranks, and a stage after the merge holds items": Row(
        lambda _: items().shard(4).merge().shuffle(window=3),
        lambda _: items().shard(4).merge().shuffle(window=3),
        1,
        None,
        why="'shuffle', after the merge, reads the 3 items of window 0 again",
        ranks=(1, 2),
    ),
    "another kind of merge": plain(
        items(6).shard(2).merge(), items(6).shard(2).merge("best_effort", max_skips_per_round=0), 3, [3, 4, 5]
    ),
    "concurrency, executor, retries, `limit=`, prefetch, transfer": plain(
        items(6).map(double),
        items(6)
        .map(double, executor="thread", concurrency=2, retries=3, limit=sl.Limit(1))
        .prefetch(3)
        .transfer("host"),
        3,
        [6, 8, 10],
    ),
    "batch: `max_wait_s`": plain(
        items(6).batch(2, collate=None), items(6).batch(2, collate=None, max_wait_s=60), 1, [[2, 3], [4, 5]]
    ),
    "a new file": of_files(
        lambda folder: write(folder, "0"), ["b1", "a2", "b2", "c0", "c1", "c2"], "read_lines.new_files"
    ),
    "a removed file": of_files(
        lambda folder: (folder / "a.txt").unlink(), ["b1", "c0", "b2", "c1", "c2"], "read_lines.removed_files"
    ),
    "a removed file, with a stage in the middle of it": Row(
        lambda folder: lines(folder).shuffle(window=3),
        lambda folder: lines(folder).shuffle(window=3),
        3,
        None,
        why="would find other items",
        change=lambda folder: (folder / "a.txt").unlink(),
    ),
    "a file of lines or CSV that has grown": of_files(
        append, ["b1", "a2", "b2", "a3", "c0", "c1", "c2"], "read_lines.changed_files"
    ),
    "a file that has shrunk, or has another ETag": of_files(
        lambda folder: write(folder, "a", 2), None, why="has not grown, so it is another one"
    ),
    "a file that has grown and is compressed, or no text (tar, Parquet, NumPy, …)": Row(
        lambda folder: zipped(folder, 3), lambda folder: zipped(folder, 4), 1, None, why="can't grow"
    ),
    "one file in several shards that has changed": Row(
        one_file, one_file, 1, None, why="byte ranges of its shards move", change=append
    ),
    "files listed in another order": Row(
        lambda folder: listed(folder, "abc"),
        lambda folder: listed(folder, "cba"),
        3,
        ["b1", "a2", "b2", "c0", "c1", "c2"],
        ("read_lines.order",),
    ),
    "from_items: another length": plain(items(10).shard(2), items(12).shard(2), 7, [7, 8, 9, 10, 11], "items.length"),
    "from_items: another length, shuffled": refused(
        items(10).shuffle().shard(2), items(12).shuffle().shard(2), "places items by their number"
    ),
    "from_items: another length, contiguous": refused(
        items(10).shard(2, "contiguous"), items(12).shard(2, "contiguous"), "the blocks of a contiguous split move"
    ),
}


def rows_of_docs() -> dict[str, str]:
    """Return the table's rows: the change, and what is to be accepted."""
    found = {}
    for line in DOCS.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 3 and cells[0] != "change":
            found[cells[0]] = cells[2]
    return found


def head_of(row: Row, folder: Path) -> tuple[list[Any], sl.Snapshot]:
    with row.before(folder).open(rank=0, world_size=row.ranks[0]) as stream:
        head = [next(stream) for _ in range(row.take)]
        return head, sl.Snapshot.from_json(stream.snapshot().to_json())


def rest_of(row: Row, folder: Path, snapshot: sl.Snapshot, accept: Sequence[str]) -> list[Any]:
    with row.after(folder).open(resume=snapshot, accept=accept, rank=0, world_size=row.ranks[1]) as stream:
        return list(stream)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "abc")
    return tmp_path


def test_the_docs_and_this_test_have_the_same_rows() -> None:
    assert rows_of_docs().keys() == ROWS.keys()


def test_the_docs_name_what_is_to_be_accepted() -> None:
    for name, told in rows_of_docs().items():
        row = ROWS[name]
        if row.rest is None:
            assert told == "refused", name
        elif not row.accept:
            assert told == "none needed", name
        else:
            accepted = {entry.rpartition(".")[2] for entry in row.accept}
            assert set(re.findall(r"[.](\w+)`", told)) == accepted, name


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [name for name in ROWS if ROWS[name].accept])
def test_a_change_is_refused_until_it_is_accepted_and_then_delivers_what_was_said(name: str, folder: Path) -> None:
    row = ROWS[name]
    _, snapshot = head_of(row, folder)
    row.change(folder)
    with pytest.raises(ResumeError) as found:
        rest_of(row, folder, snapshot, ())
    for argument in row.accept:
        assert f'accept=["{argument}"]: ' in str(found.value)
    if len(row.accept) > 1:
        for missing in row.accept:
            with pytest.raises(ResumeError, match=re.escape(f'accept=["{missing}"]')):
                rest_of(row, folder, snapshot, [one for one in row.accept if one != missing])
    assert rest_of(row, folder, snapshot, row.accept) == row.rest
    explained = row.after(folder).explain(snapshot, accept=row.accept)
    assert explained.fits
    assert all(f"accepted {argument}: " in str(explained) for argument in row.accept)


@pytest.mark.parametrize("name", [name for name in ROWS if ROWS[name].rest is None])
def test_what_can_not_be_accepted_is_refused_with_the_reason(name: str, folder: Path) -> None:
    row = ROWS[name]
    _, snapshot = head_of(row, folder)
    row.change(folder)
    with pytest.raises(ResumeError, match=re.escape(row.why)) as found:
        rest_of(row, folder, snapshot, ())
    cannot = re.findall(r"^    ([\w.]+): ", str(found.value).partition("this can't:")[2], re.MULTILINE)
    assert cannot or row.ranks != (1, 1)
    with pytest.raises((ResumeError, PlanError)):
        rest_of(row, folder, snapshot, cannot)
    if row.ranks == (1, 1):
        assert row.why in str(row.after(folder).explain(snapshot))


@pytest.mark.parametrize("name", [name for name in ROWS if ROWS[name].rest is not None and not ROWS[name].accept])
def test_what_does_not_count_goes_on_as_it_is(name: str, folder: Path) -> None:
    row = ROWS[name]
    _, snapshot = head_of(row, folder)
    if row.warns:
        with pytest.warns(CodeChangedWarning, match=r"the code of fn \(fn=fixed") as found:
            assert rest_of(row, folder, snapshot, ()) == row.rest
        assert len(found) == 1
        assert Path(found[0].filename) == Path(__file__)
    else:
        assert rest_of(row, folder, snapshot, ()) == row.rest
