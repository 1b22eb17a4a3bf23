"""Do the records of a TFRecord file come as fast as out of a reader in pure Python?"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import streamline as sl
from bench import harness
from bench.suite import Case, Suite, Tally, at_least, peer
from streamline.io.formats.tfrecord import masked

_FOLDER = tempfile.TemporaryDirectory(prefix="streamline-bench-")

SMALL, LARGE = 100, 100_000
"""Bytes of a record."""


@cache
def path(size: int, records: int) -> str:
    """Return the file of so many records, each of which begins with its number; it is made where it is missing."""
    checksum = peer("google_crc32c").value
    found = Path(_FOLDER.name) / f"{size}-{records}.tfrecord"
    length = struct.pack("<Q", size)
    head, rest = length + struct.pack("<I", masked(checksum(length))), bytes(size - 8)
    with found.open("wb") as file:
        for number in range(records):
            record = struct.pack("<Q", number) + rest
            file.write(head + record + struct.pack("<I", masked(checksum(record))))
    return str(found)


def prepare_small(records: int) -> None:
    path(SMALL, records)


def prepare_large(records: int) -> None:
    path(LARGE, records)


def _tally(records: Iterable[bytes]) -> Tally:
    count = total = 0
    for record in records:
        count += 1
        total += int.from_bytes(record[:8], "little")
    return Tally(count, total)


def by_package(size: int, records: int) -> Tally:
    return _tally(map(bytes, peer("tfrecord.reader").tfrecord_iterator(path(size, records))))


def checked_by_hand(size: int, records: int) -> Tally:
    checksum = peer("google_crc32c").value

    def checked() -> Iterable[bytes]:
        for record in map(bytes, peer("tfrecord.reader").tfrecord_iterator(path(size, records))):
            checksum(record)
            yield record

    return _tally(checked())


def ours(size: int, records: int) -> Tally:
    with sl.read_tfrecord(path(size, records)).open() as stream:
        return _tally(stream)


def package_small(records: int) -> Tally:
    return by_package(SMALL, records)


def package_large(records: int) -> Tally:
    return by_package(LARGE, records)


def checked_small(records: int) -> Tally:
    return checked_by_hand(SMALL, records)


def checked_large(records: int) -> Tally:
    return checked_by_hand(LARGE, records)


def small(records: int) -> Tally:
    return ours(SMALL, records)


def large(records: int) -> Tally:
    return ours(LARGE, records)


def expected(records: int) -> Tally:
    return Tally(records, records * (records - 1) // 2)


NOTE = (
    "Whole runs, opening and closing included; the file is in the page cache. The package lends its buffer for each "
    "record, and checks nothing; a program that keeps records copies them, as is done here. streamline checks both "
    "checksums of each record, so that the like of it is a loop that computes those of the data."
)

OWN, CHECKED, NEEDS = "the package tfrecord", "the package, checksums by hand", ("tfrecord", "google_crc32c")

SUITES = tuple(
    Suite(
        question=f"TFRecord: do {what} records come as fast as out of a reader in pure Python?",
        unit="items/s",
        floor=CHECKED,
        expected=expected,
        smoke_items=200,
        note=f"{note} {NOTE}",
        cases=(
            Case(CHECKED, checked, records, peers=NEEDS, prepare=prepare),
            Case(OWN, own, records, peers=NEEDS, prepare=prepare),
            Case("streamline", run, records, (at_least(1.0, CHECKED),), peers=NEEDS, prepare=prepare),
        ),
    )
    for what, note, own, checked, run, prepare, records in (
        ("small", "100 bytes each.", package_small, checked_small, small, prepare_small, 300_000),
        ("large", "100 kB each.", package_large, checked_large, large, prepare_large, 5_000),
    )
)


def main() -> None:
    harness.main(SUITES)


if __name__ == "__main__":
    main()
