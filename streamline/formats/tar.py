"""Tar archives, read from any sample on: WebDataset's, or any other's members."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar

from streamline.core.counters import HoldTimer, StageMeter, Working
from streamline.core.flow import Chunk, Demand, Lists
from streamline.core.pace import Pace
from streamline.core.state import At, State, States
from streamline.errors import DataError, PlanError, ReadError
from streamline.fetching.file import File
from streamline.formats.base import Format, Place
from streamline.formats.compression import named, not_splittable
from streamline.formats.pieces import pieces
from streamline.formats.tar_samples import Gathered, Samples
from streamline.formats.tar_scanner import Scanner
from streamline.formats.tar_walk import walk_of
from streamline.sharding.split import byte_range

__all__ = ["MAX_SAMPLE_BYTES", "TarFormat"]


MAX_SAMPLE_BYTES = 256 * 1024 * 1024
"""The most data that a sample has unless the user says otherwise: as long as the longest line."""


@dataclass(frozen=True, kw_only=True)
class TarFormat(Format[Any]):
    """Tar archives. Place: {"file", "byte", "sample"}: where the next sample begins, and how many are before it.

    A byte of 0 in a share other than the first means that nobody has looked yet where its first sample begins.

    Attributes:
      group: whether members are grouped into samples; otherwise each is one.
      max_sample_bytes: a sample with more data is an error.
    """

    kind: ClassVar[str] = "read_tar"
    reread: ClassVar[str] = "seeks to its sample (compressed: unpacks up to it)"

    group: bool = True
    max_sample_bytes: int = MAX_SAMPLE_BYTES

    def begin(self, path: str | None) -> Place:
        return {"file": path, "byte": 0, "sample": 0}

    def not_splittable(self, path: str, num_shards: int) -> PlanError | None:
        kind = named(path)
        return None if kind is None else not_splittable(path, num_shards, kind)

    def options(self) -> dict[str, Any]:
        return {"group": self.group}

    async def chunks(self, file: File, begin: Place, after: Place, name: str, demand: Demand) -> Lists[Any]:
        meter = demand.meter
        with Working(meter):
            reader = await _reader(self, file, begin, after, name, demand)
        if reader is None:
            yield Chunk((), (), At(name, dict(after)))
            return
        pace = Pace()
        async with aclosing(pieces(file, reader.byte)) as blocks:
            while True:
                failure: Exception | None = None
                with Working(meter):
                    try:
                        block = await anext(blocks, None)
                    except (DataError, ReadError) as error:
                        failure = error
                if failure is not None:
                    for chunk in reader.chunks(reader.samples.rest()):
                        yield chunk
                    raise failure
                if block is None:
                    break
                reader.scanner.feed(block[0])
                more = True
                while more:
                    found = _held(reader.samples.next, meter)
                    for chunk in reader.chunks(found):
                        yield chunk
                    if reader.samples.over:
                        return
                    more = found.more
                    await pace.breathe()
        for chunk in reader.chunks(_held(reader.samples.finish, meter), final=True):
            yield chunk


def _held(work: Any, meter: StageMeter | None) -> Gathered:
    with HoldTimer(meter):
        found: Gathered = work()
    return found


async def _reader(
    format: TarFormat, file: File, begin: Place, after: Place, name: str, demand: Demand
) -> _Reader | None:
    """Return what reads from `begin` on; None: nothing in this share of the archive is left."""
    part, byte, sample, stop = file.part, begin["byte"], begin["sample"], None
    if part.num_shards > 1:
        walk = await walk_of(file, format.group)
        stop = byte_range(walk.size, part.num_shards, part.shard)[1] if part.shard < part.num_shards - 1 else None
        if part.shard and not byte:
            found = await walk.begin(file, part.shard)
            if found is None:
                return None
            byte, sample = found
    scanner = Scanner(file.path, byte)
    samples = Samples(
        file.path,
        scanner,
        stop,
        group=format.group,
        max_bytes=format.max_sample_bytes,
        patient=demand.skips is not None and demand.skips.active,
    )
    return _Reader(scanner, samples, file.path, byte, sample, name, after, demand)


class _Reader:
    """Turns what is found in one archive into chunks.

    Attributes:
      byte: where it begins to read.
    """

    def __init__(
        self,
        scanner: Scanner,
        samples: Samples,
        path: str,
        byte: int,
        sample: int,
        name: str,
        after: Place,
        demand: Demand,
    ) -> None:
        self.scanner = scanner
        self.samples = samples
        self.byte = byte
        self._path = path
        self._sample = sample
        self._name = name
        self._after = after
        self._demand = demand

    def chunks(self, found: Gathered, *, final: bool = False) -> Iterator[Chunk[Any]]:
        """Yield the samples of a slice; behind one that is left out, only the place.

        Raises:
          DataError: what the slice ends with.
        """
        last = self.samples.over or (final and found.wrong is None and found.failure is None)
        if found.items:
            self._sample += len(found.items)
            first = self._sample - len(found.items) + 1
            states = _Ends(self._name, self._path, first, found.ends, self._after if last else None)
            yield Chunk(found.items, states)
        elif last:
            yield Chunk((), (), At(self._name, dict(self._after)))
        if found.failure is not None:
            raise found.failure
        if found.wrong is not None:
            self._sample += 1
            end = found.wrong.end
            place = dict(self._after) if end is None else _place(self._path, end, self._sample)
            self._demand.judge(found.wrong.error, found.wrong.item, At(self._name, place))
            yield Chunk((), (), At(self._name, place))


class _Ends:
    """A column: behind sample i of a list, the byte where the next one begins.

    Args:
      first: samples of the archive up to the list's first one, with it.
      last: the place behind the last one, where it is the archive's last; else None.
    """

    __slots__ = ("_ends", "_first", "_last", "_name", "_path")

    def __init__(self, name: str, path: str, first: int, ends: Sequence[int], last: Place | None) -> None:
        self._name = name
        self._path = path
        self._first = first
        self._ends = ends
        self._last = last

    def __getitem__(self, index: int, /) -> State:
        if self._last is not None and index == len(self._ends) - 1:
            return At(self._name, dict(self._last))
        return At(self._name, _place(self._path, self._ends[index], self._first + index))

    def trimmed(self, first: int, count: int) -> States:
        last = self._last if first + count == len(self._ends) else None
        return _Ends(self._name, self._path, self._first + first, self._ends[first : first + count], last)


def _place(path: str, byte: int, sample: int) -> Place:
    return {"file": path, "byte": byte, "sample": sample}
