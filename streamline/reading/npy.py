"""`read_npy`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from streamline.core.options import given
from streamline.errors import PlanError, PlanTypeError
from streamline.io.formats.npy import NpyFormat
from streamline.io.storage.options import AccessOptions
from streamline.io.storage.paths import Paths
from streamline.pipeline import Pipeline
from streamline.reading.files import pipeline_of

__all__ = ["read_npy"]


def read_npy(
    paths: Paths, *, arrays: Iterable[str] | None = None, name: str = "read_npy", **access: Unpack[AccessOptions]
) -> Pipeline[Any]:
    """Read the rows of NumPy files, along the first axis: arrays, or NumPy's scalars where it is the only axis.

    Of an npz file, whose arrays have as many rows, an item is a dict {name: row}. A local file is mapped into memory,
    and rows are read-only views of it; a remote one is read by ranges. What is deflated (`np.savez_compressed`) is
    unpacked from its start, by a resume and by each shard too. Arrays of Python objects are refused: they are pickles.

    Args:
      paths: as `read_lines`; npy and npz are told apart by their first bytes.
      arrays: names of those that are read of an npz file; None: all.
      name: its part of a state is kept under it.
      access: as `read_lines`.

    Raises:
      PlanTypeError: an option of the wrong type.
      PlanError: no array at all, or one that is named twice.
      When the pipeline is opened: ReadError for what is missing. While it runs: ReadError for what can't be read,
      DataError for what is damaged or no such array, with file and row.
    """
    return pipeline_of(NpyFormat(arrays=_npy_names(arrays)), paths, name, **access)


def _npy_names(arrays: Iterable[str] | None) -> tuple[str, ...] | None:
    if arrays is None:
        return None
    if isinstance(arrays, str | bytes) or not isinstance(arrays, Iterable):
        raise PlanTypeError(f'read_npy(arrays=) is a list of names, ["x", "y"], got {given(arrays)}')
    names = tuple(arrays)
    if not all(isinstance(name, str) for name in names):
        raise PlanTypeError(f'read_npy(arrays=) is a list of names, ["x", "y"], got {given(names)}')
    if not names or len(set(names)) < len(names):
        raise PlanError(f"read_npy(arrays=) is one name or more, each once, got {list(names)}")
    return names
