"""What a mixture's resume makes of changes at its end, and of a component's data: nothing comes twice, none is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import streamline as sl
from streamline.errors import ResumeError
from streamline.pipeline import Pipeline
from tests.laws.profile import sampled


def parts(**lengths: int) -> dict[str, Pipeline[int]]:
    """Component "a" has 0, 1, 2, …; "b" 1000, 1001, …"""
    starts = {name: 1000 * at for at, name in enumerate("abc")}
    return {name: sl.from_items(range(starts[name], starts[name] + length)) for name, length in lengths.items()}


def taken(pipe: Pipeline[int], count: int, resume: sl.Snapshot | None = None, **options: Any) -> tuple[list[int], Any]:
    """Return so many items, or all if there are fewer, and a snapshot after them that has been JSON."""
    with pipe.open(resume=resume, **options) as stream:
        found = [item for _, item in zip(range(count), stream, strict=False)]
        return found, sl.Snapshot.from_json(stream.snapshot().to_json())


def length_of(item: int) -> int:
    return item % 10


def once(pipe: Pipeline[int]) -> Pipeline[int]:
    return pipe.shuffle(window=6)


def twice(pipe: Pipeline[int]) -> Pipeline[int]:
    return pipe.shuffle(window=5).shuffle(window=4)


def by_length(pipe: Pipeline[int]) -> Pipeline[int]:
    return pipe.bucket_by_length([3, 7], 3, length=length_of, collate=None).unbatch()


REWINDING = [once, twice, by_length]


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("stop", ["all", "first"])
def test_a_component_that_had_ended_goes_on_where_it_has_more_now(shards: int, stop: Any) -> None:
    """Also if no item is taken before the next snapshot, which lists the data of today."""
    before = sl.mix(parts(a=60, b=4), stop=stop).shard(shards)
    ended: list[Any] = []
    count = 0
    while not all(ended) or not ended:
        count += 1
        first, snapshot = taken(before, count)
        ended = [state.get("mix", {}).get("ended") for state in snapshot.worker_states]
        if len(first) < count:
            break
    after = sl.mix(parts(a=60, b=13), stop="all").shard(shards)
    _, again = taken(after, 0, snapshot, accept=["mix.b.length"])
    for resume in (snapshot, again):
        rest = list(after.open(resume=resume, accept=["mix.b.length"]).sync_stream())
        assert sorted(first + rest) == [*range(60), *range(1000, 1013)]


def test_a_component_that_had_ended_and_is_as_it_was_stays_ended() -> None:
    """Else its weight would count until it is drawn, and others' items would come in another order."""
    pipe, other = sl.mix(parts(a=60, b=4, c=60)), sl.mix(parts(a=60, b=4, c=70))
    whole = list(pipe)
    _, snapshot = taken(pipe, 40)
    assert snapshot.worker_states[0]["mix"]["ended"] == ["b"]
    rest = list(other.open(resume=snapshot, accept=["mix.c.length"]).sync_stream())
    assert rest[:15] == whole[40:55]


