"""Runs of several ranks in one host process: a worker that several of them need runs once, and each gets what it gives.

A run that may share says so in its `Hello`, with a digest of its plan. All such runs with the same digest are *peers*.
A peer that opens a worker joins the one that another peer has opened, if all is equal that decides on its items: plan,
shard, number of shards, epoch, what was skipped before, and the state. So peers that begin at the same place share,
and others never do. A worker keeps what it has given for those that come later, until that is more than may be in
flight to one peer (its share of `BYTES_ON_THE_WAY`, and `KEPT_TIMES` times its items); from then on it is joined no
more. One that has come to its end before that is kept, though the first peers have closed it.

The workers live in a `SharedRun`, served as every run is, whose link leads to its peers: a list is packed and written
once, and sent to each. Bounds hold for each peer: it gets as much as it has given credit for, and the rest waits here.
The worker is given credit for what all of them have consumed. So the fast ones wait for the slowest, which is at most
what may be in flight to it ahead; if it consumes nothing for `STALL_S` while another one has nothing left, it is
*detached*: its worker is closed, and it opens another one at its own state, which is exact, as after a death. A peer
that dies or leaves is left out at once. A shared worker pauses when all of its peers do; what it has counted and
skipped is reported to each.

Rejected: items passed on by the rank that has them, which costs its interpreter's time; and one memory that all may
write to: what a peer writes into its arrays, no other may see.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import anyio
from anyio.abc import TaskGroup

from streamline.backends.hosts.host_server import Spec, first_message, load_spec, serve
from streamline.backends.ipc.link import Link, LinkClosed
from streamline.backends.ipc.messages import (
    CallProgress,
    CloseWorker,
    Credit,
    FlushAt,
    Hello,
    HostReady,
    ItemsMessage,
    Message,
    MetricsUpdate,
    Observe,
    OpenWorker,
    PackedItems,
    PauseHost,
    PauseStatus,
    ProgressMessage,
    ResumeHost,
    Shutdown,
    SkippedItem,
    StacksRequest,
    TaskStacks,
    WorkerClosed,
    WorkerEnded,
    WorkerOpened,
)
from streamline.backends.ipc.pickling import Pickling, load
from streamline.backends.ipc.socket_link import Outgoing, SharedItems, SocketLink, outgoing
from streamline.core.duplicate_check import Beginning

if TYPE_CHECKING:
    from streamline.backends.network.connections import Introduction

STALL_S = 10.0
"""Seconds for which a peer may consume nothing while another one waits for it. In a training of several ranks that
share their data, none gets ahead by more than a step; much longer steps than this are not seen."""

KEPT_TIMES = 4
"""How many times the items that may be in flight to one peer are kept for those that come later: peers begin at about
the same time, and the stages after the merge take some items before the loop waits for another rank."""


async def serve_socket(sock: socket.socket, payload: int) -> None:
    """Serve a run in a host process that ranks share."""
    await serve_link(SocketLink(sock), payload)


async def serve_network(sock: socket.socket, payload: int, introduction: Introduction | None = None) -> None:
    """Likewise, for consumers on another machine, as `streamline.backends.remote.network_link.serve_network` does."""
    from streamline.backends.remote.network_link import load_here, network_link  # hosts on one machine don't need it

    await serve_link(await network_link(sock, introduction), payload, load_here)


async def serve_link(link: SocketLink, payload: int, load: Callable[[int], Spec] = load) -> None:
    """Serve a run over `link`, as a peer of others if it says so."""
    if (hello := await first_message(link, payload)) is None:
        return
    plan = _plans.get(hello.share)
    if plan is not None:
        os.close(payload)
    elif (spec := await load_spec(link, payload, load)) is None:
        return
    elif hello.share:
        plan = _plans[hello.share] = SharedPlan(hello.share, spec)
    else:
        await serve(link, spec)
        return
    await plan.serve(link)


class SharedPlan:
    """A plan that peers run in this process, loaded once.

    Attributes:
      runs: a new one begins where a shard is run already, from another place or in another epoch.
    """

    def __init__(self, share: bytes, spec: Spec) -> None:
        self.spec = spec
        self.runs: list[SharedRun] = []
        self._share = share
        self._peers = 0

    async def serve(self, link: Link) -> None:
        """Serve one peer until it hangs up."""
        self._peers += 1
        try:
            await RunPeer(link, self).serve()
        finally:
            self._peers -= 1
            if not self._peers:
                del _plans[self._share]


_plans: dict[bytes, SharedPlan] = {}


class SharedRun:
    """Workers of several peers, of each shard at most one; it ends with the last peer that has used it.

    Attributes:
      peers: that have opened a worker here.
      ended: set when all is cleaned up.
    """

    def __init__(self, plan: SharedPlan, hello: Hello, *, one_machine: bool) -> None:
        self.peers: list[RunPeer] = []
        self.workers: dict[int, _SharedWorker] = {}
        self.ended = anyio.Event()
        self.ending = False
        self.group: TaskGroup | None = None
        self._plan = plan
        self._link = _RunLink(self, one_machine=one_machine)
        self._numbers = count()
        self._paused: set[RunPeer] = set()
        self._pauses = 0
        self._holding = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            WorkerOpened: self._of_worker,
            ItemsMessage: self._of_worker,
            ProgressMessage: self._of_worker,
            WorkerEnded: self._of_worker,
            WorkerClosed: self._on_closed,
            SkippedItem: lambda message: self._of_shard(message.key[0], message),
            Beginning: lambda message: self._of_shard(message.shard, message),
            PauseStatus: self._pause_status,
            TaskStacks: self._stacks,
            MetricsUpdate: self._metrics,
            CallProgress: lambda message: self.workers[message.worker].pass_on(message),
        }
        self.post(Hello(hello.host, None, hello.observed, None))

    async def serve(self) -> None:
        """Run until `Shutdown`."""
        try:
            async with anyio.create_task_group() as group:
                self.group = group
                await serve(self._link, self._plan.spec)
                group.cancel_scope.cancel()
        except Exception:
            traceback.print_exc()
            for peer in self.peers:
                peer.link.close()  # it begins anew, in another process
        finally:
            self.ending = True
            self._plan.runs.remove(self)
            self.ended.set()

    def post(self, message: Message) -> None:
        self._link.put(message)

    def worker_of(self, shard: int) -> _SharedWorker | None:
        return next((worker for worker in self.workers.values() if worker.shard == shard), None)

    def frees(self, shard: int) -> bool:
        """Whether a worker of a shard can be opened here; what one that is over has kept is dropped for it."""
        worker = self.worker_of(shard)
        if worker is not None and worker.over and not worker.peers:
            del self.workers[worker.number]
            return True
        return worker is None

    def open(self, peer: RunPeer, message: OpenWorker) -> _SharedWorker:
        """Open a worker for its first peer."""
        number = next(self._numbers)
        worker = self.workers[number] = _SharedWorker(self, number, message)
        self.enter(peer)
        worker.join(peer, message)
        self.post(message._replace(worker=number))
        return worker

    def enter(self, peer: RunPeer) -> None:
        """Count a peer as one of this run."""
        if peer not in self.peers:
            self.peers.append(peer)
            peer.runs.append(self)
        self.observe()
        if self._holding:
            self._holding = False
            self.post(ResumeHost())

    async def leave(self, peer: RunPeer) -> None:
        """Let a peer go, which has left its workers; the last one waits for the end."""
        if self.peers == [peer] and not self.ending:
            self.ending = True
            self.post(Shutdown())
        if self.ending:
            await self.ended.wait()
        self.peers.remove(peer)
        self._paused.discard(peer)
        self._hold_if_all_pause()

    def observe(self) -> None:
        """Report spans if a peer wants them."""
        self.post(Observe(any(peer.observed for peer in self.peers)))

    # Pauses -----------------------------------------------------------------------------------------------------------

    def pause(self, peer: RunPeer) -> bool:
        """Pause for a peer; return whether `PauseStatus` follows: the run goes on until all of its peers pause."""
        self._paused.add(peer)
        self._hold_if_all_pause()
        return self._holding

    def resume(self, peer: RunPeer) -> None:
        self._paused.discard(peer)
        if self._holding:
            self._holding = False
            self.post(ResumeHost())

    def waits(self, peer: RunPeer) -> bool:
        """Whether a peer wants more items at the moment."""
        return peer not in self._paused

    def _hold_if_all_pause(self) -> None:
        if self.peers and not self._holding and not self.ending and self._paused.issuperset(self.peers):
            self._holding = True
            self._pauses += 1
            self.post(PauseHost(self._pauses))

    # What the run says ------------------------------------------------------------------------------------------------

    def deliver(self, message: Any) -> None:
        """Pass a message of the run on to the peers that it is for. In its event loop's thread, but for some kinds."""
        self._handlers[type(message)](message)

    def _of_shard(self, shard: int, message: Message) -> None:
        if (worker := self.worker_of(shard)) is not None:
            worker.put(message)

    def _of_worker(self, message: Any) -> None:
        if (worker := self.workers.get(message.worker)) is not None:  # else it was over, and another is in its place
            worker.put(self._once(message))

    def _on_closed(self, message: WorkerClosed) -> None:
        worker = self.workers.get(message.worker)
        if worker is not None and not worker.over:
            del self.workers[message.worker]
            worker.on_closed()

    def _pause_status(self, message: PauseStatus) -> None:
        if message.number == self._pauses and self._holding:
            for peer in self._paused:
                peer.at_work(self, message.names)

    def _stacks(self, message: TaskStacks) -> None:
        for peer in self.peers:
            peer.link.send(message)

    def push(self) -> None:
        """Write what peers' links have queued; from any thread."""
        for peer in list(self.peers):
            peer.link.push()

    def _once(self, message: Any) -> Message:
        """Return a message with its items written, once for all peers."""
        if not isinstance(message, ItemsMessage):
            return message  # type: ignore[no-any-return]
        assert isinstance(message.packed, Outgoing)
        return message._replace(
            packed=SharedItems(message.packed, self._link.new_classes(), one_machine=self._link.one_machine)
        )

    def _metrics(self, update: MetricsUpdate) -> None:
        """Tell each peer of its shards, and the first one of what was read: it was read once."""
        for at, peer in enumerate(list(self.peers)):
            shards = {worker.shard for worker in list(self.workers.values()) if peer in worker.peers}
            mine = update._replace(
                stages=tuple(stage for stage in update.stages if stage[0].shard in shards),
                channels=tuple(channel for channel in update.channels if channel.shard in shards),
                spans=tuple(span for span in update.spans if span[0][1] in shards),
                traffics=() if at else update.traffics,
            )
            if any(mine[:4]):
                peer.link.send_threadsafe(mine)


