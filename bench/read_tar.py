"""Is reading WebDataset tar archives as fast as with webdataset? Local files, samples as dicts of bytes."""

from __future__ import annotations

import atexit
import shutil
import tarfile
import tempfile
from collections.abc import Iterable
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, at_least, peer

Kind = Literal["images", "small"]

SIZES: dict[Kind, tuple[int, int]] = {"images": (20 * 1024, 100 * 1024), "small": (512, 1536)}


@cache
def archive(kind: Kind, samples: int) -> Path:
    """Return an archive of samples with two fields: data of a random size, and a class."""
    folder = Path(tempfile.mkdtemp(prefix="bench_read_tar_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    rng = np.random.default_rng(0)
    path = folder / f"{kind}.tar"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, size in enumerate(rng.integers(*SIZES[kind], samples).tolist()):
            for field, data in (("jpg", rng.bytes(size)), ("cls", b"%d" % (number % 1000))):
                info = tarfile.TarInfo(f"{number:08d}.{field}")
                info.size = len(data)
                tar.addfile(info, BytesIO(data))
    return path


def consume(samples: Iterable[dict[str, Any]]) -> Tally:
    count = checksum = 0
    for sample in samples:
        count += 1
        checksum += len(sample["jpg"]) + int(sample["cls"])
    return Tally(count, checksum)


@cache
def expected(kind: Kind, n: int) -> Tally:
    sizes = np.random.default_rng(0).integers(*SIZES[kind], n)
    return Tally(n, int(sizes.sum()) + sum(number % 1000 for number in range(n)))


def plain(kind: Kind, n: int) -> Tally:
    """A loop over `tarfile`, as one would write it by hand."""

    def samples() -> Iterable[dict[str, Any]]:
        sample: dict[str, Any] = {}
        with tarfile.open(archive(kind, n), "r|") as tar:
            for member in tar:
                key, _, field = member.name.partition(".")
                if sample and sample["__key__"] != key:
                    yield sample
                    sample = {}
                file = tar.extractfile(member)
                assert file is not None
                sample.update({"__key__": key, field: file.read()})
                tar.members = []  # type: ignore[attr-defined]  # else it keeps every header
        yield sample

    return consume(samples())


def streamline(kind: Kind, n: int) -> Tally:
    with sl.read_tar(archive(kind, n)).open() as stream:
        return consume(stream)


def webdataset(kind: Kind, n: int) -> Tally:
    library = peer("webdataset")
    return consume(library.WebDataset(str(archive(kind, n)), shardshuffle=False, empty_check=False))


def suite(kind: Kind, question: str, items: int) -> Suite:
    """Return the table for one kind of archive."""
    prepare = partial(archive, kind)
    peers, targets = "webdataset", (at_least(1, "webdataset"), at_least(1, "tarfile, by hand"))
    return Suite(
        question=question,
        unit="samples/s",
        floor="tarfile, by hand",
        expected=partial(expected, kind),
        smoke_items=50,
        note="One local file in the page cache, two members a sample, one process. Whole runs.",
        cases=(
            Case("tarfile, by hand", partial(plain, kind), items, prepare=prepare),
            Case("streamline, read_tar", partial(streamline, kind), items, targets, prepare=prepare),
            Case("webdataset", partial(webdataset, kind), items, peers=(peers,), prepare=prepare),
        ),
    )


SUITES = (
    suite("images", "WebDataset tar: samples of 20 to 100 KiB", 4000),
    suite("small", "WebDataset tar: samples of 1 KiB", 10_000),
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
