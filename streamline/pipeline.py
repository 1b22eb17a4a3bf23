"""The plan as users write it: immutable, cheap, typed; each method returns a new one."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from html import escape
from itertools import islice
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Never, NoReturn, TypeVar, Unpack, cast, get_args, overload

from streamline.backends.base import Backend
from streamline.core.blame import stage_name
from streamline.core.limits import Limit, check_limit
from streamline.core.options import (
    OPTIONS_ELSEWHERE,
    check_flag,
    check_function,
    check_int,
    check_known,
    check_seconds,
    check_seed,
    check_takes_item,
    is_async,
    no_attribute,
    type_and_repr,
)
from streamline.core.tracebacks import TrimmedTraceback
from streamline.core.user_function import check_call
from streamline.errors import PlanError, PlanTypeError, printable
from streamline.merge.base import Merge
from streamline.merge.best_effort import merge_of
from streamline.plan.compile import compile_plan
from streamline.plan.describe import describe, max_in_flight
from streamline.plan.draw import Drawing
from streamline.plan.plan import MOST_SHARDS, Plan, Shard
from streamline.plan.rules import RESERVED
from streamline.runtime.debug import DebugStream
from streamline.runtime.open import Openable, Opened, StepReplay, prepare
from streamline.runtime.run import DebugKeywords, OpenKeywords, OpenOptions, RunKeywords, lists_keywords
from streamline.runtime.sync_stream import SyncStream
from streamline.snapshot.compatibility import NewFiles
from streamline.snapshot.explain import Explanation, explain
from streamline.snapshot.snapshot import Snapshot
from streamline.sources.base import Mode, Source
from streamline.transfer.devices import written
from streamline.transfer.stage import Transfer
from streamline.transforms.base import Stage
from streamline.transforms.batch import Batch, collate_of
from streamline.transforms.batched_map import GATHER, SCATTER, Gather, OfList, Scatter
from streamline.transforms.bucket import bucket_of
from streamline.transforms.cache import Cache
from streamline.transforms.collate import unstack
from streamline.transforms.custom import Declared, Through, check_through
from streamline.transforms.cut import cost_batch_of, group_by_of
from streamline.transforms.enumerate import Enumerate
from streamline.transforms.filter import Filter
from streamline.transforms.flat_map import FlatMap, Unbatch
from streamline.transforms.limit import Skip, Take
from streamline.transforms.map import NOT_AFTER_A_CHOICE, Numbering, Seeded, map_of
from streamline.transforms.pack import Block, pack_of
from streamline.transforms.prefetch import Prefetch
from streamline.transforms.regenerate import Regenerate
from streamline.transforms.repeat import Repeat
from streamline.transforms.retry import Retry, RetryOptions
from streamline.transforms.sample import sample_of
from streamline.transforms.scan import Scan, check_scan
from streamline.transforms.shuffle import IndexShuffle, Shuffle, ShuffleFiles
from streamline.transforms.window import Window

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from streamline.runtime.check import Report
    from streamline.runtime.writing import FormatName, WriteKeywords, Written
    from streamline.training.loader import Loader

T = TypeVar("T")
U = TypeVar("U")
S = TypeVar("S")
K = TypeVar("K")
MAP_OPTIONS = ("batched", "concurrency", "ordered", "executor", "seed", "seed_globals", "limit", "name")
RETRY = tuple(RetryOptions.__annotations__)
DEADLINE_S = 10.0
"""Of `Pipeline.check`, for reading and again for the stages: some servers are slow to start, and a person waits."""

INSIDE = frozenset({"merged_at", "merging", "settled", "sharded_at", "sharding"})
"""Attributes that users have no use for, and that completion needn't show."""

LOADER_OPTIONS = ("resume", "epoch", "steps_per_epoch", "fixed_epoch", "persistent")