class _KeptMessage(NamedTuple):
    """A message for the peers of a worker, with so many items of `size` bytes."""

    message: Any
    items: int
    size: int


class _Share:
    """One peer's part in a worker, which has this number on its link.

    Attributes:
      at: the index of its next entry.
      out, out_bytes: items that were sent to it and not consumed.
      behind, behind_bytes: those, and the ones that wait here.
      acked: progress that has arrived.
      credits: how often it has consumed something.
    """

    __slots__ = ("acked", "at", "behind", "behind_bytes", "credits", "number", "out", "out_bytes")

    def __init__(self, message: OpenWorker) -> None:
        self.number = message.worker
        self.at = self.acked = self.credits = 0
        self.out = self.behind = message.in_flight
        self.out_bytes = self.behind_bytes = message.in_flight_bytes


class _MessageLog:
    """What a worker has given: entries from the one with index `first` on; all of them, as long as it is `whole`.

    Attributes:
      items, size: given in all.
      progress: how many messages of progress were given.
      ended: the worker has finished, or failed.
    """

    def __init__(self, *, whole: bool) -> None:
        self.whole = whole
        self.items = self.size = self.progress = 0
        self.ended = False
        self.first = 0
        self._entries: deque[_KeptMessage] = deque()

    def add(self, message: Any) -> _KeptMessage:
        packed = message.packed if isinstance(message, ItemsMessage) else None
        entry = _KeptMessage(message, *(0, 0) if packed is None else (packed.count, packed.nbytes))
        self.progress += isinstance(message, ProgressMessage)
        self.ended = self.ended or isinstance(message, WorkerEnded)
        self.items += entry.items
        self.size += entry.size
        self._entries.append(entry)
        return entry

    def entry(self, index: int) -> _KeptMessage | None:
        """Return an entry; None: it isn't there yet."""
        at = index - self.first
        return self._entries[at] if at < len(self._entries) else None

    def drop_until(self, index: int) -> None:
        """Drop the entries before this one."""
        while self.first < index:
            self._entries.popleft()
            self.first += 1


