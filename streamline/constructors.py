"""Where a pipeline starts that reads no files: `from_items`, `from_iterable`, `from_stream`, `mix`, `zip`, replicas.

`@sl.source`: a pipeline that starts at a generator function of one's own.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from os import PathLike
from pathlib import PurePath
from typing import Any, Generic, TypeAlias, TypeVar, get_args, overload

from streamline.core.blame import stage_name
from streamline.core.options import check_flag, check_function, check_seed, type_and_repr
from streamline.core.user_function import DeclaredFunction, check_call, parameters_of
from streamline.errors import PlanError, PlanTypeError
from streamline.pipeline import Pipeline
from streamline.plan.compile import component
from streamline.plan.component import PlanComponent
from streamline.sources.composite import named
from streamline.sources.concat import Concat
from streamline.sources.custom import CustomSource
from streamline.sources.foreign_datasets import (
    HuggingFaceSource,
    TorchSource,
    is_huggingface_iterable,
    is_torch_iterable,
    library_of,
)
from streamline.sources.items import Indexable, Items
from streamline.sources.iterable import IterableSource
from streamline.sources.live import MAX_AHEAD, MAX_AHEAD_BYTES, live_of
from streamline.sources.mix import Mix, Stop
from streamline.sources.sampler import draws_of
from streamline.sources.table_rows import rows_of
from streamline.sources.zip import Zip
from streamline.training.replicator import Replicator
from streamline.training.stream_dataset import StreamDataset

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
    indexed = hasattr(items, "__len__") and hasattr(items, "__getitem__")
    if isinstance(items, type | Pipeline) or not indexed:
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


def from_pandas(frame: Any, *, name: str = "items") -> Pipeline[dict[Any, Any]]:
    """Read the rows of a pandas DataFrame, by position: dicts of Python values, as `to_dict("records")` gives them.

    As `from_items` reads them: shuffled by index, split, and resumed by it.

    Args:
      frame: read, never changed.
      name: its part of a state is kept under it.

    Raises:
      PlanTypeError: it is something else.
      PlanError: it has two columns of one name.
    """
    return _from_frame("from_pandas", "pandas", frame, name)


def from_polars(frame: Any, *, name: str = "items") -> Pipeline[dict[str, Any]]:
    """Read the rows of a polars DataFrame, by position: dicts of Python values, as `to_dicts()` gives them.

    As `from_items` reads them: shuffled by index, split, and resumed by it.

    Args:
      frame: read, never changed.
      name: its part of a state is kept under it.

    Raises:
      PlanTypeError: it is something else: a LazyFrame, which has not run.
    """
    return _from_frame("from_polars", "polars", frame, name)


def _from_frame(function: str, library: str, frame: object, name: str) -> Pipeline[Any]:
    if library_of(frame, "DataFrame") != library:
        raise PlanTypeError(f"{function} reads a {library} DataFrame, got {_type_text(frame)}: {_reader_of(frame)}")
    return from_items(frame, name=name)  # type: ignore[arg-type]


def _type_text(data: object) -> str:
    return type_and_repr(data) if type(data).__module__ == "builtins" else f"{_library(data)} {type(data).__name__}"


def _library(data: object) -> str:
    return type(data).__module__.partition(".")[0]


def _reader_of(data: object) -> str:
    """Return the line that reads what a constructor was given by mistake."""
    library, kind = _library(data), type(data).__name__
    if kind == "LazyFrame":
        return "it has no rows yet, sl.from_polars(frame.collect())"
    if kind == "DataFrame" and library in ("pandas", "polars"):
        return f"sl.from_{library}(frame)"
    if library == "pyarrow":
        return "sl.from_arrow(table)"
    return "sl.from_items(data) reads what has an index"


@overload
def from_torch(dataset: Indexable[T], *, name: str = "items") -> Pipeline[T]: ...


@overload
def from_torch(dataset: Iterable[T], *, name: str = "items") -> Pipeline[T]: ...


@overload
def from_torch(dataset: Any, *, name: str = "items") -> Pipeline[Any]: ...


def from_torch(dataset: Any, *, name: str = "items") -> Pipeline[Any]:
    """Read a dataset of torch.

    A map-style one is read by index, as by `from_items`: `.shuffle(seed=)` and `.shard(n)` take the place of samplers,
    `DistributedSampler` included.

    An `IterableDataset` splits itself, as it does in a `DataLoader`: under `.shard(n)` it is iterated n times, and
    `torch.utils.data.get_worker_info()` says of shard s that it is worker s of n, over all ranks. So it must not split
    itself by ranks, too. Of one that ignores this each item comes n times, and a DuplicateWarning says so:
    `sl.from_iterable(lambda: dataset)` keeps each worker's stride. A resume iterates up to its place, or loads its
    state, if it has `state_dict` and `load_state_dict`. Each pass iterates a copy, which is told the epoch by
    `set_epoch`, if it has that.

    Args:
      dataset: an instance of `torch.utils.data.Dataset`.
      name: its part of a state is kept under it.

    Raises:
      PlanTypeError: it is something else: a DataLoader, a sampler.
    """
    if is_torch_iterable(dataset):
        return Pipeline(TorchSource(name=name, dataset=dataset))
    return from_items(dataset, name=name)


def from_huggingface(dataset: Any, *, name: str = "items") -> Pipeline[Any]:
    """Read a `Dataset` or an `IterableDataset` of Hugging Face's datasets.

    A `Dataset` is read by index, as by `from_items`, in slices of its Arrow table; items are in its format. An
    `IterableDataset` is iterated: a resume loads its state, and iterates up to 32 items. `.shard(n)` splits it by its
    own shards, if n divides their number; else each worker reads everything, and keeps its part. Each pass iterates a
    copy, which is told the epoch.

    Args:
      dataset: one split; in a format other than "arrow" and "polars", if it is a `Dataset`.
      name: its part of a state is kept under it.

    Raises:
      PlanTypeError: it is something else: a DatasetDict, a name.
      PlanError: while it runs: it shuffles in a buffer, which its state leaves out. `.shuffle(window=)` doesn't.
    """
    if is_huggingface_iterable(dataset):
        return Pipeline(HuggingFaceSource(name=name, dataset=dataset))
    return from_items(dataset, name=name)


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
    raise PlanTypeError(f"from_iterable(factory) is a function, got {type_and_repr(factory)}: {way}")


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
    What was read after the last snapshot is lost in a crash, unless it is kept on disk.

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
        before the feed is asked for the next one. Saving a snapshot releases what it has passed.

    Raises:
      PlanTypeError: no async iterable, or an option of the wrong type.
      PlanError: an option out of range, or one of encode and decode without the other.
      While it runs: PlanTypeError for an item that can't be kept, JournalError for a disk that fails, WorkerStarved
      beyond `max_ahead`.
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
    `.shard` after it splits each component, whose stages run in every worker, too. A resume may have other weights,
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
        raise PlanError(f"sl.mix(stop=) is one of {', '.join(map(repr, get_args(Stop)))}, got {type_and_repr(stop)}")
    parts = _components("sl.mix", pipelines)
    draws = draws_of(weights, [part for part, _ in parts], seed)
    return Pipeline(Mix(name=name, components=parts, draws=draws, stop=stop))


def zip(*pipelines: Pipeline[Any], strict: bool = False, name: str = "zip") -> Pipeline[tuple[Any, ...]]:
    """Give tuples of one item of each pipeline. It ends with the shortest.

    After `.shard`, each worker zips its shard of each of them: possible where they are indexed, and each stage gives
    one item for one.

    Args:
      pipelines: each without `.shard` and `.merge`.
      strict: one that ends before the others is a `DataError`.
      name: its part of a state is kept under it.

    Raises:
      PlanTypeError: something else than pipelines.
      PlanError: a live one, one that is sharded or merged, or chooses an order.
    """
    check_flag("sl.zip(strict=)", strict)
    return Pipeline(Zip(name=name, components=_components("sl.zip", pipelines), strict=strict))


def concat(*pipelines: Pipeline[T], name: str = "concat") -> Pipeline[T]:
    """Give all items of the first pipeline, then those of the next.

    After `.shard`, each worker gives its shard of each of them in turn. Snapshots keep the states by number: a resume
    may have more pipelines after those that it had.

    Args:
      pipelines: each without `.shard` and `.merge`.
      name: its part of a state is kept under it.

    Raises:
      PlanTypeError: something else than pipelines.
      PlanError: a live one, one that is sharded or merged, or chooses an order.
    """
    return Pipeline(Concat(name=name, components=_components("sl.concat", pipelines)))


def _components(option: str, pipelines: object) -> tuple[tuple[str, PlanComponent], ...]:
    """Return what pipelines are as components. What nested ones are made of keeps its names, where they differ."""
    found = _named_components(option, pipelines, deep=False)
    names = [name for _, part in found for name in (*part.source.names, *part.names)]
    return found if len({*names}) == len(names) else _named_components(option, pipelines, deep=True)


def _named_components(option: str, pipelines: object, *, deep: bool) -> tuple[tuple[str, PlanComponent], ...]:
    found = []
    for name, pipe in named(option, pipelines).items():
        if not isinstance(pipe, Pipeline):
            raise PlanTypeError(f"{option} takes pipelines, got {type_and_repr(pipe)} for {name!r}")
        whole = pipe.sharding is None and pipe.merging is None
        found.append((name, component(option, name, pipe.source, pipe.stages, whole=whole, deep=deep)))
    return tuple(found)


class StreamReplicator(Replicator[T]):
    """Gives n readers of this process disjoint parts of one stream: item i to replica i mod n, each in order.

    The stream is read once, from the first item that is asked for: an async one in the event loop that asks for it, or,
    if that is plain code, in a thread with a loop of its own, where a sync one is always read. A loop that ends while
    it reads the stream ends it for all, with a `ClosedError`. What can be closed is closed after the end, a failure,
    and the replicator's close.

    A replica that isn't read holds up the others once `capacity` items wait for it; when one of them has starved of it
    for `stall_timeout`, all fail with `ReplicaStalled`, which names it. Likewise at once when one is lost: garbage
    collected unread, or left by an exception. One that is closed on purpose has its share dropped, and counted.

    Args:
      source: a pipeline, which is opened here; or an iterable, sync or async, such as a stream that is open.
      num_replicas: n, at least 1.
      capacity: items that may wait for each replica, at least 1; of a pipeline, up to 256 more are at hand. By default
        256; where a pipeline's items are batches, divided by their size, and at least 2.
      stall_timeout: seconds, more than 0; `math.inf`: for ever.
      options: of a pipeline, those of `open`.

    Raises:
      PlanTypeError: a source that can't be iterated, or an option of the wrong type.
      PlanError: an option out of range, or options of `open` for what isn't a pipeline.
    """

    def pipeline(
        self,
        number: int,
        *,
        name: str = "replica",
        encode: Callable[[T], Any] | None = None,
        decode: Callable[[Any], T] | None = None,
        journal: str | PathLike[str] | None = None,
    ) -> Pipeline[T]:
        """Return a pipeline that begins with replica `number`, read as a live source: see `from_stream`.

        Its snapshots hold what it has read and not yet delivered, so each of n pipelines resumes by itself. If the
        source of all is a pipeline, that is exact, over kills too: after its journal, each goes on in a new
        StreamReplicator with the item that it hadn't read, for which the stream is read from its start, or from where
        `load_state_dict` says. Of another source, what waited for a replica when the process ended is lost.

        Leaving such a pipeline doesn't close its replica: it may be opened again, one opening at a time.

        Args:
          name, encode, decode, journal: as in `from_stream`.

        Raises:
          PlanError: as in `replica`; or the source is a pipeline that chooses an order, so that a resume would have
            other items.
          PlanTypeError: an option of the wrong type.
        """
        live_of_feed = partial(
            live_of,
            name,
            encode=encode,
            decode=decode,
            max_ahead=MAX_AHEAD,
            max_ahead_bytes=MAX_AHEAD_BYTES,
            partitioned=False,
            journal=journal,
        )
        live_of_feed(list)  # what is wrong with the options is said before the replica is taken
        return Pipeline(live_of_feed(self._feed(number)))


SOURCE_KEYWORDS = ("state", "shard", "num_shards")
"""The keywords that a source's function is always given."""


