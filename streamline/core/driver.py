"""The driver: the one task that moves items from a flow into a channel.

Success: every list is sent, the flow is closed, then the channel finishes. Stage failure: what came before has been
sent; the flow is closed, then the channel fails with the user's exception. Cancellation: the flow is closed under a
shield, and the channel is abandoned. Snapshot, pause: before and after each list the driver passes the gate; the states
travel with the items.

A driver never raises: its exception would cancel its siblings and strand what they hold.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from streamline.core.blame import cancellation_requested
from streamline.core.capacity import Capacity
from streamline.core.channel import Channel, Feeder, Inbox, Sink
from streamline.core.pace import HANDOVER_S, Pace

if TYPE_CHECKING:
    from streamline.core.flow import Flow, Site
    from streamline.core.gate import Gate
    from streamline.core.tasks import Job, Tasks

T = TypeVar("T")

LAST_TASK = "the last stage"
"""The name of the task that pulls the flow of a plan's last stage."""


def behind_channel(
    flow: Flow[T],
    site: Site,
    name: str,
    capacity: int,
    capacity_bytes: int | None = None,
    *,
    by_list: bool = False,
    widest: int | None = None,
    last: bool = False,
) -> Inbox[T]:
    """Return the receiving end of a channel that a task of its own fills from `flow`, from the first pull on."""
    channel = Channel[T](flow.state, Capacity(capacity, capacity_bytes, by_list=by_list, widest=widest))
    channel.filler = flow.meter
    channel.turns = 1 if last else 2
    filled_by = name if flow.meter is None else flow.meter.figures.name
    return run_into(channel, partial(drive, flow, channel, site.tasks.gate), site, name, filled_by)


def run_into(
    channel: Channel[T], work: Callable[[], Awaitable[None]], site: Site, name: str, filled_by: str
) -> Inbox[T]:
    """Return the inbox of `channel`, whose first pull starts `work`; `filled_by` names the stage for its meter."""
    full_name = f"{name} of shard {site.shard}"
    channel.feeder = TaskFeeder(channel, work, site.tasks, full_name)
    channel.join(site.tasks.session)
    meters = site.tasks.session.meters
    if meters.on:
        channel.meter = meters.channel(filled_by, site.shard, channel.capacity.items)
    return channel.inbox


class TaskFeeder(Feeder):
    def __init__(self, channel: Channel[Any], work: Callable[[], Awaitable[None]], tasks: Tasks, name: str) -> None:
        self._channel, self._tasks, self._name = channel, tasks, name
        self._work: Callable[[], Awaitable[None]] | None = work  # until it has begun: the flow isn't kept after its end
        self._job: Job | None = None
        tasks.add_cleanup(channel.abandon)

    def start(self) -> None:
        assert self._work is not None
        work, self._work = partial(self._tasks.gate.participate, self._name, self._work), None
        self._job = self._tasks.start(work, self._name, self._channel.abandon)

    def cancel(self) -> None:
        if self._job is not None:
            self._job.cancel()

    async def stop(self) -> None:
        if self._job is not None:
            await self._tasks.stop(self._job)

    def on_closed(self) -> None:
        self._tasks.remove_cleanup(self._channel.abandon)


async def drive(flow: Flow[T], channel: Sink[T], gate: Gate) -> None:
    """Pull `flow` to its end into `channel`."""

    async def pump() -> None:
        pace = Pace()
        while True:
            room = channel.room_at_once
            if room < 1:
                room = await channel.wait_room()
                pace.begin()  # its reader had a turn
            if gate.holding:
                await gate.passage()
            most, flow.min_items = channel.pull_size(room)
            chunk = await flow.pull(most)
            if gate.holding:
                await gate.passage()  # the pause began during the pull
            if chunk is None:
                return
            await channel.send(chunk)
            chunk.items = ()  # as `take_items`: the generator that made the chunk may keep it
            del chunk
            await pace.yield_after(HANDOVER_S, channel.turns)

    await fill_channel(channel, flow, pump)


async def fill_channel(channel: Sink[Any], flow: Flow[Any], work: Callable[[], Awaitable[None]]) -> None:
    """Do the work that fills `channel`, close the `flow` that it reads, and end the channel accordingly."""
    try:
        try:
            await work()
        finally:
            with anyio.CancelScope(shield=True):
                await flow.aclose()
    except BaseException as failure:
        if cancellation_requested(failure):
            channel.abandon()
            raise
        channel.fail(failure)
    else:
        channel.finish()
