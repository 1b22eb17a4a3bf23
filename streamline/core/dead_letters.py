"""Dead letters: a JSONL file with a line for each skipped item.

A line is written when its item counts as consumed, and has a number: the n-th that the stage skipped in the shard and
epoch. A resume drops the lines beyond the snapshot's counts, since those items come again: no item has two lines. If a
cache on disk may serve what comes after the snapshot, these items aren't tried again, and their lines stay, until a
line with the same number replaces them.

Lines are written before the consumer gets its next list, so a kill loses none; they are not synced, so a power cut may.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from io import BufferedReader, FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from streamline.core.atomic_file import open_regular, replace_file, write_all
from streamline.core.item_codec import decode_json
from streamline.core.text import clean, cut, safe_text
from streamline.errors import DeadLetterError, printable

if TYPE_CHECKING:
    from streamline.core.error_policy import DeadLetter, Failure

logger = logging.getLogger(__name__)

PREFIX = b'{"dead_letter":1,'
"""How each line begins; 1 is the version of the format."""

SAME_FIELDS = ("passes", "items", "error", "message", "item")
"""Fields that two lines of the same failure share, in whichever run they were written."""


class DeadLetters:
    """The file of one rank. Nothing is kept open between two writes.

    Args:
      path: as the user gave it; of several ranks, each has a file of its own: "bad-rank-00003-of-00008.jsonl".
      counts: of the state that the run begins at: skipped items by (shard, stage).
      cached: keep lines beyond the counts: a cache on disk may serve those items.
      process: of the job, if several are this rank: each has a file of its own, "bad-rank-…-process-00005.jsonl".

    Raises:
      DeadLetterError: it can't be read or written, or is a file of something else.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rank: int,
        world_size: int,
        epoch: int,
        counts: Mapping[tuple[int, str], int],
        process: int | None = None,
        *,
        cached: bool = False,
    ) -> None:
        given = Path(path).absolute()  # a later chdir changes nothing
        if world_size > 1:
            given = given.with_name(f"{given.stem}-rank-{rank:05}-of-{world_size:05}{given.suffix}")
        if process is not None:
            given = given.with_name(f"{given.stem}-process-{process:05}{given.suffix}")
        self.path = given
        self._rank = rank
        self._epoch = epoch
        self._cached = cached
        self._ahead: dict[_LineNumber, DeadLetter] = {}  # lines beyond the counts
        try:
            self._begin(counts)
        except DeadLetterError:
            raise
        except OSError as error:
            raise _write_error(self.path, error) from error

    def letter_of(self, failure: Failure, epoch: tuple[int, ...]) -> DeadLetter:
        return {
            "dead_letter": 1,
            "epoch": epoch[0],
            "passes": list(epoch[1:]),
            "rank": self._rank,
            "shard": failure.shard,
            "stage": failure.stage,
            "n": 0,
            "kind": failure.kind,
            "items": failure.items,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "position": failure.position,
            "error": type(failure.error).__qualname__,
            "message": clean(safe_text(failure.error, str)),
            "item": cut(safe_text(failure.item, repr)),
            "traceback": clean(failure.traceback),
        }

    def append(self, lines: Iterable[DeadLetter]) -> None:
        """Append lines. After a `DeadLetterError`, part of a line may be written, which the next opening removes."""
        try:
            self._append(lines)
        except OSError as error:
            raise _write_error(self.path, error) from error

    def _append(self, letters: Iterable[DeadLetter]) -> None:
        if self._ahead:
            letters = [letter for letter in letters if not self._is_there(letter)]
        lines = b"".join(msgspec.json.encode(letter) + b"\n" for letter in letters)
        descriptor = open_regular(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            write_all(descriptor, lines)
        finally:
            os.close(descriptor)

    def _is_there(self, letter: DeadLetter) -> bool:
        """Return whether a line is in the file; if its number has another failure, remove that line and later ones."""
        there = self._ahead.get(_number(letter))
        if there is None or all(letter[name] == there[name] for name in SAME_FIELDS):
            return there is not None
        shard, stage, n = _number(letter)
        old = {number for number in self._ahead if number[:2] == (shard, stage) and number[2] >= n}
        with BufferedReader(FileIO(open_regular(self.path, os.O_RDONLY))) as file:
            kept = [
                line
                for line, fields in self._parse(file)
                if fields is not None and not (fields["epoch"] == self._epoch and _number(fields) in old)
            ]
        replace_file(self.path, b"".join(kept))
        self._ahead = {number: line for number, line in self._ahead.items() if number not in old}
        return False

    def _begin(self, counts: Mapping[tuple[int, str], int]) -> None:
        """Keep the lines that the state counts, and those of earlier epochs."""
        if not self.path.exists():
            self._append(())  # so that a path that can't be written fails now
            self._warn_missing(counts, [])
            return
        with BufferedReader(FileIO(open_regular(self.path, os.O_RDONLY))) as file:
            lines = list(self._parse(file))
        kept = [line for line, fields in lines if fields is not None and self._keeps(line, fields, counts)]
        self._warn_missing(counts, [fields for _, fields in lines if fields is not None])
        if len(kept) < len(lines):
            replace_file(self.path, b"".join(kept))
        else:
            self._append(())

    def _warn_missing(self, counts: Mapping[tuple[int, str], int], found: Iterable[DeadLetter]) -> None:
        """Warn if lines of items that the state counts as skipped are missing."""
        last: dict[tuple[int, str], int] = {}
        for fields in found:
            if fields["epoch"] == self._epoch:
                key = fields["shard"], fields["stage"]
                last[key] = max(last.get(key, 0), fields["n"])
        for (shard, stage), count in counts.items():
            if last.get((shard, stage), 0) < count:
                logger.warning(
                    "%s ends before the snapshot: %s has skipped %d items in shard %d, and the file has lines up to "
                    "number %d. The others were skipped, too: use a copy of the file that is as new as the snapshot",
                    printable(str(self.path)), stage, count, shard, last.get((shard, stage), 0),
                )  # fmt: skip

    def _parse(self, lines: Iterable[bytes]) -> Iterator[tuple[bytes, DeadLetter | None]]:
        """Yield each line with its fields; None for a last one that a kill has cut off."""
        for number, line in enumerate(lines, 1):
            whole = line.endswith(b"\n")
            if not line.startswith(PREFIX) and (whole or not PREFIX.startswith(line)):
                raise DeadLetterError(
                    f"{self.path} is not a file of dead letters: line {number} is {line[:40]!r}; give dead_letters= "
                    "another path"
                )
            yield line, decode_json(line, _fields, partial(self._damage_error, number)) if whole else None

    def _damage_error(self, number: int, why: str) -> DeadLetterError:
        return DeadLetterError(f"{self.path} line {number} is damaged: {why}; move the file away")

    def _keeps(self, line: bytes, fields: DeadLetter, counts: Mapping[tuple[int, str], int]) -> bool:
        if fields["epoch"] != self._epoch:
            return bool(fields["epoch"] < self._epoch)
        if fields["n"] <= counts.get((fields["shard"], fields["stage"]), 0):
            return True
        if self._cached:
            letter = json.loads(line)
            self._ahead[_number(fields)] = {name: letter.get(name) for name in SAME_FIELDS}
        return self._cached


class _LineKey(msgspec.Struct):
    """The fields that identify a line."""

    epoch: int
    shard: int
    stage: str
    n: int


_LineNumber: TypeAlias = tuple[int, str, int]
"""Shard, stage and n of a line, which are its own in an epoch."""


def _number(fields: DeadLetter) -> _LineNumber:
    return fields["shard"], fields["stage"], fields["n"]


def _fields(line: Any) -> DeadLetter:
    return msgspec.structs.asdict(msgspec.convert(line, _LineKey))


def _write_error(path: Path, error: OSError) -> DeadLetterError:
    return DeadLetterError(error.errno, f"can't write dead letters: {error.strerror or error}", str(path))
