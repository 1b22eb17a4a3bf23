"""One host's part of a running: the near end of the link between them, and what becomes of it when the host dies."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio

from streamline.border.crossing import failure_in, left_out_in
from streamline.border.link import Link, LinkClosed
from streamline.border.messages import (
    AtWork,
    Broken,
    Calling,
    Closed,
    Counts,
    Culprit,
    Ended,
    Hold,
    Items,
    Leave,
    LeftOut,
    Opened,
    Release,
    Taken,
)
from streamline.errors import ClosedError, WorkerDied
from streamline.gate import Phase, resting
from streamline.hosts.host import Host
from streamline.hosts.remote import RemoteWorker
from streamline.hosts.stuck import watch_stuck
from streamline.tasks import Tasks

__all__ = ["CLOSE_S", "Care", "Lane"]

CLOSE_S = 5.0
"""Seconds that user code in a host has to end when the stream is left; then the host is killed."""

logger = logging.getLogger("streamline.hosts")


@dataclass(frozen=True, kw_only=True)
class Care:
    """What is borne of a host.

    Attributes:
      max_restarts: deaths while a worker gives nothing in between.
      worker_timeout: seconds that the consumer waits for a worker that gives nothing before it is reported with its
        stack; None: for ever.
      replace_stuck: whether the host is then replaced.
    """

    max_restarts: int = 3
    worker_timeout: float | None = None
    replace_stuck: bool = False


class Lane:
    """The workers of a running that one host runs.

    Args:
      payload: what a host is given to begin with.
      care: how long its death, or its silence, is borne.
      own: whether the host ends with the running.

    Attributes:
      restarts: hosts that have taken the place of another.
    """

    def __init__(self, host: Host, payload: Any, tasks: Tasks, care: Care, *, own: bool) -> None:
        self.host = host
        self.restarts = 0
        self._care = care
        self._stuck: tuple[RemoteWorker[Any], float] | None = None
        self._payload = payload
        self._tasks = tasks
        self._gate = tasks.gate
        self._own = own
        self._link: Link | None = None
        self._workers: dict[int, RemoteWorker[Any]] = {}
        self._wanted: set[int] = set()
        self._turns: deque[RemoteWorker[Any]] = deque()  # who go on one after the other: one of them ends hosts
        self._mover = self._gate.mover(host.name)
        self._begun = False
        self._pause = 0
        self._failure: BaseException | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            Opened: lambda message: self._to(message, RemoteWorker.opened),
            Items: self._items,
            Calling: lambda message: self._to(message, RemoteWorker.calling),
            Ended: self._ended,
            Taken: self._taken,
            Closed: self._closed,
            LeftOut: self._left_out,
            AtWork: self._at_work,
            Counts: lambda message: None,
            Broken: self._broken,
        }

    def add(self, worker: RemoteWorker[Any]) -> None:
        """Let a worker run here, once it is started."""
        self._workers[worker.number] = worker

    def begin(self) -> None:
        """Start the host, if it doesn't run, and the task that listens to it."""
        if not self._begun:
            self._begun = True
            name = f"border of {self.host.name}"
            self._tasks.start(partial(self._gate.moves, name, self._serve), name, self._abandon)
            if (timeout_s := self._care.worker_timeout) is not None:
                replace = self._replace if self._care.replace_stuck else None
                watch = partial(watch_stuck, self.host, self._running, self._tasks, timeout_s, replace)
                self._tasks.start(watch, f"watch over {self.host.name}", lambda: None)

    def start(self, worker: RemoteWorker[Any]) -> None:
        """Start a worker."""
        self._wanted.add(worker.number)
        self.begin()
        if self._failure is not None:
            self._fail_all(self._failure)
        elif self._link is not None:
            worker.open(self._link)

    def _running(self) -> Collection[RemoteWorker[Any]]:
        return [worker for worker in self._workers.values() if worker.link is not None and not worker.over]

    def _replace(self, worker: RemoteWorker[Any], spent: float) -> None:
        """End the host of a worker that is stuck."""
        if self._link is not None:
            self._stuck = worker, spent
            self.host.kill(self._link)

    # The task ---------------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        self._gate.holds(self._hold, self._release)
        try:
            while True:
                await self._connected()
                try:
                    await self._listen()
                except LinkClosed:
                    await self._died()
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as failure:
            self._fail_all(failure)
        finally:
            self._gate.holds_no_more(self._hold)
            with anyio.CancelScope(shield=True):
                await self._leave()

    async def _connected(self) -> None:
        """Connect, and open the workers that are wanted."""
        link = self._link = self.host.connect(self._payload)
        self._tasks.start(link.flush, f"border of {self.host.name}, writing", lambda: None)
        if self._gate.holding:
            self._hold()
        for number in sorted(self._wanted):
            worker = self._workers[number]
            if not worker.over and worker not in self._turns:
                worker.open(link)
        self._next_turn()

    async def _listen(self) -> None:
        link = self._link
        assert link is not None
        while True:
            for message in await resting(link.receive()):
                if self._gate.phase is Phase.PAUSED and type(message) is Items:
                    await self._gate.passage()  # a call that went on too long; what comes before all rests is let in
                self._handlers[type(message)](message)
                del message

    async def _died(self) -> None:
        """Count the death against the workers that may be at fault, and let another host take over."""
        link, self._link = self._link, None
        assert link is not None
        link.close()
        self._rested()
        if self.host.closed:
            raise ClosedError("the pool of hosts that this stream's workers ran in was closed") from None
        lost = [worker for number in sorted(self._wanted) if (worker := self._workers.get(number)) is not None]
        for worker in lost:
            worker.lost()
        name = self.host.name
        fell = await self._tasks.threads.run(partial(self.host.fell, link))
        ended, _, crash = fell.partition("\n")
        stuck, self._stuck = self._stuck, None
        if stuck is not None:
            ended = f"{ended}: it was stuck for {stuck[1]:.3g} s"
        self.restarts += 1
        logger.warning("%s has ended with %s: another one takes its place%s", name, ended, crash and f"\n{crash}")
        for worker in lost:
            if worker.over:
                worker.gone()
        lost = [worker for worker in lost if not worker.over]
        suspects = [stuck[0]] if stuck is not None else [worker for worker in lost if worker.calls]
        if len(suspects) > 1:
            self._turns = deque(sorted(suspects, key=lambda worker: worker.channel.held))  # whom the merge waits for: 0
        else:
            self._turns.clear()
            for worker in suspects or lost:
                if worker.died(self._care.max_restarts):
                    self._give_up(worker, name, ended)
        for worker in lost:
            worker.calls.clear()

    def _next_turn(self) -> None:
        """Open the first one of those that take turns, if it isn't; it is over as soon as it gives something."""
        while self._turns and self._turns[0].over:
            self._turns.popleft()
        if self._turns and self._turns[0].link is None and self._link is not None:
            self._turns[0].open(self._link)

    def _turn_over(self, number: int) -> None:
        if self._turns and self._turns[0].number == number:
            self._turns.popleft()
            self._next_turn()

    def _give_up(self, worker: RemoteWorker[Any], name: str, ended: str) -> None:
        """Its hosts die: fail it, in the place of the call that they die of, if that is known."""
        if worker.culprit is None and len(worker.calls) == 1:
            ((stage, number),) = worker.calls
            message = f"{self._deaths(worker, name, ended)}: each time it had called {stage}, on the same item"
            shard = worker.site.shard
            worker.culprit = Culprit(stage, number, message, shard, self.host.number, ended)
        else:
            worker.fail(self._dead(worker, name, ended))
            worker.gone()

    async def _leave(self) -> None:
        """Let the host clean up behind this running; one that takes too long is ended."""
        link = self._link
        if link is not None:
            link.send(Leave())
            with anyio.move_on_after(CLOSE_S) as patience:
                while True:
                    try:
                        for message in await link.receive():
                            if type(message) in (Closed, LeftOut):
                                self._handlers[type(message)](message)
                    except LinkClosed:
                        break
            if patience.cancelled_caught:
                self.host.kill(link)
            link.close()
        for worker in self._workers.values():
            worker.gone()
        self._gate.moves_no_more(self._mover)
        if self._own:
            await self._tasks.threads.run(self.host.close)

    def _abandon(self) -> None:
        """There is no event loop any more to leave in peace."""
        link, self._link = self._link, None
        if link is not None:
            if self._own:
                self.host.kill(link)
            link.close()
        for worker in self._workers.values():
            worker.gone()
        if self._own:
            self.host.close()

    def _fail_all(self, failure: BaseException) -> None:
        self._failure = failure
        for worker in self._workers.values():
            worker.fail(failure)
            worker.gone()

    def _deaths(self, worker: RemoteWorker[Any], name: str, ended: str) -> str:
        site = worker.site
        return (
            f"the worker of shard {site.shard} of {site.num_shards} has lost its host {worker.deaths} times without "
            f"giving anything in between; the last, {name}, ended with {ended}"
        )

    def _dead(self, worker: RemoteWorker[Any], name: str, ended: str) -> WorkerDied:
        at = worker.position
        message = self._deaths(worker, name, ended) + (f". It stands behind {at}" if at else "")
        shard, process = worker.site.shard, self.host.number
        return WorkerDied(message, shard=shard, process=process, exit=ended, position=at)

    # Messages ---------------------------------------------------------------------------------------------------------

    def _to(self, message: Any, handle: Callable[[RemoteWorker[Any], Any], None]) -> None:
        if (worker := self._workers.get(message.worker)) is not None:
            handle(worker, message)

    def _items(self, message: Items) -> None:
        self._to(message, RemoteWorker.items)
        self._turn_over(message.worker)

    def _ended(self, message: Ended) -> None:
        self._to(message, RemoteWorker.ended)
        self._turn_over(message.worker)

    def _taken(self, message: Taken) -> None:
        worker = self._workers.get(message.worker)
        if worker is not None and worker.feeding is not None:
            worker.feeding.taken(message)

    def _closed(self, message: Closed) -> None:
        worker = self._workers.get(message.worker)
        if worker is not None and worker.calm() and self._link is not None:
            worker.open(self._link)
            return
        self._wanted.discard(message.worker)
        self._workers.pop(message.worker, None)
        if worker is not None:
            worker.gone()
        self._turn_over(message.worker)

    def _left_out(self, message: LeftOut) -> None:
        failure = left_out_in(message.failure)
        self._tasks.session.errors.happened(message.key, failure, message.epoch, message.number)

    def _broken(self, message: Broken) -> None:
        raise failure_in(message.failure)

    # Pauses -----------------------------------------------------------------------------------------------------------

    def _hold(self) -> None:
        if self._link is not None:
            self._pause += 1
            self._link.send(Hold(self._pause))
            if self._mover.rests:
                self._mover.wake()

    def _release(self) -> None:
        self._rested()
        if self._link is not None:
            self._link.send(Release())

    def _at_work(self, message: AtWork) -> None:
        if message.pause != self._pause:
            return
        if message.names:
            self._mover.name = f"{', '.join(message.names)} in {self.host.name}"
        else:
            self._rested()

    def _rested(self) -> None:
        if not self._mover.rests:
            self._mover.rest()
