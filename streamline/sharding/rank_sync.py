"""Rank synchronization in rounds: ranks exchange item counts over a store, a round ahead of the consumers.

In a round each rank writes how many items it has, and whether that was all. The last one to write computes how many
all may give, and stores the answer. A rank enters the next round when it has given these.

Failure: a `RanksError` for a store that can't be reached, a rank that is silent for longer than the timeout, and, at
once, a rank that has reported a failure. Cancellation: a key or two stay in the store.

The store may be torch.distributed's; its process groups, which belong to the trainer, aren't used.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, TypeVar, cast

import anyio

from streamline.core.forks import ForkSafeLock
from streamline.core.gate import wait_at_rest
from streamline.core.tasks import RankWait, Session
from streamline.core.text import some
from streamline.errors import RanksError
from streamline.sharding.ends import Agreement, EndsPolicy, Store
from streamline.sharding.ranks import Rank


def store_of_torch(rank: Rank) -> Store | None:
    """Return the store with which torch.distributed was initialised; None: it wasn't, or is of other ranks.

    Where given ranks aren't torch's, several processes might be the same rank: only a mesh says which.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    if not rank.members and (distributed.get_rank(), distributed.get_world_size()) != (rank.rank, rank.world_size):
        return None
    found = getattr(getattr(distributed, "distributed_c10d", None), "_get_default_store", None)
    return None if found is None else cast("Store | None", found())


def own_connection(store: Store) -> Store:
    """Return a store of the same keys, over a connection of its own where there can be one: no other user waits."""
    clone = getattr(store, "clone", None)
    if clone is None:
        return store
    try:
        return cast(Store, clone())
    except (RuntimeError, NotImplementedError):  # a kind of store that has no other connection
        return store


R = TypeVar("R")

LOOKS_S = (0.0005, 0.05)
"""Pauses between two looks at a store, the first and the longest: a wait on torch's can't be cancelled."""

SAID_CHARS = 2000
"""Of a failure, what the other ranks read."""

_opened: weakref.WeakKeyDictionary[Store, dict[tuple[str, int], int]] = weakref.WeakKeyDictionary()

_opening = ForkSafeLock()


class _RankFailedError(Exception):
    """A failure that another rank has reported: its number, and why."""


def far(policy: EndsPolicy, said: list[tuple[int, bool]]) -> tuple[int, bool]:
    """Return how many items all ranks may give, and whether that is all, by what each has, and whether that is all."""
    if policy == "pad":
        return max(have for have, _ in said), all(over for _, over in said)
    least = min(have for have, _ in said)
    return least, any(over for have, over in said if have == least)