class _SharedWorker:
    """A worker, with this number in its run, and its peers.

    Attributes:
      closing: it is being closed, for its last peer.
      over: it is closed, but all that it has given is kept.
    """

    def __init__(self, run: SharedRun, number: int, opened: OpenWorker) -> None:
        self.peers: dict[RunPeer, _Share] = {}
        self.closing = self.over = False
        self._run = run
        self._opened = opened._replace(worker=number)
        self._capacity = opened.items
        self._log = _MessageLog(whole=not opened.track_calls and opened.crashing_call is None)
        self._held, self._held_bytes = opened.in_flight, opened.in_flight_bytes  # as the sender counts
        self._acked = 0  # messages of progress
        self._watched = False

    @property
    def number(self) -> int:
        return self._opened.worker

    @property
    def shard(self) -> int:
        return self._opened.shard

    def fits(self, peer: RunPeer, message: OpenWorker) -> bool:
        """Whether a peer that opens this gets just what the worker has given, and will give."""
        mine = self._opened
        return (
            self._log.whole
            and not self.closing
            and peer not in self.peers  # which reads it twice, apart
            and not message.track_calls
            and message.crashing_call is None
            and _place(message) == _place(mine)
            and (message.items, message.size) == (mine.items, mine.size)
        )

    def join(self, peer: RunPeer, message: OpenWorker) -> None:
        """Let a peer have all that the worker gives."""
        share = self.peers[peer] = _Share(message)
        share.behind += self._log.items
        share.behind_bytes += self._log.size
        self._deliver(peer, share)
        self._balance()

    def put(self, message: Any) -> None:
        """Send the peers a message of the worker, as far as they have room."""
        log = self._log
        if isinstance(message, WorkerOpened):
            self._capacity = message.items
        _, items, size = log.add(message)
        self._held += items
        self._held_bytes += size
        log.whole = log.whole and log.size <= self._opened.size and log.items <= KEPT_TIMES * self._capacity
        for peer, share in self.peers.items():
            share.behind += items
            share.behind_bytes += size
            self._deliver(peer, share)
        self._trim()
        self._watch()

    def pass_on(self, message: CallProgress) -> None:
        """Send a message at once; from any thread."""
        for peer, share in list(self.peers.items()):
            peer.link.send_threadsafe(message._replace(worker=share.number))

    def credit(self, peer: RunPeer, message: Credit) -> None:
        """Note that a peer has consumed items, or that progress has arrived."""
        share = self.peers[peer]
        if not message.items:
            share.acked += 1
            self._ack()
            return
        share.credits += 1
        share.out -= message.items
        share.out_bytes -= message.size
        share.behind -= message.items
        share.behind_bytes -= message.size
        self._deliver(peer, share)
        self._balance()

    def flush_at(self, message: FlushAt) -> None:
        """Tell the worker where lists may end; peers that began at the same place agree on that."""
        self._run.post(message._replace(worker=self.number))

    def leave(self, peer: RunPeer) -> bool:
        """Let a peer go; return whether it has gone. The last one goes when the worker is closed."""
        kept = self._log.ended and self._log.whole
        if len(self.peers) > 1 or kept:
            del self.peers[peer]
        if self.peers and (kept or peer not in self.peers):
            self._balance()
            self._ack()
            return True
        if not self.closing and not self.over:
            self.closing, self.over = not kept, kept
            self._run.post(CloseWorker(self.number))
        return kept

    def on_closed(self) -> None:
        """Note that it is closed, with all that it had opened."""
        for peer, share in self.peers.items():
            peer.on_left(share.number)

    def _deliver(self, peer: RunPeer, share: _Share) -> None:
        """Send a peer what it has room for."""
        while (entry := self._log.entry(share.at)) is not None:
            message, items, size = entry
            full = share.out + items > self._capacity or share.out_bytes + size > self._opened.size
            if items and share.out and full:
                return
            share.at += 1
            share.out += items
            share.out_bytes += size
            peer.link.send(message._replace(worker=share.number) if hasattr(message, "worker") else message)

    def _balance(self) -> None:
        """Give the worker credit for what all peers have consumed; less than none, if one has come that has more."""
        behind = max(share.behind for share in self.peers.values())
        behind_bytes = max(share.behind_bytes for share in self.peers.values())
        if behind != self._held:
            self._run.post(Credit(self.number, self._held - behind, self._held_bytes - behind_bytes))
            self._held, self._held_bytes = behind, behind_bytes
        self._trim()
        self._watch()

    def _ack(self) -> None:
        given = self._log.progress
        if self._acked < given <= min(share.acked for share in self.peers.values()):
            self._acked = given
            self._run.post(Credit(self.number, 0, 0))

    def _trim(self) -> None:
        """Drop what all peers were sent, unless later ones may come."""
        if not self._log.whole:
            self._log.drop_until(min(share.at for share in self.peers.values()))

    # Peers that lag ---------------------------------------------------------------------------------------------------

    @property
    def _waited_for(self) -> bool:
        """Whether a peer has nothing left, while others have, and what they have is all there will be for now."""
        hungry = any(not share.behind and self._run.waits(peer) for peer, share in self.peers.items())
        return hungry and not self._log.ended and any(share.behind for share in self.peers.values())

    def _watch(self) -> None:
        if not self._watched and self._waited_for and self._run.group is not None:
            self._watched = True
            self._run.group.start_soon(self._detach_stalled)

    async def _detach_stalled(self) -> None:
        """Detach peers that consume nothing for too long, as long as another one waits."""
        while self._waited_for:
            credits = {peer: share.credits for peer, share in self.peers.items() if share.behind}
            given = self._log.items
            await anyio.sleep(STALL_S)
            if self._waited_for and self._log.items == given:
                for peer, before in credits.items():
                    share = self.peers.get(peer)
                    if share is not None and share.behind and share.credits == before and self.leave(peer):
                        peer.on_left(share.number)
        self._watched = False


