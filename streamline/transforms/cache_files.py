"""The files of `.cache(path=)`: blocks of a pass, each written atomically, with a checksum, under a unique name.

A file's name holds the stage, the shard, a digest of the stages upstream, the drawing, the number of items up to its
end, its own random id and that of the block before it, and whether it is the last. So the names alone say which blocks
make a pass, none is written twice, and two runs that draw the same pass at once write two chains, which may share their
first blocks. After a kill, the next run continues the chain.

A reset is an empty file whose name has the number of the next drawing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from streamline.core.atomic_file import write_parts
from streamline.core.item_codec import Read, unpack_all
from streamline.core.record_file import DamagedError, pack_parts, read_pack, size_of, whose, write_pack
from streamline.core.state import Json, Tree
from streamline.errors import CacheFull, ReadError
from streamline.transforms.cache_pass import MAKE_ROOM

MAGIC = b"streamline cached block 1\n"

WRITER = ".cache(path=)"

ROOT = "0" * 16
"""The id before the first block."""

_NAME = re.compile(
    r"(?P<whose>.+\.shard-\d+-of-\d+\.[0-9a-f]{16})\.drawing-(?P<drawing>\d+)\."
    r"(?:reset|(?P<stop>\d+)\.(?P<before>[0-9a-f]{16})-(?P<id>[0-9a-f]{16})(?P<end>\.end)?(?P<chosen>\.chosen)?\.cache)"
)


def new_id() -> str:
    return os.urandom(8).hex()


@dataclass(frozen=True)
class CacheBlock:
    """A file, as its name describes it.

    Attributes:
      stop: items of the pass up to its end.
      chosen: its order was chosen, so drawing it again may give another one.
    """

    path: Path
    drawing: int
    stop: int
    before: str
    id: str
    end: bool
    nbytes: int
    chosen: bool = False


class BlockInfo(NamedTuple):
    """The content of a block.

    Attributes:
      epoch: in which it was drawn.
      state: the upstream's, after it.
    """

    items: list[Any]
    epoch: tuple[int, ...]
    state: Tree


class FoundBlocks:
    """The blocks of one stage and shard that a folder has."""

    def __init__(self, blocks: Sequence[CacheBlock], newest: int) -> None:
        self.newest = newest
        self.blocks = {block.id: block for block in blocks}
        self._followers: dict[str, list[CacheBlock]] = {}
        for block in blocks:
            self._followers.setdefault(block.before, []).append(block)

    def chain(self, tip: str) -> list[CacheBlock] | None:
        """Return the blocks up to this one; None: one of them is missing."""
        found: list[CacheBlock] = []
        while tip != ROOT:
            block = self.blocks.get(tip)
            if block is None:
                return None
            found.append(block)
            tip = block.before
        return found[::-1]

    def beyond(self, tip: str, drawing: int, *, chosen: bool = True) -> list[CacheBlock]:
        """Return the blocks after this one: a whole pass if there is one, else the longest chain.

        Args:
          chosen: include those whose order was chosen.
        """
        ends, todo = list[CacheBlock](), [block for block in self._followers.get(tip, ()) if block.drawing == drawing]
        while todo:
            block = todo.pop()
            if block.chosen and not chosen:
                continue
            todo += self._followers.get(block.id, ())
            ends.append(block)
        if not ends:
            return []
        found = [max(ends, key=lambda block: (block.end, block.stop, block.id))]
        while found[-1].before != tip:
            found.append(self.blocks[found[-1].before])
        return found[::-1]


class CacheFiles:
    """The files of one stage in one shard. Calls block.

    Args:
      stage: as messages call it.
      upstream_digest: of the stages upstream.
    """

    def __init__(
        self,
        folder: str,
        stage: str,
        name: str,
        upstream_digest: str,
        shard: int,
        num_shards: int,
        max_bytes: int | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.stage = stage
        self._whose = f"{whose(name, shard, num_shards)}.{upstream_digest}"
        self._shard = shard
        self.max_bytes = max_bytes

    def look(self) -> FoundBlocks:
        blocks, newest = list[CacheBlock](), 0
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    match = _NAME.fullmatch(entry.name)
                    if match is None or match["whose"] != self._whose:
                        continue
                    drawing = int(match["drawing"])
                    newest = max(newest, drawing)
                    if match["id"] is not None:
                        with suppress(FileNotFoundError):  # another run has just removed it
                            path, stop, size = Path(entry.path), int(match["stop"]), entry.stat().st_size
                            end, chosen = match["end"] is not None, match["chosen"] is not None
                            block = CacheBlock(path, drawing, stop, match["before"], match["id"], end, size, chosen)
                            blocks.append(block)
        except FileNotFoundError:
            return FoundBlocks((), 0)
        except OSError as error:
            raise ReadError(f"can't look into {self.folder}: {error.strerror or error}; {self._wants}") from error
        return FoundBlocks(blocks, newest)

    def write(self, block: CacheBlock, held: BlockInfo, before_bytes: int) -> CacheBlock:
        """Write a block durably, and return it as it is on disk.

        Args:
          block: without a path and a size.
          before_bytes: of the blocks before it.

        Raises:
          CacheFull: with those before, it exceeds `max_bytes`.
          ReadError: it can't be written.
          DataError: an item can't be serialized.
        """
        path = self.folder / (
            f"{self._whose}.drawing-{block.drawing}.{block.stop:012}.{block.before}-{block.id}"
            f"{'.end' if block.end else ''}{'.chosen' if block.chosen else ''}.cache"
        )
        body = {"name": path.name, "epoch": held.epoch, "state": held.state}
        parts = pack_parts(MAGIC, WRITER, held.items, body)
        size = size_of(parts)
        if self.max_bytes is not None and before_bytes + size > self.max_bytes:
            raise CacheFull(
                f"{self.stage} of shard {self._shard} has files of {before_bytes:,} bytes, and the next one, up to "
                f"item {block.stop:,}, has {size:,}: a pass doesn't fit into max_bytes={self.max_bytes:,}. "
                f"{MAKE_ROOM}"
            )
        try:
            write_pack(path, parts, self._whose)
        except OSError as error:
            raise ReadError(f"can't keep a pass in {path}: {error.strerror or error}; {self._wants}") from error
        return replace(block, path=path, nbytes=size)

    @property
    def _wants(self) -> str:
        return "name a folder for .cache(path=) that can be written, with room for a pass of all shards"

    def read(self, block: CacheBlock) -> BlockInfo:
        """Return a block's content.

        Raises:
          DamagedError: it isn't as it was written.
          FileNotFoundError: it has been removed.
          ReadError: it can't be read.
        """

        def unpacked(body: Json, read: Read) -> BlockInfo:
            if body["name"] != block.path.name:
                raise ValueError(f"it was written as {body['name']}")
            return BlockInfo(unpack_all(body["items"], read), tuple(body["epoch"]), body["state"])

        try:
            return read_pack(block.path, MAGIC, unpacked)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ReadError(f"can't read {block.path} of {self.stage}: {error.strerror or error}") from error

    def remove(self, blocks: Sequence[CacheBlock]) -> None:
        """Remove files; errors are ignored."""
        for block in blocks:
            with suppress(OSError):
                block.path.unlink(missing_ok=True)

    def remove_before(self, drawing: int) -> None:
        """Remove the files of drawings before this one."""
        with suppress(OSError):
            for path in list(self.folder.iterdir()):
                match = _NAME.fullmatch(path.name)
                if match is not None and match["whose"] == self._whose and int(match["drawing"]) < drawing:
                    path.unlink(missing_ok=True)

    def reset(self) -> None:
        """Begin a new drawing for the runs that begin from now on."""
        number = self.look().newest + 1
        try:
            write_parts(self.folder / f"{self._whose}.drawing-{number}.reset", ())
        except OSError as error:
            raise ReadError(f"can't reset {self.stage}: {error.strerror or error}; {self._wants}") from error


def whole(read: Callable[[], BlockInfo]) -> BlockInfo | str:
    """Return what `read` does, or a text that says what is wrong with the file."""
    try:
        return read()
    except FileNotFoundError:
        return "is gone"
    except DamagedError as error:
        return f"{error}"
