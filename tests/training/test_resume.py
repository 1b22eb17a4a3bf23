"""Replicas of a pipeline resume exactly, together by `state_dict`, and each by the snapshot of its own pipeline."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.errors import PlanError, ResumeError, SnapshotError
from streamline.training.replica_shares import ReplicaShares
from tests.laws.profile import covering, examples


def double(x: int) -> int:
    return 2 * x


async def jittered(x: int) -> int:
    await anyio.sleep(0.0005 * (x * 7 % 3))
    return 2 * x


LENGTH = 60

STRICT = sl.from_items(range(LENGTH)).shard(3).map(double).shuffle(window=8).merge()
PIPES = {
    "strict": STRICT,
    "iterable": sl.from_iterable(lambda: iter(range(LENGTH))).map(double),
    "best_effort": sl.from_items(range(LENGTH)).shard(3).map(jittered).merge("best_effort", max_skips_per_round=2),
    "unordered": sl.from_items(range(LENGTH)).map(jittered, concurrency=4, ordered=False),
    "unordered, unfolded": sl.from_items(range(LENGTH // 2))
    .map(jittered, concurrency=4, ordered=False)
    .flat_map(lambda x: [x, x + LENGTH]),
}


def whole(pipe: sl.Pipeline[int]) -> list[int]:
    return list(pipe)


async def taken_by(replicator: sl.StreamReplicator[int], counts: list[int]) -> list[list[int]]:
    """Let each replica take so many items, in turn, as far as there are any."""
    replicas = [replicator.replica(r) for r in range(replicator.num_replicas)]
    found: list[list[int]] = [[] for _ in replicas]
    left = list(counts)
    while any(left):
        for r, replica in enumerate(replicas):
            if left[r]:
                left[r] -= 1
                found[r] += [item async for item in _one(replica)]
    KEPT.append(replicas)
    return found


KEPT: list[Any] = []


async def _one(replica: Any) -> Any:
    try:
        yield await anext(replica)
    except StopAsyncIteration:
        return


@examples(25)
@given(st.sampled_from(list(PIPES)), st.lists(st.integers(0, 12), min_size=1, max_size=4), st.lists(st.integers(0, 5)))
def test_a_set_of_replicas_resumes_exactly(kind: str, counts: list[int], more: list[int]) -> None:
    """Two runs that are left, with as many items taken of each replica as may be, then the rest."""
    pipe, of = PIPES[kind], len(counts)

    async def main() -> None:
        parts: list[list[list[int]]] = []
        state: dict[str, Any] | None = None
        for takes in (counts, (more + [0] * of)[:of], [LENGTH] * of):
            async with sl.StreamReplicator(pipe, of, capacity=16) as replicator:
                if state is not None:
                    replicator.load_state_dict(state)
                    assert replicator.state_dict() == state
                parts.append(await taken_by(replicator, takes))
                before = replicator.state_dict()
            state = json.loads(json.dumps(replicator.state_dict()))  # also behind the close
            assert state["taken"] == before["taken"]
            KEPT.clear()
        mine = [[item for part in parts for item in part[r]] for r in range(of)]
        if kind in ("strict", "iterable"):
            items = whole(pipe)
            assert mine == [items[r::of] for r in range(of)]
        else:
            assert Counter(item for part in mine for item in part) == Counter(whole(pipe))

    async def limited() -> None:
        with anyio.fail_after(200):
            await main()

    anyio.run(limited)


def test_a_state_before_the_first_item_and_one_of_a_closed_replica() -> None:
    replicator = sl.StreamReplicator(STRICT, 2)
    begin = replicator.state_dict()
    assert begin == {"taken": [0, 0], "closed": [], "behind": 0, "snapshot": "", "version": 1}
    replicator.load_state_dict(begin)
    first, second = replicator.replica(0), replicator.replica(1)
    assert next(second) == whole(STRICT)[1]
    second.close()
    assert next(first) == whole(STRICT)[0]
    state = replicator.state_dict()
    replicator.close()
    again = sl.StreamReplicator(STRICT, 2)
    again.load_state_dict(state)
    with pytest.raises(ResumeError, match="was closed in the run"):
        again.replica(1)
    assert list(again.replica(0)) == whole(STRICT)[2::2]
    assert [one.standing for one in again.stats()] == ["read", "closed"]


def test_a_state_that_is_asked_for_while_readers_go_on_fits_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps of it, another thread takes so much that what is needed is dropped meanwhile."""
    pipe, asker, pending = sl.from_items(range(5000)), threading.get_ident(), [900]
    taken = ReplicaShares.taken.fget  # type: ignore[attr-defined]

    def overtaken(shares: ReplicaShares) -> list[int]:
        found: list[int] = taken(shares)
        if threading.get_ident() == asker and pending:
            for _ in range(pending.pop()):
                assert next(first) == next(second) - 1
        return found

    with sl.StreamReplicator(pipe, 2) as replicator:
        first, second = replicator.replica(0), replicator.replica(1)
        assert [next(first), next(second), next(first)] == [0, 1, 2]
        assert next(second) == 3
        monkeypatch.setattr(ReplicaShares, "taken", property(overtaken))
        state = replicator.state_dict()
        assert not pending
    with sl.StreamReplicator(pipe, 2) as again:
        again.load_state_dict(state)
        assert [next(again.replica(0)), next(again.replica(1))] == [4, 5]


