"""`read_lines` and `read_jsonl`."""

from __future__ import annotations

from typing import Any, TypeVar, Unpack

from streamline.core.options import check_int
from streamline.io.formats.line_decoding import MAX_LINE_BYTES, Decode, decode_json, decode_text
from streamline.io.formats.lines import LineFormat
from streamline.io.storage.options import AccessOptions
from streamline.io.storage.paths import Paths
from streamline.pipeline import Pipeline
from streamline.reading.files import pipeline_of

__all__ = ["read_jsonl", "read_lines"]

T = TypeVar("T")


def read_lines(
    paths: Paths, *, max_line_bytes: int = MAX_LINE_BYTES, name: str = "read_lines", **access: Unpack[AccessOptions]
) -> Pipeline[str]:
    r"""Read the lines of text files (UTF-8), without their ends, "\n" or "\r\n"; empty lines are items.

    A byte order mark at the beginning of a file is no part of its first line.

    A resume goes on at the byte; in a compressed file, it decompresses what is before it once more.

    Args:
      paths: local paths and objects of stores (s3://, gs://, az://), with globs; http(s) URLs; all with braces:
        part-{000..127}.txt; one or several. gzip, zstd, bzip2 and xz are unpacked.
      max_line_bytes: a longer line is an error; >= 1.
      name: its part of a state is kept under it.
      access: how bytes are had: `http`, `concurrency`, `cache_dir`, `cache_max_bytes`, `storage_options`, see
        `streamline.io.storage.options.Access`.

    Raises:
      PlanTypeError, PlanError: an option of the wrong type or value.
      When the pipeline is opened: ReadError for what is missing. While it runs: ReadError for what can't be read,
      DataError for what can't be decoded, each with file, line and byte.
    """
    return _lines("read_lines", decode_text, paths, name, max_line_bytes, **access)


def read_jsonl(
    paths: Paths, *, max_line_bytes: int = MAX_LINE_BYTES, name: str = "read_jsonl", **access: Unpack[AccessOptions]
) -> Pipeline[Any]:
    """Read the JSON values of files with one a line; blank lines are skipped. Otherwise as `read_lines`."""
    return _lines("read_jsonl", decode_json, paths, name, max_line_bytes, **access)


def _lines(
    kind: str, decode: Decode[T], paths: Paths, name: str, max_line_bytes: int, **access: Unpack[AccessOptions]
) -> Pipeline[T]:
    max_line_bytes = check_int(f"{kind}(max_line_bytes=)", max_line_bytes, 1)
    return pipeline_of(LineFormat(made_by=kind, decode=decode, max_line_bytes=max_line_bytes), paths, name, **access)
