"""Where a pipeline starts that reads no files: `from_items`, `from_iterable`, `from_stream`, `mix` and `zip`."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence, Set
from os import PathLike
from pathlib import PurePath
from typing import Any, TypeAlias, TypeVar, get_args

from streamline.compiling import component
from streamline.errors import PlanError, PlanTypeError
from streamline.mixing.components import named
from streamline.mixing.draws import draws_of
from streamline.mixing.mix import Mix, Stop
from streamline.mixing.zipped import Zip
from streamline.options import check_seed, given
from streamline.pipeline import Pipeline
from streamline.plan import Plan
from streamline.sources.dataset import StreamDataset
from streamline.sources.items import Indexable, Items
from streamline.sources.iterable import IterableSource
from streamline.sources.live import MAX_AHEAD, MAX_AHEAD_BYTES, live_of
from streamline.table_rows import rows_of

__all__ = ["from_items", "from_iterable", "from_stream", "mix", "zip"]

T = TypeVar("T")

Weights: TypeAlias = Mapping[str, float]


def from_items(items: Indexable[T], *, name: str = "items") -> Pipeline[T]:
    """Read by index what has `__len__` and `__getitem__`: a list, an array, a memory map, a map-style dataset, a table.

    Its `__getitems__` is called with lists of indices if it has one. A resume computes its place: nothing is read
    again. If reading item i fails, the items before it arrive, then the error, which names the index.

    Of a pandas or polars DataFrame, a pyarrow Table or RecordBatch, items are rows: dicts of Python values by column,
    also where column labels are no strings. Of a Series, an Array or a ChunkedArray, items are its values. Both go by
    position, whatever the index says, and are made of slices, as many rows at a time as take a few milliseconds.

    Args:
      items: read, never changed.
      name: its part of a state is kept under it.

    Raises:
      PlanTypeError: `items` has no length or no index, or is read by key: a dict, a polars LazyFrame.
      PlanError: a table with two columns of one name.
    """
    if isinstance(items, type) or not hasattr(items, "__len__") or not hasattr(items, "__getitem__"):
        raise _not_indexed(items)
    return Pipeline(Items(name=name, items=rows_of(items)))


def _not_indexed(items: object) -> PlanTypeError:
    """Return the refusal of what `from_items` can't read, with the line to write instead."""
    kind = type(items).__name__
    if isinstance(items, Pipeline):
        hint = "it is the beginning of a pipeline already"
    elif kind == "LazyFrame":
        hint = "it has no rows yet, sl.from_items(frame.collect())"
    elif isinstance(items, Set):
        hint = "it has no order, sl.from_items(sorted(items))"
    elif isinstance(items, PurePath):
        hint = "of a file, sl.read_lines(path), sl.read_jsonl(path), …"
    elif isinstance(items, int):
        hint = f"of numbers, sl.from_items(range({items}))"
    elif isinstance(items, AsyncIterable):
        hint = "of an async iterable, sl.from_iterable(make), where make() returns a new one for each pass"
    elif isinstance(items, Iterator):
        hint = "of an iterator, sl.from_items(list(items)), or sl.from_iterable(make), where make() returns a new one"
    elif isinstance(items, Iterable):
        hint = "for an iterable, use from_iterable(lambda: items)"
    elif callable(items):
        hint = "sl.from_iterable(make) calls a function for an iterable, anew for each pass"
    else:
        hint = "of an iterable, use from_iterable(lambda: ...)"
    return PlanTypeError(f"from_items needs __len__ and __getitem__, and {kind} has not both: {hint}")


def from_iterable(
    factory: Callable[[], Iterable[T] | AsyncIterable[T]] | StreamDataset[T], *, name: str = "iterable"
) -> Pipeline[T]:
    """Read the sync or async iterable that `factory` returns; it is called anew per pass, worker and resume.

    Every worker iterates all of it and keeps its stride; a resume iterates up to where it stood. If the iterable or its
    iterator has `state_dict` and `load_state_dict` (Hugging Face datasets, torchdata), or `get_state` and `set_state`
    (grain), a resume loads a state of at most 32 items before instead. It then keeps its place in itself, so `factory`
    makes a new one at each call. A sync iterable is iterated in the event loop, list by list: one that waits (for a
    queue, a socket) had better be async. For a generator function that keeps its place itself, see `sl.source`; for
    what can be read only once, `from_stream`.

    Args:
      factory: called without arguments; or a `StreamDataset`, whose own factory is called then.
      name: its part of a state is kept under it.

    Raises:
      PlanTypeError: `factory` can't be called: an iterable itself could be read once only. While it runs: it returned
        no iterable; or the state holds what JSON can't.
      PlanError: while it runs: the factory returned an iterator, or another object whose place belongs to another use,
        a second time; or one whose state is known to lose items.
      ResumeError: while it runs: the snapshot holds a state, and what the factory returns can't load one.
    """
    if isinstance(factory, StreamDataset):
        factory = factory.anew
    _check_factory(factory)
    return Pipeline(IterableSource(name=name, factory=factory))