class DeclaredSource(DeclaredFunction, Generic[T]):
    """A generator function that keeps its place in a dict: called with its parameters, it makes a pipeline.

    `fn` is the function as it was written, for calling it in a test: `rows.fn(state={}, shard=0, num_shards=1)`.
    """

    def __call__(self, *, name: str | None = None, **params: Any) -> Pipeline[T]:
        """Return a pipeline that reads what the function yields.

        Args:
          name: its part of a state is kept under it; by default the function's name.
          params: keyword arguments for the function. They count in the fingerprint as `.through`'s do.

        Raises:
          PlanTypeError: a parameter is missing, unknown, or one that streamline passes itself.
          PlanError: a name that a pipeline uses itself.
        """
        own = stage_name(self)
        names, _ = parameters_of(self.fn)
        check_call(f"{own}()", self.fn, 0, params, (*SOURCE_KEYWORDS, "epoch") if "epoch" in names else SOURCE_KEYWORDS)
        pipe: Pipeline[T] = Pipeline(
            CustomSource(name=own if name is None else name, fn=self, params=tuple(params.items()))
        )
        _ = pipe.plan  # is checked
        return pipe


@overload
def source(
    *, state: Callable[[], dict[str, Any]]
) -> Callable[[Callable[..., AsyncIterator[T] | Iterator[T]]], DeclaredSource[T]]: ...


