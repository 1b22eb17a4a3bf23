"""A pipeline's items to a folder of shards, exactly once across kills: `write_jsonl` and its like.

The job runs the stream itself. It writes a shard, gives it its name, and then replaces the manifest, which names all
shards that count and holds the snapshot right after the last item in them: one step, in which shard and snapshot change
together. A kill leaves what the last manifest names, and perhaps a shard that none names. A resume removes that, opens
the stream at the manifest's snapshot, and so writes the same shards again, where the order of items is fixed.

On success, the last manifest says that the job is complete. On a failure of a stage, an item that can't be written, a
full disk, Ctrl-C: the shard that was begun is dropped, and the exception gets a note that says how to go on.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, get_args

import msgspec

from streamline.core.options import check_installed, check_int, check_known, type_and_repr
from streamline.core.text import in_bytes, quantity
from streamline.core.tracebacks import TrimmedTraceback
from streamline.errors import DataError, PlanError, PlanTypeError, WriteError, printable
from streamline.io.formats.encoders import (
    Encoder,
    JsonlOutput,
    NpyOutput,
    OutputFormat,
    ParquetOutput,
    TarOutput,
    UnwritableItemError,
)
from streamline.io.storage.base import ShardFile
from streamline.io.storage.manifest import Manifest, WrittenShard, manifest_name, parse_manifest, world_sizes
from streamline.io.storage.options import Access, HttpOptions
from streamline.io.storage.output_folder import OutputFolder, output_folder, unwritable
from streamline.runtime.open import Openable
from streamline.runtime.run import OpenOptions, RunKeywords
from streamline.runtime.sync_stream import SyncStream
from streamline.sharding.ranks import Rank
from streamline.snapshot.snapshot import Snapshot

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("streamline.writing")  # as the docs call it
R = TypeVar("R")

SHARD_BYTES = 256 * 1024 * 1024
"""A shard, unless the user says otherwise: large enough for a store's throughput, small enough to divide the shards of
a large data set over many workers. WebDataset's usual size."""

FormatName = Literal["jsonl", "npy", "parquet", "tar"]

FORMATS: dict[str, Callable[[], OutputFormat]] = {
    kind.kind: kind for kind in (JsonlOutput, NpyOutput, ParquetOutput, TarOutput)
}
"""What makes a format with its defaults, by name."""


