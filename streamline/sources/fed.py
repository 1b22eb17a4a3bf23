"""What a worker of a live source is opened on: what its feed, one for all workers of the rank, hands to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from streamline.core.channel import Inbox
from streamline.core.flow import Flow, Site
from streamline.core.state import Tree
from streamline.sources.base import Mode, Part, Source

__all__ = ["FedSource"]


@dataclass(frozen=True, kw_only=True, eq=False)
class FedSource(Source[Any]):
    """One worker's queue."""

    modes: ClassVar[tuple[Mode, ...]] = ("shared",)

    inbox: Inbox[Any]

    @property
    def kind(self) -> str:
        return "from_stream"

    def listing(self) -> None:
        """A feed has no length and no files."""

    def open(self, site: Site, part: Part, state: Tree | None = None) -> Flow[Any]:
        return self.inbox