@overload
def source(fn: Callable[..., Any] | None = None, /, *, state: None = None) -> Any: ...


def source(fn: Callable[..., Any] | None = None, /, *, state: Callable[[], dict[str, Any]] | None = None) -> Any:
    """Declare that a generator function is a source that keeps its place in a dict, so that it resumes exactly.

        @sl.source(state=dict)
        async def rows(*, state, shard, num_shards, url):
            async for number, row in table(url, start=state.get("next", shard), step=num_shards):
                state["next"] = number + num_shards  # first: the dict at a yield resumes after the item yielded
                yield row

        pipe = rows(url="...").shard(4).map(decode)

    The function, async or sync, is called anew per worker, pass and resume, with

    - `state`: at first what the decorator's `state` makes; at a resume, what it was at the yield of the last item that
      the consumer got. Change it in place, then yield; JSON-able at every yield.
    - `shard`, `num_shards`: it splits itself: together, all shards must be the whole. Without `.shard`, 0 of 1.
    - `epoch`, if it has a parameter of that name: a number, another one in each pass: the loader's epoch; within a
      `.repeat`, that epoch * 2**32 + the pass.
    - what the pipeline was made with.

    It is run in a task of its own, some way ahead of its reader. A sync one holds the event loop while it waits.

    Args:
      state: makes the first state, a dict (`state=dict`).

    Raises:
      PlanTypeError: `state` is missing, or what is decorated is no generator function that takes the keywords above.
    """
    if fn is not None or state is None:
        raise PlanTypeError(
            "@source takes state=dict (or another function that makes a dict): @sl.source(state=dict). A generator "
            "function that declares no state is read with from_iterable(rows), and iterated from its start at a resume"
        )
    check_function("@source(state=)", state)

    def declare(fn: Callable[..., AsyncIterator[T] | Iterator[T]]) -> DeclaredSource[T]:
        _check_source(fn)
        return DeclaredSource(fn, state)

    return declare


def _check_source(fn: Callable[..., Any]) -> None:
    """Insist on a function that can be a source."""
    name = stage_name(fn)
    if not (inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn)):
        raise PlanTypeError(
            f"@source declares a generator function (async def or def, with a yield in it), and {name} is none: what "
            "returns an iterable is read with from_iterable"
        )
    names, others = parameters_of(fn)
    if missing := [keyword for keyword in SOURCE_KEYWORDS if keyword not in names and not others]:
        raise PlanTypeError(
            f"@source: {name} has no keyword {', '.join(missing)}: async def {name}(*, state, shard, num_shards, ...)"
        )
    if "name" in names:
        raise PlanTypeError(f"@source: name= names the source where {name} is called: call the parameter otherwise")
