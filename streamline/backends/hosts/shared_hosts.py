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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, ClassVar, NamedTuple, Protocol

import anyio

from streamline.backends.hosts.host import Host, HostExit, SocketHost
from streamline.backends.hosts.job import JobDirectory, remove_dead_jobs
from streamline.backends.hosts.plan_shipping import Shipped
from streamline.backends.hosts.process_main import ProcessEnv
from streamline.backends.hosts.stdio_relay import Answer, Relay, reply_to
from streamline.backends.ipc.control_connection import ControlConnection
from streamline.backends.ipc.link import Link
from streamline.backends.network.connections import Introduction, Listener, UnreachableError
from streamline.backends.network.handshake import PeerHello
from streamline.core.cleanup import Cleanup
from streamline.core.figures import HostKind, host_label
from streamline.core.forks import ForkSafeLock, disown_in_copies
from streamline.core.threads import resolve, start_thread, wait_future
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

    def host(self, number: int, *, shared: bool = False) -> Host: ...

    def wrap_payload(self, shipped: Shipped) -> Any:
        """Return what hosts get of a plan that was shipped."""


# What a guest and its owner say to each other -------------------------------------------------------------------------
class _GuestRequest(NamedTuple):
    """What a guest asks for.

    Attributes:
      what: "reach", a new link with this number to a host, with the plan's descriptor; or of the host of a link:
        "exit_of", why it has ended, "stacks", "kill".
    """

    number: int
    what: str
    link: int
    arguments: tuple[Any, ...] = ()


class _OwnerAnswer(NamedTuple):
    """The answer to the request of this number: to "reach", an error, or pid and node, with the link's descriptor."""

    number: int
    result: Any


class _HostQuestion(NamedTuple):
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

    def kill(self) -> None:
        self.of.kill(self.process)


