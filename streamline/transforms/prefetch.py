"""A channel where the user wants one, or where concurrency begins: what is upstream runs ahead in a task of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from streamline.core.driver import behind_channel
from streamline.core.flow import Flow, Opener
from streamline.core.knobs import Knob, KnobValues
from streamline.core.state import Tree
from streamline.transforms.base import Stage, StageLayout

T = TypeVar("T")

MOST_ITEMS = 4096
"""That a tuner lets it keep ready."""


@dataclass(frozen=True, kw_only=True)
class Prefetch(Stage[T, T]):
    """Keeps up to `items` items ready (and `bytes` bytes, if given; one item is always admitted)."""

    kind: ClassVar[str] = "prefetch"
    counted: ClassVar[bool] = False
    one_to_one = True

    items: int
    bytes: int | None = None

    @property
    def in_flight(self) -> int:
        return self.items

    @property
    def layout(self) -> StageLayout:
        return StageLayout(holds=None, after=self.items, after_bytes=self.bytes)

    @property
    def knob(self) -> Knob:
        return Knob(stage=self.name, kind="prefetch", written=self.items, most=max(self.items, MOST_ITEMS))

    def open(self, upstream: Opener[T], state: Tree | None = None) -> Flow[T]:
        inbox = behind_channel(upstream(state), upstream.site, self.name, self.items, self.bytes)
        if (knobs := upstream.site.tasks.session.services.find(KnobValues)) is not None:
            knobs.join(self.name, inbox)
        return inbox