def test_a_resume_reads_little_again() -> None:
    asked: list[int] = []

    def ask(x: int) -> int:
        asked.append(x)
        return x

    pipe = sl.from_items(range(20_000)).map(ask)
    with sl.StreamReplicator(pipe, 2, capacity=8) as replicator:
        pairs = zip(replicator.replica(0), replicator.replica(1), strict=False)
        for _ in range(8_000):
            next(pairs)
        state = replicator.state_dict()
    asked.clear()
    with sl.StreamReplicator(pipe, 2, capacity=8) as replicator:
        replicator.load_state_dict(state)
        replicas = replicator.replica(0), replicator.replica(1)
        assert next(replicas[0]) == 16_000
    assert min(asked) >= 16_000 - 2 * 256


def test_states_that_do_not_fit_are_refused() -> None:
    replicator = sl.StreamReplicator(STRICT, 2)
    state = sl.StreamReplicator(STRICT, 3).state_dict()
    with pytest.raises(ResumeError, match=r"of 3 replicas, and there are 2: make a StreamReplicator\(source, 3\)"):
        replicator.load_state_dict(state)
    with pytest.raises(SnapshotError, match="not a replicator's state: missing entries"):
        replicator.load_state_dict({"taken": [1]})
    replica = replicator.replica(0)
    with pytest.raises(PlanError, match="comes before the first"):
        replicator.load_state_dict(replicator.state_dict())
    assert next(replica) == whole(STRICT)[0]
    state = replicator.state_dict()
    replicator.close()
    other = sl.StreamReplicator(STRICT.skip(1), 2)
    other.load_state_dict(state)
    with pytest.raises(ResumeError, match="another plan"):
        list(other.replica(0))
    live = sl.StreamReplicator(sl.from_stream(_feed), 2)
    with pytest.raises(PlanError, match=r"read each replica through replicator\.pipeline"):
        live.state_dict()


@pytest.mark.parametrize("kind", ["best_effort", "unordered"])
def test_passes_over_what_chooses_have_no_state_and_the_way_out_is_said(kind: str) -> None:
    replicator = sl.StreamReplicator(PIPES[kind].repeat(2), 2)
    with pytest.raises(PlanError, match=r"chosen anew in each pass.*: move \.repeat before \.shard"):
        replicator.state_dict()


async def _feed() -> Any:
    for item in range(LENGTH):
        yield item


# Each in a pipeline of its own ---------------------------------------------------------------------------------------


def batches(replicator: sl.StreamReplicator[int], r: int, **options: Any) -> sl.Pipeline[list[int]]:
    return replicator.pipeline(r, **options).shuffle(window=4).batch(3, collate=None)