def _place(message: OpenWorker) -> tuple[Any, ...]:
    """Return what decides on the items of a worker of a plan."""
    return message.shard, message.num_shards, message.epoch, message.skipped, message.state


class RunPeer:
    """One run in this host."""

    def __init__(self, link: Link, plan: SharedPlan) -> None:
        self.link = link
        self.runs: list[SharedRun] = []
        self.observed = False
        self._plan = plan
        self._hello: Hello | None = None
        self._workers: dict[int, _SharedWorker] = {}
        self._group: TaskGroup | None = None
        self._pause = 0
        self._statuses: dict[SharedRun, tuple[str, ...] | None] = {}  # in a pause; None: not known yet
        self._handlers: dict[type, Callable[[Any], None]] = {
            Hello: self._on_hello,
            Observe: self._on_observe,
            OpenWorker: self._open,
            Credit: self._credit,
            FlushAt: self._flush_at,
            CloseWorker: self._close,
            PauseHost: self._begin_pause,
            ResumeHost: self._end_pause,
            StacksRequest: self._stacks,
        }

    async def serve(self) -> None:
        """Serve it until it hangs up; then, the runs that it has begun, until no other needs them."""
        async with anyio.create_task_group() as self._group:
            self._group.start_soon(self.link.flush)
            await self._listen()
            for worker in list(self._workers.values()):
                worker.leave(self)
            for run in list(self.runs):
                await run.leave(self)
            await self.link.drain()
            self.link.close()

    async def _listen(self) -> None:
        try:
            while True:
                for message in await self.link.receive():
                    if isinstance(message, Shutdown):
                        return
                    self._handlers[type(message)](message)
        except LinkClosed:
            return
        except Exception:  # the runs that this has begun may serve others
            traceback.print_exc()

    def _on_hello(self, hello: Hello) -> None:
        self._hello = hello
        self.link.host = hello.host.partition(",")[0]
        self.observed = hello.observed
        if hello.answer:
            self.link.send(HostReady())

    def _on_observe(self, message: Observe) -> None:
        self.observed = message.observed
        for run in self.runs:
            run.observe()

    # Workers ----------------------------------------------------------------------------------------------------------

    def _open(self, message: OpenWorker) -> None:
        runs = [run for run in self._plan.runs if not run.ending]
        for run in runs:
            worker = run.worker_of(message.shard)
            if worker is not None and worker.fits(self, message):
                run.enter(self)
                worker.join(self, message)
                self._workers[message.worker] = worker
                return
        run = next((run for run in runs if run.frees(message.shard)), None) or self._new_run()
        self._workers[message.worker] = run.open(self, message)

    def _new_run(self) -> SharedRun:
        assert self._hello is not None
        assert self._group is not None
        run = SharedRun(self._plan, self._hello, one_machine=self.link.one_machine)
        self._plan.runs.append(run)
        self._group.start_soon(run.serve)
        return run

    def _credit(self, message: Credit) -> None:
        if (worker := self._workers.get(message.worker)) is not None:
            worker.credit(self, message)

    def _flush_at(self, message: FlushAt) -> None:
        if (worker := self._workers.get(message.worker)) is not None:
            worker.flush_at(message)

    def _close(self, message: CloseWorker) -> None:
        worker = self._workers.get(message.worker)
        if worker is None or worker.leave(self):  # the former: it was detached just now
            self.on_left(message.worker)

    def on_left(self, number: int) -> None:
        """Tell it that a worker of its is closed; if it didn't ask for that, it opens it anew."""
        self._workers.pop(number, None)
        self.link.send(WorkerClosed(number))

    # Pauses, stacks ---------------------------------------------------------------------------------------------------

    def _begin_pause(self, message: PauseHost) -> None:
        self._pause = message.number
        self._statuses = {run: None for run in self.runs if run.pause(self)}
        self._send_pause_status()

    def at_work(self, run: SharedRun, names: tuple[str, ...]) -> None:
        """Take note of what isn't at rest in one of its runs."""
        if run in self._statuses:
            self._statuses[run] = names
            self._send_pause_status()

    def _send_pause_status(self) -> None:
        if None not in self._statuses.values():
            names = [name for names in self._statuses.values() for name in names or ()]
            self.link.send(PauseStatus(self._pause, tuple(names)))

    def _end_pause(self, _: ResumeHost) -> None:
        self._statuses.clear()
        for run in self.runs:
            run.resume(self)

    def _stacks(self, message: StacksRequest) -> None:
        for run in self.runs:
            run.post(message)


