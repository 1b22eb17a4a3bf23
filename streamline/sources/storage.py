"""Where bytes come from: the one seam between formats and what holds the files."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from streamline.sources.http_options import HttpOptions
from streamline.sources.local import LocalStorage
from streamline.sources.paths import is_url

__all__ = ["HttpOptions", "Storage", "Storages"]


class Storage(Protocol):
    """Files by path, read as streams of bytes. Belongs to one flow, and is closed with it."""

    async def size(self, path: str) -> int | None:
        """Return a file's size in bytes; None if nobody can say.

        Raises:
          ReadError: as for `blocks`.
        """

    def blocks(self, path: str, start: int = 0, stop: int | None = None) -> AsyncGenerator[bytes, None]:
        """Yield bytes `start` to `stop` (None: the end) in blocks of bounded size, none of them empty.

        Raises:
          ReadError: the file can't be had, changed on the way, or has no byte `start`. Being cut short is never an end.
        """

    async def aclose(self) -> None:
        """Close what is open. Idempotent."""


class Storages:
    """The storages of one flow, each opened when a path needs it."""

    def __init__(self, http: HttpOptions | None = None) -> None:
        self._http = http or HttpOptions()
        self._open: dict[str, Storage] = {}

    def of(self, path: str) -> Storage:
        """Return the storage that holds `path`."""
        kind = "http" if is_url(path) else "local"
        if kind not in self._open:
            self._open[kind] = self._make(kind)
        return self._open[kind]

    def _make(self, kind: str) -> Storage:
        if kind == "local":
            return LocalStorage()
        from streamline.sources.http import HttpStorage  # aiohttp takes 0.2 s to import

        return HttpStorage(self._http)

    async def aclose(self) -> None:
        """Close them all."""
        while self._open:
            await self._open.popitem()[1].aclose()