def trained(pipes: list[Any], resumes: list[Any], steps: list[int | None]) -> tuple[list[list[int]], list[Any]]:
    """Let a thread for each pipeline take so many batches; return what they got, and their snapshots."""
    found: list[list[int]] = [[] for _ in pipes]
    snapshots: list[Any] = [None for _ in pipes]
    failures: list[BaseException] = []

    def train(r: int) -> None:
        try:
            with pipes[r].open(resume=resumes[r], backend=sl.Threads(1)) as stream:
                for step, batch in enumerate(stream):
                    found[r] += batch
                    if steps[r] is not None and step + 1 == steps[r]:
                        snapshots[r] = stream.snapshot()
                        break
                else:
                    snapshots[r] = stream.snapshot()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(r,)) for r in range(len(pipes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
    return found, snapshots


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("steps", "on_disk", "with_state"), covering([(1, 1, 1), (5, 2, 4), (3, 6, 1)], [True, False], [True, False])
)
def test_pipelines_of_replicas_resume_each_by_itself(
    steps: tuple[int, ...], on_disk: bool, with_state: bool, tmp_path: Path
) -> None:
    def options(r: int) -> dict[str, Any]:
        return {"journal": tmp_path / str(r)} if on_disk else {}

    with sl.StreamReplicator(STRICT, 3, capacity=LENGTH) as replicator:
        state = replicator.state_dict()
        first, snapshots = trained([batches(replicator, r, **options(r)) for r in range(3)], [None] * 3, list(steps))
    snapshots = [sl.Snapshot.from_json(snapshot.to_json()) for snapshot in snapshots]
    with sl.StreamReplicator(STRICT, 3, capacity=LENGTH) as replicator:
        if with_state:
            replicator.load_state_dict(state)
        rest, _ = trained([batches(replicator, r, **options(r)) for r in range(3)], snapshots, [None] * 3)
    items = whole(STRICT)
    mine = [one + other for one, other in zip(first, rest, strict=True)]
    assert [sorted(part) for part in mine] == [sorted(items[r::3]) for r in range(3)]
    with sl.StreamReplicator(STRICT, 3, capacity=LENGTH) as replicator:
        assert mine == trained([batches(replicator, r) for r in range(3)], [None] * 3, [None] * 3)[0]


@pytest.mark.long
def test_a_pipeline_of_a_replica_is_opened_again_in_the_same_process() -> None:
    """Also of a source that can't be read again: what was read is in the snapshot, the rest waits in the replica."""
    with sl.StreamReplicator(iter(range(5_000)), 1, capacity=4) as replicator:
        pipe = replicator.pipeline(0).batch(2, collate=None)
        with pipe.open() as stream:
            first = [next(stream) for _ in range(3)]
            with (
                pipe.open() as second,
                pytest.raises(PlanError, match="read by another opening"),
            ):  # not all is read yet
                next(second)
        with pipe.open(resume=stream.snapshot()) as stream:
            rest = list(stream)
    assert [item for batch in first + rest for item in batch] == list(range(5_000))


def test_a_resume_that_would_lose_items_is_refused() -> None:
    with sl.StreamReplicator(sl.from_items(range(5_000)), 1, capacity=4) as replicator:
        pipe = replicator.pipeline(0)
        with pipe.open() as stream:
            early = stream.snapshot()  # what was read ahead by now is in it, and that isn't all
            assert len(list(stream)) == 5_000
        with pipe.open(resume=early) as stream, pytest.raises(ResumeError, match="were handed out"):
            list(stream)
    with sl.StreamReplicator(STRICT, 1) as replicator:
        pipe = replicator.pipeline(0)
        with pipe.open() as stream:
            assert len(list(stream)) == LENGTH
            late = stream.snapshot()
    with sl.StreamReplicator(STRICT.take(10), 1) as replicator:
        pipe = replicator.pipeline(0)
        with pipe.open(resume=late) as stream, pytest.raises(ResumeError, match="the stream ends after 10"):
            next(stream)


def test_pipelines_of_what_chooses_an_order_are_refused() -> None:
    for kind, name in [("best_effort", "the best-effort merge"), ("unordered", "map")]:
        replicator = sl.StreamReplicator(PIPES[kind], 2)
        with pytest.raises(PlanError, match=f"{name}.* chooses an order"):
            replicator.pipeline(0)
    with pytest.raises(PlanError, match="encode= and decode= together"):
        sl.StreamReplicator(range(3), 2).pipeline(0, encode=str)
    with pytest.raises(PlanError, match="from 0 to 1"):
        sl.StreamReplicator(range(3), 2).pipeline(2)


def test_an_error_of_the_stream_reaches_all_pipelines() -> None:
    def items() -> Iterator[int]:
        yield from range(10)
        raise KeyError("broken")

    with sl.StreamReplicator(items(), 2, capacity=20) as replicator:
        pipes = [replicator.pipeline(r).map(double) for r in range(2)]
        for r, pipe in enumerate(pipes):
            found: list[int] = []
            with pytest.raises(KeyError, match="broken"), pipe.open() as stream:
                found.extend(iter(stream))
            assert found == [] or found == [2 * x for x in range(r, 10, 2)]


async def test_pipelines_read_in_one_event_loop() -> None:
    found: list[list[int]] = [[], []]

    async def train(r: int, pipe: sl.Pipeline[int]) -> None:
        async with pipe.open() as stream:
            async for item in stream:
                found[r].append(item)

    async with (
        sl.StreamReplicator(sl.from_items(range(500)).map(double), 2, capacity=8) as replicator,
        anyio.create_task_group() as group,
    ):
        for r in range(2):
            group.start_soon(train, r, replicator.pipeline(r).shard(2).map(double).merge())
    assert found == [[4 * x for x in range(r, 500, 2)] for r in range(2)]


@pytest.mark.long
def test_a_pipeline_of_a_replica_runs_in_processes() -> None:
    with sl.StreamReplicator(range(40), 1) as replicator:
        pipe = replicator.pipeline(0).shard(2).map(abs).merge()
        with pipe.open(backend=sl.Processes(1)) as stream:
            assert list(stream) == list(range(40))
