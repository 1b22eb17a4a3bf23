"""The storage of each path, by its scheme; and how users register one of their own."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

from streamline.core.meters import Traffic
from streamline.errors import PlanError
from streamline.io.storage.base import ADDED, Storage
from streamline.io.storage.local import LocalStorage
from streamline.io.storage.object_cache import CachedStorage, ObjectCache
from streamline.io.storage.options import Access, HttpOptions
from streamline.io.storage.paths import HUB, STORE_SCHEMES, scheme_of

WHERE = re.compile(r"^(?:(?:aws|azure|google|s3|hf)_.*)?(?:endpoint|account_name)")
"""Options and variables of the environment that say where a store is, in small letters: by obstore's names, and
huggingface_hub's."""

S = TypeVar("S", bound=Callable[[Any], Storage])


def storage(scheme: str) -> Callable[[S], S]:
    """Register what reads the paths that begin with `scheme://`: a class, or a function that returns a `Storage`.

    It is called with the `Access` of the source (its `storage_options=`, say) in each event loop that reads.

    Raises:
      PlanError: streamline reads this scheme itself.
    """
    scheme = scheme.lower()
    if scheme_of(f"{scheme}://") != scheme or scheme in (*SCHEMES, "file"):
        raise PlanError(f"@storage({scheme!r}): expected a scheme that streamline doesn't read itself, such as zip")

    def register(make: S) -> S:
        ADDED[scheme] = make
        return make

    return register


class Storages:
    """The storages that one `Access` needs, each opened when a path needs it.

    Attributes:
      cache: keeps objects on local disk, and counts what that saves; None: they are not kept.
    """

    def __init__(self, access: Access | None = None, traffic: Traffic | None = None) -> None:
        self._access = access or Access()
        self._traffic = traffic or Traffic()
        self._open: dict[Callable[..., Storage], Storage] = {}
        folder, most = self._access.cache_dir, self._access.cache_max_bytes
        self.cache = None if folder is None else ObjectCache(os.fspath(folder), most, self._traffic)

    def of(self, path: str) -> Storage:
        """Return the storage that holds `path`."""
        scheme = scheme_of(path)
        make = self._access.added.get(scheme) or SCHEMES.get(scheme, _local)
        if make not in self._open:
            self._open[make] = self._opened(make, own=scheme in self._access.added)
        return self._open[make]

    def _opened(self, make: Callable[..., Storage], *, own: bool) -> Storage:
        made = make(self._access) if own else make(self._access, self._traffic)
        if self.cache is None or make is _local:
            return made
        return CachedStorage(made, self.cache, _where(self._access) if make in (_objects, _hub) else "")

    async def aclose(self) -> None:
        while self._open:
            await self._open.popitem()[1].aclose()
        if self.cache is not None:
            await self.cache.aclose()


def _where(access: Access) -> str:
    """Return what says, besides their paths, which objects a store's are: not credentials, which come and go."""
    named = {**os.environ, **(access.storage_options or {})}
    return repr(sorted((name.lower(), str(value)) for name, value in named.items() if WHERE.search(name.lower())))


def _local(access: Access, traffic: Traffic) -> Storage:
    return LocalStorage()


def _http(access: Access, traffic: Traffic) -> Storage:
    from streamline.io.storage.http import HttpStorage  # aiohttp takes 0.2 s to import

    return HttpStorage(access.http or HttpOptions(), traffic)


def _objects(access: Access, traffic: Traffic) -> Storage:
    from streamline.io.storage.object_store import ObjectStorage

    return ObjectStorage(access.storage_options, access.http, traffic)


def _hub(access: Access, traffic: Traffic) -> Storage:
    from streamline.io.storage.hub import HubStorage

    return HubStorage(access.storage_options, access.http, traffic)


SCHEMES: dict[str, Callable[[Access, Traffic], Storage]] = {
    "": _local,
    "http": _http,
    "https": _http,
    **dict.fromkeys(STORE_SCHEMES, _objects),
    HUB: _hub,
}
"""What makes the storages that streamline has itself, by scheme."""