def _check_factory(factory: object) -> None:
    if callable(factory):
        return
    if isinstance(factory, Iterator | AsyncIterator):
        way = "an iterator can be read once: give the function that makes it, from_iterable(make), not make()"
    elif hasattr(factory, "__len__") and hasattr(factory, "__getitem__"):
        way = "what has an index is read by it, sl.from_items(items)"
    else:
        way = "from_iterable(lambda: items), which is called anew for each pass"
    raise PlanTypeError(f"from_iterable(factory) is a function, got {given(factory)}: {way}")


def from_stream(
    stream: Callable[[], AsyncIterable[T]] | AsyncIterable[T],
    *,
    name: str = "stream",
    encode: Callable[[T], Any] | None = None,
    decode: Callable[[Any], T] | None = None,
    max_ahead: int = MAX_AHEAD,
    max_ahead_bytes: int = MAX_AHEAD_BYTES,
    partitioned: bool = False,
    journal: str | PathLike[str] | None = None,
) -> Pipeline[T]:
    """Read a live feed, which can't be read again: a socket, a queue, an endless HTTP response.

    It is read once, by one task for all workers, which are handed its items in turn. What was read is kept until the
    consumer is past it, and a snapshot holds it, so a resume goes on exactly where it stood, and then with the feed.
    What was read behind the last snapshot is lost in a crash, unless it is kept on disk.

    Args:
      stream: an async iterable, or a function without arguments that returns one; an iterator can be read by one
        opening only. It is closed when the stream is left.
      name: its part of a state is kept under it.
      encode: a sync function from an item to a JSON value, bytes or a NumPy array, in which form it is kept; needed for
        other items than these.
      decode: the inverse.
      max_ahead: items that may wait for one worker while another one drops all that it is given.
      max_ahead_bytes: bytes, as kept, that may wait for all workers of a rank; each worker may have one item.
      partitioned: each rank has a feed of its own; without it, one rank only can read.
      journal: a directory in which what is read is kept, so that a crash loses nothing of it. Each item is written
        before the feed is asked for the next one. Saving a snapshot lets go of what it has passed.

    Raises:
      PlanTypeError: no async iterable, or an option of the wrong type.
      PlanError: an option out of range, or one of encode and decode without the other.
      While it runs: PlanTypeError for an item that can't be kept, JournalError for a disk that fails, WorkerStarved
      behind `max_ahead`.
    """
    return Pipeline(
        live_of(
            name,
            stream,
            encode=encode,
            decode=decode,
            max_ahead=max_ahead,
            max_ahead_bytes=max_ahead_bytes,
            partitioned=partitioned,
            journal=journal,
        )
    )


def mix(
    pipelines: Mapping[str, Pipeline[T]] | Sequence[Pipeline[T]],
    weights: Weights | Sequence[tuple[int, Weights]] | None = None,
    *,
    seed: int = 0,
    stop: Stop = "all",
    name: str = "mix",
) -> Pipeline[T]:
    """Draw each item from one of several pipelines, by weights.

    Item n of a worker comes from the component that is drawn for (seed, epoch, shard, n): the same in every run. A
    `.shard` behind it splits each component, whose stages run in every worker, too. A resume may have other weights,
    and components may come and go: each one's state is kept under its name. For passes, give a component a `.repeat`.

    Args:
      pipelines: by name, or a list, whose names are "0", "1", …; each without `.shard` and `.merge`.
      weights: by name; in a list, by number as text. Or a schedule: [(0, {...}), (100_000, {...})], from so many items
        of all workers on. None: equal ones. A component of weight 0 isn't read.
      seed: of the draws.
      stop: "all": the weights of a component that has ended go to the others, until all have; "first": end with the
        first that ends.
      name: its part of a state is kept under it.

    Raises:
      PlanTypeError: something else than pipelines or weights.
      PlanError: a component that is live, sharded, merged, or chooses an order; weights that name others, or can't be.
    """
    seed = check_seed("sl.mix(seed=)", seed)
    if stop not in get_args(Stop):
        raise PlanError(f"sl.mix(stop=) is one of {', '.join(map(repr, get_args(Stop)))}, got {given(stop)}")
    parts = _components("sl.mix", pipelines)
    draws = draws_of(weights, [part for part, _ in parts], seed)
    return Pipeline(Mix(name=name, components=parts, draws=draws, stop=stop))


def zip(*pipelines: Pipeline[Any], strict: bool = False, name: str = "zip") -> Pipeline[tuple[Any, ...]]:
    """Give tuples of one item of each pipeline. It ends with the shortest.

    Behind `.shard`, each worker zips its shard of each of them: possible where they are indexed, and each stage gives
    one item for one.

    Args:
      pipelines: each without `.shard` and `.merge`.
      strict: one that ends before the others is a `DataError`.
      name: its part of a state is kept under it.

    Raises:
      PlanTypeError: something else than pipelines.
      PlanError: a live one, one that is sharded or merged, or chooses an order.
    """
    return Pipeline(Zip(name=name, components=_components("sl.zip", pipelines), strict=strict))


def _components(option: str, pipelines: object) -> tuple[tuple[str, Plan], ...]:
    found = []
    for name, pipe in named(option, pipelines).items():
        if not isinstance(pipe, Pipeline):
            raise PlanTypeError(f"{option} takes pipelines, got {given(pipe)} for {name!r}")
        whole = pipe.sharding is None and pipe.merging is None
        found.append((name, component(option, name, pipe.source, pipe.stages, whole=whole)))
    return tuple(found)
