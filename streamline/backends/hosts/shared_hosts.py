"""Hosts that the processes of one job on one machine share: one of them owns the hosts, the others are its guests.

The first process that needs a host listens at the job's socket (`streamline.backends.hosts.job`), and starts hosts as
any of them asks for one; so there are as many as the backend says, whatever the number of ranks. A guest proves that it
knows the key, sends its plan, and gets the consumer's end of a link: a descriptor. Items, credits and states then pass
between its host and it, as between the owner's hosts and the owner. Over the connection to the owner go questions of
user code, deaths and stacks.

The owner's end, at whatever moment, ends its hosts: to a guest that is the death of a host, which counts against
nothing. The first guest that connects again finds that nothing listens, and owns new ones; workers continue after the
last item that arrived. An owner whose own runs are over keeps its hosts for its guests, as long as it lives.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any, ClassVar, NamedTuple, Protocol

import anyio

from streamline.backends.hosts.host import Host, HostExit, SocketHost
from streamline.backends.hosts.job import JobDirectory, remove_dead_jobs
from streamline.backends.hosts.plan_shipping import HasFileno, Shipped
from streamline.backends.hosts.process_env import ProcessEnv, process_env
from streamline.backends.hosts.stdio_relay import Answer, Relay, reply_to
from streamline.backends.ipc.control_connection import ControlConnection
from streamline.backends.ipc.link import Link
from streamline.backends.network.connections import Introduction, Listener, UnreachableError
from streamline.backends.network.handshake import PeerHello
from streamline.core.cleanup import Cleanup
from streamline.core.counters import HostKind, host_label
from streamline.core.forks import ForkSafeLock, disowned_in_copies
from streamline.core.threads import bring, brought, start_thread
from streamline.errors import ClosedError, HostError

logger = logging.getLogger("streamline.hosts")

JOIN_S = 60.0
"""Seconds to wait for an owner that doesn't answer: it may be stopped, or import something that holds the GIL."""

ANSWER_S = 10.0
"""Seconds that a guest waits for its owner to say why a host has ended, or what it does: an owner may be stopped."""


class Sharing(Protocol):
    """A backend whose hosts can be shared."""

    isolates: ClassVar[bool]
    """Whether there is room for one more host, for a rank whose workers have died."""

    @property
    def sharing_kind(self) -> str:
        """The same for backends that can share hosts."""

    def host(self, number: int) -> Host: ...

    def carried(self, shipped: Shipped) -> Any:
        """Return what hosts get of a plan that was shipped."""


# What a guest and its owner say to each other -------------------------------------------------------------------------
class _Reach(NamedTuple):
    """Ask for a link to a host; the plan's descriptor comes with it."""

    link: int
    host: int
    nbytes: int
    env: ProcessEnv


class _Ask(NamedTuple):
    """Ask why the host of a link has ended ("exit"), for its stacks ("stacks"), or to kill it ("kill")."""

    link: int
    number: int
    what: str


class _Reached(NamedTuple):
    """The answer to `_Reach`: the link's descriptor comes with it, unless it has failed."""

    link: int
    pid: int
    node: str
    failure: HostError | None = None


class _Told(NamedTuple):
    """The answer to an `_Ask` of this number."""

    number: int
    result: Any


class _Question(NamedTuple):
    """A question of user code, and, the other way, the reply to it."""

    link: int
    body: bytes


class _OwnerGone(Exception):  # noqa: N818 - another one takes its place
    """The owner has ended."""


class _ReachedHost(NamedTuple):
    """The host of a link, as it is known where it was asked for.

    Attributes:
      of: the owner, if this process is that, or the guest.
      process: the owner's, or the number of a guest's link.
      pid: returns it; 0: it isn't known yet: of a process elsewhere, its agent says it, and its link may come before.
    """

    of: HostOwner | HostGuest
    process: Any
    pid: Callable[[], int]
    node: str


