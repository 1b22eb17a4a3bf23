"""Workers on the machines of a Ray cluster: Ray places and supervises agents, and carries no items.

For each host Ray is asked for an actor, which runs an agent for that host alone: the agent dials this process, as
`streamline worker` does, and all else goes as with `Remote`. A host process that dies is started again by its agent.
When an agent is lost, because its actor, its node or the network failed, another actor is asked for, on another node if
there is room: it takes Ray 10 s to see that a node has died, and a minute for one that is silent, and until then it
places actors there. Ray restarts and retries nothing, since it does not know which items have arrived. Actors end with
their hosts, and by themselves without the trainer.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from streamline.backends.hosts.pool import HostPool
from streamline.backends.network.connections import UnreachableError
from streamline.backends.remote.agents import Agents, HostGone, RemoteProcess, agents_at
from streamline.backends.remote.remote import AgentsBackend, RemoteHost
from streamline.core.forks import ForkSafeLock
from streamline.core.threads import resolve, start_thread
from streamline.errors import DISTRIBUTION, HostError, PlanError, install
from streamline.plan.plan import Plan

logger = logging.getLogger("streamline.hosts")

STRATEGIES = ("SPREAD", "DEFAULT")


@dataclass(frozen=True)
class Ray(AgentsBackend):
    """Workers run in processes on a Ray cluster, each under an actor of its own: worker w in host w mod n.

    If the program has not called `ray.init()`, opening a pipeline does, as Ray's own libraries do. A host that dies, or
    whose actor or node is lost, is replaced; its workers continue after the last item that arrived. Items don't pass
    through Ray, but over TCP connections to this process, which aren't encrypted.

    `with sl.Ray(32) as pool:` makes a pool that is kept between pipelines and serves several at once.

    Args:
      hosts: processes, at least 1, at most one per worker. (8, 64): work begins once 8 of them are there, up to 64 are
        used, and workers move when one comes or goes; the items and their order are the same.
      num_cpus: that Ray reserves for each, at least 0.
      resources: custom resources that Ray reserves for each, by name.
      scheduling_strategy: "SPREAD", "DEFAULT", or one of the objects of `ray.util.scheduling_strategies`. Only such an
        object puts hosts into a placement group, also within Ray Train.
      runtime_env: the actors' runtime environment: what the hosts need that isn't installed on the nodes.
      env: environment variables to change in the hosts.
      start_timeout_s: seconds to wait for a place, for each host; of (8, 64), while there are fewer than 8.
      lost_after_s: seconds of silence after which a machine counts as lost, at least 2.
      shared: "node": the processes of one job on this machine use the same hosts (docs/ranks.md). None: each has its
        own.
    """

    num_cpus: float = field(default=1, kw_only=True)
    resources: Mapping[str, float] | None = field(default=None, kw_only=True)
    scheduling_strategy: Any = field(default="SPREAD", kw_only=True)
    runtime_env: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.scheduling_strategy, str) and self.scheduling_strategy not in STRATEGIES:
            raise PlanError(
                f"Ray(scheduling_strategy=) is {' or '.join(map(repr, STRATEGIES))}, or an object of "
                f"ray.util.scheduling_strategies, got {self.scheduling_strategy!r}"
            )

    @property
    def sharing_kind(self) -> str:
        asked = self.num_cpus, self.resources, self.scheduling_strategy, self.runtime_env
        return f"{super().sharing_kind}, {_describe(asked)}"

    def check(self, plan: Plan) -> None:
        super().check(plan)
        self.actor_class()
        check_own_node()

    def pool(self, *, hints: bool = False) -> HostPool:
        self.actor_class()
        return super().pool(hints=hints)

    def host(self, number: int, *, shared: bool = False) -> RayHost:
        return RayHost(number, self, shared_by_ranks=shared)

    def listen_for(self, user: object) -> Agents:
        return agents_at((node_address(), 0), process_key(), self.lost_after_s, None, user)

    def actor_class(self) -> Any:
        """Return the class of the actors, with their options.

        Raises:
          HostError: there is no cluster. PlanError: Ray isn't installed, or refuses the options.
        """
        connected_ray()
        try:
            return _actor_class().options(
                num_cpus=self.num_cpus,
                resources=dict(self.resources or {}),
                scheduling_strategy=self.scheduling_strategy or "DEFAULT",  # None: the placement group of Ray Train
                runtime_env=self.runtime_env,
                max_restarts=0,
                max_task_retries=0,
                **(_lost_nodes.last() if self.scheduling_strategy in (*STRATEGIES, None) else {}),
            )
        except (TypeError, ValueError) as error:
            raise PlanError(f"Ray refuses the options of {self.short}: {error}") from error

    @property
    def there(self) -> int:
        """How many of its hosts run."""
        return sum(host.backend is self and host.there for host in list(_hosts))

    def way_out(self, agents: Agents) -> str:
        ray = connected_ray()
        needs = {"CPU": self.num_cpus, **(self.resources or {})}
        asked = ", ".join(f"{name} {number:g}" for name, number in needs.items())
        total, free = ray.cluster_resources(), ray.available_resources()
        has = ", ".join(f"{name} {total.get(name, 0):g} ({free.get(name, 0):g} free)" for name in needs)
        nodes = sum(node["Alive"] for node in ray.nodes())
        return (
            f"{self.there} of its {self.most} hosts have come. Each needs {asked}; the cluster's {nodes} nodes "
            f"have {has}. Add nodes, ask for less (num_cpus=, resources=, scheduling_strategy=), or begin with fewer "
            f"hosts: Ray((1, {self.most}))"
        )


def _describe(value: Any) -> str:
    """Return what an option says, in the same words in all processes: objects of Ray's say nothing of themselves."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{name!r}: {_describe(one)}' for name, one in value.items()))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_describe, value))}]"
    if hasattr(value, "__dict__"):
        said = {"id": value.id} if hasattr(value, "id") else vars(value)  # a placement group also has a cache
        return f"{type(value).__name__}{_describe(said)}"
    return repr(value)


