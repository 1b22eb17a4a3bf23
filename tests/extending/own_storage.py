"""A storage outside the package: the members of zip archives, zip://ARCHIVE!MEMBER."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from zipfile import ZipFile

from streamline.io.storage.base import FoundObject, Storage
from streamline.io.storage.options import Access
from streamline.io.storage.paths import Glob
from streamline.io.storage.registry import storage


@storage("zip")
class ZipStorage(Storage):
    """Opens the archive for each question: enough for a few members."""

    def __init__(self, access: Access) -> None:
        """The options that `read_*` were given are in `access`."""

    async def list(self, pattern: str) -> list[FoundObject]:
        archive, _, members = pattern.partition("!")
        glob = Glob(members)
        with ZipFile(archive.removeprefix("zip://")) as file:
            return [await self.stat(f"{archive}!{name}") for name in sorted(file.namelist()) if glob.matches(name)]

    async def stat(self, path: str) -> FoundObject:
        archive, _, member = path.removeprefix("zip://").partition("!")
        with ZipFile(archive) as file:
            return FoundObject(path, file.getinfo(member).file_size)

    async def blocks(
        self, path: str, start: int = 0, stop: int | None = None, etag: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        archive, _, member = path.removeprefix("zip://").partition("!")
        with ZipFile(archive) as file:
            yield file.read(member)[start:stop]