# The owner ------------------------------------------------------------------------------------------------------------
class HostOwner:
    """This process owns the hosts, and listens for others.

    Args:
      unused: called, in any thread, when a guest has left.
    """

    def __init__(self, sharing: Sharing, job: JobDirectory, unused: Callable[[], object]) -> None:
        self.guests: set[_GuestSession] = set()
        self.sharing = sharing
        self._job = job
        self._unused = unused
        self._lock = threading.RLock()
        self._hosts: dict[int, SocketHost[Any]] = {}
        self._closed = False
        self._listener = Listener(os.fspath(job.socket), job.new_key(), self._came)
        self._cleanup = Cleanup(self, _remove, job, os.getpid())  # a guest may leave as this process exits
        disowned_in_copies(self)

    @property
    def gone(self) -> bool:
        return self._closed

    def disown(self) -> None:
        self._lock = threading.RLock()

    def host(self, number: int) -> SocketHost[Any]:
        """Return a host; it starts at its first link."""
        with self._lock:
            if self._closed:
                raise _OwnerGone
            if (host := self._hosts.get(number)) is None:
                made = self.sharing.host(number)
                assert isinstance(made, SocketHost)
                host = self._hosts[number] = made
                host.start()
            return host

    async def reach(
        self, number: int, payload: Any, answer: Answer | Relay | None, env: ProcessEnv
    ) -> tuple[socket.socket, _ReachedHost]:
        """Return the consumer's end of a new link to a host, for a run of this process or of a guest."""
        host = self.host(number)
        try:
            sock, process = await host.reach(payload, answer, env)
        except ClosedError:
            raise _OwnerGone from None
        return sock, _ReachedHost(self, (host, process), lambda: int(process.pid), host.node)

    def exit_of(self, process: Any) -> HostExit:
        """Return how a host has ended; blocks."""
        host, its = process
        exit_reason: HostExit = host.exit_of(its)
        return exit_reason

    def kill(self, process: Any) -> None:
        _, its = process
        its.kill()

    def stacks(self, process: Any) -> str:
        host, _ = process
        stacks: str = host.stacks()
        return stacks

    def resident_bytes(self, number: int) -> int:
        host = self._hosts.get(number)
        return 0 if host is None else host.resident_bytes()

    def close_if_unused(self) -> bool:
        """End the hosts, and leave nothing in the job's directory, unless there are guests; return whether it ended.

        Blocks.
        """
        with self._job.locked():
            with self._lock:
                if self.guests or self._closed:
                    return self._closed
                self._closed = True
                hosts = list(self._hosts.values())
            self._listener.close()  # one that has just connected reads the end, and tries again
            self._job.remove()
            self._cleanup.detach()
        for host in hosts:
            host.leave()
        for host in hosts:
            host.close()
        return True

    def _came(self, sock: socket.socket, hello: PeerHello, _: str) -> None:
        """Take a guest whose handshake is done."""
        session = _GuestSession(self, sock, hello)
        with self._lock:
            taken = not self._closed and hello.role == "node"
            if taken:
                self.guests.add(session)
        if not taken:  # if this process has just ended its hosts, it tries again
            sock.close()
            return
        logger.debug("process %d shares the hosts of this one", hello.pid)
        session.start()

    def left(self, session: _GuestSession) -> None:
        """Note that a guest has left."""
        with self._lock:
            self.guests.discard(session)
        self._unused()


def _remove(job: JobDirectory, owner: int) -> None:
    """Leave nothing in the job's directory, at the owner's exit: from now on, others find no owner."""
    if os.getpid() == owner:
        with job.locked():
            job.remove()


