"""A backend that copies: hosts are tasks of the stream's own event loop, and their links pickle all messages.

Without a process and in a reproducible order, it shows what worker processes show: what doesn't pickle, what is shared
and must not be, and what becomes of a stream when a host dies at any moment (`HostDeath`).
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import anyio

from streamline.backends.base import Workers
from streamline.backends.hosts.connection import Hosting
from streamline.backends.hosts.host import Host, HostExit
from streamline.backends.hosts.host_server import Spec, serve
from streamline.backends.hosts.placement import Elasticity
from streamline.backends.hosts.pool import HostedWorkers
from streamline.backends.hosts.restarts import CrashTracking
from streamline.backends.ipc.link import Link, LinkClosed, PipeLink
from streamline.backends.ipc.messages import Message, PackedItems, PackingError
from streamline.core.flow import Site
from streamline.core.tasks import Tasks
from streamline.errors import HostError
from streamline.plan.plan import Plan


class HostDeath(NamedTuple):
    """When a host dies.

    Attributes:
      link: number of its link, among all that the run makes.
      sent: messages that it gets before it dies; None: all.
      received: messages from it that arrive; None: all.
    """

    link: int
    sent: int | None = None
    received: int | None = None


class HostDeaths:
    """When the hosts of one run die.

    Attributes:
      links: that were made so far.
      sent: messages that went to each of them, likewise `received`.
      happened: deaths so far.
      counts: whether a death counts against what ran.

    Args:
      late: how many turns of other tasks each link takes, in order.
    """

    def __init__(self, cuts: Sequence[HostDeath] = (), *, late: Sequence[int] = (), counts: bool = True) -> None:
        self.counts = counts
        self._late = deque(late)
        self.links = self.happened = 0
        self.sent: list[int] = []
        self.received: list[int] = []
        self._cuts = {cut.link: cut for cut in cuts}

    def late(self) -> int:
        """Return how many turns of other tasks the next link takes."""
        return self._late.popleft() if self._late else 0

    def cut(self) -> HostDeath:
        """Return when the next link is cut."""
        self.links += 1
        self.sent.append(0)
        self.received.append(0)
        return self._cuts.get(self.links - 1, HostDeath(self.links - 1))


class CopiedItems(NamedTuple):
    """Items as bytes."""

    data: bytes
    count: int  # type: ignore[assignment]

    @property
    def nbytes(self) -> int:
        return len(self.data)

    @property
    def copied_bytes(self) -> int:
        return len(self.data)

    @property
    def slabs(self) -> tuple[int, int]:
        return 0, 0


class CopyLink(PipeLink):
    """One end of a pipe through which nothing goes but copies."""

    copies: ClassVar[bool] = True

    def __init__(self, lock: Any) -> None:
        super().__init__(lock)
        self.allow_send: Callable[[], bool] = lambda: True
        self.allow_receive: Callable[[], bool] = lambda: True

    def pack(self, items: Sequence[Any]) -> PackedItems:
        try:
            return CopiedItems(pickle.dumps(list(items), 5), len(items))
        except Exception:
            for index, item in enumerate(items):
                try:
                    pickle.dumps(item, 5)
                except Exception as error:
                    raise PackingError(index, type(item).__name__) from error
            raise

    def unpack(self, packed: PackedItems) -> list[Any]:
        assert isinstance(packed, CopiedItems)
        items: list[Any] = pickle.loads(packed.data)
        return items

    def send(self, message: Message) -> None:
        copied: Message = pickle.loads(pickle.dumps(message, 5))
        if self.allow_send():
            super().send(copied)
        else:
            self.close()

    async def receive(self) -> Sequence[Message]:
        allowed: list[Message] = []
        for message in await super().receive():
            if not self.allow_receive():
                self.close()
                break
            allowed.append(message)
        if not allowed:
            raise LinkClosed
        return allowed


class _TaskHost(Host):
    """A host that is a task of the run's own."""

    closed = False

    def __init__(self, number: int, tasks: Tasks, deaths: HostDeaths) -> None:
        self.number = number
        self._tasks = tasks
        self._deaths = deaths

    @property
    def name(self) -> str:
        return f"copying host {self.number}"

    async def connect(self, payload: Spec, answer: Callable[[Any], Any] | None = None) -> Link:
        for _ in range(self._deaths.late()):
            await anyio.lowlevel.checkpoint()
        lock = threading.Lock()
        near, far = CopyLink(lock), CopyLink(lock)
        near.other, far.other = far, near
        cut = self._deaths.cut()
        near.allow_send = partial(self._allow, self._deaths.sent, cut.link, cut.sent)
        near.allow_receive = partial(self._allow, self._deaths.received, cut.link, cut.received)

        async def run() -> None:
            with anyio.CancelScope(shield=True):  # as elsewhere: it ends when the run says so
                await serve(far, payload, answer)

        start = partial(self._tasks.start, run, f"copying host {self.number}", far.close)
        Context().run(start)  # it doesn't take part in this side's gate
        return near

    def _allow(self, counts: list[int], number: int, limit: int | None) -> bool:
        self._deaths.happened += counts[number] == limit
        counts[number] += 1
        return limit is None or counts[number] <= limit

    def exit_reason(self, link: Link) -> HostExit:
        return HostExit("a cut", counts=self._deaths.counts)

    def kill(self, link: Link) -> None:
        link.close()

    def stacks(self) -> str:
        return "a task"

    def leave(self) -> None:
        """It ends with its links."""

    def close(self) -> None:
        """Likewise."""


def _missing(_: Sequence[Host], there: int, least: int) -> HostError:
    return HostError(f"{there} of {least}")


@dataclass(frozen=True)
class Copying:
    """Worker w runs in host w mod n, and all that comes from there is a copy.

    Args:
      n: hosts, at least 1.
      cuts: when hosts die, in every run.
      max_restarts: as of `Processes`.
      runs: the deaths in each run so far.
      least: hosts that there must be, which come and go: links take their time, as in `HostDeaths`, and deaths count
        against nothing, unless `counts`; `timeout_s` as in `Elasticity`. None: those that die are replaced.
    """

    n: int
    cuts: tuple[HostDeath, ...] = ()
    max_restarts: int = 3
    least: int | None = field(default=None, kw_only=True)
    late: tuple[int, ...] = field(default=(), kw_only=True)
    counts: bool = field(default=False, kw_only=True)
    timeout_s: float = field(default=60.0, kw_only=True)
    runs: list[HostDeaths] = field(default_factory=list, init=False, compare=False, repr=False)

    def check(self, plan: Plan) -> None:
        """Every plan runs here."""

    def begin(self, plan: Plan, site: Site, workers: int) -> Workers:
        session = site.tasks.session
        spec = Spec.of(plan, session)
        deaths = HostDeaths(self.cuts, late=self.late, counts=self.least is None or self.counts)
        elasticity = None if self.least is None else Elasticity(self.least, self.timeout_s, _missing)
        self.runs.append(deaths)
        hosts = [_TaskHost(number, site.tasks, deaths) for number in range(min(self.n, workers))]
        hosting = Hosting(spec, CrashTracking(max_restarts=self.max_restarts), own=True)
        return HostedWorkers(plan, site, hosts, workers, hosting, elasticity=elasticity)
