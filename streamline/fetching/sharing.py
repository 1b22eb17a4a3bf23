"""What all flows of one source in one event loop share: its storages, and the tasks that ask them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from streamline.core.session import Session
from streamline.core.tasks import Tasks
from streamline.fetching.crew import Crew
from streamline.storage.access import Access
from streamline.storage.storages import Storages

__all__ = ["Lease"]


@dataclass
class _Shared:
    storages: Storages
    crew: Crew | None = None
    users: int = 0
    notes: dict[str, Any] = field(default_factory=dict)


class Lease:
    """The storages of a source, for one of its flows; the last one that gives them back closes them.

    Args:
      session: of the running.
      name: of the source.
      access: how it reads.

    Attributes:
      storages: likewise.
      notes: what formats remember of files for the source's other flows.
    """

    def __init__(self, session: Session, name: str, access: Access) -> None:
        self._session = session
        self._shares: dict[str, _Shared] = session.shares
        self._name = name
        self._access = access
        self._shared = self._shares.setdefault(name, _Shared(Storages(access, session.meters.traffic(name))))
        self._shared.users += 1
        self.storages = self._shared.storages
        self.notes = self._shared.notes
        self._held = True

    def crew(self, tasks: Tasks) -> Crew:
        """Return what makes the requests of the source; it is made with `tasks` if there is none yet."""
        shared = self._shared
        if shared.crew is None:
            shared.crew = Crew(tasks, self._access.concurrency, self._session.budget)
        return shared.crew

    async def aclose(self) -> None:
        """Give them back. Idempotent."""
        if not self._held:
            return
        self._held = False
        self._shared.users -= 1
        if not self._shared.users:
            del self._shares[self._name]
            try:
                if self._shared.crew is not None:
                    await self._shared.crew.aclose()
            finally:
                await self._shared.storages.aclose()
