"""The running Python's own standard library as gzipped JSONL shards: real text that every machine already has."""

from __future__ import annotations

import gzip
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Installed packages vary from machine to machine, and tests are as large as the rest of the library together.
SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"})

Record = dict[str, str]


@dataclass(frozen=True)
class Corpus:
    """What was written: for the table, and for the number of batches to expect."""

    shards: tuple[Path, ...]
    files: int
    records: int
    text_bytes: int
    stored_bytes: int


def standard_library() -> Path:
    """Return the folder that holds the running Python's own modules."""
    return Path(sysconfig.get_paths()["stdlib"])


def source_files(root: Path) -> list[Path]:
    """Return every `.py` file below `root`, sorted, without installed packages and tests."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(path for path in found if path.is_file())


def records(root: Path, files: list[Path], chunk_chars: int) -> Iterator[Record]:
    """Cut files into records of at most `chunk_chars` characters, in order; an empty file gives none."""
    for path in files:
        text = path.read_bytes().decode("utf-8", errors="replace")
        name = path.relative_to(root).as_posix()
        for start in range(0, len(text), chunk_chars):
            yield {"path": name, "text": text[start : start + chunk_chars]}


def write_corpus(
    target: Path, *, shards: int, chunk_chars: int, max_files: int | None = None, root: Path | None = None
) -> Corpus:
    """Write `part-000.jsonl.gz` and so on; the same library gives the same bytes.

    Args:
      target: an existing folder.
      shards: files to write, 1 to 1000; record i goes to file i mod `shards`, so all are equally long.
      chunk_chars: characters a record, at most.
      max_files: take about this many source files, spread over the whole library; None for all.
      root: the library; None for the running Python's.

    Raises:
      FileNotFoundError: there is no source below `root` (some minimal Pythons ship only compiled modules).
    """
    root = standard_library() if root is None else root
    files = source_files(root)
    if not files:
        raise FileNotFoundError(f"the demo streams the standard library's .py files, and found none below {root}")
    if max_files is not None:
        files = files[:: max(1, len(files) // max_files)][:max_files]
    lines: list[list[bytes]] = [[] for _ in range(shards)]
    count = text_bytes = 0
    for count, record in enumerate(records(root, files, chunk_chars), start=1):
        text_bytes += len(record["text"].encode())
        lines[(count - 1) % shards].append(json.dumps(record).encode() + b"\n")
    paths = tuple(target / f"part-{shard:03d}.jsonl.gz" for shard in range(shards))
    for path, content in zip(paths, lines, strict=True):
        # mtime=0: gzip writes the time into its header, and two runs would differ in four bytes.
        path.write_bytes(gzip.compress(b"".join(content), compresslevel=6, mtime=0))
    stored_bytes = sum(path.stat().st_size for path in paths)
    return Corpus(paths, len(files), count, text_bytes, stored_bytes)