class WriteKeywords(RunKeywords, total=False):
    """What all `write_*` take alike, as keywords; the options of `open` among them."""

    shard_bytes: int
    compression: str | None
    resume: bool
    http: HttpOptions | None
    storage_options: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a folder holds of one rank's job, when that is complete.

    Attributes:
      folder: as it was given.
      shards: files that the rank has written, in all runs of the job together.
      items: in them.
      bytes: of them.
      items_before: of the items, those that earlier runs had written; all: there was nothing left to do.
    """

    folder: str
    shards: int
    items: int
    bytes: int
    items_before: int = 0

    def __str__(self) -> str:
        items, shards = quantity(self.items, "item"), quantity(self.shards, "shard")
        found = f"{printable(self.folder)}: {items} in {shards}, {in_bytes(self.bytes)}"
        return found + (f"; {self.items_before:,} of the items by earlier runs" if self.items_before else "")


def write_jsonl(pipeline: Openable[Any], folder: str | PathLike[str], **options: Unpack[WriteKeywords]) -> Written:
    """Run a pipeline, and write its items as lines of JSON, in shards; exactly once across kills and resumes.

    A JSON value for each item, as msgspec writes it: NumPy's numbers and arrays too, dates and bytes as strings. NaN
    and infinities, which JSON has no word for, are refused. Other formats: `write_parquet`, `write_tar`, `write_npy`.

    `folder` then has shards, `shard-00000-000000.jsonl`, and a manifest that names them: `read_jsonl(folder)` reads
    what that says. Shards and manifest are written whole or not at all. Of several ranks, each writes shards of its
    own, and a manifest. docs/writing.md says what kills, failures, stores and several jobs do.

    Args:
      pipeline: runs to its end, or until a failure; blocks meanwhile.
      folder: a local one, made if it is missing, or one in a store: s3://, gs://, az://.
      shard_bytes: a shard ends after the item with which it has so many bytes; >= 1, by default 256 MiB.
      compression: "gzip" or "zstd" (its default level), each shard as one stream, `shard-00000-000000.jsonl.gz`;
        `shard_bytes` counts bytes before it. Of Parquet, one of pyarrow's: "snappy" by default, "zstd", "gzip",
        "brotli", "lz4", "none". NumPy files have none.
      resume: go on with the job that has begun to write there, where its last whole shard ends; where there is none,
        begin. Without it, a folder that isn't empty is refused.
      http, storage_options: how a store is reached, see `read_jsonl`.
      options: those of `Pipeline.open`. Ranks end apart, each with all that it has (`ends="allow"`).

    Returns:
      What is in the folder of this rank's, when all of it is.

    Raises:
      PlanTypeError, PlanError: an option of the wrong type or value; a live source without `journal=`.
      WriteError: the folder isn't empty, has a writer, or can't be written to.
      ResumeError: another pipeline has written there.
      DataError: an item can't be written.
      What the stream fails with.
    """
    return write(pipeline, folder, JsonlOutput(), **options)


def write_npy(pipeline: Openable[Any], folder: str | PathLike[str], **options: Unpack[WriteKeywords]) -> Written:
    """Run a pipeline, and write its items, arrays of one shape and type, or numbers, as rows of NumPy files.

    Otherwise as `write_jsonl`; `read_npy(folder)` reads it.
    """
    return write(pipeline, folder, NpyOutput(), **options)


def write_parquet(
    pipeline: Openable[Any],
    folder: str | PathLike[str],
    *,
    schema: pa.Schema | None = None,
    **options: Unpack[WriteKeywords],
) -> Written:
    """Run a pipeline, and write its items, dicts by column or record batches, as rows of Parquet files.

    Otherwise as `write_jsonl`; `read_parquet(folder)` reads it. Needs `pip install 'streamline-data[arrow]'`.

    Args:
      schema: the columns and their types; None: as the first 1,000 rows show them, for all shards of this rank.
    """
    check_installed("write_parquet", "pyarrow", "pyarrow", "arrow")
    return write(pipeline, folder, ParquetOutput(schema), **options)


def write_tar(pipeline: Openable[Any], folder: str | PathLike[str], **options: Unpack[WriteKeywords]) -> Written:
    """Run a pipeline, and write its items, samples as `read_tar` gives them, into tar archives (WebDataset's).

    An item is a dict: "__key__", and bytes or str (as UTF-8) by field. Otherwise as `write_jsonl`; `read_tar(folder)`
    reads it.
    """
    return write(pipeline, folder, TarOutput(), **options)


def output_format(name: object) -> OutputFormat:
    if name not in get_args(FormatName):
        wrong, shown = (PlanError, repr(name)) if isinstance(name, str) else (PlanTypeError, type_and_repr(name))
        raise wrong(f".write(format=) is one of {', '.join(map(repr, get_args(FormatName)))}, got {shown}")
    if name == "parquet":
        check_installed('.write(format="parquet")', "pyarrow", "pyarrow", "arrow")
    return FORMATS[str(name)]()


def write(
    pipeline: Openable[Any],
    folder: str | PathLike[str],
    format: OutputFormat,
    *,
    shard_bytes: int = SHARD_BYTES,
    compression: str | None = None,
    resume: bool = False,
    http: HttpOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Unpack[RunKeywords],
) -> Written:
    """Write shards of a format: see `write_jsonl`."""
    given_pipeline: object = pipeline
    if not isinstance(given_pipeline, Openable):
        way = ": give the pipeline; the job opens it itself, so that it can resume" if hasattr(pipeline, "plan") else ""
        raise PlanTypeError(f"write_{format.kind} takes a pipeline, got {type_and_repr(pipeline)}{way}")
    if not isinstance(resume, bool):
        raise PlanTypeError(
            f"write_{format.kind}(resume=) is True or False, got {type_and_repr(resume)}: the folder has the state"
        )
    known = WriteKeywords.__annotations__
    check_known(f"write_{format.kind}", options.keys() - known.keys(), known)
    check_int(f"write_{format.kind}(shard_bytes=)", shard_bytes, 1)
    format = format if compression is None else format.compressed(compression)
    if options.setdefault("ends", "allow") != "allow":
        raise PlanError(f"write_{format.kind}(ends=): each rank writes all that it has: leave it out")
    if not pipeline.plan.source.survives_kill:
        raise PlanError(
            f"{pipeline.plan.source.kind} can't be read again, and what comes after the last whole shard would be lost "
            'with this process: keep it on disk, journal="dir/"'
        )
    rank = OpenOptions.of(**options).ranks.find()
    if rank.shared:
        raise PlanError("several processes share this rank, and each would write its shards: let one of them write")
    access = Access(http=http, storage_options=storage_options)
    with TrimmedTraceback(), output_folder(folder, access, manifest_name(rank.rank, rank.world_size)) as out:
        return _WriteJob(out, rank, format, shard_bytes).run(pipeline, options, resume=resume)


class _WriteJob:
    def __init__(self, out: OutputFolder, rank: Rank, format: OutputFormat, shard_bytes: int) -> None:
        self._out = out
        self._format = format
        self._shard_bytes = shard_bytes
        self._name = manifest_name(rank.rank, rank.world_size)
        self._manifest = Manifest(format=format.suffix[1:], rank=rank.rank, world_size=rank.world_size)
        self._sink: ShardFile | None = None
        self._encoder: Encoder | None = None
        self._items = 0  # in the shard

    def run(self, pipeline: Openable[Any], options: RunKeywords, *, resume: bool) -> Written:
        begun = self._find_job(resume=resume)
        snapshot = None if begun is None else Snapshot.from_json(json.dumps(begun.snapshot))
        opened = pipeline.open(resume=snapshot, **options)
        if begun is not None and begun.complete:
            _ = opened.resolved  # whether it is this pipeline that has written it
            logger.info("%s is complete: nothing to do", printable(self._out.path))
            return self._result(before=begun.items)
        before = self._manifest.items
        with opened as stream:
            self._claim(stream)
            try:
                self._write_all(stream)
            except BaseException as error:
                self._drop()
                error.add_note(self._how_to_go_on())
                raise
        return self._result(before=before)

    def _find_job(self, *, resume: bool) -> Manifest | None:
        """Return the manifest of the job to resume; None: the folder is empty. Raises `WriteError`."""
        path, content = self._out.path, self._out.manifest(self._name)
        if content is None:
            names = self._out.names()
            self._check_ranks(names)
            if others := [name for name in names if not self._of_other_rank(name)]:
                raise WriteError(
                    f"{path} isn't empty, and has no {self._name} of a job to go on with: it holds {others[0]}"
                    f"{f' and {len(others) - 1:,} more' if len(others) > 1 else ''}; give an empty folder"
                )
            return None
        if not resume:
            raise WriteError(
                f"a job has written to {path}: go on with it, resume=True (--resume), or give another folder"
            )
        found = parse_manifest(content, f"{path}/{self._name}")
        if found.format != (own := self._format.suffix[1:]):
            raise WriteError(f"{path} holds {found.format}, and this writes {own}: write that, or give another folder")
        there = self._out.names()
        for shard in found.shards:
            if there.get(shard.name) != shard.bytes:
                now = f"has {there[shard.name]:,} bytes" if shard.name in there else "is gone"
                way = "put it there again, or give another folder"
                raise WriteError(f"{path}/{shard.name} {now}, and {shard.bytes:,} were written: {way}")
        self._manifest = found
        return found

    def _check_ranks(self, names: Collection[str]) -> None:
        """Refuse the job of another number of ranks: each rank has its own state and shards."""
        own = self._manifest
        if sizes := world_sizes(names) - {own.world_size}:
            ranks = min(sizes)
            raise WriteError(
                f"{self._out.path} holds the job of {quantity(ranks, 'rank')}, and this is rank {own.rank} of "
                f"{own.world_size}: give another folder, or go on with world_size={ranks}. Ranks don't wait for each "
                "other here, so one process may run several in turn: write(…, resume=True, rank=r, "
                f"world_size={ranks}) for each r"
            )

    def _of_other_rank(self, name: str) -> bool:
        """Whether a file may be another rank's, of this job."""
        size = self._manifest.world_size
        shard = re.fullmatch(rf"shard-(\d{{5,}})-\d{{6,}}.*{re.escape(self._format.suffix)}", name)
        if shard is not None:
            return int(shard[1]) < size and int(shard[1]) != self._manifest.rank
        return name in {manifest_name(rank, size) for rank in range(size)}

    def _claim(self, stream: SyncStream[Any]) -> None:
        """Write the manifest, before any shard, and remove shards that it doesn't name."""
        manifest, snapshot = self._manifest, stream.snapshot()
        run = 0 if manifest.snapshot is None else manifest.run + 1
        self._put(snapshot, run=run)
        counts = {shard.name for shard in manifest.shards}
        own = re.compile(rf"shard-{manifest.rank:05d}-\d{{6,}}(?:-(\d+))?{re.escape(self._format.suffix)}")
        for name in self._out.names():
            found = own.fullmatch(name)
            if found is None or name in counts:
                continue
            if not self._out.fenced or int(found[1] or 0) < run:  # a later start may have made the others
                self._out.remove(name)

    def _write_all(self, stream: SyncStream[Any]) -> None:
        add, most = self._add, self._shard_bytes
        for item in stream:
            if add(item) >= most:
                self._commit(stream)
        if self._encoder is not None:
            self._commit(stream, complete=True)
        else:
            self._put(stream.snapshot(), complete=True)

    def _add(self, item: Any) -> int:
        if self._encoder is None:
            self._sink = self._out.shard()
            self._encoder = self._format.encoder(self._sink, self._shard_bytes, self._manifest.common)
        self._items += 1
        return self._encode(self._encoder.add, item)

    def _encode(self, step: Callable[..., R], *item: Any) -> R:
        try:
            return step(*item)
        except UnwritableItemError as error:
            raise self._unwritable(error, *item) from error.__cause__
        except RecursionError as error:
            raise self._unwritable(UnwritableItemError("it is nested too deeply, or in itself"), *item) from error
        except OSError as error:
            raise unwritable(self._out.disk, "write to", error) from error

    def _commit(self, stream: SyncStream[Any], *, complete: bool = False) -> None:
        """Finish a shard, and name it in the manifest, with the snapshot."""
        assert self._encoder is not None
        assert self._sink is not None
        self._encode(self._encoder.finish)
        manifest, snapshot = self._manifest, stream.snapshot()
        fence = f"-{manifest.run}" if self._out.fenced and manifest.run else ""
        name = f"shard-{manifest.rank:05d}-{len(manifest.shards):06d}{fence}{self._format.suffix}"
        shard = WrittenShard(name, self._items, self._sink.size)
        self._out.commit(self._sink, name)
        common = self._encoder.common
        self._put(snapshot, shards=[*manifest.shards, shard], common=common, complete=complete)
        self._sink, self._encoder, self._items = None, None, 0

    def _put(self, snapshot: Snapshot, **changed: Any) -> None:
        state = json.loads(snapshot.to_json())
        new = msgspec.structs.replace(self._manifest, snapshot=state, **changed)
        where = f"{self._out.path}/{self._name}"
        snapshot.store_with(lambda: self._out.replace_manifest(self._name, new.content()), where)
        self._manifest = new

    def _drop(self) -> None:
        """Discard the shard that was begun."""
        if self._encoder is not None:
            self._encoder.abandon()
        if self._sink is not None:
            self._sink.discard()

    def _unwritable(self, error: UnwritableItemError, *item: object) -> DataError:
        number = self._manifest.items + self._items - error.ago
        kind = f", of type {type(item[0]).__qualname__}," if item and not error.ago else ""
        return DataError(f"item {number:,} of what is written{kind} can't be written as {self._format.kind}: {error}")

    def _how_to_go_on(self) -> str:
        manifest = self._manifest
        return printable(
            f"{self._out.path} holds {quantity(manifest.items, 'item')} in "
            f"{quantity(len(manifest.shards), 'whole shard')}: write again with resume=True (--resume) to go on after "
            "them"
        )

    def _result(self, before: int) -> Written:
        manifest = self._manifest
        return Written(
            folder=self._out.path,
            shards=len(manifest.shards),
            items=manifest.items,
            bytes=manifest.size,
            items_before=before,
        )