class _GuestSession:
    """A guest, seen from the owner. One thread reads what it says; what waits has one of its own."""

    def __init__(self, owner: HostOwner, sock: socket.socket, hello: PeerHello) -> None:
        self._owner = owner
        self._connection = ControlConnection(sock)
        self._name = f"streamline guest {hello.pid}"
        self._places: dict[int, _ReachedHost] = {}
        self._relays: dict[int, Relay] = {}
        disowned_in_copies(self)

    def disown(self) -> None:
        """Close the connection in a fork of this process: its end must have one holder."""
        self._connection.sock.close()

    def start(self) -> None:
        start_thread(threading.Thread(target=self._listen, name=self._name, daemon=True))

    def _listen(self) -> None:
        try:
            while True:
                message = self._connection.receive()
                if isinstance(message, _Reach):
                    shipped = Shipped(self._connection.descriptors.popleft(), message.nbytes)
                    self._apart(partial(self._reach, message, shipped))
                elif isinstance(message, _Ask):
                    self._apart(partial(self._tell, message))
                else:
                    self._reply(message)
        except EOFError:
            logger.debug("%s has left", self._name)
        finally:
            self._connection.hang_up()
            self._connection.close()
            self._owner.left(self)

    def _apart(self, work: Callable[[], object]) -> None:
        start_thread(threading.Thread(target=work, name=self._name, daemon=True))

    def _reach(self, message: _Reach, shipped: Shipped) -> None:
        payload = self._owner.sharing.carried(shipped)
        relay = Relay(partial(self._ask, message.link), payload.close)
        self._relays[message.link] = relay
        reach = self._owner.reach
        try:
            sock, place = anyio.run(reach, message.host, payload, relay, message.env)
        except _OwnerGone:
            self._connection.hang_up()
        except Exception as error:
            failure = error if isinstance(error, HostError) else HostError(f"{type(error).__name__}: {error}")
            self._connection.send(_Reached(message.link, 0, "", failure))
        else:
            with sock:
                self._places[message.link] = place
                self._connection.send(_Reached(message.link, place.pid(), place.node), sock.fileno())

    def _tell(self, message: _Ask) -> None:
        owner, result = self._owner, None
        if (place := self._places.get(message.link)) is not None:
            ask: Any = {"exit": owner.exit_of, "kill": owner.kill, "stacks": owner.stacks}[message.what]
            result = ask(place.process)
        self._connection.send(_Told(message.number, result))

    def _ask(self, link: int, body: bytes) -> None:
        self._connection.send(_Question(link, body))

    def _reply(self, message: _Question) -> None:
        with suppress(OSError):  # the host has died meanwhile
            self._relays[message.link].reply(message.body)


# A guest --------------------------------------------------------------------------------------------------------------
class HostGuest:
    """This process uses the hosts of another one, the owner."""

    def __init__(self, sock: socket.socket, owner: int) -> None:
        self.gone = False
        self._owner = f"process {owner}, which had it" if owner else "the process that had it"
        self._connection = ControlConnection(sock)
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._reached: dict[int, Future[tuple[socket.socket, _Reached]]] = {}
        self._told: dict[int, Future[Any]] = {}
        self._answers: dict[int, Answer | None] = {}
        self._thread = threading.Thread(target=self._listen, name="streamline guest", daemon=True)
        disowned_in_copies(self)
        start_thread(self._thread)

    def disown(self) -> None:
        """Close the connection in a fork of this process: its end must have one holder."""
        self._lock = threading.Lock()
        self._connection.sock.close()

    async def reach(
        self, number: int, payload: Any, answer: Answer | Relay | None, env: ProcessEnv
    ) -> tuple[socket.socket, _ReachedHost]:
        """Return the consumer's end of a new link to one of the owner's hosts."""
        assert not isinstance(answer, Relay)
        link, future = next(self._numbers), Future[tuple[socket.socket, _Reached]]()
        self._answers[link] = answer
        self._expect(self._reached, link, future)
        self._connection.send(_Reach(link, number, payload.nbytes, env), payload.fileno())
        try:
            sock, reached = await brought(future)
        except BaseException:
            if not bring(future, _OwnerGone()) and future.exception() is None:
                future.result()[0].close()
            raise
        return sock, _ReachedHost(self, link, lambda: reached.pid, reached.node)

    def exit_of(self, process: Any) -> HostExit:
        """Return how a host has ended; blocks."""
        with suppress(_OwnerGone, TimeoutError):
            if isinstance(told := self._asked(process, "exit"), HostExit):
                return told
        return HostExit(f"the end of {self._owner}", counts=False)

    def kill(self, process: Any) -> None:
        self._connection.send(_Ask(process, next(self._numbers), "kill"))

    def stacks(self, process: Any) -> str:
        with suppress(_OwnerGone, TimeoutError):
            return self._asked(process, "stacks") or ""
        return ""

    def resident_bytes(self, number: int) -> int:
        """Return 0: the owner counts it."""
        return 0

    def close(self) -> None:
        """Leave the owner. Blocks until nothing more comes."""
        self._connection.hang_up()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _asked(self, link: int, what: str) -> Any:
        number, future = next(self._numbers), Future[Any]()
        self._expect(self._told, number, future)
        self._connection.send(_Ask(link, number, what))
        return future.result(ANSWER_S)

    def _expect(self, futures: dict[int, Future[Any]], number: int, future: Future[Any]) -> None:
        with self._lock:
            if not self.gone:
                futures[number] = future
                return
        bring(future, _OwnerGone())

    def _listen(self) -> None:
        try:
            while True:
                self._take(self._connection.receive())
        except EOFError:
            with self._lock:
                self.gone = True
                waiting = [*self._reached.values(), *self._told.values()]
            for future in waiting:
                bring(future, _OwnerGone())
            self._connection.close()

    def _take(self, message: Any) -> None:
        if isinstance(message, _Reached):
            future = self._reached.pop(message.link)
            if message.failure is not None:
                bring(future, message.failure)
                return
            sock = socket.socket(fileno=self._connection.descriptors.popleft())
            if not bring(future, (sock, message)):  # it waits no more
                sock.close()
        elif isinstance(message, _Told):
            if (told := self._told.pop(message.number, None)) is not None:
                bring(told, message.result)
        else:
            answering = partial(self._answer, message)
            start_thread(threading.Thread(target=answering, name="streamline answer", daemon=True))

    def _answer(self, question: _Question) -> None:
        reply = reply_to(self._answers.get(question.link), question.body)
        self._connection.send(_Question(question.link, reply))


