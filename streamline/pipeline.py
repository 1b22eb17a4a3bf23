"""The plan as users write it: immutable, cheap, typed; each method returns a new one."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Never, NoReturn, TypeVar, cast, get_args, overload

from streamline.blame import stage_name
from streamline.collate import unstack
from streamline.compiling import compiled
from streamline.declared import check_call
from streamline.errors import PlanError, PlanTypeError, printable
from streamline.keeping import Keeping
from streamline.merge import Merge, merge_of
from streamline.options import (
    OF_OTHERS,
    check_function,
    check_int,
    check_known,
    check_seconds,
    check_seed,
    check_takes_item,
    given,
    is_async,
    no_attribute,
)
from streamline.plan import Plan, Shard
from streamline.rules import RESERVED
from streamline.sources.base import Mode, Source
from streamline.transfer.devices import written
from streamline.transforms.base import Stage
from streamline.transforms.batch import Batch, collate_of
from streamline.transforms.bucket import bucket_of
from streamline.transforms.custom import Declared, Through, check_through
from streamline.transforms.filter import Filter
from streamline.transforms.flat_map import FlatMap, Unbatch
from streamline.transforms.map import NOT_AFTER_A_CHOICE, Numbering, Seeded, map_of
from streamline.transforms.pack import Block, pack_of
from streamline.transforms.transfer import Transfer

__all__ = ["Pipeline"]

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, repr=False)
class Pipeline(Keeping[T]):
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
          num_shards: at least 1; may exceed the number of items or files.
          mode: "interleaved" (item i to shard i mod n), "contiguous" (one block each), "file" (file f to shard f mod
            n) or "replicated" (every worker reads all and keeps its stride); None: the source's default. A custom
            source splits itself ("custom"), a live one is handed out in turn ("shared").
          drop_remainder: leave out the items that would make some shards longer than others; not of sources that
            split themselves, nor of live ones.
          interleave: files that each worker reads in turn, item by item; more than one splits by "file".

        Raises:
          PlanError: a second shard, or one behind the merge; a mode that the source doesn't have; a stage before it
            that acts on items.
        """
        check_known(".shard", unknown, ("mode", "drop_remainder", "interleave"))
        num_shards = check_int(".shard(num_shards)", num_shards, 1)
        if mode is not None and not isinstance(mode, str):
            raise PlanTypeError(
                f".shard(mode=) is one of {get_args(Mode)}, or None, got {given(mode)}: {OF_OTHERS['index']}"
            )
        interleave = check_int(".shard(interleave=)", interleave, 1)
        by_file: Mode | None = "file" if mode is None and interleave > 1 else mode
        shard = Shard(num_shards=num_shards, mode=by_file, drop_remainder=drop_remainder, interleave=interleave)
        if self.sharding is not None or self.merging is not None:
            raise PlanError(".shard splits the source, once: it can't stand behind another .shard or a .merge")
        return replace(self, sharding=shard, sharded_at=len(self.stages))._checked()

    @overload
    def map(
        self, fn: Callable[[T], Awaitable[U]], *, concurrency: int | None = None, ordered: bool = True,
        name: str | None = None,
    ) -> Pipeline[U]: ...  # fmt: skip
    @overload
    def map(
        self, fn: Callable[[T], U], *, concurrency: int | None = None, ordered: bool = True,
        executor: Literal["thread"] | None = None, name: str | None = None,
    ) -> Pipeline[U]: ...  # fmt: skip
    @overload
    def map(
        self, fn: Callable[..., Awaitable[U]], *, concurrency: int | None = None, ordered: bool = True,
        seed: int, seed_globals: bool = False, name: str | None = None,
    ) -> Pipeline[U]: ...  # fmt: skip
    @overload
    def map(
        self, fn: Callable[..., U], *, concurrency: int | None = None, ordered: bool = True,
        executor: Literal["thread"] | None = None, seed: int, seed_globals: bool = False, name: str | None = None,
    ) -> Pipeline[U]: ...  # fmt: skip
    def map(
        self,
        fn: Callable[..., Any],
        *,
        concurrency: int | None = None,
        ordered: bool = True,
        executor: Literal["thread"] | None = None,
        seed: int | None = None,
        seed_globals: bool = False,
        name: str | None = None,
        **unknown: Any,
    ) -> Pipeline[Any]:
        """Replace each item by `fn` of it. None is an item like any other.

        Args:
          fn: sync: called inline, in the task that pulls; async: called `concurrency` times at once. With concurrency,
            a lambda around an async function is one, too.
          concurrency: calls, or threads, at once; for async functions and `executor="thread"`; 1 by default. A stream
            has 64 threads at the most, whatever its workers ask for together.
          ordered: False: results leave as they are completed; with `concurrency=1`, calls and results keep the order of
            the inputs. Resuming is exact all the same.
          executor: "thread": a sync function that releases the GIL or waits is called in threads, on lists of items.
          seed: `fn` is also given `rng=`, a NumPy Generator that depends on (seed, name, epoch, shard, ordinal) alone;
            or `generator=`, one of torch's, if it takes that.
          seed_globals: for libraries that take none: each call finds `random`, NumPy and torch seeded.
          name: by default the function's.

        Raises:
          PlanError: options that the kind of function doesn't have; a seed behind a stage that chooses an order.
        """
        check_known(".map", unknown, ("concurrency", "ordered", "executor", "seed", "seed_globals", "name"))
        check_function(".map(fn)", fn)
        pipe, name = self, self._name(name, stage_name(fn))
        if seed is not None:
            seed = check_seed(".map(seed=)", seed)
            if self._chooses:
                raise PlanError(f".map(seed=) numbers its inputs, so it {NOT_AFTER_A_CHOICE}")
            pipe = pipe._with(Numbering(name=f"{name}.rng", seed=seed, stage=name, seed_globals=seed_globals))
            fn = Seeded(fn, seed_globals)
            check_takes_item(".map(fn, seed=)", fn.fn, *fn.takes)
        elif seed_globals:
            raise PlanError(".map(seed_globals=True) needs a seed=, from which each item's numbers come")
        else:
            check_takes_item(".map(fn)", fn)
        return pipe._with(map_of(name, fn, concurrency=concurrency, ordered=ordered, executor=executor))

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

    @overload
    def batch(
        self, size: int, *, drop_remainder: bool = False, collate: Literal["stack", "torch"] = "stack",
        max_wait_s: float | None = None, name: str | None = None,
    ) -> Pipeline[Any]: ...  # fmt: skip
    @overload
    def batch(
        self, size: int, *, drop_remainder: bool = False, collate: None, max_wait_s: float | None = None,
        name: str | None = None,
    ) -> Pipeline[list[T]]: ...  # fmt: skip
    @overload
    def batch(
        self, size: int, *, drop_remainder: bool = False, collate: Callable[[list[T]], U],
        max_wait_s: float | None = None, name: str | None = None,
    ) -> Pipeline[U]: ...  # fmt: skip
    def batch(
        self,
        size: int,
        *,
        drop_remainder: bool = False,
        collate: Literal["stack", "torch"] | Callable[[list[T]], Any] | None = "stack",
        max_wait_s: float | None = None,
        name: str | None = None,
        **unknown: Any,
    ) -> Pipeline[Any]:
        """Collate each `size` items into one.

        Args:
          size: items in a batch; the last one has the rest.
          drop_remainder: leave out the last batch if it isn't full.
          collate: "stack": see `streamline.collate.stack`; "torch": likewise, of tensors throughout; None: a list; a
            sync function of the list.
          max_wait_s: a batch that isn't full leaves this many seconds after its first item came; None: it waits until
            it is full. Which items go together depends on time then; resuming is exact all the same.
        """
        check_known(".batch", unknown, ("drop_remainder", "collate", "max_wait_s", "name"))
        size = check_int(".batch(size)", size, 1)
        if max_wait_s is not None:
            check_seconds(".batch(max_wait_s=)", max_wait_s)
        fn = collate_of(".batch(collate=)", collate)
        name = self._name(name, "batch")
        return self._with(Batch(name=name, size=size, drop_remainder=drop_remainder, collate=fn, max_wait_s=max_wait_s))

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
        """Put documents, sequences of tokens, one behind the other, and cut them into blocks of `length` tokens.

        A block is a dict of arrays: "tokens"; "segment_ids", 1, 2, ... for each document in it, 0 for padding; and
        "positions" in the segment, which begin at 0 in each document and in each block.

        Args:
          length: tokens in a block; the last one is padded with 0.
          key: of the field with the tokens, where items are dicts; what else is in them is left out.
          eos: a token that is put behind each document that has any.
          drop_remainder: leave out the last block if it isn't full.
        """
        stage = pack_of(length, key, eos, drop_remainder, name=self._name(name, "pack"))
        return self._with(stage)

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

    def transfer(self, device: Any, *, depth: int = 2, name: str | None = None) -> Pipeline[Any]:
        """Bring the batches to a device while the loop computes. The last stage; puts a strict merge before if none is.

        NumPy arrays become arrays or tensors there, in dicts, lists, tuples and dataclasses too; other parts stay.

        Args:
          device: "host" (nothing changes), "cpu", "cuda", "cuda:1", "mps", a torch.device, "jax", a device or sharding
            of JAX. It is looked for when the pipeline is opened; "cuda" is the current one of the thread that does.
          depth: batches that are on their way, or there already, while the loop works on the one before.

        Raises:
          PlanError: a device that doesn't exist; `open` says the same of one that isn't here.
        """
        depth = check_int(".transfer(depth=)", depth, 1)
        pipe = self if self.merging is not None else self.merge()
        return pipe._with(Transfer(name=self._name(name, "transfer"), device=written(device), depth=depth))

    @property
    def plan(self) -> Plan:
        """The plan in sections, as it is run."""
        return compiled(self.source, self.stages, self.sharding, self.sharded_at, self.merging, self.merged_at)

    def settled(self) -> Pipeline[T]:
        return replace(self, stages=tuple(stage.settled() for stage in self.stages))

    if not TYPE_CHECKING:  # who checks types is told sooner

        def __getattr__(self, name: str) -> NoReturn:
            raise no_attribute(self, name)

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
