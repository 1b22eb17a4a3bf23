"""The last flow of a rank that ends together with others: fewer items than there are, or some of them again.

A rank pads with its first items, in a pass of its own from the beginning on, as often as it takes: they can be read
again after a resume, which the last ones couldn't. State: the upstream's; how many items are left, where that is known;
while padding, how many items were padded, and the state in that pass. So a resume gives as many items as were left.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from streamline.core.choices import Branch
from streamline.core.flow import Chunk, Flow, Lists, ListsFlow, Opener, Site, StageContext
from streamline.core.state import Over, State, States, Tally, Tree, trimmed
from streamline.core.tasks import Session
from streamline.core.text import quantity
from streamline.errors import RanksError
from streamline.sharding.ends import NAME, Agreement, EndsReport, nothing_to_pad
from streamline.sharding.rank_sync import Rounds, count_stream

logger = logging.getLogger("streamline.ending")  # as the docs call it

T = TypeVar("T")


def ending(opener: Opener[T], site: Site, agreement: Agreement, state: Tree | None) -> Flow[T]:
    """Return the flow that `opener` opens at `state`, ended as the ranks have agreed."""
    session = site.tasks.session
    flow, context = opener(state), StageContext(site)
    run = _Ending(opener, flow, agreement, session, context)
    return ListsFlow(run.begin(flow.state), run.lists(), context, flow)


class Padded(State):
    """After a padded item: the state at the end of the rank's own items, and the one in the pass for padding."""

    __slots__ = ("again", "end", "own")

    def __init__(self, own: Tree, end: State, again: State) -> None:
        self.own, self.end, self.again = own, end, again

    def json(self, until: State | None = None) -> Tree:
        return {**self.end.json(), NAME: {**self.own, "again": self.again.json()}}

    def tally(self, found: Tally) -> None:
        self.end.tally(found)

    def where(self) -> str:
        return self.again.where()

    def forks(self) -> Iterator[Branch]:
        yield from self.end.forks()
        yield from self.again.forks()


def padded_in(state: State) -> int:
    """Return how many items were padded up to a state of the last flow."""
    own = state.own if isinstance(state, Padded) or (isinstance(state, Over) and state.name == NAME) else {}
    return int(own.get("padded", 0))


@dataclass(frozen=True)
class _Leaving:
    """States with how many items are left after each."""

    own: Tree
    states: States

    def __getitem__(self, index: int, /) -> State:
        return Over(NAME, {**self.own, "left": self.own["left"] - index - 1}, self.states[index])

    def trimmed(self, first: int, count: int) -> States:
        return _Leaving({**self.own, "left": self.own["left"] - first}, trimmed(self.states, first, count))


@dataclass(frozen=True)
class _Padding:
    """States after padded items."""

    own: Tree
    end: State
    states: States

    def __getitem__(self, index: int, /) -> State:
        own = {**self.own, "padded": self.own["padded"] + index + 1}
        if "left" in own:
            own["left"] -= index + 1
        return Padded(own, self.end, self.states[index])