# Both -----------------------------------------------------------------------------------------------------------------
class _Node:
    """The shared hosts of a job, as this process sees them."""

    def __init__(self, sharing: Sharing) -> None:
        self.users = 0
        self._sharing = sharing
        self._job = JobDirectory(f"{sharing.sharing_kind}, {_program()}", os.environ)
        self._lock = ForkSafeLock()
        self._role: HostOwner | HostGuest | None = None

    def join(self) -> HostOwner | HostGuest:
        """Return what this process is, and become one of the two, if it isn't, or its owner has gone. Blocks.

        Raises:
          HostError: the job's directory is unsafe, or its key isn't the owner's; or the owner doesn't answer.
        """
        deadline = time.monotonic() + JOIN_S
        while True:
            with self._lock:
                if not self.users:
                    raise ClosedError("what would use the shared hosts is closed")
                if self._role is not None and not self._role.gone:
                    return self._role
                if isinstance(self._role, HostGuest):
                    self._role.close()
                try:
                    self._role = self._joined()
                except UnreachableError as error:  # it has just ended, or it is stopped
                    if time.monotonic() > deadline:
                        raise
                    logger.debug("the owner of shared hosts: %s", error)

    @property
    def role(self) -> HostOwner | HostGuest | None:
        """What this process is; None: nothing yet."""
        return self._role

    def release(self) -> None:
        """Leave, if there is no user here; an owner stays for its guests. Blocks."""
        with self._lock:
            role = self._role
            if self.users or role is None:
                return
            if isinstance(role, HostOwner):
                if role.close_if_unused():
                    self._role = None
                return
            self._role = None
            role.close()
            self._job.remove_if_dead()

    def _joined(self) -> HostOwner | HostGuest:
        job = self._job
        with job.locked():
            sock = job.connected()
            if sock is None:
                remove_dead_jobs()
                return HostOwner(self._sharing, job, self.release)
            key = job.key()
        pid = _peer_pid(sock)
        hello = PeerHello(role="node", node=socket.gethostname(), pid=os.getpid())
        return HostGuest(Introduction(os.fspath(job.socket), key, hello).greet(sock), pid)


def _program() -> str:
    """Return the file of the main module: others define other things under the same names."""
    return str(getattr(sys.modules.get("__main__"), "__file__", ""))


def _peer_pid(sock: socket.socket) -> int:
    """Return the process at the other end of a Unix socket; 0: unknown."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0
    return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), "little")


_nodes: dict[tuple[int, str, str | None], _Node] = {}

_joining = ForkSafeLock()

os.register_at_fork(after_in_child=_nodes.clear)  # those are the parent's


@contextmanager
def _node_of(sharing: Sharing) -> Iterator[_Node]:
    """Use the hosts of this process's job; they end with their last user, here or elsewhere."""
    where = os.getpid(), sharing.sharing_kind, os.environ.get("STREAMLINE_JOB")
    with _joining:
        node = _nodes.get(where) or _nodes.setdefault(where, _Node(sharing))
        node.users += 1
    try:
        yield node
    finally:
        with _joining:
            node.users -= 1
        node.release()


