"""`.transfer`: moves batches to a device while the loop computes; the last stage of a plan, on the rank's stream."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from anyio import CancelScope

from streamline.core.blame import blame, cancellation_requested
from streamline.core.channel import Inbox
from streamline.core.driver import behind_channel
from streamline.core.flow import Chunk, Flow, Lists, ListsFlow, Opener, StageRun
from streamline.core.meters import Working
from streamline.core.pace import map_in_slices
from streamline.core.place import Lender
from streamline.core.state import Tree
from streamline.transfer.base import HandOver, Mover, Target
from streamline.transfer.devices import IN_PLACE, found
from streamline.transforms.base import Stage


@dataclass(frozen=True, kw_only=True)
class Transfer(Stage[Any, Any]):
    """Moves batches to a device, up to `depth` of them ahead of the consumer; none where they are in place already.

    Success: batches come in order, each when the consumer's own work may use it. Failure: raised at its batch, with a
    note. Cancellation, close: the batch that is being written into a buffer is finished; copies in progress are waited
    for before their memory is freed. It keeps no state: a snapshot is taken after the batch consumed.

    Attributes:
      device: as `transfer.devices.written` returns it.
      target: the device that was found; None until the pipeline is opened.
    """

    kind: ClassVar[str] = "transfer"
    last: ClassVar[bool] = True
    counted: ClassVar[bool] = False
    uncounted_options = ("device", "depth", "target")
    one_to_one = True

    device: Any
    depth: int = 2
    target: Target | None = field(default=None, repr=False)

    @property
    def owns_output_channel(self) -> bool:
        return self.device not in IN_PLACE

    @property
    def hands_over(self) -> bool:
        """Whether a batch is ordered only for the thread that takes it, on its current stream."""
        return isinstance(self.device, str) and self.device.startswith("cuda")

    @property
    def in_flight(self) -> int:
        return self.depth if self.owns_output_channel else 0

    def settled(self) -> Transfer:
        return self if self.target is not None else replace(self, target=found(self.device))

    def open(self, upstream: Opener[Any], state: Tree | None = None) -> Flow[Any]:
        if not self.owns_output_channel:
            return super().open(upstream, state)
        site, mover = upstream.site, self._mover()
        site.tasks.add_cleanup(mover.close)
        services = site.tasks.session.services
        if mover.hands_over:
            services.add(HandOver, HandOver(mover.arrived))
        services.add(Lender, Lender(mover.place, mover.on_mapped))  # for what is opened next
        flow = upstream(state)
        run = self.run_over(flow, site, state, None)
        if run.meter is not None:
            run.meter.figures.executor = "thread"
        if run.meter is not None and mover.details is not None:
            run.meter.details_from(mover.details)
        moved = ListsFlow(self.begin(flow.state, None), self._moved(run, mover), run, flow)
        return _OneByOne(behind_channel(moved, site, str(self), self.depth))

    def _mover(self) -> Mover:
        return (self.target or found(self.device)).mover(self.depth)

    async def lists(self, run: StageRun[Any]) -> Lists[Any]:
        """Convert batches in place: no task, no channel."""
        mover = self._mover()
        if run.meter is not None and mover.details is not None:
            run.meter.details_from(mover.details)
        async with aclosing(map_in_slices(run, mover.move, str(self), "")) as parts:
            async for chunk, moved in parts:
                yield Chunk(moved, chunk.states, chunk.progress)
                del chunk, moved

    async def _moved(self, run: StageRun[Any], mover: Mover) -> Lists[Any]:
        try:
            while (chunk := await run.upstream.pull(1)) is not None:
                items, states, after = chunk.items, chunk.states, chunk.progress
                del chunk  # batches are large: release each as soon as possible
                if not items:
                    yield Chunk((), (), after)
                    continue
                try:
                    moved = [await self._move(mover, items[0], run)]
                except BaseException as error:
                    if cancellation_requested(error):
                        raise
                    last = states[0]
                    run.skip_or_raise(blame(error, str(self), run.site, last), items[0], last)
                    yield Chunk((), (), last if after is None else after)
                    continue
                del items
                yield Chunk(moved, states, after)
                del moved
        finally:
            mover.close()
            run.site.tasks.remove_cleanup(mover.close)

    async def _move(self, mover: Mover, batch: Any, run: StageRun[Any]) -> Any:
        with Working(run.meter), CancelScope(shield=True):  # it would copy from memory that is free
            return await run.site.tasks.threads.run(partial(mover.move, batch), "a batch")


class _OneByOne(Flow[Any]):
    """Delivers one batch at a time, however many are ready: each is handed over when it is taken, not earlier."""

    def __init__(self, inbox: Inbox[Any]) -> None:
        super().__init__(inbox.state)
        self._inbox = inbox

    async def _next(self, limit: int) -> Chunk[Any] | None:
        return await self._inbox.pull(1)

    def release(self) -> None:
        self._inbox.release()

    async def aclose(self) -> None:
        await super().aclose()
        await self._inbox.aclose()
