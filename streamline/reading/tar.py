"""`read_tar`."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

from streamline.core.options import check_int, given
from streamline.errors import PlanTypeError
from streamline.io.formats.tar import MAX_SAMPLE_BYTES, Member, TarFormat
from streamline.io.storage.options import AccessOptions
from streamline.io.storage.paths import Paths
from streamline.pipeline import Pipeline
from streamline.reading.files import pipeline_of

__all__ = ["read_tar"]


@overload
def read_tar(
    paths: Paths,
    *,
    group: Literal[True] = True,
    max_sample_bytes: int = MAX_SAMPLE_BYTES,
    name: str = "read_tar",
    **access: Unpack[AccessOptions],
) -> Pipeline[dict[str, Any]]: ...
@overload
def read_tar(
    paths: Paths,
    *,
    group: Literal[False],
    max_sample_bytes: int = MAX_SAMPLE_BYTES,
    name: str = "read_tar",
    **access: Unpack[AccessOptions],
) -> Pipeline[Member]: ...
@overload
def read_tar(
    paths: Paths,
    *,
    group: bool,
    max_sample_bytes: int = MAX_SAMPLE_BYTES,
    name: str = "read_tar",
    **access: Unpack[AccessOptions],
) -> Pipeline[Any]: ...
def read_tar(
    paths: Paths,
    *,
    group: bool = True,
    max_sample_bytes: int = MAX_SAMPLE_BYTES,
    name: str = "read_tar",
    **access: Unpack[AccessOptions],
) -> Pipeline[Any]:
    """Read the samples of tar archives (WebDataset's): consecutive members that share a key.

    The key of "train/0001.seg.png" is "train/0001", its field "seg.png", in lower case. An item is a dict: "__key__",
    and the bytes of each field. Members without a key ("README", ".hidden", "__meta__/…"), folders, symbolic links and
    devices are passed over; hard links, sparse files, and a second member for a field are errors.

    A resume goes on at the byte; in a compressed archive, it decompresses what is before it once more. Split into
    shards ("contiguous"), each owns the samples that begin in its share of the bytes; to find the first one, each
    process walks once over the headers before it, past the data where they are long.

    Args:
      paths: as `read_lines`.
      group: False: each file in the archive is an item, whatever it is called, with its `name` and `data`.
      max_sample_bytes: a sample with more data is an error; >= 1.
      name: its part of a state is kept under it.
      access: as `read_lines`.

    Raises:
      PlanTypeError, PlanError: an option of the wrong type or value.
      When the pipeline is opened: ReadError for what is missing. While it runs: ReadError for what can't be read,
      DataError for an archive that is damaged or cut short, each with file, member and byte.
    """
    if not isinstance(group, bool):
        raise PlanTypeError(f"expected read_tar(group=) as True or False, got {given(group)}")
    max_sample_bytes = check_int("read_tar(max_sample_bytes=)", max_sample_bytes, 1)
    return pipeline_of(TarFormat(group=group, max_sample_bytes=max_sample_bytes), paths, name, **access)
