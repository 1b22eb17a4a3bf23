"""`read_files`."""

from __future__ import annotations

from typing import Unpack

from streamline.io.formats.whole_files import WholeFile, WholeFormat
from streamline.io.storage.options import AccessOptions
from streamline.io.storage.paths import Paths
from streamline.pipeline import Pipeline
from streamline.reading.files import pipeline_of

__all__ = ["read_files"]


def read_files(paths: Paths, *, name: str = "read_files", **access: Unpack[AccessOptions]) -> Pipeline[WholeFile]:
    """Read whole files: one item for each, in order, with its `path` and its `data`, bytes as they are.

    A resume goes on with the next file. Many files are fetched at a time, `concurrency=` of them. One file is one item,
    so it can't be split over shards.

    Args:
      paths: as `read_lines`; nothing is unpacked.
      name: its part of a state is kept under it.
      access: as `read_lines`.

    Raises:
      PlanTypeError, PlanError: an option of the wrong type or value.
      When the pipeline is opened: ReadError for what is missing. While it runs: ReadError for a file that can't be
      read, behind the items before it; with `on_error="skip"` it is left out, and counted.
    """
    return pipeline_of(WholeFormat(), paths, name, **access)
