"""From what a user gives to a `read_*` function to a pipeline."""

from __future__ import annotations

from typing import TypeVar, Unpack

from streamline.errors import PlanTypeError
from streamline.io.formats.base import Format
from streamline.io.storage.options import Access, AccessOptions
from streamline.io.storage.paths import Paths, given_paths
from streamline.pipeline import Pipeline
from streamline.sources.files import Files

__all__ = ["pipeline_of"]

T = TypeVar("T")


def pipeline_of(format: Format[T], paths: Paths, name: str, **access: Unpack[AccessOptions]) -> Pipeline[T]:
    """Return the pipeline that reads files of a format.

    Raises:
      PlanTypeError: an option that there is none of.
      As `given_paths` and `Access`.
    """
    if unknown := sorted(access.keys() - AccessOptions.__annotations__.keys()):
        known = ", ".join(f"{option}=" for option in AccessOptions.__annotations__)
        raise PlanTypeError(f"{format.kind} takes no {unknown[0]}=; beside those of its format it takes {known}")
    return Pipeline(Files(name=name, format=format, paths=given_paths(paths), access=Access(**access)))