# The owner ------------------------------------------------------------------------------------------------------------
class HostOwner:
    """This process owns the hosts, and listens for others. `unused` is called, in any thread, when a guest has left."""

    def __init__(self, sharing: Sharing, job: JobDirectory, unused: Callable[[], object]) -> None:
        self.guests: set[_GuestSession] = set()
        self.sharing = sharing
        self._job = job
        self._unused = unused
        self._lock = threading.RLock()
        self._hosts: dict[int, SocketHost[Any]] = {}
        self._closed = False
        self._listener = Listener(os.fspath(job.socket), job.new_key(), self._on_guest)
        self._cleanup = Cleanup(self, _remove, job, os.getpid())  # a guest may leave as this process exits
        disown_in_copies(self)

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
                made = self.sharing.host(number, shared=True)
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

        Blocks. What it is cut off in, the next call does.
        """
        with self._job.locked(), self._lock:
            if self.guests and not self._closed:
                return False
            self._closed = True
        self._listener.close()  # one that has just connected reads the end, and tries again
        self._job.remove_if_dead()  # else another process owns new hosts by now
        self._cleanup.detach()
        for host in self._hosts.values():
            host.leave()
        for host in self._hosts.values():
            host.close()
        return True

    def _on_guest(self, sock: socket.socket, hello: PeerHello, _: str) -> None:
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

    def on_left(self, session: _GuestSession) -> None:
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
        self._replies: dict[int, Callable[[bytes], object]] = {}  # by the link that the question came from
        disown_in_copies(self)

    def disown(self) -> None:
        """Close the connection in a fork of this process: its end must have one holder."""
        self._connection.sock.close()

    def start(self) -> None:
        start_thread(threading.Thread(target=self._listen, name=self._name, daemon=True))

    def _listen(self) -> None:
        try:
            while True:
                message = self._connection.receive()
                if isinstance(message, _HostQuestion):
                    self._replies[message.link](message.body)
                    continue
                answer = partial(self._answer, message, self._connection.taken_descriptors())
                start_thread(threading.Thread(target=answer, name=self._name, daemon=True))
        except EOFError:
            logger.debug("%s has left", self._name)
        finally:
            self._connection.hang_up()
            self._connection.close()
            self._owner.on_left(self)

    def _answer(self, request: _GuestRequest, descriptors: Sequence[int]) -> None:
        if request.what == "reach":
            self._reach(request, *descriptors)
            return
        place = self._places.get(request.link)
        result = None if place is None else getattr(self._owner, request.what)(place.process)
        self._connection.send(_OwnerAnswer(request.number, result))

    def _ask(self, link: int, question: bytes, reply: Callable[[bytes], object]) -> None:
        self._replies[link] = reply
        self._connection.send(_HostQuestion(link, question))

    def _reach(self, request: _GuestRequest, descriptor: int) -> None:
        link, owner, connection = request.link, self._owner, self._connection
        host, nbytes, env = request.arguments
        payload = owner.sharing.wrap_payload(Shipped(descriptor, nbytes))
        try:
            relay = Relay(partial(self._ask, link), payload.close)
            sock, place = anyio.run(owner.reach, host, payload, relay, env)
        except _OwnerGone:
            connection.hang_up()
        except Exception as error:
            failure = error if isinstance(error, HostError) else HostError(f"{type(error).__name__}: {error}")
            connection.send(_OwnerAnswer(request.number, failure))
        else:
            with sock:
                self._places[link] = place
                connection.send(_OwnerAnswer(request.number, (place.pid(), place.node)), sock.fileno())


# A guest --------------------------------------------------------------------------------------------------------------
class HostGuest:
    """This process uses the hosts of another one, the owner."""

    def __init__(self, sock: socket.socket, owner: int) -> None:
        self.gone = False
        self._owner = f"process {owner}, which had it" if owner else "the process that had it"
        self._connection = ControlConnection(sock)
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._requested: dict[int, Future[Any]] = {}
        self._answers: dict[int, Answer | None] = {}
        self._thread = threading.Thread(target=self._listen, name="streamline guest", daemon=True)
        disown_in_copies(self)
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
        link = next(self._numbers)
        self._answers[link] = answer
        future = self._request("reach", link, (number, payload.nbytes, env), payload.fileno())
        try:
            sock, pid, node = await wait_future(future)
        except BaseException:
            if not resolve(future, _OwnerGone()) and future.exception() is None:
                future.result()[0].close()
            raise
        return sock, _ReachedHost(self, link, lambda: int(pid), node)

    def exit_of(self, process: Any) -> HostExit:
        """Return how a host has ended; blocks."""
        with suppress(_OwnerGone, TimeoutError):
            if isinstance(how := self._request("exit_of", process).result(ANSWER_S), HostExit):
                return how
        return HostExit(f"the end of {self._owner}", counts=False)

    def kill(self, process: Any) -> None:
        self._request("kill", process)

    def stacks(self, process: Any) -> str:
        with suppress(_OwnerGone, TimeoutError):
            return self._request("stacks", process).result(ANSWER_S) or ""
        return ""

    def resident_bytes(self, number: int) -> int:
        """Return 0: the owner counts it."""
        return 0

    def close(self) -> None:
        """Leave the owner. Blocks until nothing more comes."""
        self._connection.hang_up()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _request(self, what: str, link: int, arguments: tuple[Any, ...] = (), *descriptors: int) -> Future[Any]:
        """Return what brings the answer, or `_OwnerGone`."""
        number, future = next(self._numbers), Future[Any]()
        with self._lock:
            self._requested[number] = future
            gone = self.gone
        if gone:
            resolve(future, _OwnerGone())
        self._connection.send(_GuestRequest(number, what, link, arguments), *descriptors)
        return future

    def _listen(self) -> None:
        try:
            while True:
                self._take(self._connection.receive())
        except EOFError:
            with self._lock:
                self.gone = True
                waiting = list(self._requested.values())
            for future in waiting:
                resolve(future, _OwnerGone())
            self._connection.close()

    def _take(self, message: Any) -> None:
        if isinstance(message, _HostQuestion):
            answering = partial(self._answer, message)
            start_thread(threading.Thread(target=answering, name="streamline answer", daemon=True))
            return
        future, result = self._requested.pop(message.number), message.result
        link = [socket.socket(fileno=descriptor) for descriptor in self._connection.taken_descriptors()]
        if not resolve(future, (*link, *result) if link else result):  # it waits no more
            for sock in link:
                sock.close()

    def _answer(self, question: _HostQuestion) -> None:
        reply = reply_to(self._answers.get(question.link), question.body)
        self._connection.send(_HostQuestion(question.link, reply))


# Both -----------------------------------------------------------------------------------------------------------------
class _JobHosts:
    """The shared hosts of a job, as this process sees them."""

    def __init__(self, sharing: Sharing) -> None:
        self.users: set[SharedHost] = set()
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
                    self._role = self._new_role()
                except UnreachableError as error:  # it has just ended, or it is stopped
                    if time.monotonic() > deadline:
                        raise
                    logger.debug("the owner of shared hosts: %s", error)

    @property
    def role(self) -> HostOwner | HostGuest | None:
        """What this process is; None: nothing yet."""
        return self._role

    def release(self) -> None:
        """Leave, if there is no user here; an owner stays for its guests. Blocks. Idempotent."""
        with self._lock:
            role = self._role
            if self.users or role is None:
                return
            if isinstance(role, HostOwner):
                if not role.close_if_unused():
                    return
            else:
                role.close()
                self._job.remove_if_dead()
            self._role = None  # not before: what Ctrl-C cuts off, the next close does

    def _new_role(self) -> HostOwner | HostGuest:
        job = self._job
        with job.locked():
            sock = job.connect()
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


_nodes: dict[tuple[int, str, str | None], _JobHosts] = {}

_joining = ForkSafeLock()

os.register_at_fork(after_in_child=_nodes.clear)  # those are the parent's


def _node_of(sharing: Sharing, user: SharedHost) -> _JobHosts:
    """Return the hosts of this process's job; they end with their last user, here or elsewhere."""
    where = os.getpid(), sharing.sharing_kind, os.environ.get("STREAMLINE_JOB")
    with _joining:
        node = _nodes.get(where) or _nodes.setdefault(where, _JobHosts(sharing))
        node.users.add(user)
        return node