class SharedHost(Host):
    """One of the shared hosts, for the runs of this process.

    Where calls of user code are tracked, since hosts have died, it is one of this process alone: else what another rank
    runs may end it again and again, and a call of this one that has nothing to do with it would be blamed.
    """

    kind: ClassVar[HostKind] = "process"
    shared = True

    def __init__(self, number: int, sharing: Sharing) -> None:
        self.number = number
        self.closed = False
        self._sharing = sharing
        own = sharing.host(number)
        assert isinstance(own, SocketHost)
        self._own: SocketHost[Any] = own  # not started, unless this is isolated
        self._isolated = False
        self._using = ExitStack()
        self._node = self._using.enter_context(_node_of(sharing))
        self._lock = threading.RLock()  # reentrant: a finaliser may close it in this thread
        self._joined: Future[HostOwner | HostGuest] | None = None
        self._place: _ReachedHost | None = None
        self._place_of: weakref.WeakKeyDictionary[Link, _ReachedHost] = weakref.WeakKeyDictionary()

    @property
    def name(self) -> str:
        return host_label(self.number, self.kind, self.pid, self.node, shared=not self._isolated)

    @property
    def pid(self) -> int | None:
        if self._isolated:
            return self._own.pid
        place = self._place
        return None if place is None else place.pid() or None

    @property
    def node(self) -> str:
        if self._isolated:
            return self._own.node
        place = self._place
        return "" if place is None else place.node

    def resident_bytes(self) -> int:
        if self._isolated:
            return self._own.resident_bytes()
        place = self._place
        return 0 if place is None else place.of.resident_bytes(self.number)

    def start(self) -> None:
        with self._lock:
            self._join()

    def _join(self) -> Future[HostOwner | HostGuest]:
        """Return what brings the owner or guest that this process is; under the lock."""
        if self.closed:
            raise ClosedError(f"process {self.number} was closed with its pool")
        joined = self._joined
        if joined is None or (joined.done() and (joined.exception() is not None or joined.result().gone)):
            joined = self._joined = Future()
            start_thread(threading.Thread(target=self._join_in, args=(joined,), name="streamline join", daemon=True))
        return joined

    def _join_in(self, joined: Future[HostOwner | HostGuest]) -> None:
        try:
            role = self._node.join()
            if isinstance(role, HostOwner):
                with suppress(_OwnerGone):
                    role.host(self.number)  # it begins to start
        except BaseException as error:
            bring(joined, error)
        else:
            bring(joined, role)

    def isolate(self) -> None:
        self._isolated = self._sharing.isolates

    async def connect(self, payload: HasFileno, answer: Callable[[Any], Any] | None = None) -> Link:
        if self._isolated:
            return await self._own.connect(payload, answer)
        while True:
            with self._lock:
                joined = self._join()
            role = await brought(joined)
            try:
                sock, place = await role.reach(self.number, payload, answer, process_env())
            except _OwnerGone:
                continue
            link = self._own.link_over(sock)
            with self._lock:
                self._place = self._place_of[link] = place
                if self.closed:
                    link.close()
            return link

    def exit_reason(self, link: Link) -> HostExit:
        if (place := self._place_of.get(link)) is None:
            return self._own.exit_reason(link)
        return place.of.exit_of(place.process)

    def kill(self, link: Link) -> None:
        if (place := self._place_of.get(link)) is None:
            self._own.kill(link)
        else:
            place.of.kill(place.process)

    def stacks(self) -> str:
        if self._isolated:
            return self._own.stacks()
        place = self._place
        return ("" if place is None else place.of.stacks(place.process)) or "it doesn't answer, or is just starting"

    def leave(self) -> None:
        with self._lock:
            self.closed = True
            links = list(self._place_of)
        for link in links:
            link.close()
        self._own.leave()

    def close(self) -> None:
        self.leave()
        self._own.close()
        with self._lock:
            using, self._using = self._using, ExitStack()
            joined = self._joined
        if joined is not None and not joined.done():
            joined.exception()  # it is about to join
        using.close()
