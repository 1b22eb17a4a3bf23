"""What counts as another plan, and what doesn't; and how the difference reads."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

import streamline as sl
from streamline.errors import ResumeError
from streamline.pipeline import Pipeline
from streamline.plan.fingerprint import fingerprint
from streamline.transforms.bucket import length_of
from streamline.transforms.collate import as_list, stack

Change = Callable[[Pipeline[Any]], Pipeline[Any]]


def double(x: int) -> int:
    return 2 * x


def triple(x: int) -> int:
    return 3 * x


async def wait(x: int) -> int:
    return x


def perhaps_noisy(x: int, *, rng: Any = None) -> int:
    return x


def noisy(x: int, *, rng: Any) -> int:
    return x


def collated(items: list[Any]) -> Any:
    return items


@sl.stage(state=dict)
async def window(items: AsyncIterator[Any], *, state: dict[str, Any], size: int = 2) -> AsyncIterator[Any]:
    async for item in items:
        yield item


def source() -> Pipeline[int]:
    return sl.from_items(list(range(100)))


def of(pipe: Pipeline[Any]) -> Any:
    """The fingerprint, without the hashes of code."""
    return [{**entry, "code": None} for entry in fingerprint(pipe.plan)]


def refused(ours: Pipeline[Any], theirs: Pipeline[Any], accept: Sequence[str] = ()) -> str:
    """Return why `ours` doesn't go on from a snapshot of `theirs`."""
    with theirs.open() as stream:
        snapshot = stream.snapshot()
    with pytest.raises(ResumeError) as found:
        ours.open(resume=snapshot, accept=accept)
    return str(found.value)


SAME: dict[str, tuple[Change, Change]] = {
    "prefetch": (lambda p: p.map(double), lambda p: p.prefetch(4).map(double).prefetch(9, bytes=100)),
    "concurrency": (lambda p: p.map(wait, concurrency=2), lambda p: p.map(wait, concurrency=64)),
    "threads": (lambda p: p.map(double), lambda p: p.map(double, executor="thread", concurrency=3)),
    "kind of merge": (lambda p: p.shard(3).merge(), lambda p: p.shard(3).merge("best_effort")),
    "options of the merge": (
        lambda p: p.shard(3).merge("best_effort", max_lead=2),
        lambda p: p.shard(3).merge("best_effort", max_skips_per_round=0, max_lead=9),
    ),
    "a merge that stands there anyway": (lambda p: p.shard(3), lambda p: p.shard(3).merge()),
    "a shard that is there anyway": (lambda p: p.map(double), lambda p: p.shard(1).map(double)),
    "a mode that is the default": (lambda p: p.shard(3), lambda p: p.shard(3, "interleaved")),
}

OTHER: dict[str, tuple[Change, Change]] = {
    "another function": (lambda p: p.map(double, name="f"), lambda p: p.map(triple, name="f")),
    "another name": (lambda p: p.map(double), lambda p: p.map(double, name="f")),
    "another kind": (lambda p: p.map(double, name="f"), lambda p: p.filter(double, name="f")),
    "another order": (lambda p: p.map(double).map(triple), lambda p: p.map(triple).map(double)),
    "one more stage": (lambda p: p, lambda p: p.map(double)),
    "unordered": (lambda p: p.map(wait), lambda p: p.map(wait, ordered=False)),
    "size of a batch": (lambda p: p.batch(2), lambda p: p.batch(3)),
    "the rest of a batch": (lambda p: p.batch(2), lambda p: p.batch(2, drop_remainder=True)),
    "collate": (lambda p: p.batch(2), lambda p: p.batch(2, collate=None)),
    "a collate of one's own": (lambda p: p.batch(2, collate=None), lambda p: p.batch(2, collate=collated)),
    "count of take": (lambda p: p.shard(2).take(3), lambda p: p.shard(2).take(4)),
    "count of skip": (lambda p: p.shard(2).skip(3), lambda p: p.shard(2).skip(4)),
    "passes": (lambda p: p.repeat(2), lambda p: p.repeat(None)),
    "seed": (lambda p: p.shuffle(seed=0), lambda p: p.shuffle(seed=1)),
    "seed of a window": (lambda p: p.shuffle(window=4), lambda p: p.shuffle(window=4, seed=1)),
    "window": (lambda p: p.shuffle(window=4), lambda p: p.shuffle(window=5)),
    "seed of a map": (lambda p: p.map(noisy, seed=0), lambda p: p.map(noisy, seed=1)),
    "a seed at all": (lambda p: p.map(perhaps_noisy, name="f"), lambda p: p.map(perhaps_noisy, name="f", seed=0)),
    "shards": (lambda p: p.shard(2), lambda p: p.shard(3)),
    "mode": (lambda p: p.shard(2), lambda p: p.shard(2, "contiguous")),
    "the remainder": (lambda p: p.shard(2), lambda p: p.shard(2, drop_remainder=True)),
    "before or behind the shard": (lambda p: p.take(4).shard(2), lambda p: p.shard(2).take(4)),
    "before or behind the merge": (lambda p: p.shard(2).take(4).merge(), lambda p: p.shard(2).merge().take(4)),
    "parameters of a custom stage": (lambda p: p.through(window, size=2), lambda p: p.through(window, size=3)),
}


