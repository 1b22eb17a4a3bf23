"""The plan as users write it: immutable, cheap, typed; each method returns a new one."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast, overload

from streamline.blame import stage_name
from streamline.collate import as_list, stack, unstack
from streamline.compiling import compiled
from streamline.declared import check_call
from streamline.errors import PlanError
from streamline.merge import Merge, merge_of
from streamline.options import check_function, check_int, check_seconds, check_seed, is_async
from streamline.plan import Plan, Shard
from streamline.rules import RESERVED
from streamline.runnable import Runnable
from streamline.sources.base import Mode, Source
from streamline.transforms.base import Stage
from streamline.transforms.batch import Batch
from streamline.transforms.custom import Declared, Through
from streamline.transforms.filter import Filter
from streamline.transforms.flat_map import FlatMap, Unbatch
from streamline.transforms.limit import Skip, Take
from streamline.transforms.map import Numbering, Seeded, map_of
from streamline.transforms.prefetch import Prefetch
from streamline.transforms.repeat import Repeat
from streamline.transforms.shuffle import IndexShuffle, Shuffle, ShuffleFiles

__all__ = ["Pipeline"]

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, repr=False)
class Pipeline(Runnable[T]):
    """A plan: where items come from and what happens to them. Immutable, comparable, printable; nothing runs.

    `for x in pipe` and `async for x in pipe` run it with defaults, `open` with others.

    Each stage's part of a state is kept under its `name=`; by default that of its function, or its kind, with a number
    where there are several. Each method raises a `PlanError` where the plan can't mean what it says then, and a
    `PlanTypeError`, which is one too, for an option of the wrong type.

    Attributes:
      source: where items come from.
      stages: in order. Without `.shard` they belong to the only worker, until `.merge`.
      sharding: None until `.shard`; then `sharded_at` stages stand before it.
      merging: None until `.merge`; then `merged_at` stages stand before it.
    """

    source: Source[Any]
    stages: tuple[Stage[Any, Any], ...] = ()
    sharding: Shard | None = None
    sharded_at: int = 0
    merging: Merge | None = None
    merged_at: int = 0

    # Stages ---------------------------------------------------------------------------------------------------------

    def shard(self, num_shards: int, mode: Mode | None = None, *, drop_remainder: bool = False) -> Pipeline[T]:
        """Split the source into `num_shards` shards in the whole job, each read by one worker.

        Args:
          num_shards: at least 1; may exceed the number of items or files.
          mode: "interleaved" (item i to shard i mod n), "contiguous" (one block each), "file" (file f to shard f mod
            n) or "replicated" (every worker reads all and keeps its stride); None: the source's default. A custom
            source splits itself ("custom"), a live one is handed out in turn ("shared").
          drop_remainder: leave out the items that would make some shards longer than others; not of sources that
            split themselves, nor of live ones.

        Raises:
          PlanError: a second shard, or one behind the merge; a mode that the source doesn't have; a stage before it
            that acts on items.
        """
        check_int(".shard(num_shards)", num_shards, 1)
        shard = Shard(num_shards=num_shards, mode=mode, drop_remainder=drop_remainder)
        if self.sharding is not None or self.merging is not None:
            raise PlanError(".shard splits the source, once: it can't stand behind another .shard or a .merge")
        return replace(self, sharding=shard, sharded_at=len(self.stages))._checked()

    @overload
    def map(
        self,
        fn: Callable[[T], Awaitable[U]],
        *,
        concurrency: int | None = None,
        ordered: bool = True,
        name: str | None = None,
    ) -> Pipeline[U]: ...
    @overload
    def map(
        self,
        fn: Callable[[T], U],
        *,
        concurrency: int | None = None,
        ordered: bool = True,
        executor: Literal["thread"] | None = None,
        name: str | None = None,
    ) -> Pipeline[U]: ...
    @overload
    def map(
        self,
        fn: Callable[..., Awaitable[U]],
        *,
        concurrency: int | None = None,
        ordered: bool = True,
        seed: int,
        name: str | None = None,
    ) -> Pipeline[U]: ...
    @overload
    def map(
        self,
        fn: Callable[..., U],
        *,
        concurrency: int | None = None,
        ordered: bool = True,
        executor: Literal["thread"] | None = None,
        seed: int,
        name: str | None = None,
    ) -> Pipeline[U]: ...
    def map(
        self,
        fn: Callable[..., Any],
        *,
        concurrency: int | None = None,
        ordered: bool = True,
        executor: Literal["thread"] | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> Pipeline[Any]:
        """Replace each item by `fn` of it. None is an item like any other.

        Args:
          fn: sync: called inline, in the task that pulls; async: called `concurrency` times at once.
          concurrency: calls, or threads, at once; for async functions and `executor="thread"`; 1 by default. A stream
            has 64 threads at the most, whatever its workers ask for together.
          ordered: False: results leave as they are completed. Resuming is exact all the same.
          executor: "thread": a sync function that releases the GIL or waits is called in threads, on lists of items.
          seed: `fn` is also given `rng=`, a NumPy Generator that depends on (seed, name, epoch, shard, ordinal) alone.
          name: by default the function's.

        Raises:
          PlanError: options that the kind of function doesn't have; a seed behind a stage that chooses an order.
        """
        check_function(".map(fn)", fn)
        pipe, name = self, self._name(name, stage_name(fn))
        if seed is not None:
            check_seed(".map(seed=)", seed)
            if self._chooses:
                raise PlanError(
                    ".map(seed=) numbers its inputs, so it can't stand behind an unordered map or a best-effort merge, "
                    "whose order another run would choose differently: move it before"
                )
            pipe = pipe._with(Numbering(name=f"{name}.rng", seed=seed, stage=name))
            fn = Seeded(fn)
        return pipe._with(map_of(name, fn, concurrency=concurrency, ordered=ordered, executor=executor))

    def filter(self, fn: Callable[[T], object], *, name: str | None = None) -> Pipeline[T]:
        """Keep the items for which the sync function `fn` is true."""
        check_function(".filter(fn)", fn)
        if is_async(fn):
            raise PlanError(
                ".filter takes a sync function: an async one would always be true. Look it up in a .map before"
            )
        return self._with(Filter(name=self._name(name, stage_name(fn)), fn=fn))

    def flat_map(self, fn: Callable[[T], Iterable[U]], *, name: str | None = None) -> Pipeline[U]:
        """Replace each item by the items of the iterable that the sync function `fn` makes of it, in order."""
        check_function(".flat_map(fn)", fn)
        if is_async(fn) or inspect.isasyncgenfunction(fn):
            raise PlanError(".flat_map takes a sync function; for an async one, write a stage for .through")
        return self._with(FlatMap(name=self._name(name, stage_name(fn)), fn=fn))

    @overload
    def batch(
        self,
        size: int,
        *,
        drop_remainder: bool = False,
        collate: Literal["stack"] = "stack",
        max_wait_s: float | None = None,
        name: str | None = None,
    ) -> Pipeline[Any]: ...
    @overload
    def batch(
        self,
        size: int,
        *,
        drop_remainder: bool = False,
        collate: None,
        max_wait_s: float | None = None,
        name: str | None = None,
    ) -> Pipeline[list[T]]: ...
    @overload
    def batch(
        self,
        size: int,
        *,
        drop_remainder: bool = False,
        collate: Callable[[list[T]], U],
        max_wait_s: float | None = None,
        name: str | None = None,
    ) -> Pipeline[U]: ...
    def batch(
        self,
        size: int,
        *,
        drop_remainder: bool = False,
        collate: Literal["stack"] | Callable[[list[T]], Any] | None = "stack",
        max_wait_s: float | None = None,
        name: str | None = None,
    ) -> Pipeline[Any]:
        """Collate each `size` items into one.

        Args:
          size: items in a batch; the last one has the rest.
          drop_remainder: leave out the last batch if it isn't full.
          collate: "stack": see `streamline.collate.stack`; None: a list; a sync function of the list.
          max_wait_s: a batch that isn't full leaves this many seconds after its first item came; None: it waits until
            it is full. Which items go together depends on time then; resuming is exact all the same.
        """
        check_int(".batch(size)", size, 1)
        if max_wait_s is not None:
            check_seconds(".batch(max_wait_s=)", max_wait_s)
        if isinstance(collate, str) and collate != "stack":
            raise PlanError(f".batch(collate=) is 'stack', None or a function, got {collate!r}")
        fn = stack if collate == "stack" else as_list if collate is None else collate
        check_function(".batch(collate=)", fn)
        if is_async(fn) or inspect.isasyncgenfunction(fn):
            raise PlanError(
                ".batch(collate=) takes a sync function: what an async one returns would be the batch. Await it in a "
                ".map behind .batch(collate=None)"
            )
        name = self._name(name, "batch")
        return self._with(Batch(name=name, size=size, drop_remainder=drop_remainder, collate=fn, max_wait_s=max_wait_s))

    def unbatch(self, *, name: str | None = None) -> Pipeline[Any]:
        """Replace each batch by its items: of a list, the first axis of arrays, in dicts, tuples and dataclasses."""
        return self._with(Unbatch(name=self._name(name, "unbatch"), fn=unstack))

    def take(self, count: int, *, name: str | None = None) -> Pipeline[T]:
        """Keep the first `count` items; before a merge, of each worker."""
        check_int(".take(count)", count, 0)
        return self._with(Take(name=self._name(name, "take"), count=count))

    def skip(self, count: int, *, name: str | None = None) -> Pipeline[T]:
        """Drop the first `count` items; before a merge, of each worker."""
        check_int(".skip(count)", count, 0)
        return self._with(Skip(name=self._name(name, "skip"), count=count))

    def repeat(self, times: int | None = None, *, name: str | None = None) -> Pipeline[T]:
        """Go through everything before it `times` times; None: for ever. Shuffles before it differ in each pass."""
        if times is not None:
            check_int(".repeat(times)", times, 0)
        return self._with(Repeat(name=self._name(name, "repeat"), times=times))

    def shuffle(self, *, window: int | None = None, seed: int = 0, name: str | None = None) -> Pipeline[T]:
        """Permute the items: each `window` of them, or without a window the whole index of an indexable source.

        Args:
          window: items that are permuted among themselves; twice as many are held in memory, and a resume reads up to
            twice as many again. Behind `.shard`, in each worker.
          seed: with it and the epoch (and shard and window), the order is always the same.

        Raises:
          PlanError: without a window, the source has no index, or it stands behind `.shard`.
        """
        check_seed(".shuffle(seed=)", seed)
        name = self._name(name, "shuffle")
        if window is None:
            return self._with(IndexShuffle(name=name, seed=seed))
        check_int(".shuffle(window=)", window, 1)
        return self._with(Shuffle(name=name, window=window, seed=seed))

    def shuffle_files(self, *, seed: int = 0, name: str | None = None) -> Pipeline[T]:
        """Permute the list of files, by seed and epoch, before it is sharded."""
        check_seed(".shuffle_files(seed=)", seed)
        return self._with(ShuffleFiles(name=self._name(name, "shuffle_files"), seed=seed))

    def through(self, fn: Callable[..., AsyncIterator[U]], *, name: str | None = None, **params: Any) -> Pipeline[U]:
        """Pass the items through an async generator function of one async iterator.

        Args:
          fn: called as `fn(items, **params)`; declared with `@sl.stage`, it is resumed from its last safe point.
            Undeclared, a resume runs it from the start and passes over what it had yielded.
          params: keyword arguments for `fn`.

        Raises:
          PlanTypeError: of a declared one, a parameter is missing, unknown, or one that streamline passes itself.

        Warns:
          UserWarning: it is undeclared.
        """
        check_function(".through(fn)", fn)
        if isinstance(fn, Declared):
            check_call(f".through({stage_name(fn)})", fn.fn, 1, params, ("state",) if fn.state is not None else ())
        pipe = self._with(Through(name=self._name(name, stage_name(fn)), fn=fn, params=tuple(params.items())))
        if not isinstance(fn, Declared):
            warnings.warn(
                f"a resume will run {stage_name(fn)} from its start: declare what it remembers with "
                "@sl.stage(state=dict), or @sl.stage(stateless=True)",
                stacklevel=2,
            )
        return pipe

    def prefetch(self, items: int, *, bytes: int | None = None) -> Pipeline[T]:
        """Let what is before run ahead by up to `items` items, in a task of its own.

        Args:
          items: kept ready at the most.
          bytes: the same in bytes, as `streamline.sizes.nbytes` counts them; one item is always admitted.
        """
        check_int(".prefetch(items)", items, 1)
        if bytes is not None:
            check_int(".prefetch(bytes=)", bytes, 1)
        return self._with(Prefetch(name=self._name(None, "prefetch"), items=items, bytes=bytes))

    def merge(
        self,
        kind: Literal["strict", "best_effort"] = "strict",
        *,
        max_skips_per_round: int | None = None,
        max_lead: int | None = None,
    ) -> Pipeline[T]:
        """Make one stream of the workers'. What comes behind acts on this stream.

        Args:
          kind: "strict": in turn, always the same order. "best_effort": whoever has an item, within bounds; the order
            depends on timing, resuming is exact all the same.
          max_skips_per_round: best-effort: workers without an item that are passed over before waiting; 0 is strict
            order; 2 by default.
          max_lead: best-effort: items that a worker may be ahead of the slowest one; 8 by default.
        """
        if self.merging is not None:
            raise PlanError("there is one .merge: behind it there is only one stream")
        merge = merge_of(kind, max_skips_per_round, max_lead)
        return replace(self, merging=merge, merged_at=len(self.stages))

    @property
    def plan(self) -> Plan:
        """The plan in sections, as it is run."""
        return compiled(self.source, self.stages, self.sharding, self.sharded_at, self.merging, self.merged_at)

    # ----------------------------------------------------------------------------------------------------------------

    @property
    def _chooses(self) -> bool:
        return any(stage.chooses for stage in self.stages) or (self.merging is not None and self.merging.chooses)

    def _name(self, given: str | None, default: str) -> str:
        """Return a name that no other part of this pipeline has."""
        taken = {self.source.name, *RESERVED, *(stage.name for stage in self.stages)}
        if given is not None:
            if given in taken.difference(RESERVED):  # those are refused with the plan
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