_hosts: weakref.WeakSet[RayHost] = weakref.WeakSet()
"""Those of this process, for messages that count them."""

LOST_S = 90.0
"""Seconds for which a node is taken last. Ray places actors on a silent one until five checks of 13 s have failed."""

NODE = "ray.io/node-id"
"""The label that Ray gives each node."""


class _LostNodes:
    """The nodes on which this process has lost agents of late, whether or not Ray has noticed."""

    def __init__(self) -> None:
        self._lost: dict[str, tuple[float, bool]] = {}  # when, and whether it is fit to run agents

    def add(self, node: str, *, fit: bool) -> bool:
        """Note a node; return whether it is news that it isn't fit."""
        _, was_fit = self._lost.get(node, (0.0, True))
        self._lost[node] = time.monotonic(), fit
        return was_fit and not fit

    def last(self) -> dict[str, Any]:
        """Return options of an actor, by which Ray places it there only if no other node has room, if it is fit."""
        since = time.monotonic() - LOST_S
        lost = {node: fit for node, (at, fit) in list(self._lost.items()) if at > since}
        if not lost:
            return {}
        fallback = [{"label_selector": {NODE: f"in({','.join(filter(lost.get, lost))})"}}] if any(lost.values()) else []
        return {"label_selector": {NODE: f"!in({','.join(lost)})"}, "fallback_strategy": fallback}


_lost_nodes = _LostNodes()


class RayHost(RemoteHost):
    """A host process under an actor, or the ones that replaced them."""

    def __init__(self, number: int, backend: Ray, *, shared_by_ranks: bool) -> None:
        super().__init__(number, backend, shared_by_ranks=shared_by_ranks)
        self.backend = backend
        self._actor: _AskedActor | None = None
        self._last: RemoteProcess | None = None
        _hosts.add(self)

    @property
    def there(self) -> bool:
        """Whether its process runs."""
        running = self._running
        return running is not None and not running.gone.is_set()

    def _place(self, agents: Agents) -> Future[RemoteProcess]:
        self._last = last = self._running or self._last
        if self._actor is None or self._actor.failure is not None or (last is not None and last.agent.lost):
            self._end_place()
            if self._actor is not None:
                self._note_end(self._actor)
            self._actor = _AskedActor(agents, replaces=last is not None)
        placed = agents.place(self.number, self.backend.env, self._actor.ticket, shared=self._shared_by_ranks)
        self._actor.serve(self.backend, placed)
        return placed

    def _note_end(self, actor: _AskedActor) -> None:
        number, _ = actor.node
        if number and _lost_nodes.add(number, fit=actor.fit):
            logger.warning("%s", actor.failure)  # not in a thread of Ray's: one that logs stays known to Python

    def _end_place(self) -> None:
        if self._actor is not None:
            self._actor.end()