class Rounds:
    """The rounds of one stream, this rank's `nth` of its kind. Used by one task; the store, in a thread."""

    def __init__(self, agreement: Agreement, session: Session, nth: int) -> None:
        assert agreement.store is not None
        self._store = own_connection(agreement.store)
        self._rank, self._ranks = agreement.rank.rank, agreement.rank.world_size
        self._ends = agreement.ends
        self._session = session
        self._wait = session.services.get(RankWait)
        self._key = f"streamline/{agreement.key}/{nth}"
        self._failed = f"{self._key}/failed"
        self._round = 0
        self._broken = False

    async def next(self, have: int, over: bool) -> tuple[int, bool]:
        """Say how many items this rank has; return how many all may give, and if that is all. Raises `RanksError`."""
        key, self._round = f"{self._key}/{self._round}", self._round + 1
        try:
            found = await self._call(partial(self._say, key, have, over))
            if found is None:
                found = await self._answer(key)
        except RanksError:
            self._broken = True
            raise
        return int(found[1:]), found[:1] == b"="

    async def fail(self, error: Exception) -> None:
        """Report that this rank has failed: else others wait until the timeout. If this fails, the error notes it."""
        if self._broken:
            return
        said = f"{self._rank} {type(error).__name__}: {error}"[:SAID_CHARS]
        try:
            await self._call(partial(self._store.set, self._failed, said))
        except RanksError as failure:
            error.add_note(f"the other ranks don't know of it: {failure}")

    def _say(self, key: str, have: int, over: bool) -> bytes | None:
        """Write this rank's number; the last rank to do so computes, stores and returns the answer."""
        store = self._store
        store.set(f"{key}/{self._rank}", f"{'=' if over else '+'}{have}")
        if store.add(f"{key}/said", 1) < self._ranks:
            return None
        said = [store.get(f"{key}/{rank}") for rank in range(self._ranks)]
        count, ended = far(self._ends.policy, [(int(one[1:]), one[:1] == b"=") for one in said])
        answer = f"{'=' if ended else '+'}{count}"
        store.set(f"{key}/agreed", answer)
        before = f"{self._key}/{self._round - 2}"  # all have read that: they are here
        for name in ("said", "agreed", *map(str, range(self._ranks))) if self._round > 1 else ():
            store.delete_key(f"{before}/{name}")
        return answer.encode()

    async def _answer(self, key: str) -> bytes:
        """Wait until the last rank has written its number."""
        pause, longest = LOOKS_S
        waited, said = 0.0, perf_counter()
        began, consumer = said, self._session.meters.consumer
        try:
            while (found := await self._call(partial(self._look, key))) is None:
                await wait_at_rest(anyio.sleep(pause))
                pause, now = min(2 * pause, longest), perf_counter()
                if (since := consumer.waiting_since) is not None:  # else the consumer is busy
                    waited += max(0.0, now - max(began, since))
                    consumer.ranks_wait_s += max(0.0, now - max(began, since))
                began = now
                if waited >= self._ends.timeout_s:
                    raise RanksError(self._silence_text(await self._call(partial(self._missing, key))))
                if perf_counter() - said >= 1:
                    said = perf_counter()
                    missing = await self._call(partial(self._missing, key))
                    self._wait.missing = f"rank {some(missing)} to say whether there is another item"
        finally:
            self._wait.missing = ""
        return found

    def _look(self, key: str) -> bytes | None:
        if self._store.check([f"{key}/agreed"]):
            return self._store.get(f"{key}/agreed")
        if self._store.check([self._failed]):
            raise _RankFailedError(self._store.get(self._failed).decode())
        return None

    def _missing(self, key: str) -> list[int]:
        return [rank for rank in range(self._ranks) if not self._store.check([f"{key}/{rank}"])]

    def _silence_text(self, missing: list[int]) -> str:
        return (
            f'ends="{self._ends.policy}": rank {some(missing)} of {self._ranks} has not said whether it has another '
            f"item; rank {self._rank} has waited {self._ends.timeout_s:g} s for it. Has it ended, left its loop, or "
            "opened other streams? All ranks open the same ones, in the same order"
        )

    async def _call(self, ask: Callable[[], R]) -> R:
        def look() -> R | Exception:
            try:
                return ask()
            except Exception as error:
                return error

        found = await wait_at_rest(self._session.threads.run(look))
        if isinstance(found, _RankFailedError):
            rank, _, said = str(found).partition(" ")
            raise RanksError(
                f'ends="{self._ends.policy}": rank {rank} of {self._ranks} has failed, so that rank {self._rank} '
                f"can't end together with it: {said}"
            )
        if isinstance(found, Exception):
            raise RanksError(
                f'ends="{self._ends.policy}": the store over which {self._ranks} ranks agree can\'t be asked: {found}'
            ) from found
        return found


def count_stream(agreement: Agreement) -> int:
    """Return how many streams of this kind a rank has opened before: all ranks open the same ones, in the same order.

    Called at the opening: whether a first item is pulled may differ between ranks.
    """
    with _opening:
        counts = _opened.setdefault(agreement.store, {}) if agreement.store is not None else {}
        key = agreement.key, agreement.rank.rank
        counts[key] = counts.get(key, -1) + 1
        return counts[key]
