"""Every kind of source and of stage: a snapshot of any of them, resumed by any other; and no kind that isn't here."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as parquet
import pytest

import streamline as sl
from streamline.errors import ResumeError
from streamline.io.formats.base import Format
from streamline.pipeline import Pipeline
from streamline.plan.fingerprint import fingerprint
from streamline.snapshot.inspection import report
from streamline.sources.base import Source
from streamline.training.loader_state import LoaderState
from streamline.transforms.base import Stage
from tests.io.formats.records import array_record_file, lance_dataset, mds_file, put, record_file
from tests.laws.profile import mostly_long, sampled
from tests.snapshot.functions import later, noisy, size_of, tokens, twice
from tests.sources.stand_ins import Dataset, StatefulNumbers

Pipe = Pipeline[Any]


class Rows:
    """An iterable that knows its state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 8:
            self.at += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@sl.source(state=lambda: {"at": 0})
def counted(*, state: dict[str, int], shard: int, num_shards: int) -> Iterator[int]:
    while state["at"] < 8:
        state["at"] += 1
        yield state["at"] - 1


async def fed() -> AsyncIterator[int]:
    for n in range(8):
        yield n


@sl.stage(state=dict)
async def summed(items: AsyncIterator[int], *, state: dict[str, int]) -> AsyncIterator[int]:
    async for item in items:
        state["sum"] = state.get("sum", 0) + item
        yield item


KEPT: list[sl.StreamReplicator[int]] = []
"""A replicator that is dropped ends its replicas."""


def replicated() -> Pipe:
    KEPT.append(sl.StreamReplicator(range(16), 2))
    return KEPT[-1].pipeline(0)


def same(x: Any) -> Any:
    return x


def counted_on(seen: int, x: Any) -> tuple[int, Any]:
    return seen + 1, x


def true(x: Any) -> bool:
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of each format, of eight rows."""
    path = tmp_path_factory.mktemp("kinds")
    table = pa.table({"n": list(range(8))})
    for name in "ab":
        (path / f"{name}.txt").write_text("".join(f"{n}\n" for n in range(8)))
        (path / f"{name}.csv").write_text("n\n" + "".join(f"{n}\n" for n in range(8)))
        np.save(path / f"{name}.npy", np.arange(8))
        with h5py.File(path / f"{name}.h5", "w") as file:
            file["x"] = np.arange(8)
        (path / f"{name}.tfrecord").write_bytes(record_file([b"x"] * 8))
        (path / f"{name}.mds").write_bytes(mds_file({"n": ("uint8", 1)}, [[bytes([n])] for n in range(8)]))
        (path / f"{name}.array_record").write_bytes(array_record_file([b"x"] * 8))
        put(path / f"{name}.lance", lance_dataset({"n": list(range(8))}, 3))
        parquet.write_table(table, path / f"{name}.parquet", row_group_size=3)
        feather.write_feather(table, path / f"{name}.arrow", chunksize=3)
        with tarfile.open(path / f"{name}.tar", "w") as archive:
            for n in range(8):
                member = tarfile.TarInfo(f"{n}.txt")
                member.size = 1
                archive.addfile(member, BytesIO(b"x"))
    return path


def files_of(read: Callable[..., Pipe], suffix: str) -> Callable[[Path], Pipe]:
    return lambda folder: read([folder / f"a.{suffix}", folder / f"b.{suffix}"])


SOURCES: dict[str, Callable[[Path], Pipe]] = {
    "from_items": lambda _: sl.from_items(range(8)),
    "from_items of another name": lambda _: sl.from_items(range(8), name="rows"),
    "from_iterable": lambda _: sl.from_iterable(lambda: iter(range(8))),
    "from_iterable with a state": lambda _: sl.from_iterable(Rows),
    "from_iterable of a StreamDataset": lambda _: sl.from_iterable(sl.StreamDataset(lambda: iter(range(8)))),
    "from_torch": lambda _: sl.from_torch(StatefulNumbers(8)),
    "from_huggingface": lambda _: sl.from_huggingface(Dataset.iterable(8)),
    "from_stream": lambda _: sl.from_stream(fed),
    "from_stream of a replica": lambda _: replicated(),
    "stream_http": lambda _: sl.stream_http("http://127.0.0.1:9/", framing="lines"),
    "source": lambda _: counted(),
    "mix": lambda _: sl.mix({"a": sl.from_items(range(4)), "b": sl.from_items(range(4))}),
    "mix of others": lambda folder: sl.mix({"a": files_of(sl.read_lines, "txt")(folder), "b": counted()}),
    "concat": lambda _: sl.concat(sl.from_items(range(4)), sl.from_items(range(4))),
    "zip": lambda _: sl.zip(sl.from_items(range(8)), sl.from_items(range(8))),
    "zip of others": lambda folder: sl.zip(files_of(sl.read_npy, "npy")(folder), sl.from_iterable(Rows)),
    "read_lines": files_of(sl.read_lines, "txt"),
    "read_lines in turn": lambda folder: files_of(sl.read_lines, "txt")(folder).shard(1, mode="file", interleave=2),
    "read_jsonl": files_of(sl.read_jsonl, "txt"),
    "read_csv": files_of(sl.read_csv, "csv"),
    "read_tar": files_of(sl.read_tar, "tar"),
    "read_tfrecord": files_of(sl.read_tfrecord, "tfrecord"),
    "read_parquet": files_of(sl.read_parquet, "parquet"),
    "read_arrow": files_of(sl.read_arrow, "arrow"),
    "read_array_record": files_of(sl.read_array_record, "array_record"),
    "read_lance": files_of(sl.read_lance, "lance"),
    "read_mds": files_of(sl.read_mds, "mds"),
    "read_npy": files_of(sl.read_npy, "npy"),
    "read_hdf5": files_of(sl.read_hdf5, "h5"),
    "read_files": files_of(sl.read_files, "txt"),
}
"""By the source's kind, and what is special about it."""

