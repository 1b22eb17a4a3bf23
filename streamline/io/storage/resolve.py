"""From the paths that a user gave to the files that are read: globs and braces expanded, each file looked at.

Servers and stores are asked in the running event loop by `afind`: it goes on meanwhile, and a cancellation leaves
nothing. `find` blocks: it runs a loop in a thread of its own for as long as it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TypeVar

import anyio
from anyio.from_thread import start_blocking_portal

from streamline.core.meters import Traffic
from streamline.core.threads import ThreadPool
from streamline.errors import PlanError, ReadError
from streamline.io.storage.base import FoundObject, Storage, together
from streamline.io.storage.manifest import HEAD, check_size, may_be_manifest, parse_manifest, shards_of
from streamline.io.storage.options import Access
from streamline.io.storage.paths import (
    braces,
    check_once,
    escape,
    is_object,
    is_pattern,
    is_remote,
    is_url,
    local_files,
    size_of,
)
from streamline.io.storage.registry import Storages

T = TypeVar("T")

MOST_ASKED = 1000
"""URLs, and objects without a listing, that are asked for their size and ETag when a pipeline is opened. If there are
more, none is asked, and a missing one is found when it is read. Asking takes as long as reading a small object."""


def find(paths: Sequence[str], access: Access, traffic: Traffic | None = None) -> tuple[FoundObject, ...]:
    """Return the files that paths mean, in order; those of one glob sorted. Looks at them; blocks meanwhile.

    Raises:
      ReadError: a file is missing, a directory, or can't be looked at; a glob without a match; credentials.
      PlanError: braces that mean nothing; a file given twice; storage options that aren't any.
    """
    named = _expand(paths)
    if not any(isinstance(one, str) for one in named):
        return _once(one for one in named if isinstance(one, FoundObject))
    with start_blocking_portal("asyncio", name="streamline finding") as portal:
        return portal.call(_looked_up, named, access, traffic)


async def afind(paths: Sequence[str], access: Access, traffic: Traffic | None = None) -> tuple[FoundObject, ...]:
    """As `find`, awaited: asyncio's running loop asks servers and stores, and a thread looks at local files.

    Cancellation: nothing is left.
    """
    return await _looked_up(await in_one_thread(partial(_expand, paths)), access, traffic)


async def in_one_thread(look: Callable[[], T]) -> T:
    """Return what a function finds, called in a thread of its own, which then ends."""
    threads = ThreadPool(1)
    try:
        return await threads.run(look, "a listing")  # of Lance, perhaps
    finally:
        threads.close()


def content_of(path: str, access: Access, traffic: Traffic | None = None) -> bytes:
    """Return all of a file that has been found. Blocks."""

    async def read() -> bytes:
        storages = Storages(access, traffic)
        try:
            return await storages.of(path).read(path, 0, None)
        finally:
            await storages.aclose()

    if not is_remote(path):
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise ReadError(f"can't read {path}: {error.strerror}") from error
    with start_blocking_portal("asyncio", name="streamline finding") as portal:
        return portal.call(read)


def look_up(
    paths: Mapping[int, str], access: Access, answers: dict[int, FoundObject | Exception], within_s: float
) -> None:
    """Ask what some objects are, and put each answer, or what it failed with, under its key. Blocks for `within_s`."""

    async def ask(storages: Storages, at: int) -> None:
        try:
            answers[at] = await storages.of(paths[at]).stat(paths[at])
        except Exception as error:
            answers[at] = error

    async def ask_all() -> None:
        storages = Storages(access)
        try:
            with anyio.move_on_after(within_s):
                await together([partial(ask, storages, at) for at in paths])
        finally:
            with anyio.CancelScope(shield=True):
                await storages.aclose()

    with start_blocking_portal("asyncio", name="streamline finding") as portal:
        portal.call(ask_all)


def _expand(paths: Sequence[str]) -> list[str | FoundObject]:
    """Return the URLs and globs that paths and their braces stand for, and local files as they are found."""
    named: list[str | FoundObject] = []
    for path in paths:
        if is_remote(path):
            named += braces(path)
        else:
            named += [FoundObject(file, size_of(file)) for file in local_files(path)]
    if any(isinstance(one, str) and is_url(one) for one in named):
        import_module("streamline.io.storage.http")  # takes 0.2 s: here, rather than in the event loop
    return named


async def _looked_up(
    named: list[str | FoundObject], access: Access, traffic: Traffic | None
) -> tuple[FoundObject, ...]:
    """Return the files that URLs and globs mean, and those that were found before, in order."""
    storages = Storages(access, traffic)
    strict = access.http is not None and access.http.require_validator
    few = strict or sum(isinstance(one, str) and not is_pattern(one) for one in named) <= MOST_ASKED

    async def meant(one: str | FoundObject) -> list[FoundObject]:
        if isinstance(one, FoundObject):
            return [one]
        try:
            found = await named_by(one)
        except (PlanError, ReadError):
            manifests = [] if is_url(one) else await manifests_in(storages.of(one), one)
            if not manifests:
                raise
            return await written(storages, f"{one.rstrip('/')}/", manifests, whole=True)
        if not any(may_be_manifest(each.path) for each in found):
            return found
        return [file for each in found for file in await written(storages, each.path, [each], whole=False)]

    async def named_by(one: str) -> list[FoundObject]:
        storage = storages.of(one)
        if is_object(one) and one.endswith("/"):
            raise PlanError(f"{one} is a directory: write {one}* for the objects in it, or {one}** for all below it")
        if not is_pattern(one):
            return [await storage.stat(one) if few else FoundObject(one)]
        if found := await storage.list(one):
            return found
        try:
            return [await storage.stat(one)]  # as for local files: it may exist as it is written
        except ReadError:
            raise ReadError(f"no object matches {one}: check the spelling, and that the data is there") from None

    try:
        found = await together([partial(meant, one) for one in named])
    finally:
        await storages.aclose()
    return _once(chain.from_iterable(found))


async def manifests_in(storage: Storage, folder: str) -> list[FoundObject]:
    """Return the files in a folder of a store that may be manifests; none where it can't be listed."""
    try:
        found = await storage.list(f"{escape(folder.rstrip('/'))}/manifest*.json")
    except ReadError:
        return []
    return [each for each in found if may_be_manifest(each.path)]


async def written(storages: Storages, path: str, manifests: list[FoundObject], *, whole: bool) -> list[FoundObject]:
    """Return the shards that manifests name (another program's file: itself); `whole`: all ranks' must be there."""
    storage = storages.of(path)
    contents = [await storage.read(each.path, 0, None) if may_be_manifest(each.path) else b"" for each in manifests]
    parts = [
        parse_manifest(content, each.path)
        for each, content in zip(manifests, contents, strict=True)
        if content.startswith(HEAD)
    ]
    if not parts:
        return manifests
    folder = path.rpartition("/")[0]
    shards = shards_of(path, parts, whole=whole)
    if len(shards) > MOST_ASKED:
        return [FoundObject(f"{folder}/{shard.name}", shard.bytes) for shard in shards]
    found = await together([partial(storage.stat, f"{folder}/{shard.name}") for shard in shards])
    for each, shard in zip(found, shards, strict=True):
        check_size(each.path, each.size, shard)
    return found


def _once(files: Iterable[FoundObject]) -> tuple[FoundObject, ...]:
    """Return all files, each of which must be there once."""
    found = tuple(files)
    check_once(file.path for file in found)
    return found