@pytest.mark.parametrize("name", SAME)
def test_what_changes_no_item_does_not_count(name: str) -> None:
    one, other = SAME[name]
    assert of(one(source())) == of(other(source()))


@pytest.mark.parametrize("name", OTHER)
def test_what_changes_items_counts(name: str) -> None:
    one, other = OTHER[name]
    assert of(one(source())) != of(other(source()))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", OTHER)
def test_another_plan_is_refused_with_the_difference(name: str) -> None:
    one, other = (change(source()) for change in OTHER[name])
    text = refused(other, one)
    assert "taken of another plan" in text
    lines = text.splitlines()
    assert any(line.startswith(("  - ", "  + ")) for line in lines)
    assert "    from_items 'items' ()" in lines, "what is the same is shown without a sign"
    assert "accept=[" in text or "this can't:" in text


def test_the_data_are_not_in_it() -> None:
    """They are in the listing."""
    assert of(sl.from_items([1, 2])) == of(sl.from_items([1, 2, 3]))
    assert of(sl.from_items([1])) != of(sl.from_items([1], name="other"))
    assert of(sl.from_items([1])) != of(sl.from_iterable(lambda: [1]))


@pytest.mark.parametrize("name", OTHER)
def test_it_is_json(name: str) -> None:
    for change in OTHER[name]:
        assert json.loads(json.dumps(of(change(source())))) == of(change(source()))


def test_the_difference_reads_like_one() -> None:
    theirs = source().shard(2).map(double).merge().batch(2, collate=None)
    ours = source().shard(2).map(double).merge().batch(4, collate=None).take(3)
    assert refused(ours, theirs) == (
        "the snapshot was taken of another plan (- the snapshot's, + this one's):\n"
        "    from_items 'items' ()\n"
        "    shard 'shard' (num_shards=2, mode='interleaved', drop_remainder=False)\n"
        "    map 'double' (fn='double')\n"
        "    merge 'merge' ()\n"
        "  - batch 'batch' (size=2, drop_remainder=False, collate='as_list')\n"
        "  + batch 'batch' (size=4, drop_remainder=False, collate='as_list')\n"
        "  + take 'take' (count=3)\n"
        "this can be accepted:\n"
        '    accept=["batch.size"]: the batches from here on have the new size, from the first item that was in no '
        "batch delivered\n"
        '    accept=["take.added"]: it counts from here on\n'
        'all that can be: accept=["batch.size", "take.added"]'
    )


def test_what_was_accepted_is_not_asked_for_again_but_stays_in_the_list_to_copy() -> None:
    theirs = source().shard(2).merge().batch(2, collate=None)
    text = refused(source().shard(2).merge().batch(4, collate=None).take(3), theirs, ["take.added"])
    assert 'accept=["batch.size"]: ' in text
    assert 'accept=["take.added"]: ' not in text
    assert text.endswith('all that can be: accept=["batch.size", "take.added"]')


def test_nothing_is_offered_for_acceptance_that_would_not_open_the_plan() -> None:
    theirs = source().shard(2).merge().batch(2, collate=None)
    text = refused(source().shard(3).merge().batch(4, collate=None), theirs)
    assert "  - batch 'batch' (size=2" in text
    assert "this can't:\n    shard.num_shards: every item would be in another shard" in text
    assert "accept=" not in text


def test_renaming_a_function_of_the_package_changes_no_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprints() -> list[Any]:
        by_length = source().bucket_by_length([4], 2)
        return [of(pipe) for pipe in (source().batch(2), source().batch(2, collate=None), by_length)]

    before = fingerprints()
    for own in (stack, as_list, length_of):
        monkeypatch.setattr(own, "__qualname__", "renamed")
    assert fingerprints() == before
