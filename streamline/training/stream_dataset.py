"""`StreamDataset`: an iterable dataset whose iterator is kept from one iteration to the next, until it is reset."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, Generic, Literal, NoReturn, TypeVar, cast

import anyio
import msgspec

from streamline.core.cleanup import Cleanup
from streamline.core.cursor import PartIterator
from streamline.core.forks import ForkSafeLock
from streamline.core.options import check_function, check_int, type_and_repr
from streamline.core.state import digest
from streamline.core.state_types import Count, check_type
from streamline.core.tracebacks import TrimmedTraceback
from streamline.errors import ClosedError, PlanError, PlanTypeError, ResumeError, SnapshotError
from streamline.sources.single_use import Use
from streamline.training.shared_iterator import SharedAsyncIterator, SharedIterator, SharedSyncIterator

T = TypeVar("T")

Factory = Callable[[], Iterable[T] | AsyncIterable[T] | Awaitable[Iterable[T] | AsyncIterable[T]]]

STRATEGIES = ("replicated", "shared")


class Drew(msgspec.Struct):
    """What `state_dict` returns: items drawn, whether they were all, and the iterator's own state."""

    items: Count
    ended: bool
    state: Any


class StreamDataset(Generic[T]):
    """Iterates what `factory` returns, once: `iter()` again goes on where the last iteration ended, until `reset()`.

    So after the end, iterating again gives nothing, and after a failure the same exception again. `factory` is called
    for the first item; a failure of its own is not kept: the next item calls it again. Any number of threads, or of
    tasks of one event loop, may iterate: each item goes to exactly one of them.

    A sync iterator serves `for` and `async for`, which then iterates it in the event loop. An async one serves
    `async for`, in the event loop in which it was made. A pull that is cancelled inside an async generator ends that: a
    `ClosedError` says so, it is no end.

    Ctrl-C inside the iterator's own code may end it, as it ends any generator: a `ClosedError` says so, it is no end.
    Anywhere else it loses nothing in a plain loop: the item that the loop hasn't got is the next one, and the state is
    before it.

    Several workers (processes, say) each have a StreamDataset of their own, with a number of its own.

    In a pipeline, `sl.from_iterable(dataset)` calls the factory anew per pass, worker and resume, so that resumes are
    exact, and doesn't move this iterator; `sl.from_stream(dataset)` goes on with this one, and journals.

    Args:
      factory: returns an iterable, sync or async, or is a coroutine function that does.
      worker_id: 0-based among `num_workers`; both or none. By default those of torch's DataLoader, in whose worker this
        is iterated, else 0 of 1.
      strategy: "replicated": the factory gives each worker the whole stream, and the worker keeps the items i with
        i mod num_workers = worker_id. "shared": it gives each worker items of its own (a queue, a partition), and the
        worker keeps them all.

    Raises:
      PlanTypeError: no function, or numbers that are no integers.
      PlanError: a worker that there isn't, or a strategy.
    """

    def __init__(
        self,
        factory: Factory[T],
        worker_id: int | None = None,
        num_workers: int | None = None,
        *,
        strategy: Literal["replicated", "shared"] = "replicated",
    ) -> None:
        check_function("StreamDataset(factory)", factory)
        if (worker_id is None) != (num_workers is None):
            raise PlanError("give StreamDataset worker_id= and num_workers= together: which of how many this is")
        if worker_id is not None and num_workers is not None:
            num_workers = check_int("StreamDataset(num_workers=)", num_workers, 1)
            worker_id = check_int("StreamDataset(worker_id=)", worker_id, 0)
            if worker_id >= num_workers:
                raise PlanError(
                    f"StreamDataset(worker_id=) is from 0 to {num_workers - 1}, got {worker_id}: there are "
                    f"{num_workers} workers, and the first one is 0"
                )
        if strategy not in STRATEGIES:
            raise PlanError(f"StreamDataset(strategy=) is one of {STRATEGIES}, got {type_and_repr(strategy)}")
        self.factory = factory
        self.strategy = strategy
        self._given = (worker_id, num_workers)
        self._lock = ForkSafeLock()  # of making and dropping; the shared iterator has one of its own
        self._pass = 0
        self._drawn: SharedIterator[T] | None = None
        self._resume: dict[str, Any] | None = None
        self._making: anyio.Lock | None = None
        self._cleanup: Cleanup | None = None

    @property
    def worker(self) -> tuple[int, int]:
        """This worker's number, and how many there are, in this process."""
        worker_id, num_workers = self._given
        if worker_id is not None and num_workers is not None:
            return worker_id, num_workers
        data = sys.modules.get("torch.utils.data")  # if it isn't imported, this is no worker of it
        info = None if data is None else data.get_worker_info()
        return (0, 1) if info is None else (info.id, info.num_workers)

    @property
    def stride(self) -> tuple[int, int]:
        """Which items i of the factory's stream are this worker's: those with i mod the second = the first."""
        return self.worker if self.strategy == "replicated" else (0, 1)

    def __iter__(self) -> Iterator[T]:
        return _DatasetPass(self, self._pass)

    def __aiter__(self) -> AsyncIterator[T]:
        return _DatasetPass(self, self._pass)

    def reset(self) -> None:
        """Close the iterator; the next iteration makes a new one. Loops in progress get a `ClosedError`.

        From any thread; while another one waits for an item, that one closes it.

        Raises:
          PlanError: the iterator is async, so that its close has to be awaited.
        """
        if isinstance(self._drawn, SharedAsyncIterator):
            raise PlanError("this StreamDataset's iterator is async: await dataset.areset()")
        if (drawn := self._forget()) is not None:
            cast("SharedSyncIterator[T]", drawn).drop()

    async def areset(self) -> None:
        """As `reset`, for any iterator."""
        drawn = self._forget()
        if isinstance(drawn, SharedAsyncIterator):
            await drawn.drop()
        elif isinstance(drawn, SharedSyncIterator):
            drawn.drop()

    def _forget(self) -> SharedIterator[T] | None:
        with self._lock:
            self._pass += 1
            self._resume = None
            self._making = None
            if self._cleanup is not None:
                self._cleanup.detach()
            drawn, self._drawn = self._drawn, None
            return drawn

    # Resume ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last item that any loop took.

        It holds the iterator's own state, if that has `state_dict` and `load_state_dict` (or `get_state` and
        `set_state`). To be called between two items: not while another thread waits for one.
        """
        if self._drawn is not None:
            return _sealed(self._drawn.state_dict())
        return _sealed(self._resume or {"items": 0, "ended": False, "state": None})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on where `state_dict` said.

        An iterator without a state of its own is iterated up to there.

        Raises:
          PlanError: it is being iterated: reset it first.
          ResumeError, SnapshotError: it is no such state. With the first item: the iterator can't load it, or ends
            before.
        """
        if not isinstance(state, dict) or state.keys() != {"items", "ended", "state", "sha256"}:
            raise ResumeError(f"expected what StreamDataset.state_dict() returned, got {type_and_repr(state)}")
        check_type(state, Drew, "the state of a StreamDataset")
        found = {key: value for key, value in state.items() if key != "sha256"}
        if state != _sealed(found):
            raise SnapshotError(
                "the state of a StreamDataset is damaged, or was edited: its checksum is of another one"
            )
        if self._drawn is not None:
            raise PlanError("load_state_dict comes before the first item: reset() this StreamDataset, then load")
        self._resume = found

    # The iterator ----------------------------------------------------------------------------------------------------

    def anew(self) -> Iterable[T] | AsyncIterable[T]:
        """Return the items of this worker from the stream's start, over a new iterator: for `from_iterable`.

        It is the factory's own iterable, which may have a state, where this worker keeps all items.
        """
        made, use = self.factory(), self._use()
        worker, of = self.stride
        if isinstance(made, Awaitable) or (isinstance(made, AsyncIterable) and of > 1):
            return _stride(made, worker, of, use)
        return made if of == 1 or not isinstance(made, Iterable) else _sync_stride(made, worker, of, use)

    def _use(self) -> Use:
        return Use("StreamDataset", self.factory, shared=self.strategy == "shared")

    def _check_pass(self, number: int) -> None:
        if number != self._pass:
            raise ClosedError("this StreamDataset was reset: iterate it anew")

    def part(self, number: int) -> Iterator[T] | None:
        """Return what gives the next item of a pass, or nothing where another thread is quicker; None: at the end."""
        with self._lock:
            self._check_pass(number)
            drawn = self._drawn or self._made(self.factory(), in_loop=False)
        if isinstance(drawn, SharedAsyncIterator):
            raise _not_sync("its iterator is async")
        return cast("SharedSyncIterator[T]", drawn).part()

    async def anext(self, number: int) -> T:
        """Return the next item of a pass."""
        self._check_pass(number)
        drawn = self._drawn or await self._amade(number)
        if isinstance(drawn, SharedAsyncIterator):
            return cast(T, await drawn.next())
        while (part := cast("SharedSyncIterator[T]", drawn).part()) is not None:
            for item in part:
                return item
        raise StopAsyncIteration

    async def _amade(self, number: int) -> SharedIterator[T]:
        """Call the factory, unless another task has: while it is awaited, other tasks wait."""
        with self._lock:
            making = self._making = self._making or anyio.Lock()
        async with making:
            self._check_pass(number)
            if self._drawn is not None:
                return self._drawn
            with self._lock:
                made = self.factory()
                if not isinstance(made, Awaitable):
                    return self._made(made, in_loop=True)
            found = await made
            with self._lock:
                self._check_pass(number)
                return self._made(found, in_loop=True)

    def _made(self, made: object, *, in_loop: bool) -> SharedIterator[T]:
        """Begin to share what the factory has returned."""
        drawn: SharedIterator[T]
        if isinstance(made, AsyncIterable) and in_loop:
            drawn = SharedAsyncIterator(made, *self.stride, self._resume, self._use())
        elif isinstance(made, Iterable):
            drawn = SharedSyncIterator(made, *self.stride, self._resume, self._use())
            self._cleanup = Cleanup(self, drawn.drop).not_at_exit()
        elif isinstance(made, AsyncIterable):
            raise _not_sync(f"its factory returns an async iterable ({type(made).__name__})")
        elif isinstance(made, Awaitable):
            getattr(made, "close", lambda: None)()
            raise _not_sync("its factory is a coroutine function")
        else:
            raise PlanTypeError(
                f"expected StreamDataset's factory to return an iterable, sync or async, got {type(made).__name__}"
            )
        self._drawn = drawn
        return drawn

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the options, for a worker in another process; a PlanError while it is being iterated."""
        if self._drawn is not None:
            raise PlanError("a StreamDataset that is being iterated can't be copied into another process: reset() it")
        return {**self.__dict__, "_lock": None, "_making": None, "_cleanup": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = ForkSafeLock()

    def __repr__(self) -> str:
        worker, of = self.worker
        return f"StreamDataset(worker {worker} of {of}, {self.strategy})"


def _sealed(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "sha256": digest(state)}


def _not_sync(why: str) -> PlanTypeError:
    return PlanTypeError(f"this StreamDataset can't be iterated with for: {why}; use async for")


class _DatasetPass(PartIterator[T]):
    """One iteration of a dataset: all share its iterator."""

    def __init__(self, dataset: StreamDataset[T], number: int) -> None:
        self._dataset = dataset
        self._number = number

    def _fetch_part(self) -> NoReturn:
        self._go_on(self._dataset.part(self._number))

    def __aiter__(self) -> _DatasetPass[T]:
        return self

    async def __anext__(self) -> T:
        with TrimmedTraceback():
            return await self._dataset.anext(self._number)


def _sync_stride(items: Iterable[T], worker: int, of: int, use: Use) -> Iterator[T]:
    iterator = use.iterated(items, iter)
    try:
        for at, item in enumerate(iterator):
            if at % of == worker:
                yield item
    finally:
        getattr(iterator, "close", lambda: None)()
        del items, iterator
        use.close()


async def _stride(made: Any, worker: int, of: int, use: Use) -> AsyncIterator[Any]:
    items = made if isinstance(made, AsyncIterable) else await made
    if not isinstance(items, AsyncIterable):
        for item in _sync_stride(items, worker, of, use):
            yield item
        return
    iterator, at = use.iterated(items, aiter), 0
    try:
        async for item in iterator:
            if at % of == worker:
                yield item
            at += 1
    finally:
        if (aclose := getattr(iterator, "aclose", None)) is not None:
            await aclose()
        del made, items, iterator
        use.close()