class _AskedActor:
    """An actor that Ray is asked for.

    Args:
      replaces: whether another one has run the host before.

    Attributes:
      failure: why it doesn't run, or runs no longer.
      fit: whether its node may run it as well as another one.
    """

    def __init__(self, agents: Agents, *, replaces: bool) -> None:
        self.ticket = secrets.token_hex(16)
        self.failure: HostGone | HostError | None = None
        self.fit = True
        self._agents = agents
        self._replaces = replaces
        self._backend: Ray
        self._actor: Any = None
        self._node: Future[tuple[str, str]] = Future()
        self._placed: Future[RemoteProcess] = Future()

    @property
    def node(self) -> tuple[str, str]:
        """Where it runs: Ray's number of the node, and the machine's name; both "": it has not said."""
        return self._node.result() if self._node.done() and self._node.exception() is None else ("", "")

    def serve(self, backend: Ray, placed: Future[RemoteProcess]) -> None:
        """Let it run the agent, unless it does; what is `placed` fails with it."""
        self._backend = backend
        self._placed = placed
        try:
            if self._actor is None:
                self._actor = backend.actor_class().remote()
                self._node = self._actor.node.remote().future()
                address = node_address(), self._agents.port
                served = self._actor.serve.remote(address, process_key(), self.ticket, CONNECT_S)
                served.future().add_done_callback(self._ended)
                if self._replaces:
                    start_thread(threading.Thread(target=self._check_own_node, name="streamline Ray node", daemon=True))
        except Exception as error:  # Ray has errors of many kinds, where a cluster has just gone
            self.failure = HostGone(f"Ray can't be asked for an actor: {_text_of(error)}")
        if self.failure is not None:
            resolve(placed, self.failure)

    def end(self) -> None:
        """End it, with the host that it runs."""
        self._agents.dismiss(self.ticket)
        import ray

        if self._actor is not None and ray.is_initialized():  # else it has ended, and `kill` would begin a new cluster
            ray.kill(self._actor)

    def _check_own_node(self) -> None:
        with suppress(Exception):  # of Ray, where the cluster has just gone
            try:
                check_own_node()
            except HostError as error:
                resolve(self._placed, error)

    def _ended(self, served: Future[object]) -> None:
        error = served.exception()
        _, name = self.node
        why = f"a Ray actor{name and f' on {name}'} has ended: {_text_of(error)}"
        advice = _advice(error)
        self.fit = advice is None
        passes = not _is_final(error) and (self._replaces or self._goes_on_without)  # other nodes can run it
        kind = HostGone if self.fit or passes else HostError
        self.failure = kind(why if advice is None else f"{why}. {advice}")
        resolve(self._placed, self.failure)

    @property
    def _goes_on_without(self) -> bool:
        hosts = self._backend.hosts
        return isinstance(hosts, tuple) and self._backend.there >= hosts[0]


INSTALL = (
    f"Install {DISTRIBUTION} on the nodes, in the version that is here, or let Ray do that where an actor starts: "
    "Ray(runtime_env={'pip': [...]})"
)

REACH = "The nodes must reach this process at any port, as Ray's own processes do"


def _advice(error: BaseException | None) -> str | None:
    """Say what to do about an error that another actor would meet, too; None: it may not."""
    from ray import exceptions

    if isinstance(error, ImportError):
        return INSTALL
    if isinstance(error, UnreachableError):
        return REACH
    known: dict[type[Exception], str] = {
        exceptions.RuntimeEnvSetupError: "See runtime_env=",
        exceptions.ActorUnschedulableError: "See scheduling_strategy=",
        exceptions.RayTaskError: "See the log of that worker of Ray",
    }
    return next((advice for kind, advice in known.items() if isinstance(error, kind)), None)