class _Ending:
    def __init__(
        self, opener: Opener[Any], flow: Flow[Any], agreement: Agreement, session: Session, context: StageContext
    ) -> None:
        self._opener, self._flow, self._agreement = opener, flow, agreement
        self._session, self._context = session, context
        self._left = agreement.left
        self._over = False
        self._nth = count_stream(agreement)
        self._padded = agreement.padded
        self._begin_again = agreement.again
        self._pass: Flow[Any] | None = None
        self._seen = bool(agreement.again)

    def begin(self, upstream: State) -> State:
        """Return the state before the first item."""
        if self._begin_again is not None:
            return Over(NAME, {**self._own(), "padded": self._padded, "again": self._begin_again}, upstream)
        return upstream if self._left is None else Over(NAME, self._own(), upstream)

    async def lists(self) -> Lists[Any]:
        agreement = self._agreement
        rounds = None if agreement.store is None else Rounds(agreement, self._session, self._nth)
        held: Chunk[Any] | None = None
        given = have = 0
        may, last = (0, False) if self._left is None else (self._left, True)
        try:
            while True:
                if held is None and not self._over and not (last and given >= may):
                    held = await self._pull(self._context.max_items if rounds is not None else may - given)
                    have += 0 if held is None else len(held.items)
                if held is not None and not held.items:
                    yield self._chunk(held)  # progress
                    held = None
                    continue
                if given >= may and not last and rounds is not None:
                    may, last = await rounds.next(have, self._over)
                if given >= may:
                    break
                if held is not None:
                    chunk, held, room = held, None, may - given
                    if len(chunk.items) > room:
                        chunk, held = chunk.part(0, room), chunk.part(room, len(chunk.items))
                    chunk = self._chunk(chunk)
                elif agreement.ends.policy == "pad":
                    chunk = await self._again(may - given)
                else:
                    raise RanksError(self._too_few(may - given))
                given += len(chunk.items)
                have = max(have, given)
                yield chunk
                del chunk  # the reader has it: items are not kept while the next are made
        except Exception as error:
            if rounds is not None:
                await rounds.fail(error)
            raise
        finally:
            if self._pass is not None:
                await self._pass.aclose()
        self._tell(agreement.spare if rounds is None else have - given)

    async def _pull(self, want: int) -> Chunk[Any] | None:
        chunk = await self._flow.pull(min(want, self._context.max_items))
        self._over = chunk is None
        return chunk

    def _own(self) -> Tree:
        own: Tree = {"policy": self._agreement.ends.policy}
        if self._left is not None:
            own |= {"left": self._left, "spare": self._agreement.spare}
        return own

    def _chunk(self, chunk: Chunk[Any]) -> Chunk[Any]:
        """Return items with the states that they have here."""
        if self._left is None:
            return chunk
        own, self._left = self._own(), self._left - len(chunk.items)
        after = None if chunk.progress is None else Over(NAME, self._own(), chunk.progress)
        return Chunk(chunk.items, _Leaving(own, chunk.states), after)

    async def _again(self, most: int) -> Chunk[Any]:
        """Return 1 to `most` items of the pass for padding; after its end, of the next one."""
        while True:
            if self._pass is None:
                self._pass, self._begin_again = self._opener(self._begin_again), None
            chunk = await self._pass.pull(min(most, self._context.max_items))
            if chunk is None:
                await self._pass.aclose()
                self._pass = None
                if not self._seen:
                    raise RanksError(nothing_to_pad(self._agreement.rank.rank, self._agreement.rank.world_size))
            elif chunk.items:
                self._seen = True
                own = {**self._own(), "padded": self._padded}
                self._padded += len(chunk.items)
                if self._left is not None:
                    self._left -= len(chunk.items)
                return Chunk(chunk.items, _Padding(own, self._flow.state, chunk.states))

    def _too_few(self, missing: int) -> str:
        return (
            f"{missing:,} items fewer came than were counted beforehand, by which "
            f"{self._agreement.rank.world_size} ranks are to end together: has the source fewer than it says? "
            'ends="allow" lets each rank end by itself'
        )

    def _tell(self, spare: int) -> None:
        """Log and report the items dropped or padded on this rank."""
        rank, more = self._agreement.rank, self._left is None and not self._over
        epoch = self._context.site.epoch[0]
        policy = self._agreement.ends.policy
        report = EndsReport(policy=policy, agreed="on the way", dropped=spare, more=more)
        self._session.services.add(EndsReport, report)
        which = f"rank {rank.rank} of {rank.world_size}"
        if spare:
            logger.warning(
                'ends="drop", epoch %d: %s drops %s%s: another rank has fewer',
                epoch, which, quantity(spare, "surplus item"), " or more" if more else "",
            )  # fmt: skip
        elif self._padded:
            logger.info('ends="pad", epoch %d: %s gave %s again', epoch, which, quantity(self._padded, "item"))