STAGES: dict[str, Callable[[Pipe], Pipe]] = {
    "batch": lambda pipe: pipe.batch(2, collate=None),
    "batch by cost": lambda pipe: pipe.batch(2, max_cost=99, cost=size_of, collate=None),
    "batch in time": lambda pipe: pipe.batch(2, collate=None, max_wait_s=60),
    "bucket_by_length": lambda pipe: pipe.bucket_by_length([1], 2, length=size_of, collate=None),
    "cache": lambda pipe: pipe.cache(),
    "filter": lambda pipe: pipe.filter(true),
    "enumerate": lambda pipe: pipe.enumerate(),
    "flat_map": lambda pipe: pipe.flat_map(twice),
    "groups": lambda pipe: pipe.group_by(repr),
    "map": lambda pipe: pipe.map(same),
    "map of lists": lambda pipe: pipe.map(same, batched=4),
    "map as completed": lambda pipe: pipe.map(later, concurrency=2, ordered=False),
    "numbering": lambda pipe: pipe.map(noisy, seed=1),
    "pack": lambda pipe: pipe.map(tokens).pack(4),
    "prefetch": lambda pipe: pipe.prefetch(2),
    "regenerate": lambda pipe: pipe.regenerate(4),
    "repeat": lambda pipe: pipe.repeat(2),
    "scan": lambda pipe: pipe.scan(counted_on, 0),
    "shuffle": lambda pipe: pipe.shuffle(window=4),
    "skip": lambda pipe: pipe.skip(1),
    "take": lambda pipe: pipe.take(20),
    "through": lambda pipe: pipe.through(summed),
    "transfer": lambda pipe: pipe.map(tokens).transfer("host"),
    "unbatch": lambda pipe: pipe.batch(2, collate=None).unbatch(),
    "window": lambda pipe: pipe.window(3),
    "none": lambda pipe: pipe,
}
"""By the stage's kind, over eight items."""

BEFORE: dict[str, Callable[[Pipe], Pipe]] = {
    "sample": lambda pipe: pipe.sample(),
    "shuffle the index": lambda pipe: pipe.shuffle(),
    "take": lambda pipe: pipe.take(6),
    "skip": lambda pipe: pipe.skip(1),
    "repeat": lambda pipe: pipe.repeat(2),
}
"""Likewise, before the shard."""

AFAR = ("stream_http", "from_stream of a replica")
"""Sources that are not read here: there is no server, and who else reads the replicator is in no snapshot."""


def staged(section: str) -> dict[str, Pipe]:
    """Return pipelines by what is special about their stages: in the workers, after the merge, before the shard."""
    rows = sl.from_items(range(8))
    if section == "before":
        return {name: make(rows).shard(1).merge() for name, make in BEFORE.items()}
    if section == "after":
        return {name: make(rows.shard(1).merge()) for name, make in STAGES.items()}
    return {name: make(rows.shard(1)).merge() for name, make in STAGES.items() if name != "transfer"}


@pytest.fixture(scope="module")
def snapshots(folder: Path) -> dict[str, list[sl.Snapshot]]:
    """A snapshot of each source at its beginning, and one behind some items."""
    counts = {"read_files": 1, **dict.fromkeys(AFAR, 0)}
    return {
        name: [snapshot_of(make(folder), items) for items in sorted({0, counts.get(name, 3)})]
        for name, make in SOURCES.items()
    }


def snapshot_of(pipe: Pipe, items: int) -> sl.Snapshot:
    with pipe.open() as stream:
        for _ in range(items):
            next(stream)
        return sl.Snapshot.from_json(stream.snapshot().to_json())


def offered(refused: str) -> list[str]:
    return re.findall(r'^ +accept=\["(.*)"\]: ', refused, re.MULTILINE)


def read(pipe: Pipe, name: str, snapshot: sl.Snapshot, accept: list[str]) -> None:
    with pipe.open(resume=snapshot, accept=accept) as stream:
        if name not in AFAR:
            list(stream)


def check_pair(pipe: Pipe, name: str, snapshot: sl.Snapshot) -> str:
    """Resume: it is exact, or refused with a way out that leads out. Return which."""
    fits = pipe.explain(snapshot)
    accept = offered(str(fits))
    if fits.fits:
        read(pipe, name, snapshot, [])
        return "exact"
    with pytest.raises(ResumeError) as refused:
        pipe.open(resume=snapshot)
    assert offered(str(refused.value)) == accept
    if not accept:
        assert "this can't:" in str(refused.value)
        return "refused"
    assert "this can't:" not in str(refused.value)
    assert pipe.explain(snapshot, accept=accept).fits
    read(pipe, name, snapshot, accept)
    return "accepted"


def subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for found in kind.__subclasses__():
        yield found
        yield from subclasses(found)


def test_no_kind_of_source_or_stage_is_missing_here(folder: Path) -> None:
    for package in ("sources", "io.formats", "transforms", "transfer"):
        path = importlib.import_module(f"streamline.{package}").__path__
        for module in pkgutil.iter_modules(path, f"streamline.{package}."):
            importlib.import_module(module.name)
    pipes = [make(folder) for make in SOURCES.values()]
    sources = {type(pipe.plan.source) for pipe in pipes}
    formats = {type(pipe.plan.source.format) for pipe in pipes if hasattr(pipe.plan.source, "format")}
    plans = [pipe.plan for section in ("before", "workers", "after") for pipe in staged(section).values()]
    stages = {type(stage) for plan in plans for stage in (*plan.before, *plan.worker, *plan.after)}
    inner = {"Several", "FedSource", "Stride", "ShuffleFiles", "ReplicaFeed"}  # abstract; made by others; tested apart
    for base, known in ((Source, sources), (Format, formats), (Stage, stages)):
        ours = {one for one in subclasses(base) if one.__module__.split(".")[:2] != ["streamline", "testing"]}
        ours = {one for one in ours if one.__module__.startswith("streamline.")}
        missing = {found.__name__ for found in ours - known if not getattr(found, "__abstractmethods__", None)} - inner
        assert base is Format or all("kind" in vars(one) or one.__abstractmethods__ for one in ours), (
            "a kind is saved: it must not be the class's name"
        )
        assert not missing, f"add them to the tables of this module, and say what their states are: {missing}"
    counted_kinds = {entry["kind"] for plan in plans for entry in fingerprint(plan)}
    kinds = {
        one.kind
        for one in subclasses(Stage)
        if one.__module__.startswith("streamline.transf") and not one.__abstractmethods__
    }
    assert counted_kinds >= kinds - {"shuffle_files", "transfer", "prefetch"}
    undeclared = {found.__name__ for found in stages if found.state_type is Any} - {
        "Map", "Filter", "Prefetch", "Transfer", "IndexShuffle", "Sample",
    }  # fmt: skip
    assert not undeclared, f"say what their states are: {undeclared}"


@pytest.mark.one_in(3, 1)
@pytest.mark.filterwarnings("ignore::streamline.errors.CodeChangedWarning")
@pytest.mark.parametrize("name", mostly_long(SOURCES, 4))
def test_a_snapshot_of_any_source_resumed_here_is_exact_or_says_what_it_is_of(
    name: str, folder: Path, snapshots: dict[str, list[sl.Snapshot]]
) -> None:
    pipe = SOURCES[name](folder)
    kind = pipe.plan.source.kind
    assert all(kind in report(snapshot) for snapshot in snapshots[name])
    every, at = [one for several in snapshots.values() for one in several], [*SOURCES].index(name)
    for snapshot in [*snapshots[name], *sampled([*every[at:], *every[:at]], 3)]:
        its = snapshot.fingerprint[0]["kind"]
        if its == kind:
            check_pair(SOURCES[name](folder), name, snapshot)
        else:
            with pytest.raises(ResumeError, match=f"is of {its} and this plan reads {kind}") as refused:
                pipe.open(resume=snapshot)
            assert not offered(str(refused.value))
            state = LoaderState(snapshot=snapshot.to_json(), epoch=0, step=1, at="inside", steps_per_epoch=0)
            with pytest.raises(ResumeError, match=f"is of {its} and this plan reads {kind}"):
                pipe.loader().load_state_dict(state.to_dict())
            assert str(refused.value).splitlines() == str(pipe.explain(snapshot)).splitlines()[1:]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("section", ["before", "workers", "after"])
def test_a_snapshot_resumed_by_any_other_stages_is_exact_or_refused_with_a_way_out(section: str) -> None:
    pipes, found = staged(section), set[str]()
    for at, (other, theirs) in enumerate(pipes.items()):
        snapshot = snapshot_of(theirs, 1 if other == "pack" else 3)
        names = {other, *sampled([*pipes, *pipes][at : at + len(pipes)], 3)}
        found |= {check_pair(pipes[name], name, snapshot) for name in names}
    assert found == ({"exact", "refused"} if section == "before" else {"exact", "accepted", "refused"})


def test_a_listing_of_a_component_of_another_kind_is_never_read() -> None:
    rows = sl.mix({"a": sl.from_items(range(4))})
    snapshot = snapshot_of(rows, 1)
    body = json.loads(snapshot.to_json())
    body["listing"]["a"]["data"] = 7
    with pytest.raises(ResumeError, match=r"a: - from_items 'a/items'"):
        sl.mix({"a": counted()}).open(resume=sl.Snapshot.from_json(json.dumps(body)))