def test_a_file_that_a_components_stage_reads_again_must_stay(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{line}\n" for line in range(5)), encoding="utf-8")
    for make in (one_mixed, one_zipped):
        pipe = make(sl.read_lines(f"{tmp_path}/*.txt").shuffle(window=8))
        with pipe.open() as stream:
            first = [next(stream) for _ in range(9)]
            snapshot = stream.snapshot()
        for gone in "bd":
            text = (tmp_path / f"{gone}.txt").read_text(encoding="utf-8")
            (tmp_path / f"{gone}.txt").unlink()
            with pytest.raises(
                ResumeError, match=r"(?s)this can't:.*removed_files: '\w/shuffle' downstream of it reads the 8"
            ):
                pipe.open(resume=snapshot)
            (tmp_path / f"{gone}.txt").write_text(text, encoding="utf-8")
        (tmp_path / "a.txt").unlink()
        rest = list(pipe.open(resume=snapshot, accept=[f"{make.__doc__}.removed_files"]).sync_stream())
        assert len({*first, *rest}) == len(first) + len(rest) == 20
        (tmp_path / "a.txt").write_text("a0\na1\na2\na3\na4\n", encoding="utf-8")


def one_mixed(pipe: Pipeline[Any]) -> Pipeline[Any]:
    """mix.a"""
    return sl.mix({"a": pipe})


def one_zipped(pipe: Pipeline[Any]) -> Pipeline[Any]:
    """zip.0"""
    return sl.zip(pipe)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("later", REWINDING)
@pytest.mark.parametrize("seed", range(2))
def test_stop_first_after_all_ends_after_what_is_read_again(later: Any, seed: int) -> None:
    components = parts(a=5, b=10)
    for count in sampled(range(0, 15, 2), 3):
        first, snapshot = taken(later(sl.mix(components, seed=seed)), count)
        rest = list(later(sl.mix(components, seed=seed, stop="first")).open(resume=snapshot).sync_stream())
        check_whole(first + rest)


def check_whole(found: list[int]) -> None:
    """Insist that nothing came twice, and that of each component nothing is missing before what came last."""
    for start in (0, 1000):
        own = sorted(item for item in found if item // 1000 == start // 1000)
        assert own == [*range(start, start + len(own))]


CHANGES: dict[str, dict[str, Any]] = {
    "weights": {"weights": {"a": 1, "b": 50}, "stop": "first"},
    "seed": {"seed": 11, "stop": "first"},
    "stop": {"stop": "all"},
}


@pytest.mark.one_in(5, 3)
@pytest.mark.parametrize("later", REWINDING)
@pytest.mark.parametrize(("seed", "what"), list(enumerate(CHANGES)))
def test_an_end_that_a_later_stage_has_reached_is_the_end(later: Any, what: str, seed: int) -> None:
    """What is read again ends as it did, or is refused: a window, a rest, that was delivered in part stays what it was.

    Several times in a row: where nothing is read again, more may come, and nothing comes twice.
    """
    components, changed = parts(a=5, b=10), {"seed": seed, **CHANGES[what]}
    before = later(sl.mix(components, seed=seed, stop="first"))
    after = later(sl.mix(components, **changed))
    whole = list(before)
    for count in sampled(range(len(whole)), 4):
        found, snapshot = taken(before, count)
        try:
            for _ in range(3):
                more, snapshot = taken(after, 1, snapshot)
                found += more
        except ResumeError as refused:
            if what != "stop" or "goes back to items before its end, where there would be more now" not in str(refused):
                raise
            continue
        found += list(after.open(resume=snapshot).sync_stream())
        check_whole(found)
        if what == "stop":
            assert len(found) == 15


def test_a_component_that_comes_when_a_later_stage_has_read_to_the_end_is_refused() -> None:
    pipe = sl.mix(parts(a=4, b=4)).shuffle(window=6)
    _, snapshot = taken(pipe, 7)
    with pytest.raises(ResumeError, match="keep components"):
        list(sl.mix(parts(a=4, b=4, c=3)).shuffle(window=6).open(resume=snapshot).sync_stream())
    assert list(pipe.open(resume=snapshot).sync_stream()) == list(pipe)[7:]
    _, snapshot = taken(pipe, 8)
    more = list(sl.mix(parts(a=4, b=4, c=3)).shuffle(window=6).open(resume=snapshot).sync_stream())
    assert sorted(more) == [2000, 2001, 2002]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("changed", [{"weights": {"a": 1, "b": 9}}, {"seed": 4}])
def test_passes_that_a_later_stage_goes_back_over_are_drawn_as_they_were(shards: int, changed: dict[str, Any]) -> None:
    """Or the resume is refused: of an earlier pass, the state doesn't say where it was when it ended."""

    def passes(**options: Any) -> Pipeline[int]:
        return sl.mix(parts(a=5, b=6), **options).shard(shards).repeat(3).shuffle(window=4)

    whole, refused = list(passes()), 0
    for count in sampled(range(0, 33, 2), 4):
        first, snapshot = taken(passes(), count)
        assert first + list(passes().open(resume=snapshot).sync_stream()) == whole
        more, later = taken(passes(), count % 3, snapshot)
        for delivered, resume in ((first, snapshot), (first + more, later)):
            try:
                rest = list(passes(**changed).open(resume=resume).sync_stream())
            except ResumeError as error:
                if "goes back to an earlier pass of it: keep weights, seed, stop= and components" not in str(error):
                    raise
                refused += 1
            else:
                assert sorted(delivered + rest) == sorted(whole)
    assert 0 < refused < 15