def _text_of(error: BaseException | None) -> str:
    """Return what an error says, without the traceback that Ray writes into it."""
    cause = getattr(error, "cause", None)
    lines = [line.strip() for line in str(cause or error).splitlines() if line.strip()]
    return (lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}").removesuffix(".") if lines else repr(error)


def _is_final(error: BaseException | None) -> bool:
    """Whether no node that comes mends it: an actor's node is gone, or its placement group."""
    from ray import exceptions

    return isinstance(error, exceptions.ActorUnschedulableError)


CONNECT_S = 30.0
"""Seconds for an actor to reach the trainer, which listens before it asks for one."""


@cache
def _actor_class() -> Any:
    import ray

    class RayAgent:
        """The actor: it runs an agent for one host. Defined here, it is sent by value: a node may lack streamline."""

        def node(self) -> tuple[str, str]:
            """Return Ray's number of its node, and the machine's name."""
            return str(ray.get_runtime_context().get_node_id()), socket.gethostname()

        def serve(self, address: tuple[str, int], key: bytes, ticket: str, wait_s: float) -> None:
            """Serve the trainer until it lets this go, or is lost; then end."""
            from streamline.backends.remote.agent import run_agent

            run_agent(address, key, 1, wait_s=wait_s, rejoin_s=None, ticket=ticket)
            ray.actor.exit_actor()  # Ray may notice the trainer's end late

    return ray.remote(RayAgent)


@cache
def process_key() -> bytes:
    """Return the key of this process and the agents that it has asked for; random, for its life."""
    return secrets.token_hex(32).encode()


def node_address() -> str:
    """Return the address of this machine at which the nodes of the cluster reach it."""
    import ray

    return str(ray.util.get_node_ip_address())


# Ray itself -----------------------------------------------------------------------------------------------------------
CLIENT = (
    "sl.Ray can't work over a Ray client (ray://): its hosts connect to this process, which need not be in the "
    "cluster's network. Run the program in the cluster: `ray job submit -- python train.py`, or on one of its nodes "
    "with ray.init(address='auto')"
)

_connecting = ForkSafeLock()


def connected_ray() -> Any:
    """Return the module `ray`; where Ray isn't initialised, do that as its own libraries do: `ray.init()`.

    Raises:
      PlanError: it isn't installed. HostError: there is no connection, or one that is of no use.
    """
    try:
        import ray
    except ImportError as error:
        raise PlanError(f"sl.Ray needs ray, which is not installed: {install('ray')}") from error
    with _connecting:
        if not ray.is_initialized():
            _connect(ray)
    if ray.util.client.ray.is_connected():
        raise HostError(CLIENT)
    return ray


def _connect(ray: Any) -> None:
    where = os.environ.get("RAY_ADDRESS", "")
    if where.startswith("ray://"):
        raise HostError(f"RAY_ADDRESS is {where}: {CLIENT}")
    try:
        ray.init()
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        at = f" at RAY_ADDRESS={where}" if where else ""
        raise HostError(f"ray.init() can't connect to a cluster{at}: {_text_of(error)}. {_token()}") from error
    logger.info("ray.init() has connected this process to %s", ray.get_runtime_context().gcs_address)


def check_own_node() -> None:
    """Raise HostError: Ray has given up the node of this process, and with it the actors, which no others follow."""
    ray = connected_ray()
    here = ray.get_runtime_context().get_node_id()
    if any(node["NodeID"] == here and not node["Alive"] for node in ray.nodes()):
        raise HostError(
            f"the Ray node of this process, {node_address()}, has died: Ray has ended the actors of this program, and "
            "starts no others for it. See raylet.out there (out of memory? `ray stop`? cut off?), and start the "
            "program anew, on a node that runs"
        )


def _token() -> str:
    mode = os.environ.get("RAY_AUTH_MODE", "not set")
    return (
        "If the cluster wants a token (Ray's log says Unauthenticated), set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
        f"~/.ray/auth_token to the cluster's; here, RAY_AUTH_MODE is {mode}, and RAY_AUTH_TOKEN is "
        f"{'set' if 'RAY_AUTH_TOKEN' in os.environ else 'not set'}"
    )
