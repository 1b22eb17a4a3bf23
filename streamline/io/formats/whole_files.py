"""Whole files: each is one item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from streamline.core.flow import Chunk, Lists, StageContext
from streamline.core.meters import Working
from streamline.core.state import At
from streamline.errors import PlanError, ReadError
from streamline.io.fetch.fetcher import Fetcher
from streamline.io.fetch.file import File, FilePart
from streamline.io.formats.base import AHEAD_BYTES, Format, Place


class WholeFile(NamedTuple):
    """A file with all that is in it."""

    path: str
    data: bytes

    @property
    def nbytes(self) -> int:
        """What it holds, in bytes."""
        return len(self.data)


@dataclass(frozen=True, kw_only=True)
class WholeFormat(Format[WholeFile]):
    """Each file is one item. Place: {"file": path}, the next one."""

    kind: ClassVar[str] = "read_files"
    reread: ClassVar[str] = "goes on with the next file"

    @property
    def ahead_bytes(self) -> int | None:
        return AHEAD_BYTES

    def not_splittable(self, path: str, num_shards: int) -> PlanError | None:
        return PlanError(
            f"{path} is one file, and so one item of {self.kind}, which {num_shards} shards can't share: give several "
            "files, or write .shard(1)"
        )

    async def lists(
        self, fetcher: Fetcher, parts: Sequence[FilePart], place: Place, name: str, context: StageContext
    ) -> Lists[WholeFile]:
        index = 0
        paths = [part.path for part in parts]
        following = [*paths[1:], None]

        def state(at: int) -> At:
            return At(name, {"file": following[at]}, {"file": paths[at]})

        async with fetcher:
            while index < len(parts):
                with Working(context.meter):
                    found = await fetcher.wholes(index, context.max_items)
                items = [WholeFile(paths[at], data) for at, data in found if not isinstance(data, ReadError)]
                if items:
                    begin, index = index, index + len(items)
                    yield Chunk(items, tuple(map(state, range(begin, index))))
                last = found[-1][1]
                if isinstance(last, ReadError):
                    context.skip_or_raise(last, paths[index], state(index))
                    yield Chunk((), (), state(index))
                    index += 1

    async def chunks(
        self, file: File, begin: Place, after: Place, name: str, context: StageContext
    ) -> Lists[WholeFile]:
        data = b"".join([block async for block in file.blocks()])
        yield Chunk([WholeFile(file.path, data)], (At(name, dict(after), {"file": file.path}),))
