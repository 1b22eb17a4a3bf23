"""Resumes of resumes behind changes; what `accept` may say; ranks; and changes of files that nobody planned."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import streamline as sl
from streamline.core.flow import Site
from streamline.errors import CodeChangedWarning, PlanError, PlanTypeError, ResumeError, SnapshotError
from streamline.pipeline import Pipeline
from streamline.transforms.shuffle import permutation


def double(x: int) -> int:
    return 2 * x


def odd(x: int) -> bool:
    return x % 2 == 1


def noisy(x: int, *, rng: Any) -> int:
    return int(rng.integers(1000))


@sl.stage(stateless=True)
async def passed(items: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for item in items:
        yield item


def some(pipe: Pipeline[Any], take: int, resume: sl.Snapshot | None = None, accept: Any = ()) -> Any:
    with pipe.open(resume=resume, accept=accept) as stream:
        found = [next(stream) for _ in range(take)]
        return found, sl.Snapshot.from_json(stream.snapshot().to_json())


def rest(pipe: Pipeline[Any], resume: sl.Snapshot, accept: Any = ()) -> list[Any]:
    with pipe.open(resume=resume, accept=accept) as stream:
        return list(stream)


# What accept may say

PIPE = sl.from_items(range(9), name="rows").shard(3).map(noisy, seed=1).filter(odd).batch(2).prefetch(2)


@pytest.mark.parametrize(
    "entry",
    [
        "batch.size", "noisy.fn", "noisy.seed", "noisy.name", "odd.added", "gone.removed", "rows.length", "rows.name",
        "shard.drop_remainder", "shard.num_shards", "noisy.ordered",
    ],
)  # fmt: skip
def test_an_entry_that_is_not_needed_does_no_harm(entry: str) -> None:
    pipe = PIPE.merge()
    _, snapshot = some(pipe, 0)
    pipe.open(accept=[entry])
    pipe.open(resume=snapshot, accept=(entry,))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("batch.sise", r"'batch.sise' is nothing that 'batch' has: did you mean 'batch.size'\? \(it has batch.added, "),
        ("bach.size", r"no part of this plan is called 'bach': did you mean 'batch.size'\? \(there are batch, noisy, "),
        ("batch", r"'batch' is nothing that 'batch' has: did you mean 'batch.size'"),
        ("size", r"no part of this plan is called 'size'"),
        ("", r"no part of this plan is called ''"),
        (".removed", r"no part of this plan is called ''"),
        ("rows.new_files", r"'rows.new_files' is nothing that 'rows' has"),
        ("noisy.concurrency", r"'noisy.concurrency' is nothing that"),
        ("noisy.executor", r"'noisy.executor' is never compared, so it may change as it likes: leave it out"),
        ("merge.max_lead", r"is never compared"),
        ("prefetch.items", r"is never compared"),
    ],
)
def test_an_entry_that_names_nothing_is_a_plan_error(entry: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PIPE.open(accept=["batch.size", entry])


@pytest.mark.parametrize("accept", ["batch.size", [3], [None], 7])
def test_accept_is_a_list_of_strings(accept: Any) -> None:
    with pytest.raises(PlanTypeError, match=r'is a list of strings, accept=\["batch\.size"\]'):
        PIPE.open(accept=accept)


# Window shuffles


@pytest.mark.long
@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2), st.integers(0, 12)), min_size=1, max_size=5),
)
def test_each_window_is_served_as_it_was_begun_however_often_window_and_seed_change(
    length: int, steps: list[tuple[int, int, int]]
) -> None:
    """Against a model that shuffles block after block, and looks at the options when a block begins."""
    site = Site(None, shard=0, num_shards=1)  # type: ignore[arg-type]
    expected: list[int] = []
    pending: list[int] = []
    start = number = 0
    found: list[int] = []
    snapshot = None
    for window, seed, take in [*steps, (*steps[-1][:2], length)]:
        for _ in range(take):
            if not pending:
                block = range(start, min(start + window, length))
                pending = [block[at] for at in permutation(len(block), seed, site, number)]
                start, number = start + len(block), number + 1
            if pending:
                expected.append(pending.pop(0))
        pipe = sl.from_items(range(length)).shard(1).shuffle(window=window, seed=seed)
        with pipe.open(resume=snapshot, accept=["shuffle.window", "shuffle.seed"]) as stream:
            for _ in range(take):
                found += [item for item in [next(stream, None)] if item is not None]
            snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
    assert found == expected
    assert sorted(found) == list(range(length))


def test_a_window_that_is_not_there_any_more_is_an_error_and_nothing_is_passed_over() -> None:
    _, snapshot = some(sl.from_items(range(10)).shard(1).shuffle(window=6), 2)
    with pytest.raises(ResumeError, match="was serving a window of 6 items, and only 4 of them are left"):
        rest(sl.from_items(range(4)).shard(1).shuffle(window=6), snapshot, ["items.length"])


def test_a_last_window_goes_on_as_it_was_although_there_is_more_now() -> None:
    pipe = sl.from_items(range(10)).shard(1).shuffle(window=8)
    head, snapshot = some(pipe, 9)
    more = sl.from_items(range(14)).shard(1).shuffle(window=8)
    tail = rest(more, snapshot, ["items.length"])
    assert [*head, tail[0]] == list(pipe)
    assert sorted(tail[1:]) == [10, 11, 12, 13]


# Other stages, at every item


@pytest.mark.parametrize("take", range(8))
def test_another_size_of_batch_loses_and_doubles_nothing(take: int) -> None:
    head, snapshot = some(sl.from_items(range(30)).shard(3).merge().batch(4, collate=None), take)
    tail = rest(sl.from_items(range(30)).shard(3).merge().batch(7, collate=None), snapshot, ["batch.size"])
    assert [x for batch in head + tail for x in batch] == list(range(30))


@pytest.mark.parametrize("take", range(0, 30, 4))
def test_stages_may_be_renamed_before_and_after_the_merge_and_swap_their_names(take: int) -> None:
    def pipe(*names: str) -> Pipeline[Any]:
        a, b, c, d = names
        pipe = sl.from_items(range(30), name=a).shard(3).take(9, name=b).map(noisy, seed=1, name="n")
        return pipe.merge().shuffle(window=5, name=c).take(25, name=d)

    before, after = pipe("a", "b", "c", "d"), pipe("z", "d", "b", "c")
    whole = list(before)
    take = min(take, len(whole))
    head, snapshot = some(before, take)
    assert head + rest(after, snapshot, ["z.name", "d.name", "b.name", "c.name"]) == whole


def test_a_renamed_map_with_a_seed_goes_on_with_the_new_names_numbers() -> None:
    def pipe(name: str) -> Pipeline[int]:
        return sl.from_items(range(10)).map(noisy, seed=1, name=name)

    head, snapshot = some(pipe("a"), 4)
    with pytest.raises(ResumeError, match=r'accept=\["b\.name"\]') as found:
        rest(pipe("b"), snapshot)
    assert "rng.name" not in str(found.value)
    assert head + rest(pipe("b"), snapshot, ["b.name"]) == list(pipe("a"))[:4] + list(pipe("b"))[4:]


def test_a_stage_of_another_kind_and_the_same_name_begins_anew() -> None:
    _, snapshot = some(sl.from_items(range(9)).shard(1).take(6, name="f"), 3)
    tail = rest(sl.from_items(range(9)).shard(1).skip(2, name="f"), snapshot, ["f.removed", "f.added"])
    assert tail == [5, 6, 7, 8]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "add",
    [
        lambda p: p.map(double), lambda p: p.filter(odd), lambda p: p.flat_map(lambda x: [x]), lambda p: p.batch(2),
        lambda p: p.shuffle(window=3), lambda p: p.take(3), lambda p: p.skip(1), lambda p: p.through(passed),
        lambda p: p.map(noisy, seed=3), lambda p: p.batch(2).unbatch(),
    ],
)  # fmt: skip
@pytest.mark.parametrize("behind", [False, True])
def test_a_stage_that_is_added_begins_where_the_snapshot_is_and_removed_it_is_gone(add: Any, behind: bool) -> None:
    """As a run over the items that are left would."""
    plain = sl.from_items(range(20)).shard(2)
    plain = plain.merge() if behind else plain
    _, snapshot = some(plain, 6)
    more: Pipeline[Any] = add(plain)
    names = [stage.name for stage in more.stages]
    accept = [stage.argument(stage.name, "added") for stage in more.stages]
    with pytest.raises(ResumeError) as found:
        rest(more, snapshot)
    assert all(f'accept=["{one}"]' in str(found.value) for one in accept)
    tail = rest(more, snapshot, accept)
    left: Pipeline[Any] = sl.from_items(range(6, 20)).shard(2)
    left = add(left.merge() if behind else left)
    if "rng" not in str(names):
        assert list(map(str, tail)) == list(map(str, left))
    _, begun = some(more, 0)
    removed = [stage.argument(stage.name, "removed") for stage in more.stages]
    assert rest(plain, begun, removed) == list(range(20))


def test_what_was_accepted_is_the_plan_of_the_next_snapshots() -> None:
    small, large = (sl.from_items(range(9)).batch(size, collate=None) for size in (2, 3))
    _, first = some(small, 1)
    _, second = some(large, 1, first, ["batch.size"])
    assert rest(large, second) == [[5, 6, 7], [8]]
    with pytest.raises(ResumeError):
        rest(small, second)


def test_a_choosing_pipeline_may_change_behind_its_choices() -> None:
    async def later(x: int) -> int:
        return x

    def pipe(size: int) -> Pipeline[Any]:
        stages = sl.from_items(range(60)).shard(3).map(later, concurrency=4, ordered=False)
        return stages.merge("best_effort").batch(size, collate=None)

    head, snapshot = some(pipe(2), 7)
    tail = rest(pipe(5), snapshot, ["batch.size"])
    assert sorted(x for batch in head + tail for x in batch) == list(range(60))


def test_a_custom_stage_may_be_declared_later_but_not_be_undeclared_again() -> None:
    async def running(items: AsyncIterator[int], state: dict[str, Any] | None = None) -> AsyncIterator[int]:
        kept = {} if state is None else state
        async for item in items:
            kept["sum"] = kept.get("sum", 0) + item
            yield kept["sum"]

    declared: Any = sl.stage(state=dict, snapshot_every=2)(running)
    new = sl.from_items(range(20)).through(declared)
    with pytest.warns(UserWarning, match="from its start"):
        old = sl.from_items(range(20)).through(running)
    whole = list(new)
    head, snapshot = some(old, 7)
    again, behind = some(new, 7, snapshot)
    assert head + again + rest(new, behind) == whole
    with pytest.raises(ResumeError, match=r"declares none any more: give it back its @sl.stage\(state=dict\)"):
        rest(old, behind)


# Code


def test_a_warning_names_each_function_that_has_changed_once() -> None:
    def pipe(n: int) -> Pipeline[Any]:
        text = f"def one(x): return x + {n}\ndef same(x): return x\ndef two(x): return x > {n - 2}"
        scope: dict[str, Any] = {}
        exec(text, scope)
        stages = sl.from_items(range(9)).map(scope["one"]).map(scope["same"])
        return stages.merge().filter(scope["two"]).batch(2, collate=None)

    _, snapshot = some(pipe(1), 1)
    with pytest.warns(
        CodeChangedWarning, match=r"the code of one \(fn=one\), two \(fn=two\) has changed: what"
    ) as found:
        _, again = some(pipe(2), 1, snapshot)
    assert len(found) == 1
    rest(pipe(2), again)


@pytest.mark.parametrize("kind", ["filter", "map"])
def test_the_warning_says_what_a_stage_downstream_may_find_otherwise(kind: str) -> None:
    def pipe(n: int) -> Pipeline[Any]:
        scope: dict[str, Any] = {}
        exec(f"def fixed(x): return x + {n}", scope)
        made: Pipeline[Any] = getattr(sl.from_items(range(9)), kind)(scope["fixed"])
        return made.shuffle(window=4)

    for taken, warned in ((2, kind == "filter"), (4, False)):  # in the window, and at its end
        _, snapshot = some(pipe(1), taken)
        with pytest.warns(CodeChangedWarning) as found:
            rest(pipe(2), snapshot)
        sentence = "'shuffle' downstream of fixed reads the 4 items of window 0 again"
        assert (sentence in str(found[0].message)) == (sentence in str(pipe(2).explain(snapshot))) == warned


def test_the_factory_of_an_iterable_and_a_seeded_function_are_looked_at_too() -> None:
    def pipe(n: int) -> Pipeline[Any]:
        scope: dict[str, Any] = {"range": range}
        exec(f"def rows(): return range({n})\ndef draw(x, *, rng): return x + {n}", scope)
        return sl.from_iterable(scope["rows"]).map(scope["draw"], seed=1)

    _, snapshot = some(pipe(8), 1)
    with pytest.warns(CodeChangedWarning, match=r"the code of iterable \(factory=…\), draw \(fn=draw\) has changed"):
        assert rest(pipe(9), snapshot) == list(range(10, 18))


def test_a_snapshot_of_another_python_resumes_and_code_is_compared_from_the_next_on() -> None:
    """Bytecode is another one there, so its hashes say nothing: a warning at each upgrade would teach nobody."""
    pipe = sl.from_items(range(20)).shard(2).map(noisy, seed=1).shuffle(window=3).merge().filter(odd)
    whole, (head, snapshot) = list(pipe), some(pipe, 3)
    assert [entry["code"].keys() for entry in snapshot.fingerprint if "code" in entry] == [{"fn"}, {"fn"}]
    entries = [
        {**entry, "code": {"fn": "cpython-310-O0:0123456789abcdef"}} if "code" in entry else entry
        for entry in snapshot.fingerprint
    ]
    theirs = sl.Snapshot.from_json(replace(snapshot, fingerprint=entries).to_json())
    assert head + rest(pipe, theirs) == whole
    assert some(pipe, 1, theirs)[1].fingerprint == snapshot.fingerprint


# Files


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


CHANGES = st.lists(st.tuples(st.sampled_from("nrga"), st.integers(0, 9), st.integers(0, 9)), max_size=5)


@pytest.mark.long
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 5), st.integers(1, 3), st.booleans(), CHANGES,
)  # fmt: skip
def test_a_chain_of_resumes_over_changing_files_reads_each_line_of_the_epoch_once(
    tmp_path_factory: pytest.TempPathFactory,
    count: int,
    shards: int,
    shuffled: bool,
    changes: list[tuple[str, int, int]],
) -> None:
    """New files stay out, removed ones are skipped from then on, what grows is read unless it was left behind."""
    folder = tmp_path_factory.mktemp("data")
    for n in range(count):
        (folder / f"m{n}.txt").write_text("".join(f"m{n}.{line}\n" for line in range(4)))
    epoch = sorted(folder.iterdir())
    pipe: Pipeline[str] = sl.read_lines(str(folder / "*.txt"))
    pipe = (pipe.shuffle_files(seed=3) if shuffled else pipe).shard(shards, "file")
    accept = [f"read_lines.{what}" for what in ("new_files", "removed_files", "changed_files")]
    (folder / "keep.txt").write_text("")  # else nothing would be left to look for
    _, snapshot = some(pipe, 0)
    epoch = sorted(folder.iterdir())
    once = {path: lines_of(path) for path in epoch}  # every line that may come
    must = {path: lines_of(path) for path in epoch}  # every line that has to
    homes: dict[str, int] = {}
    found: list[str] = []
    for kind, which, take in changes:
        with pipe.open(resume=snapshot, accept=accept) as stream:
            for _ in range(take):
                found += [item for item in [next(stream, None)] if item is not None]
            snapshot = sl.Snapshot.from_json(stream.snapshot().to_json())
        for shard, tree in enumerate(snapshot.worker_states):
            if (file := tree["read_lines"]["file"]) is not None:
                assert homes.setdefault(file, shard) == shard, "a file has moved to another shard"
        path = epoch[which % len(epoch)]
        if kind == "n":
            (folder / f"a{which}{take}.txt").write_text("new\n")
        elif kind == "r" and path.exists() and path.name != "keep.txt":
            path.unlink()
            must[path] = []
        elif kind == "g" and path.exists() and path.name != "keep.txt":
            line = f"grown {len(once[path])} {path.name}"
            with path.open("a") as file_object:
                file_object.write(f"{line}\n")
            once[path] = [*once[path], line]
    found += rest(pipe, snapshot, accept)
    assert len(found) == len(set(found))
    assert set(found) <= {line for lines in once.values() for line in lines}
    assert {line for lines in must.values() for line in lines} <= set(found)


def test_the_listing_of_an_accepted_run_is_carried_on_with_the_sizes_of_today(tmp_path: Path) -> None:
    for name in "bcd":
        (tmp_path / f"{name}.txt").write_text(f"{name}0\n{name}1\n")
    pipe = sl.read_lines(str(tmp_path / "*.txt")).shard(2)
    _, snapshot = some(pipe, 1)
    (tmp_path / "a.txt").write_text("new\n")
    (tmp_path / "d.txt").unlink()
    with (tmp_path / "c.txt").open("a") as file:
        file.write("c2\n")
    accept = ["read_lines.new_files", "read_lines.removed_files", "read_lines.changed_files"]
    with pytest.raises(ResumeError) as refused:
        rest(pipe, snapshot)
    for part in ("new file ", "a.txt (4 bytes)", "d.txt is gone", "c.txt was (6 bytes), is (9 bytes)"):
        assert part in str(refused.value)
    assert f"all that can be: accept={json.dumps(accept)}" in str(refused.value)
    _, second = some(pipe, 1, snapshot, accept)
    assert [(Path(entry["path"]).name, entry["size"]) for entry in second.listing or ()] == [
        ("b.txt", 6), ("c.txt", 9), ("d.txt", 6),
    ]  # fmt: skip
    with pytest.raises(ResumeError) as again:
        rest(pipe, second, accept[1:])
    assert 'accept=["read_lines.new_files"]' in str(again.value)
    assert rest(pipe, second, accept[:2]) == ["b1", "c1", "c2"]


def test_of_many_new_files_the_first_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    pipe = sl.read_lines(str(tmp_path / "*.txt")).shard(2, "file")
    _, snapshot = some(pipe, 1)
    for n in range(25):
        (tmp_path / f"b{n:02}.txt").write_text("b\n")
    with pytest.raises(ResumeError, match=r"b09\.txt.*\n +… and 15 more\n"):
        rest(pipe, snapshot)


def test_a_file_that_was_read_before_it_was_removed_hinders_no_stage_in_the_middle(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{n}\n" for n in range(8)))
    pipe = sl.read_lines(str(tmp_path / "*.txt")).shuffle_files(seed=1).shuffle(window=4)
    whole = list(pipe)
    head, snapshot = some(pipe, 13)
    first = snapshot.worker_states[0]["read_lines"]["file"]
    for path in tmp_path.iterdir():
        if str(path) != first:
            path.unlink()
    assert head + rest(pipe, snapshot, ["read_lines.removed_files"]) == whole


# Ranks


def test_every_rank_resumes_by_the_same_line(tmp_path: Path) -> None:
    pipe = sl.from_items(range(40)).shard(6).shuffle(window=3).merge().batch(2, collate=None)
    assert sl.Snapshot.load(tmp_path / "ckpt/", missing_ok=True) is None
    whole = {}
    heads = {}
    for rank in range(3):
        with pipe.open(rank=rank, world_size=3, ends="allow") as stream:
            whole[rank] = list(stream)
        with pipe.open(rank=rank, world_size=3, ends="allow") as stream:
            heads[rank] = [next(stream) for _ in range(rank + 1)]
            stream.snapshot().save(tmp_path / "ckpt/")
    for rank in range(3):
        job = sl.Snapshot.load(tmp_path / "ckpt/", missing_ok=True)
        with pipe.open(resume=job, rank=rank, world_size=3, ends="allow") as stream:
            assert heads[rank] + list(stream) == whole[rank]


def test_another_rank_is_refused_with_the_way_out(tmp_path: Path) -> None:
    pipe = sl.from_items(range(40)).shard(6)
    for rank in range(2):
        with pipe.open(rank=rank, world_size=2) as stream:
            stream.snapshot().save(tmp_path)
    job = sl.Snapshot.load(tmp_path)
    with pytest.raises(
        ResumeError, match=r"is of rank 1 of 2, this is rank 0 of 2: load the directory .* without rank="
    ):
        pipe.open(resume=job.part(1), rank=0, world_size=2)


def test_states_of_workers_are_keyed_by_shard_in_the_text() -> None:
    with sl.from_items(range(40)).shard(6).open(rank=1, world_size=3) as stream:
        for _ in range(3):
            next(stream)
        snapshot = stream.snapshot()
    own = json.loads(snapshot.to_json())["state"]["merge"]
    assert own["workers"] == {"1": {"items": 2}, "4": {"items": 1}}
    assert own["produced"] == {"1": 2, "4": 1}
    assert (snapshot.produced, list(snapshot.shards)) == ([2, 1], [1, 4])


def test_ranks_that_do_not_belong_together_make_no_job() -> None:
    parts = []
    for rank, shards in ((0, 4), (1, 6)):
        with sl.from_items(range(9)).shard(shards).open(rank=rank, world_size=2) as stream:
            parts.append(stream.snapshot())
    with pytest.raises(SnapshotError, match=r"differ in num_shards \(4 and 6\)"):
        sl.Snapshot.of_job(parts)
    with pytest.raises(SnapshotError, match=r"expected the snapshot of rank 0 of 1"):
        sl.Snapshot.of_job(parts[1:])


# Any change, anywhere


def halves(x: Any) -> list[Any]:
    return [(x, 0), (x, 1)]


def same(x: Any) -> Any:
    return x


async def later(x: Any) -> Any:
    return x


@sl.stage(stateless=True, snapshot_every=3)
async def both(items: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for item in items:
        yield (item, "a")
        yield (item, "b")


Part = tuple[str, str, int, int]
"""Kind, name, and two numbers; none of them loses items, and all but "halves" and "both" give as many as they get."""


def built(parts: list[Part], merged_at: int, chooses: bool) -> Pipeline[Any]:
    pipe: Pipeline[Any] = sl.from_items(range(24)).shard(2)
    for at, (kind, name, a, b) in enumerate(parts):
        if at == merged_at:
            pipe = pipe.merge("best_effort" if chooses else "strict")
        if kind == "shuffle":
            pipe = pipe.shuffle(window=a, seed=b, name=name)
        elif kind == "batch":
            pipe = pipe.batch(a, collate=None, name=name).unbatch(name=f"{name}un")
        elif kind == "halves":
            pipe = pipe.flat_map(halves, name=name)
        elif kind == "both":
            pipe = pipe.through(both, name=name)
        elif kind == "later":
            pipe = pipe.map(later, concurrency=a, ordered=False, name=name)
        else:
            pipe = pipe.map(same, name=name)
    return pipe


KINDS = st.sampled_from(["shuffle", "shuffle", "batch", "halves", "both", "later", "same"])
NEUTRAL = st.sampled_from(["shuffle", "batch", "same"])


@pytest.mark.long
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_what_is_accepted_anywhere_loses_and_doubles_nothing(data: st.DataObject) -> None:
    """A change is refused, or what was delivered and what comes are together the whole, each once."""
    number = st.integers(1, 6)
    kinds = data.draw(st.lists(KINDS, min_size=1, max_size=4))
    parts = [(kind, f"s{at}", data.draw(number), data.draw(number)) for at, kind in enumerate(kinds)]
    merged_at, chooses = data.draw(st.integers(0, len(parts))), data.draw(st.booleans())
    changed, after = list(parts), merged_at
    at = data.draw(st.integers(0, len(parts) - 1))
    change = data.draw(st.sampled_from(["numbers", "add", "remove", "rename"]))
    kind, name, a, b = parts[at]
    if change == "numbers":
        changed[at] = (kind, name, data.draw(number), data.draw(number))
    elif change == "rename":
        changed[at] = (kind, "renamed", a, b)
    elif change == "add":
        changed.insert(at, (data.draw(NEUTRAL), "added", data.draw(number), data.draw(number)))
        after += at < merged_at
    elif kind in ("shuffle", "batch", "same", "later"):
        del changed[at]
        after -= at < merged_at
    before, pipe = built(parts, merged_at, chooses), built(changed, after, chooses)
    whole = sorted(map(str, before))
    head, snapshot = some(before, data.draw(st.integers(0, len(whole))))
    accept: list[str] = []
    try:
        pipe.open(resume=snapshot)
    except ResumeError as refused:
        accept = re.findall(r'^ +accept=\["(.*)"\]: ', str(refused), re.MULTILINE)
        event("refused" if "this can't:" in str(refused) else f"accepted: {change}")
        if "this can't:" in str(refused):
            with pytest.raises(ResumeError):
                pipe.open(resume=snapshot, accept=accept)
            return
    assert sorted(map(str, head + rest(pipe, snapshot, accept))) == whole