class _RunLink(Link):
    """The host's end of the link between a shared run and its peers."""

    copies: ClassVar[bool] = True

    def __init__(self, run: SharedRun, *, one_machine: bool) -> None:
        self.one_machine = one_machine
        self._run = run
        self._pickling = Pickling()
        self._messages: list[Message] = []
        self._arrived = anyio.Event()

    def put(self, message: Message) -> None:
        """Let the run receive a message."""
        self._messages.append(message)
        self._arrived.set()

    def new_classes(self) -> Any:
        """Return the definitions of classes that were packed since the last call."""
        return self._pickling.fresh()

    def pack(self, items: Sequence[Any]) -> PackedItems:
        return outgoing(self._pickling, items)

    def unpack(self, packed: PackedItems) -> list[Any]:
        raise AssertionError("a live source is read by one rank, and shared with none")

    def send(self, message: Message) -> None:
        self._run.deliver(message)

    def push(self) -> None:
        self._run.push()

    async def receive(self) -> Sequence[Message]:
        while not self._messages:
            self._arrived = anyio.Event()
            await self._arrived.wait()
        messages, self._messages = self._messages, []
        return messages

    async def flush(self) -> None:
        """Nothing to do: peers' links write."""

    async def drain(self) -> None:
        """Nothing to do: peers' links write."""

    def close(self) -> None:
        self._messages.clear()