class SharedHost(SocketHost[_ReachedHost]):
    """One of the shared hosts, for the runs of this process."""

    kind: ClassVar[HostKind] = "process"
    shared = True

    def __init__(self, number: int, sharing: Sharing) -> None:
        super().__init__(number)
        self._sharing = sharing
        own = sharing.host(number)
        assert isinstance(own, SocketHost)
        self._own: SocketHost[Any] = own  # not started, unless a run needs it
        self._node = _node_of(sharing, self)
        self._joined: Future[HostOwner | HostGuest] | None = None
        self._place: _ReachedHost | None = None

    @property
    def name(self) -> str:
        return host_label(self.number, self.kind, self.pid, self.node, shared=True)

    @property
    def pid(self) -> int | None:
        place = self._place
        return None if place is None else place.pid() or None

    @property
    def node(self) -> str:
        place = self._place
        return "" if place is None else place.node

    def resident_bytes(self) -> int:
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
            resolve(joined, error)
        else:
            resolve(joined, role)

    def isolated(self) -> Host:
        return self._own if self._sharing.isolates else self

    async def reach(
        self, payload: Any, answer: Answer | Relay | None, env: ProcessEnv
    ) -> tuple[socket.socket, _ReachedHost]:
        while True:
            with self._lock:
                joined = self._join()
            role = await wait_future(joined)
            with suppress(_OwnerGone):
                sock, place = await role.reach(self.number, payload, answer, env)
                self._place = place
                return sock, place

    def link_over(self, sock: socket.socket) -> Link:
        return self._own.link_over(sock)

    def exit_of(self, process: _ReachedHost) -> HostExit:
        return process.of.exit_of(process.process)

    def stacks(self) -> str:
        place = self._place
        return ("" if place is None else place.of.stacks(place.process)) or "it doesn't answer, or is just starting"

    def leave(self) -> None:
        with self._lock:
            self.closed = True
        for link in list(self._process_of):
            link.close()
        self._own.leave()

    def close(self) -> None:
        self.leave()
        self._own.close()
        joined = self._joined
        if joined is not None and not joined.done():
            joined.exception()  # it is about to join
        with _joining:
            self._node.users.discard(self)
        self._node.release()
