"""How a source's bytes are had, as users say it: the options that all `read_*` take alike."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from streamline.core.options import check_int, given
from streamline.errors import PlanError, PlanTypeError
from streamline.storage.http_options import HttpOptions
from streamline.storage.store_options import check_storage_options

__all__ = ["Access", "AccessOptions"]

CONCURRENCY = 64
"""Requests in flight: with 30 ms for each, some 2,000 objects a second; twice as many gained nothing on two cores."""


class AccessOptions(TypedDict, total=False):
    """What all `read_*` take alike, as keywords. What each means is said at `Access`."""

    http: HttpOptions | None
    concurrency: int
    cache_dir: str | os.PathLike[str] | None
    cache_max_bytes: int | None
    storage_options: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Access:
    """How bytes are had. Pickles, and opens nothing.

    Attributes:
      http: how http(s) URLs are read; None: as usual. Its `retries` and `timeout_s` count for object stores too.
      concurrency: requests that one source may have in flight in one process, >= 1.
      cache_dir: a folder on local disk, one that only this user can write to, in which objects that are read from afar
        are kept; processes and jobs may share it. None: nothing is kept. Local files never are.
      cache_max_bytes: what it may hold: beyond, the objects used least recently go; >= 1. None: no limit.
      storage_options: how object stores are reached, by obstore's names: "region", "endpoint", "access_key_id",
        "skip_signature", "allow_http", …; None: as the environment says.

    Raises:
      PlanTypeError: an option of the wrong type.
      PlanError: one out of range.
    """

    http: HttpOptions | None = None
    concurrency: int = CONCURRENCY
    cache_dir: str | os.PathLike[str] | None = None
    cache_max_bytes: int | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.http is not None and not isinstance(self.http, HttpOptions):
            raise PlanTypeError(f"expected http as HttpOptions, got {given(self.http)}")
        check_int("concurrency", self.concurrency, 1)
        _check_cache(self.cache_dir, self.cache_max_bytes)
        if self.storage_options is not None:
            check_storage_options(self.storage_options)


def _check_cache(cache_dir: object, max_bytes: object) -> None:
    if cache_dir is not None and (
        not isinstance(cache_dir, (str, os.PathLike)) or not isinstance(os.fspath(cache_dir), str)
    ):
        raise PlanTypeError(f"expected cache_dir as str or os.PathLike, got {given(cache_dir)}")
    if cache_dir is not None and (not os.fspath(cache_dir) or "://" in str(cache_dir) or "\0" in str(cache_dir)):
        raise PlanError(f"expected cache_dir as a folder on local disk, got {str(cache_dir)!r}")
    if max_bytes is not None:
        check_int("cache_max_bytes", max_bytes, 1)
        if cache_dir is None:
            raise PlanError("cache_max_bytes= needs a cache_dir=, the folder that it bounds")