@dataclass(frozen=True, repr=False)
class Pipeline(Openable[T]):
    """A plan: where items come from and what happens to them. Immutable, comparable, printable; nothing runs.

    `for x in pipe` and `async for x in pipe` run it with defaults, `open` with others.

    A stage's `name=` is its key in saved states; by default its function's name, or its kind, with a number if there
    are several. Each method raises a `PlanError` if the plan makes no sense with it, and a `PlanTypeError`, which is
    one too, for an option of the wrong type.

    Attributes:
      source: where items come from.
      stages: in order. Without `.shard` they belong to the only worker, until `.merge`.
      sharding: None until `.shard`; then `sharded_at` stages are before it.
      merging: None until `.merge`; then `merged_at` stages are before it.
    """

    source: Source[Any]
    stages: tuple[Stage[Any, Any], ...] = ()
    sharding: Shard | None = None
    sharded_at: int = 0
    merging: Merge | None = None
    merged_at: int = 0

    # Shards, and which items come in which order ----------------------------------------------------------------------

    def shard(
        self,
        num_shards: int,
        mode: Mode | None = None,
        *,
        drop_remainder: bool = False,
        interleave: int = 1,
        **unknown: Never,
    ) -> Pipeline[T]:
        """Split the source into `num_shards` shards in the whole job, each read by one worker.

        Args:
          num_shards: 1 to a million; may exceed the number of items or files.
          mode: "interleaved" (item i to shard i mod n), "contiguous" (one block each), "file" (file f to shard f mod
            n) or "replicated" (every worker reads all and keeps its stride); None: the source's default. A custom
            source splits itself ("custom"), a live one is handed out in turn ("shared").
          drop_remainder: leave out the items that would make some shards longer than others; not of sources that
            split themselves, nor of live ones.
          interleave: files that each worker reads in turn, item by item; more than one splits by "file".

        Raises:
          PlanError: a second shard, or one after the merge; a mode that the source doesn't have; a stage before it
            that acts on items.
        """
        check_known(".shard", unknown, ("mode", "drop_remainder", "interleave"))
        num_shards = check_int(".shard(num_shards)", num_shards, 1, MOST_SHARDS)
        if mode is not None and not isinstance(mode, str):
            raise PlanTypeError(
                f".shard(mode=) is one of {get_args(Mode)}, or None, got {type_and_repr(mode)}: "
                f"{OPTIONS_ELSEWHERE['index']}"
            )
        check_flag(".shard(drop_remainder=)", drop_remainder)
        interleave = check_int(".shard(interleave=)", interleave, 1)
        by_file: Mode | None = "file" if mode is None and interleave > 1 else mode
        shard = Shard(num_shards=num_shards, mode=by_file, drop_remainder=drop_remainder, interleave=interleave)
        if self.sharding is not None or self.merging is not None:
            raise PlanError(".shard splits the source, once: it can't stand after another .shard or a .merge")
        return replace(self, sharding=shard, sharded_at=len(self.stages))._checked()

    def shuffle(
        self, *given: Never, window: int | None = None, seed: int = 0, name: str | None = None, **unknown: Never
    ) -> Pipeline[T]:
        """Permute the items: each `window` of them, or without a window the whole index, of an indexable source.

        Args:
          window: items that are permuted among themselves; twice as many are held in memory, and a resume reads up to
            twice as many again. After `.shard`, in each worker; None: only before it.
          seed: with it and the epoch (and shard and window), the order is always the same.
        """
        check_known(".shuffle", unknown, ("window", "seed", "name"))
        if given and isinstance(given[0], bool):
            raise PlanTypeError(
                ".shuffle() shuffles as it is, the whole index; .shuffle(window=10_000) where there is none; without a "
                "shuffle, leave it out"
            )
        if given:
            raise PlanTypeError(
                f".shuffle takes no number by itself: .shuffle(window={given[0]!r}) permutes each {given[0]!r} items "
                f"among themselves, .shuffle(seed={given[0]!r}) the whole index by that seed"
            )
        seed = check_seed(".shuffle(seed=)", seed)
        name = self._name(name, "shuffle")
        if window is None:
            return self._with(IndexShuffle(name=name, seed=seed))
        window = check_int(".shuffle(window=)", window, 1)
        return self._with(Shuffle(name=name, window=window, seed=seed))

    def sample(
        self,
        count: int | None = None,
        *,
        weights: Sequence[float] | NDArray[Any] | None = None,
        replacement: bool = True,
        seed: int = 0,
        name: str | None = None,
    ) -> Pipeline[T]:
        """Draw items at random from an indexable source, before `.shard`; in each epoch others.

        Args:
          count: draws; None: as many as there are items.
          weights: of each item, finite and not below 0; they needn't sum to 1. None: equal ones.
          replacement: an item may be drawn again; False: each draw is of those that are left.
          seed: with it and the epoch, the draws are always the same.

        Raises:
          PlanError: another number of weights than of items; more draws without replacement than there are items of a
            weight above 0.
        """
        return self._with(sample_of(count, weights, replacement, seed, name=self._name(name, "sample")))

    def shuffle_files(self, *, seed: int = 0, name: str | None = None) -> Pipeline[T]:
        """Permute the list of files, by seed and epoch, before it is sharded."""
        seed = check_seed(".shuffle_files(seed=)", seed)
        return self._with(ShuffleFiles(name=self._name(name, "shuffle_files"), seed=seed))

    def repeat(self, times: int | None = None, *, name: str | None = None) -> Pipeline[T]:
        """Repeat what is upstream `times` times; None: endlessly. Shuffles upstream differ in each pass."""
        if times is not None:
            times = check_int(".repeat(times)", times, 0)
        return self._with(Repeat(name=self._name(name, "repeat"), times=times))

    def take(self, count: int, *, name: str | None = None) -> Pipeline[T]:
        """Keep the first `count` items; before a merge, of each worker."""
        count = check_int(".take(count)", count, 0)
        return self._with(Take(name=self._name(name, "take"), count=count))

    def skip(self, count: int, *, name: str | None = None) -> Pipeline[T]:
        """Drop the first `count` items; before a merge, of each worker."""
        count = check_int(".skip(count)", count, 0)
        return self._with(Skip(name=self._name(name, "skip"), count=count))

    # Items ------------------------------------------------------------------------------------------------------------

    @overload
    def map(
        self, fn: Callable[[list[T]], Awaitable[list[U]]], *, batched: int, concurrency: int | None = None,
        ordered: bool = True, limit: Limit | None = None, name: str | None = None,
        **retry: Unpack[RetryOptions],
    ) -> Pipeline[U]: ...  # fmt: skip
    @overload
    def map(
        self, fn: Callable[[list[T]], list[U]], *, batched: int, concurrency: int | None = None, ordered: bool = True,
        executor: Literal["thread"] | None = None, limit: Limit | None = None, name: str | None = None,
        **retry: Unpack[RetryOptions],
    ) -> Pipeline[U]: ...  # fmt: skip
    @overload
    def map(
        self, fn: Callable[..., Any], *, batched: int, concurrency: int | None = None, ordered: bool = True,
        executor: Literal["thread"] | None = None, seed: int | None = None, seed_globals: bool = False,
        limit: Limit | None = None, name: str | None = None,
        **retry: Unpack[RetryOptions],
    ) -> Pipeline[Any]: ...  # fmt: skip
    @overload
    def map(
        self, fn: Callable[[T], Awaitable[U]], *, concurrency: int | None = None, ordered: bool = True,
        limit: Limit | None = None, name: str | None = None,
        **retry: Unpack[RetryOptions],
    ) -> Pipeline[U]: ...  # fmt: skip
    @overload
    def map(
        self, fn: Callable[[T], U], *, concurrency: int | None = None, ordered: bool = True,
        executor: Literal["thread"] | None = None, limit: Limit | None = None, name: str | None = None,
        **retry: Unpack[RetryOptions],
    ) -> Pipeline[U]: ...  # fmt: skip
    @overload
    def map(
        self, fn: Callable[..., Awaitable[U]], *, concurrency: int | None = None, ordered: bool = True,
        seed: int, seed_globals: bool = False, limit: Limit | None = None, name: str | None = None,
        **retry: Unpack[RetryOptions],
    ) -> Pipeline[U]: ...  # fmt: skip
    @overload
    def map(
        self, fn: Callable[..., U], *, concurrency: int | None = None, ordered: bool = True,
        executor: Literal["thread"] | None = None, seed: int, seed_globals: bool = False,
        limit: Limit | None = None, name: str | None = None, **retry: Unpack[RetryOptions],
    ) -> Pipeline[U]: ...  # fmt: skip
    def map(
        self,
        fn: Callable[..., Any],
        *,
        batched: int | None = None,
        concurrency: int | None = None,
        ordered: bool = True,
        executor: Literal["thread"] | None = None,
        seed: int | None = None,
        seed_globals: bool = False,
        limit: Limit | None = None,
        name: str | None = None,
        **retry: Unpack[RetryOptions],
    ) -> Pipeline[Any]:
        """Replace each item by `fn` of it. None is an item like any other.

        Args:
          fn: sync: called inline, in the task that pulls; async: called `concurrency` times at once. With concurrency,
            a lambda around an async function is one, too.
          batched: `fn` is given a list of so many items, fewer at the end, and gives a list of as many results, an
            array with as many rows, or a dict of such columns; each row is an item again. None: it is given items.
          concurrency: calls, or threads, at once; for async functions and `executor="thread"`; 1 by default. A stream
            has at most 64 threads, for all workers together.
          ordered: False: results leave as they are completed; with `concurrency=1`, calls and results keep the order of
            the inputs. Resuming is exact all the same.
          executor: "thread": a sync function that releases the GIL or waits is called in threads, on lists of items.
          seed: `fn` is also given `rng=`, a NumPy Generator that depends on (seed, name, epoch, shard, ordinal) alone;
            or `generator=`, one of torch's, if it takes that. Not after a stage that chooses an order.
          seed_globals: for libraries that take none: each call finds `random`, NumPy and torch seeded.
          limit: a `Limit` of calls at once, or in a second, that stages may share; of all shards and hosts together.
          name: by default the function's.
          retry: when a failed call is made again: `retries`, `timeout_s`, `backoff`, `retry_on`, see `RetryOptions`.
        """
        check_known(".map", set(retry) - set(RETRY), (*MAP_OPTIONS, *RETRY))
        check_function(".map(fn)", fn)
        check_flag(".map(ordered=)", ordered)
        check_flag(".map(seed_globals=)", seed_globals)
        pipe, name = self, self._name(name, stage_name(fn))
        size = None if batched is None else check_int(".map(batched=)", batched, 1)
        call = fn if size is None else OfList(fn)
        if size is not None:
            pipe = pipe._with(Gather(name=name + GATHER, size=size))
        if seed is not None:
            seed = check_seed(".map(seed=)", seed)
            if self.plan.chooser is not None:
                raise PlanError(f".map(seed=) numbers its inputs, so it {NOT_AFTER_A_CHOICE}")
            pipe = pipe._with(Numbering(name=f"{name}.rng", seed=seed, stage=name, seed_globals=seed_globals))
            call = seeded = Seeded(call, seed_globals)
            check_takes_item(".map(fn, seed=)", fn, *seeded.takes)
        elif seed_globals:
            raise PlanError(".map(seed_globals=True) needs a seed=, from which each item's numbers come")
        else:
            check_takes_item(".map(fn)", fn)
        again = Retry.of(**retry)
        check_limit(".map(limit=)", limit)
        made = map_of(name, call, concurrency=concurrency, ordered=ordered, executor=executor, retry=again, limit=limit)
        pipe = pipe._with(made)
        return pipe if size is None else pipe._with(Scatter(name=name + SCATTER, size=size))

    def filter(self, fn: Callable[[T], object], *, name: str | None = None) -> Pipeline[T]:
        """Keep the items for which the sync function `fn` is true."""
        check_function(".filter(fn)", fn)
        check_takes_item(".filter(fn)", fn)
        if is_async(fn):
            raise PlanError(".filter takes a sync function: an async one would always be true. Look it up in a .map")
        if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise PlanError(".filter takes a function that returns true or false, and a generator is always true")
        return self._with(Filter(name=self._name(name, stage_name(fn)), fn=fn))

    def flat_map(self, fn: Callable[[T], Iterable[U]], *, name: str | None = None) -> Pipeline[U]:
        """Replace each item by the items of the iterable that the sync function `fn` makes of it, in order."""
        check_function(".flat_map(fn)", fn)
        check_takes_item(".flat_map(fn)", fn)
        if is_async(fn) or inspect.isasyncgenfunction(fn):
            raise PlanError(".flat_map takes a sync function; for an async one, write a stage for .through")
        return self._with(FlatMap(name=self._name(name, stage_name(fn)), fn=fn))

    def enumerate(self, start: int = 0, *, name: str | None = None) -> Pipeline[tuple[int, T]]:
        """Pair each item with its number, (number, item), from `start` on; before a merge, in each worker."""
        start = check_int(".enumerate(start)", start, None)
        return self._with(Enumerate(name=self._name(name, "enumerate"), start=start))

    def scan(self, fn: Callable[[S, T], tuple[S, U]], init: S, *, name: str | None = None) -> Pipeline[U]:
        """Replace each item by the output of `fn(carry, item) -> (carry, output)`; before a merge, in each worker.

        Args:
          fn: a sync function, given `init` with the first item, then the carry that it returned for the item before.
          init: a JSON value, as each carry is: snapshots have it.
        """
        check_scan(fn, init)
        return self._with(Scan(name=self._name(name, stage_name(fn)), fn=fn, init=init))

    def through(
        self, fn: Callable[..., AsyncIterator[U]] | Stage[T, U], *, name: str | None = None, **params: Any
    ) -> Pipeline[U]:
        """Pass the items through an async generator function of one async iterator, or through a `Stage` of your own.

        Args:
          fn: called as `fn(items, **params)`; declared with `@sl.stage`, it is resumed from its last safe point.
            Undeclared, a resume runs it from the start and drops what it had yielded. Or a stage: an instance of a
            subclass of `Stage`, with its own name unless one is given.
          params: keyword arguments for `fn`.

        Warns: UserWarning, if it is undeclared.
        """
        if isinstance(fn, Stage):
            if params:
                raise PlanTypeError(f".through({fn.kind}) takes no {next(iter(params))}=: a stage has its options")
            return self._with(replace(fn, name=self._name(name, fn.name)))
        check_through(fn)
        if isinstance(fn, Declared):
            check_call(f".through({stage_name(fn)})", fn.fn, 1, params, ("state",) if fn.state is not None else ())
        pipe = self._with(Through(name=self._name(name, stage_name(fn)), fn=fn, params=tuple(params.items())))
        if not isinstance(fn, Declared):
            warnings.warn(
                f"a resume will run {printable(stage_name(fn))} from its start: declare what it remembers with "
                "@sl.stage(state=dict), or @sl.stage(stateless=True)",
                stacklevel=2,
            )
        return pipe

    # Batches ----------------------------------------------------------------------------------------------------------

    @overload
    def batch(
        self, size: int | None = None, *, max_cost: float | None = None, cost: Callable[[T], float] | None = None,
        drop_remainder: bool = False, collate: Literal["stack", "torch"] = "stack", max_wait_s: float | None = None,
        name: str | None = None,
    ) -> Pipeline[Any]: ...  # fmt: skip
    @overload
    def batch(
        self, size: int | None = None, *, max_cost: float | None = None, cost: Callable[[T], float] | None = None,
        drop_remainder: bool = False, collate: None, max_wait_s: float | None = None, name: str | None = None,
    ) -> Pipeline[list[T]]: ...  # fmt: skip
    @overload
    def batch(
        self, size: int | None = None, *, max_cost: float | None = None, cost: Callable[[T], float] | None = None,
        drop_remainder: bool = False, collate: Callable[[list[T]], U], max_wait_s: float | None = None,
        name: str | None = None,
    ) -> Pipeline[U]: ...  # fmt: skip
    def batch(
        self,
        size: int | None = None,
        *,
        max_cost: float | None = None,
        cost: Callable[[T], float] | None = None,
        drop_remainder: bool = False,
        collate: Literal["stack", "torch"] | Callable[[list[T]], Any] | None = "stack",
        max_wait_s: float | None = None,
        name: str | None = None,
        **unknown: Any,
    ) -> Pipeline[Any]:
        """Collate each `size` items into one; or as many as cost at most `max_cost`.

        Args:
          size: items in a batch; the last one has the rest. With `max_cost`, the most items; None: 4,096.
          max_cost: what the items of a batch may cost together: `.batch(max_cost=4096, cost=len)`. An item that costs
            more by itself is a `DataError`.
          cost: a sync function of an item: a number, at least 0.
          drop_remainder: leave out the last batch if it isn't full.
          collate: "stack": see `streamline.transforms.collate.stack`; "torch": likewise, of tensors throughout; None: a
            list; a sync function of the list.
          max_wait_s: a batch that isn't full leaves this many seconds after its first item came; None: it waits until
            it is full. Which items go together depends on time then; resuming is exact all the same.
        """
        check_known(".batch", unknown, ("max_cost", "cost", "drop_remainder", "collate", "max_wait_s", "name"))
        by_cost = max_cost is not None or cost is not None
        if size is not None or not by_cost:
            size = check_int(".batch(size)", size, 1)
        if max_wait_s is not None:
            check_seconds(".batch(max_wait_s=)", max_wait_s)
        check_flag(".batch(drop_remainder=)", drop_remainder)
        fn, name = collate_of(".batch(collate=)", collate), self._name(name, "batch")
        if by_cost:
            return self._with(cost_batch_of(size, max_cost, cost, drop_remainder, fn, max_wait_s, name=name))
        assert size is not None
        return self._with(Batch(name=name, size=size, drop_remainder=drop_remainder, collate=fn, max_wait_s=max_wait_s))

    def group_by(
        self, key: Callable[[T], K], *, max_items: int = 1000, name: str | None = None
    ) -> Pipeline[tuple[K, list[T]]]:
        """Put consecutive items of equal keys together: (key, items). It doesn't sort.

        Args:
          key: a sync function of an item.
          max_items: more in a row of one key are a `DataError`: a group is held in memory.
        """
        return self._with(group_by_of(key, max_items, name=self._name(name, "group_by")))

    def window(self, size: int, stride: int = 1, *, name: str | None = None) -> Pipeline[list[T]]:
        """Give lists of `size` consecutive items, each beginning `stride` items after the one before.

        Before a merge, in each worker. What is left at the end, and fills no window, is left out.
        """
        size, stride = check_int(".window(size)", size, 1), check_int(".window(stride)", stride, 1)
        return self._with(Window(name=self._name(name, "window"), size=size, stride=stride))

    @overload
    def bucket_by_length(
        self, boundaries: Sequence[int], batch_size: int | Sequence[int], *, length: Callable[[T], int] | None = None,
        collate: Literal["stack", "torch"] = "stack", drop_remainder: bool = False, name: str | None = None,
    ) -> Pipeline[Any]: ...  # fmt: skip
    @overload
    def bucket_by_length(
        self, boundaries: Sequence[int], batch_size: int | Sequence[int], *, length: Callable[[T], int] | None = None,
        collate: None, drop_remainder: bool = False, name: str | None = None,
    ) -> Pipeline[list[T]]: ...  # fmt: skip
    @overload
    def bucket_by_length(
        self, boundaries: Sequence[int], batch_size: int | Sequence[int], *, length: Callable[[T], int] | None = None,
        collate: Callable[[list[T]], U], drop_remainder: bool = False, name: str | None = None,
    ) -> Pipeline[U]: ...  # fmt: skip
    def bucket_by_length(
        self, boundaries: Sequence[int], batch_size: int | Sequence[int], *, length: Callable[[T], int] | None = None,
        collate: Any = "stack", drop_remainder: bool = False, name: str | None = None,
    ) -> Pipeline[Any]:  # fmt: skip
        """Collate items of about one length into batches: each bucket of lengths fills batches of its own.

        Args:
          boundaries: the greatest length of each bucket, increasing; one more bucket takes what is longer.
          batch_size: items in a batch; or one size for each bucket, the last one's too.
          length: a sync function that says how long an item is; None: `len`, of an array its first axis.
          collate: as in `.batch`. "stack" wants items of one shape: pad them, or give a function that does.
          drop_remainder: leave out the batches that aren't full at the end; else they come bucket by bucket.
        """
        name = self._name(name, "bucket_by_length")
        return self._with(bucket_of(boundaries, batch_size, length, collate, drop_remainder, name=name))

    def unbatch(self, *, name: str | None = None) -> Pipeline[Any]:
        """Replace each batch by its items: of a list, the first axis of arrays, in dicts, tuples and dataclasses."""
        return self._with(Unbatch(name=self._name(name, "unbatch"), fn=unstack))

    def pack(
        self,
        length: int,
        key: str | None = None,
        *,
        eos: int | None = None,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Pipeline[Block]:
        """Put documents, sequences of tokens, one after the other, and cut them into blocks of `length` tokens.

        A block is a dict of arrays: "tokens"; "segment_ids", 1, 2, ... for each document in it, 0 for padding; and
        "positions" in the segment, which begin at 0 in each document and in each block.

        Args:
          length: tokens in a block; the last one is padded with 0.
          key: of the field with the tokens, where items are dicts; what else is in them is left out, with a warning.
          eos: a token that is put after each document that has any.
          drop_remainder: leave out the last block if it isn't full.
        """
        return self._with(pack_of(length, key, eos, drop_remainder, name=self._name(name, "pack")))

    # Items that are kept ----------------------------------------------------------------------------------------------

    def prefetch(self, items: int, *, bytes: int | None = None) -> Pipeline[T]:
        """Let what is upstream run ahead by up to `items` items, in a task of its own.

        Args:
          bytes: of these items, as `streamline.core.tree.nbytes` counts; one item is always admitted. None: no bound.
        """
        items = check_int(".prefetch(items)", items, 1)
        if bytes is not None:
            bytes = check_int(".prefetch(bytes=)", bytes, 1)
        return self._with(Prefetch(name=self._name(None, "prefetch"), items=items, bytes=bytes))

    def cache(
        self, *, path: str | PathLike[str] | None = None, max_bytes: int | None = None, name: str | None = None
    ) -> Pipeline[T]:
        """Keep one pass of what is upstream, and serve it in later passes: `.cache().repeat(3)`.

        All passes have the same items in the same order: shuffle after it. In memory it lasts as long as the stream: a
        stream that is opened later (an epoch of a loader, too) draws anew, and a resume draws again what was served of
        its pass. On disk it stays: later streams, and resumes, read its files, until `loader.reset_cache()`. See
        docs/regenerating.md.

        Args:
          path: a folder to keep it in, which other pipelines may share; it is made. Files have a key of what is
            upstream, its functions' code and its data's listing: only the same is served. None: in memory.
          max_bytes: in each worker, of the items, as `streamline.core.tree.nbytes` counts them, or of the files: a pass
            that is larger fails with `CacheFull`, after all items that there is room for. None: no bound.
        """
        if max_bytes is not None:
            max_bytes = check_int(".cache(max_bytes=)", max_bytes, 1)
        folder = _folder(".cache(path=)", path)
        return self._with(Cache(name=self._name(name, "cache"), max_bytes=max_bytes, path=folder))

    def regenerate(
        self,
        size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        reuse: int = 1,
        block: int | None = None,
        overlap: bool = False,
        spill: str | PathLike[str] | None = None,
        name: str | None = None,
    ) -> Pipeline[T]:
        """Draw `size` items, serve them shuffled, drop them, and draw the next.

        Put an endless `.repeat()` before it to go through a shard for ever. At the end of what is upstream, the last
        cycle has the rest.

        Args:
          size: items of a cycle; with `block`, rows. After `.shard`, in each worker.
          shuffle: whether they are; each serving by (seed, epoch, shard, cycle, serving) alone.
          reuse: how often each item is served before its cycle is dropped; each serving has an order of its own.
          block: the items are blocks, NumPy arrays or containers of them, whose first axis are rows; they are kept as
            arrays, and blocks of `block` rows come out. `size` is a multiple of it.
          overlap: draw the next cycle while one is served: two are in memory then.
          spill: a folder for cycles of items that can't be drawn again; a resume reads them there. Files are removed
            when snapshots are saved, except those that the last two need.
        """
        size = check_int(".regenerate(size)", size, 1)
        seed = check_seed(".regenerate(seed=)", seed)
        reuse = check_int(".regenerate(reuse=)", reuse, 1)
        check_flag(".regenerate(shuffle=)", shuffle)
        check_flag(".regenerate(overlap=)", overlap)
        if block is not None:
            block = check_int(".regenerate(block=)", block, 1)
            if size % block:
                raise PlanError(
                    f".regenerate({size}, block={block}) would end each cycle with a block of {size % block} rows: "
                    "make size a multiple of block"
                )
        stage = Regenerate[T](
            name=self._name(name, "regenerate"), size=size, shuffle=shuffle, seed=seed, reuse=reuse, block=block,
            overlap=overlap, spill=_folder(".regenerate(spill=)", spill),
        )  # fmt: skip
        return self._with(stage)

    # One stream of the workers', and its device -----------------------------------------------------------------------

    def merge(
        self,
        kind: Literal["strict", "best_effort"] = "strict",
        *,
        max_skips_per_round: int | None = None,
        max_lead: int | None = None,
    ) -> Pipeline[T]:
        """Make one stream of the workers', on which the stages after it act.

        Args:
          kind: "strict": in turn, always the same order. "best_effort": any worker that has an item, within bounds; the
            order depends on timing, resuming is exact all the same.
          max_skips_per_round: best-effort: workers without an item that are passed over before waiting; 0 is strict
            order; 2 by default.
          max_lead: best-effort: items that a worker may be ahead of the slowest one; 8 by default.
        """
        if self.merging is not None:
            raise PlanError("there is one .merge: after it there is only one stream")
        merge = merge_of(kind, max_skips_per_round, max_lead)
        return replace(self, merging=merge, merged_at=len(self.stages))

    def transfer(self, device: Any, *, depth: int = 2, name: str | None = None) -> Pipeline[Any]:
        """Bring the batches to a device while the loop computes. The last stage; puts a strict merge before if none is.

        NumPy arrays become arrays or tensors there, in dicts, lists, tuples and dataclasses too; other parts stay.

        Args:
          device: "host" (nothing changes), "cpu", "cuda", "cuda:1", "mps", a torch.device, "jax", a device or sharding
            of JAX, or a `Target` of your own. It is looked for when the pipeline is opened; "cuda" is the current one
            of the thread that does.
          depth: batches that are on their way, or there already, while the loop works on the one before.
        """
        depth = check_int(".transfer(depth=)", depth, 1)
        pipe = self if self.merging is not None else self.merge()
        return pipe._with(Transfer(name=self._name(name, "transfer"), device=written(device), depth=depth))

    # Running it -------------------------------------------------------------------------------------------------------

    def __iter__(self) -> SyncStream[T]:
        return self.open().sync_stream()

    def __aiter__(self) -> AsyncIterator[T]:
        return self.open().stream()

    @lists_keywords(OpenKeywords)
    def open(self, **options: Unpack[OpenKeywords]) -> Opened[T]:
        """Return what `async with` or `with` runs: an async or a plain iterator with snapshots.

        Looks at files; where servers or stores have to be asked in a running event loop, `async with` or `with` does.

        Args:
          backend: where the workers run; by default as tasks of the stream's event loop, `sl.Inline()`.
          resume: continue after this snapshot; from a job's snapshot, each rank takes its part. None: the beginning.
          accept: what may have changed since the snapshot: ["batch.size"]; a resume that is refused says what to write.
          new_files: what a resume does with files that were added since: "refuse" to resume; or read them in the
            "next_epoch".
          rank: which data-parallel rank this is; by default it is found out.
          world_size: of so many; given with `rank`, or found out with it.
          mesh: in their place, the dimension of torch's `DeviceMesh` dividing the data: mesh["dp"]. See docs/ranks.md.
          epoch: seen by shuffles, random generators and custom sources; by default the snapshot's, or 0.
          ends: how ranks with unequal shards end together: "drop" what the others have no more of (the default),
            "pad" with items given again, or "allow" each its own end; or an `sl.Ends`. One rank alone gives all. See
            docs/ranks.md.
          on_error: of a failing item or a malformed record: "raise" (the default); "skip" it, counted; or a function of
            a `Failure`.
          max_errors: skipped items beyond which it fails with `TooManyErrors`: a count, a float of all (0.01 is the
            default), or None (any).
          dead_letters: a JSONL file with a line for each skipped item; each rank has its own.
          progress: show on stderr how it gets on: live lines on a terminal or in a notebook, else INFO each 30 s.
          stall_s: seconds of waiting, by default 30, at which the log says what for, and at twice, four times, … as
            many; None: never.
          memory: bytes that sources may hold read ahead in each process, by default 256 MiB; one request is always
            admitted.
          metrics: where its metrics are read: "127.0.0.1:9464" by Prometheus, or by "opentelemetry". docs/metrics.md
          page: True: a live page shows it in a browser; "0.0.0.0:8600": at this address. docs/page.md
          record: where it records of each step which items were in it: sl.Recorder("steps/"). docs/steps.md
          skip_steps: steps whose items are drawn and not given, range(1820, 1841) say; later resumes know of them.
          tune: True: what limits gets more calls, threads, room, or hosts; or a file to go by. docs/tuning.md

        Raises:
          PlanError: what ranks, or processes of one, can't share, or can't end together; wrong options (PlanTypeError).
          ResumeError: the snapshot is of another plan, other data or ranks. ReadError: a file is missing. RecordError.
          Later, by `with`: DeadLetterError; HostError: no page there; JournalError. Warns: CodeChangedWarning.
        """
        return Opened(self.plan, OpenOptions.of(**options))

    @lists_keywords(RunKeywords)
    def loader(
        self,
        *,
        steps_per_epoch: int | None = None,
        fixed_epoch: bool = False,
        epoch: int | None = None,
        resume: Snapshot | None = None,
        persistent: bool = True,
        **options: Unpack[RunKeywords],
    ) -> Loader[T]:
        """Return what trainers hold: it can be iterated again and again, one epoch each time, saved and loaded.

        Args:
          steps_per_epoch: an epoch is so many items; the next one continues where the last one stopped, and where the
            pipeline ends, it begins anew, in its next epoch. None: an epoch is one pass.
          fixed_epoch: each iteration is of the same epoch, with the same items in the same order: for validation.
          epoch: of the first iteration; by default the snapshot's, or 0.
          resume: continue after this snapshot; if nothing follows in its epoch, with the next one. Its steps aren't
            known: with `steps_per_epoch`, an epoch begins there.
          persistent: threads and processes stay between epochs, and read ahead into the next one; `close`, or dropping
            the loader, ends them. False: each epoch has its own, and begins when it is asked for.
          options: those of `open`; each epoch is opened with them.

        Raises:
          PlanError: an epoch below 0, or fewer than 1 step; an option of the wrong type (PlanTypeError).
          As `open`, here and at each `iter()`.
        """
        known = RunKeywords.__annotations__.keys()
        check_known(".loader", options.keys() - known, [*known, *LOADER_OPTIONS])
        from streamline.training.loader import Loader  # which brings hosts, that most pipelines never start
        from streamline.training.passes import passes_of

        passes = passes_of(
            self.open, options, self.plan.source, steps_per_epoch, stay=persistent, settled=lambda: self.settled().open
        )
        return Loader(passes, epoch=epoch, steps_per_epoch=steps_per_epoch, fixed_epoch=fixed_epoch, resume=resume)

    @lists_keywords(RunKeywords)
    def replay_steps(
        self,
        path: str | PathLike[str],
        first: int,
        last: int,
        *,
        epoch: int | None = None,
        **options: Unpack[RunKeywords],
    ) -> StepReplay[T]:
        """Return what gives the items of recorded steps again, `first` to `last`, in `for` or `async for`.

        Args:
          path: as `sl.Recorder` was given it; of several epochs or ranks, `epoch` and `rank` say which.
          options: those of `open`.

        Raises:
          RecordError: some of the steps are missing. As `open`, when the loop begins. See docs/steps.md.
        """
        return StepReplay(self, path, first, last, epoch, options)

    @lists_keywords(DebugKeywords)
    def debug(self, **options: Unpack[DebugKeywords]) -> DebugStream[T]:
        """Return a plain iterator that runs the whole plan in the calling thread, one item at a time.

        For pdb, prints in order, Ctrl-C. Same items, order and states as `open`; a snapshot of the one resumes the
        other.
        Slow: calls follow one another, and hardly anything is read ahead. Works where an event loop is running, as in a
        notebook. Only blocks of files are read in a thread. Of several ranks, each ends by itself. Options and errors
        are those of `open`.
        """
        known = DebugKeywords.__annotations__.keys()
        check_known(".debug", options.keys() - known, known)
        return DebugStream(prepare(self.plan, OpenOptions.of(**options, ends="allow", stall_s=None)))

    def first(self, count: int) -> list[T]:
        """Return the first items, at most `count`; nothing is opened for 0.

        Channels hold at most `count` items: little more is read than needed. Works in a running event loop, which it
        blocks. Raises what `open` does.
        """
        count = check_int(".first(count)", count, 0)
        if not count:
            return []
        with TrimmedTraceback(), closing(self.open(ends="allow").sync_stream(most_ahead=count)) as stream:
            return list(islice(stream, count))

    def write(
        self, folder: str | PathLike[str], format: FormatName = "jsonl", **options: Unpack[WriteKeywords]
    ) -> Written:
        """Run it, and write its items to a folder of shards, exactly once across kills and resumes. Blocks meanwhile.

        Args:
          folder: on local disk, or in a store.
          format: with its defaults, see `sl.write_jsonl`, `write_npy`, `write_parquet` and `write_tar`.
          options: as of `sl.write_jsonl`: `shard_bytes`, `compression`, `resume`, those of `open`, …

        Raises:
          As `sl.write_jsonl`.
        """
        from streamline.runtime.writing import output_format, write  # a run needs none of it

        return write(self, folder, output_format(format), **options)

    # Looking at it ----------------------------------------------------------------------------------------------------

    def check(
        self, *, world_size: int | None = None, backend: Backend | None = None, deadline_s: float = DEADLINE_S
    ) -> Report:
        """Check, before a run, what it would read, and what it would fail on. Takes seconds; writes nothing.

        Lists the files, requests sizes that the listing lacks, reads the first record of a few files, compares these,
        and runs them through the stages: functions of the pipeline are called. A live source isn't read. Works in a
        running event loop, which it blocks.

        Args:
          world_size: of the planned job; by default as in `open`.
          backend: where the workers will run: for `sl.Processes`, the plan must pickle.
          deadline_s: seconds for reading, and as many for the stages; what takes longer is named.

        Returns:
          What is wrong with the plan or the data, to be printed; `report.ok`, `report.problems`,
          `report.raise_for_problems()`.
        """
        from streamline.runtime.check import check  # a run needs none of it

        return check(self.plan, world_size=world_size, backend=backend, deadline_s=deadline_s)

    def explain(
        self, snapshot: Snapshot, *, accept: Collection[str] = (), new_files: NewFiles = "refuse"
    ) -> Explanation:
        """Return what a resume of `snapshot` would do, to be printed, without doing it.

        Where each worker continues, what is read and computed again, and by which stage; or why it doesn't fit this
        plan and what to accept.

        Args:
          accept, new_files: as for `open`.

        Raises:
          PlanError: `accept` names what isn't there. ReadError: a file of the source is missing.
        """
        return explain(self.plan, snapshot, accept, new_files)

    def draw(self) -> Drawing:
        """Return a picture of the plan: Mermaid as text, SVG in a notebook, `.save("plan.svg")`. Nothing runs."""
        return Drawing(self.plan)

    @property
    def max_in_flight(self) -> int:
        """Items that are taken from the source and not yet consumed, at most, on one rank."""
        return max_in_flight(self.plan)

    def __repr__(self) -> str:
        return describe(self.plan)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"

    # What it isn't ----------------------------------------------------------------------------------------------------

    def __len__(self) -> NoReturn:
        """Refuse: torch's DataLoader asks for it first; `list(pipe)` and its like do without."""
        raise PlanTypeError(
            "a pipeline has no length: len(pipe.loader()) has, where it is known. If a DataLoader of torch's asked, it "
            "can't index a pipeline: loop over pipe.loader(), or give it DataLoader(TorchDataset(pipe), "
            "batch_size=None), from streamline.training.torch_dataset"
        )

    def __bool__(self) -> bool:
        return True  # else Python would ask for the length

    def __dir__(self) -> list[str]:
        return sorted(set(super().__dir__()) - INSIDE)

    if not TYPE_CHECKING:  # type checkers say so sooner

        def __next__(self) -> NoReturn:
            """Refuse: where it stands, a stream knows."""
            raise PlanTypeError(
                "a pipeline is iterated, each time from its beginning: for item in pipe; `with pipe.open() as stream: "
                "next(stream)` gives one item after the other, pipe.first(3) a list of the first ones"
            )

        def __getitem__(self, index: object) -> NoReturn:
            """Refuse: a pipeline has no positions."""
            raise PlanTypeError(
                f"a pipeline has no positions, so no [{index!r}]: pipe.first(3) is a list of the first items, "
                "pipe.skip(100).first(3) of later ones"
            )

        def __getattr__(self, name: str) -> NoReturn:
            raise no_attribute(self, name)

    # Inside -----------------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan in sections, as it is run."""
        return compile_plan(self.source, self.stages, self.sharding, self.sharded_at, self.merging, self.merged_at)

    def settled(self) -> Pipeline[T]:
        """Return this pipeline with what depends on the thread that opens it: the current GPU."""
        return replace(self, stages=tuple(stage.settled() for stage in self.stages))

    def _name(self, given: str | None, default: str) -> str:
        """Return a name that no other part of this pipeline has."""
        taken = {self.source.name, *RESERVED, *(stage.name for stage in self.stages)}
        if given is not None:
            if isinstance(given, str) and given in taken.difference(RESERVED):  # others are refused with the plan
                raise PlanError(f"there is a stage called {given!r} already: names keep states apart")
            return given
        name, number = default, 1
        while name in taken:
            number += 1
            name = f"{default}_{number}"
        return name

    def _with(self, stage: Stage[Any, Any]) -> Pipeline[Any]:
        return cast("Pipeline[Any]", replace(self, stages=(*self.stages, stage))._checked())

    def _checked(self) -> Pipeline[T]:
        _ = self.plan
        return self


def _folder(option: str, path: str | PathLike[str] | None) -> str | None:
    """Return the path of a local folder as a string."""
    if path is None:
        return None
    if not isinstance(path, str | PathLike):
        raise PlanTypeError(f"{option} is the path of a folder, got {type_and_repr(path)}")
    folder = os.fspath(path)
    if not folder or "://" in folder:
        raise PlanError(
            f"{option} is the path of a folder of this machine, or of a disk that it mounts, got {folder!r}"
        )
    return folder
