"""`read_csv`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

from streamline.core.options import check_int, given
from streamline.errors import PlanError, PlanTypeError
from streamline.io.formats.csv import MAX_RECORD_BYTES, CsvFormat, Dialect, Header
from streamline.io.storage.options import AccessOptions
from streamline.io.storage.paths import Paths
from streamline.pipeline import Pipeline
from streamline.reading.files import pipeline_of

__all__ = ["read_csv"]


@overload
def read_csv(
    paths: Paths,
    *,
    header: Literal[True] | Sequence[str] = True,
    delimiter: str = ",",
    quotechar: str | None = '"',
    max_record_bytes: int = MAX_RECORD_BYTES,
    name: str = "read_csv",
    **access: Unpack[AccessOptions],
) -> Pipeline[dict[str, str]]: ...


@overload
def read_csv(
    paths: Paths,
    *,
    header: Literal[False],
    delimiter: str = ",",
    quotechar: str | None = '"',
    max_record_bytes: int = MAX_RECORD_BYTES,
    name: str = "read_csv",
    **access: Unpack[AccessOptions],
) -> Pipeline[list[str]]: ...


def read_csv(
    paths: Paths,
    *,
    header: bool | Sequence[str] = True,
    delimiter: str = ",",
    quotechar: str | None = '"',
    max_record_bytes: int = MAX_RECORD_BYTES,
    name: str = "read_csv",
    **access: Unpack[AccessOptions],
) -> Pipeline[Any]:
    r"""Read the records of CSV files (RFC 4180) in UTF-8, as dicts by column; all values are strings.

    Delimiters, line ends and doubled quotes may stand inside quotes. Lines end with "\n" or "\r\n". Blank lines, and a
    byte order mark, are skipped. A record with too few or too many fields is an error. A resume goes on at the byte,
    and reads the header again; in a compressed file, it decompresses what is before it once more.

    Args:
      paths: as `read_lines`.
      header: True: each file's first record names its columns. A list of names: no file has such a record. False:
        none has, and items are lists.
      delimiter: between fields; one character: "\t".
      quotechar: around fields; one character; None: a quote means nothing, and every line is a record.
      max_record_bytes: a longer record is an error: a quote that isn't closed swallows the rest of its file; >= 1.
      name: its part of a state is kept under it.
      access: as `read_lines`.

    Raises:
      PlanTypeError, PlanError: an option of the wrong type or value.
      When the pipeline is opened: ReadError for what is missing. While it runs: ReadError for what can't be read,
      DataError for what can't be decoded, each with file, line and byte.
    """
    max_record_bytes = check_int("read_csv(max_record_bytes=)", max_record_bytes, 1)
    format = CsvFormat(
        header=_csv_header(header), dialect=_csv_dialect(delimiter, quotechar), max_record_bytes=max_record_bytes
    )
    return pipeline_of(format, paths, name, **access)


def _csv_header(header: Any) -> Header:
    if isinstance(header, bool):
        return header
    if isinstance(header, str) or not isinstance(header, Sequence) or not all(isinstance(one, str) for one in header):
        raise PlanTypeError(f"read_csv(header=): expected True, False or a list of names, got {given(header)}")
    if not header or len(set(header)) != len(header):
        raise PlanError(f"read_csv(header=): expected names, each of them once, got {given(header)}")
    return tuple(header)


def _csv_dialect(delimiter: Any, quotechar: Any) -> Dialect:
    for what, value in {"delimiter": delimiter, "quotechar": quotechar}.items():
        if not (isinstance(value, str) or (value is None and what == "quotechar")):
            raise PlanTypeError(f"read_csv({what}=): expected one character, got {given(value)}")
        if value is not None and (len(value) != 1 or value in "\r\n"):
            raise PlanError(f"read_csv({what}=): expected one character, no line end, got {value!r}")
    if delimiter == quotechar:
        raise PlanError(f"read_csv(): expected delimiter and quotechar to differ, both are {delimiter!r}")
    return Dialect(delimiter, quotechar)
