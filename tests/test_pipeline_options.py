"""Mistakes in a plan are refused where they are written, with what to do instead."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

import numpy as np
import pytest

import streamline as sl
from streamline.errors import DataError, PlanError, PlanTypeError, StreamlineError
from streamline.runtime.run import DEFAULTS, THEMES, DebugKeywords, OpenKeywords, RunKeywords, WatchOptions


async def asynchronous(item: int) -> int:
    return item


@sl.stage(stateless=True)
async def stage(items: AsyncIterator[int]) -> AsyncIterator[int]:
    async for item in items:
        yield item


async def later(items: list[int]) -> list[int]:
    return items


async def rows_later(items: list[int]) -> AsyncIterator[int]:
    for item in items:
        yield item


def source() -> sl.Pipeline[Any]:
    return sl.from_items(range(10))


BAD_VALUES: dict[str, tuple[Callable[[], object], str]] = {
    "shard(10**9)": (lambda: source().shard(10**9), "at most 1,000,000, got 1,000,000,000"),
    "async collate": (lambda: source().batch(2, collate=later), "sync function"),
    "async generator collate": (lambda: source().batch(2, collate=rows_later), "sync function"),
    "retries of -1": (lambda: sl.HttpOptions(retries=-1), "at least 0, got -1"),
    "timeout of 0": (lambda: sl.HttpOptions(timeout_s=0), "more than 0, got 0"),
    "timeout of NaN": (lambda: sl.HttpOptions(timeout_s=float("nan")), "more than 0, got nan"),
    "endless timeout below": (lambda: sl.HttpOptions(timeout_s=-float("inf")), "more than 0, got -inf"),
    "max_skips_per_round of a strict merge": (lambda: source().merge(max_skips_per_round=3), "best_effort"),
    "stage declared twice over": (lambda: sl.stage(state=dict, stateless=True), "either"),
    "stage declared as nothing": (lambda: sl.stage(), "either"),
    "snapshot_every of 0": (lambda: sl.stage(state=dict, snapshot_every=0), "at least 1"),
}
"""The others are in tests/plan/test_rules.py."""

BAD_TYPES: dict[str, tuple[Callable[[], object], str]] = {
    "shard(True)": (lambda: source().shard(True), "integer, got bool"),
    "batch('8')": (lambda: source().batch("8"), "integer, got str"),  # type: ignore[call-overload]
    "take(None)": (lambda: source().take(None), "integer, got NoneType"),  # type: ignore[arg-type]
    "skip(False)": (lambda: source().skip(False), "integer, got bool"),
    "repeat(1.5)": (lambda: source().repeat(1.5), "integer, got float"),  # type: ignore[arg-type]
    "window=True": (lambda: source().shuffle(window=True), "integer, got bool"),
    "seed=None": (lambda: source().shuffle(seed=None), "integer, got NoneType"),  # type: ignore[arg-type]
    "prefetch(True)": (lambda: source().prefetch(True), "integer, got bool"),
    "prefetch(bytes=1e6)": (lambda: source().prefetch(2, bytes=1e6), "integer, got float"),  # type: ignore[arg-type]
    "concurrency=True": (lambda: source().map(asynchronous, concurrency=True), "integer, got bool"),
    "max_lead=True": (lambda: source().merge("best_effort", max_lead=True), "integer, got bool"),
    "epoch=True": (lambda: source().open(epoch=True), "integer, got bool"),
    "rank=True": (lambda: source().shard(2).open(rank=True, world_size=2), "integer, got bool"),
    "world_size=2.0": (lambda: source().shard(2).open(rank=0, world_size=2.0), "integer, got float"),  # type: ignore[arg-type]
    "retries='x'": (lambda: sl.HttpOptions(retries="x"), "integer, got str 'x'"),  # type: ignore[arg-type]
    "retries=True": (lambda: sl.HttpOptions(retries=True), "integer, got bool"),
    "timeout_s='1'": (lambda: sl.HttpOptions(timeout_s="1"), "seconds, got str '1'"),  # type: ignore[arg-type]
    "timeout_s=None": (lambda: sl.HttpOptions(timeout_s=None), "seconds, got NoneType"),  # type: ignore[arg-type]
    "headers of pairs": (lambda: sl.HttpOptions(headers=[("a", "b")]), "mapping.*got list"),  # type: ignore[arg-type]
    "headers of bytes": (lambda: sl.HttpOptions(headers={"a": b"b"}), "value of type bytes for 'a'"),  # type: ignore[dict-item]
    "headers by number": (lambda: sl.HttpOptions(headers={1: "b"}), "name 1"),  # type: ignore[dict-item]
    "a name of a list": (lambda: source().map(abs, name=[1]), r"a name is a string .* got \[1\]"),  # type: ignore[call-overload]
    "ordered='False'": (lambda: source().map(asynchronous, ordered="False"), "True or False, got str 'False'"),  # type: ignore[call-overload]
    "seed_globals=1": (lambda: source().map(abs, seed=1, seed_globals=1), "True or False, got int 1"),  # type: ignore[call-overload]
    "shard(drop_remainder='no')": (lambda: source().shard(2, drop_remainder="no"), "True or False, got str"),  # type: ignore[arg-type]
    "batch(drop_remainder='no')": (lambda: source().batch(2, drop_remainder="no"), "True or False, got str"),  # type: ignore[call-overload]
    "bucket(drop_remainder=None)": (lambda: source().bucket_by_length([2], 2, drop_remainder=None), "True or False"),  # type: ignore[call-overload]
    "pack(drop_remainder=0)": (lambda: source().pack(2, drop_remainder=0), "True or False, got int 0"),  # type: ignore[arg-type]
    "zip(strict='False')": (lambda: sl.zip(source(), strict="False"), "True or False, got str 'False'"),  # type: ignore[arg-type]
    "filter(None)": (lambda: source().filter(None), "function, got NoneType"),  # type: ignore[arg-type]
    "flat_map([])": (lambda: source().flat_map([]), "function, got list"),  # type: ignore[arg-type]
    "collate=3": (lambda: source().batch(2, collate=3), "function, got int"),  # type: ignore[call-overload]
    "through(3)": (lambda: source().through(3), "function, got int"),  # type: ignore[arg-type]
    "from_items(3)": (lambda: sl.from_items(3), "__len__"),  # type: ignore[arg-type]
    "from_items(iterator)": (lambda: sl.from_items(iter([1])), "from_iterable"),  # type: ignore[arg-type]
    "from_iterable([1])": (lambda: sl.from_iterable([1]), "function"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("mistake", BAD_VALUES)
def test_a_bad_value_is_a_value_error_that_helps(mistake: str) -> None:
    make, match = BAD_VALUES[mistake]
    with pytest.raises(PlanError, match=match) as refused:
        make()
    assert isinstance(refused.value, ValueError)
    assert isinstance(refused.value, StreamlineError)


@pytest.mark.parametrize("mistake", list(BAD_TYPES))
def test_a_bad_type_is_a_type_error_that_helps(mistake: str) -> None:
    make, match = BAD_TYPES[mistake]
    with pytest.raises(TypeError, match=match) as refused:
        make()
    assert isinstance(refused.value, PlanError)


def test_ragged_batches_show_their_shapes() -> None:
    arrays = [np.zeros((2, 3)), np.zeros((2, 4))]
    with pytest.raises(DataError, match=r"\(2, 3\), \(2, 4\).*pad or crop") as refused:
        list(sl.from_items(arrays).batch(2))
    assert isinstance(refused.value, ValueError)
    assert "batch" in refused.value.__notes__[0]


@pytest.mark.parametrize("items", [[{"a": 1}, {"b": 1}], [(1, 2), (1, 2, 3)], [{"a": np.zeros(2)}, {"a": np.zeros(3)}]])
def test_batches_of_different_structures_show_them(items: list[Any]) -> None:
    with pytest.raises(DataError):
        list(sl.from_items(items).batch(2))


def test_what_is_refused_leaves_the_pipeline_as_it_was() -> None:
    pipe = source().map(abs)
    before = repr(pipe)
    with pytest.raises(PlanError):
        pipe.batch(0)
    assert repr(pipe) == before
    assert list(pipe) == list(range(10))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"resume": "ckpt/"}, r"open\(resume=\) is a Snapshot, got str 'ckpt/': load it: sl.Snapshot.load\('ckpt/'\)"),
        ({"resume": {"version": 1}}, r"is a Snapshot, got dict .*Snapshot.from_json"),
        ({"backend": "inline"}, r"open\(backend=\) is a backend, such as sl.Inline\(\), .*, got str 'inline'"),
        ({"backend": sl.Inline}, r"got the class sl.Inline: backend=sl.Inline\(\)$"),
        ({"backend": sl.Remote}, r"got the class sl.Remote: backend=sl.Remote\(4\)$"),
        ({"progress": 1}, r"open\(progress=\) is True or False, got int 1"),
    ],
)
def test_what_open_is_given_is_of_the_right_kind(options: Any, says: str) -> None:
    for wrong in (sl.from_items([1]).open, sl.from_items([1]).debug):
        known = options if wrong.__name__ == "open" else {key: options[key] for key in options.keys() & {"resume"}}
        if known:
            with pytest.raises(PlanTypeError, match=says):
                wrong(**known)


def test_an_option_is_declared_in_one_theme_and_has_one_keyword() -> None:
    declared = [option.name for theme in THEMES.values() for option in fields(theme)]
    assert len(set(declared)) == len(declared)
    types = {name: kind for theme in THEMES.values() for name, kind in get_type_hints(theme).items()}
    assert get_type_hints(OpenKeywords) == types
    shown = inspect.signature(sl.Pipeline.open).parameters
    assert {name: keyword.default for name, keyword in shown.items() if name != "self"} == DEFAULTS
    documented = inspect.getdoc(sl.Pipeline.open) or ""
    assert [name for name in declared if f"\n  {name}: " not in documented] == []


@pytest.mark.parametrize(
    ("method", "keywords"), [("loader", RunKeywords), ("replay_steps", RunKeywords), ("debug", DebugKeywords)]
)
def test_the_options_of_other_methods_are_listed_with_their_defaults(method: str, keywords: type) -> None:
    shown = inspect.signature(getattr(sl.Pipeline, method)).parameters
    names = keywords.__annotations__
    assert {name: shown[name].default for name in names} == {name: DEFAULTS[name] for name in names}


def test_a_new_option_is_a_field_and_a_keyword(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, kw_only=True)
    class WithSound(WatchOptions):
        sound: bool = False

    monkeypatch.setitem(THEMES, "watch", WithSound)
    monkeypatch.setitem(DEFAULTS, "sound", False)
    monkeypatch.setitem(RunKeywords.__annotations__, "sound", bool)
    louder: Any = {"sound": True}
    pipe = sl.from_items([1])
    assert pipe.open(**louder).resolved.options.watch == WithSound(sound=True)
    assert pipe.open().resolved.options.watch == WithSound()
    with pipe.loader(**louder) as loader:
        assert list(loader) == [1]
    with pytest.raises(PlanTypeError, match=r"\.debug has no sound="):
        pipe.debug(**louder)
