"""Object stores, S3, Google's and Azure's, through obstore: listed, streamed, resumed at the byte.

After a body that breaks off, a stall or an answer of a busy store, the bytes from there on are requested again, of the
same version (`If-Match`). A body ends only where the store says that the object ends.

What an error means is decided by obstore's text: it has the HTTP status and what the server said in all errors alike,
while their classes differ between operations. The texts hold whole URLs, which may be signed: so messages show only
parts of them, and our errors are not chained to obstore's.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from itertools import pairwise
from typing import IO, Any, TypeVar

import anyio

from streamline.core.meters import Traffic
from streamline.errors import ReadError, WriteError, printable
from streamline.io.storage.base import FoundObject, Storage, join_blocks, together, too_short
from streamline.io.storage.base import Version as KnownVersion
from streamline.io.storage.options import HttpOptions, open_store
from streamline.io.storage.paths import Glob, bucket_of
from streamline.io.storage.retry import Attempts, TransientError

R = TypeVar("R")

BLOCK_BYTES = 1024 * 1024
"""A block is at least so long, and at most some 0.3 MiB longer: each is a hop to obstore's threads and back, 60 µs."""

AS_IT_COMES = 1
"""The least that a block holds after a failure: else a body that breaks off again and again within its first MiB would
never get on, since what obstore has gathered of a block is lost with it."""

PART_BYTES = 8 * 1024 * 1024
"""A part of an upload; S3 takes none below 5 MiB, but for the last one."""

MOST_PARTS = 10_000
"""That S3 takes for one object."""

PARTS_AT_ONCE = 4
"""Parts under way, all of them in memory."""

OBJECTS_A_LIST = 1000
"""Objects that a store lists in one answer."""


class ObjectStorage(Storage):
    """Reads the objects of some buckets. Each is opened when a path needs it, and stays open.

    Args:
      options: the user's `storage_options=`.
      http: how often and how long is tried.
    """

    def __init__(
        self, options: Mapping[str, Any] | None = None, http: HttpOptions | None = None, traffic: Traffic | None = None
    ) -> None:
        self._options = options or {}
        self._http = http or HttpOptions()
        self._traffic = traffic or Traffic()
        self._stores: dict[str, Any] = {}

    async def list(self, pattern: str) -> list[FoundObject]:
        """Return the objects that a glob matches, sorted by path. Only what is below its plain directories is listed.

        Objects of no bytes that stand for directories, as some tools make them, are left out.
        """
        base, key = bucket_of(pattern)
        glob = Glob(key)
        below = f"{base}/{glob.directory}"
        listed = await (self._below if glob.deep else self._directly_in)(below, glob.directory or None)
        metas = sorted((meta for meta in listed if glob.matches(meta["path"])), key=lambda meta: meta["path"])
        empty = [meta["path"] for meta in metas if not meta["size"]]
        there = await together([partial(self._exists, f"{base}/{path}") for path in empty])
        marks = {path for path, is_object in zip(empty, there, strict=True) if not is_object}
        return [_object_of(f"{base}/{meta['path']}", meta) for meta in metas if meta["path"] not in marks]

    async def stat(self, path: str) -> FoundObject:
        base, key = bucket_of(path)
        store = self._store(base)
        return _object_of(path, await self._try(path, lambda: store.head_async(key)))

    def blocks(
        self, path: str, start: int = 0, stop: int | None = None, etag: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield bytes `start` to `stop` (None: the end) of an object, in blocks of some 1 MiB."""
        return self._blocks(path, start, stop, etag, BLOCK_BYTES)

    async def read(self, path: str, start: int, stop: int | None, etag: str | None = None) -> bytes:
        size = BLOCK_BYTES if stop is None else max(1, stop - start)
        async with aclosing(self._blocks(path, start, stop, etag, size)) as blocks:
            return join_blocks(printable(path), [block async for block in blocks], start, stop)

    async def upload(self, path: str, file: IO[bytes], size: int) -> None:
        """Write an object out of a file, in parts where it is large; a failure, and a cancellation, leave no parts.

        Cancellation: what is under way is waited for.
        """
        base, key = bucket_of(path)
        store = self._store(base)
        part = max(PART_BYTES, -(-size // MOST_PARTS))

        async def put() -> None:
            file.seek(0)
            with anyio.CancelScope(shield=True):
                await store.put_async(key, file, chunk_size=part, max_concurrency=PARTS_AT_ONCE)

        await self._try_write(path, put, mib=1 + size // 2**20)

    async def replace(self, path: str, content: bytes, version: KnownVersion | None) -> KnownVersion:
        base, key = bucket_of(path)
        store = self._store(base)

        async def put() -> KnownVersion:
            try:
                return _version_of(await store.put_async(key, content, mode="create" if version is None else version))
            except Exception as error:
                _drop_traceback(error)
                if not (other_version(error) or type(error).__name__ == "AlreadyExistsError"):
                    raise
            now = await self._look(store, key)
            if now is not None and now[0] == content:
                return now[1]  # of an earlier try, whose answer was lost
            raise WriteError(f"{printable(path)} was written by another job meanwhile: only one may write to a folder")

        return await self._try_write(path, put)

    async def look(self, path: str) -> tuple[bytes, KnownVersion] | None:
        base, key = bucket_of(path)
        store = self._store(base)
        return await self._try_write(path, lambda: self._look(store, key))

    async def remove(self, path: str) -> None:
        base, key = bucket_of(path)
        store = self._store(base)

        async def delete() -> None:
            with suppress(FileNotFoundError):
                await store.delete_async(key)

        await self._try_write(path, delete)

    async def aclose(self) -> None:
        """Drop the stores, which closes their connections."""
        self._stores.clear()

    async def _blocks(
        self, path: str, start: int, stop: int | None, etag: str | None, size: int
    ) -> AsyncGenerator[bytes, None]:
        base, key = bucket_of(path)
        store, attempts = self._store(base), self._attempts(path)
        position, what = start, attempts.what
        known: Version | None = None if etag is None else (etag, None)
        while stop is None or position < stop:
            try:
                options = _options(position, stop, known)
                answer = await self._asked(attempts, partial(store.get_async, key, options=options))
                known = _same(what, known, _version(answer.meta), position)
                begin, end = answer.range
                if begin != position:
                    raise ReadError(f"{what}: asked for bytes from {position:,}, the store sent those from {begin:,}")
                body = aiter(answer.stream(min_chunk_size=size))
                while block := bytes(await _next(attempts, body)):
                    position += len(block)
                    attempts.arrived(len(block))
                    attempts.progress()
                    yield block
                    attempts.wanted()
                if position == end:
                    return
                raise TransientError(f"the body ended at byte {position:,}, expected {end:,} as the store said")
            except ReadError:
                raise
            except Exception as error:
                _drop_traceback(error)
                if other_version(error) and known is not None:
                    raise _changed_error(what, position, known[0], (await self.stat(path)).etag) from None
                if past_end(error) and await self._ends_at(path, position, known):
                    return
                await _wait_or_raise(attempts, error, position)
                size = AS_IT_COMES

    async def _ends_at(self, path: str, position: int, known: Version | None) -> bool:
        size = (await self.stat(path)).size
        expected = position if known is None or known[1] is None else known[1][0]
        if size is not None and (size < position or size != expected):
            raise too_short(printable(path), size, position)
        return size == position

    async def _directly_in(self, url: str, directory: str | None) -> Sequence[Any]:
        store = self._store(bucket_of(url)[0])
        listed = await self._try(url, lambda: store.list_with_delimiter_async(directory))
        objects: Sequence[Any] = listed["objects"]
        return objects

    async def _below(self, url: str, directory: str | None) -> Sequence[Any]:
        """Return all objects below a directory; after a failure, listing goes on after the last one that came."""
        store, attempts = self._store(bucket_of(url)[0]), self._attempts(url)
        listed: Any = []
        while True:
            offset = listed[-1]["path"] if listed else None
            try:
                pages = aiter(store.list(directory, offset=offset, chunk_size=OBJECTS_A_LIST))
                while page := await _next(attempts, pages):
                    self._traffic.requests += 1
                    listed.extend(page)
                    attempts.progress()
                    attempts.wanted()
            except Exception as error:
                await _wait_or_raise(attempts, error, 0)
                if any(one["path"] > other["path"] for one, other in pairwise(listed)):
                    listed = []  # S3's directory buckets keep no order, so there is no "after" in them
            else:
                return tuple(listed)

    async def _exists(self, path: str) -> bool:
        """Whether there is an object of that name; a directory's mark, "a/", is listed as "a", which there is not."""
        base, key = bucket_of(path)
        store = self._store(base)

        async def look() -> bool:
            try:
                await store.head_async(key)
            except FileNotFoundError as error:
                _drop_traceback(error)
                return False
            return True

        return await self._try(path, look)

    async def _try(self, path: str, ask: Callable[[], Awaitable[R]], mib: int = 1) -> R:
        attempts = self._attempts(path, mib)
        while True:
            try:
                return await self._asked(attempts, ask)
            except WriteError:
                raise
            except Exception as error:
                await _wait_or_raise(attempts, error, 0)

    async def _try_write(self, path: str, ask: Callable[[], Awaitable[R]], mib: int = 1) -> R:
        try:
            return await self._try(path, ask, mib)
        except ReadError as error:
            raise WriteError(f"can't write: {error}") from None

    async def _look(self, store: Any, key: str) -> tuple[bytes, KnownVersion] | None:
        try:
            found = await store.get_async(key)
            return bytes(await found.bytes_async()), _version_of(found.meta)
        except FileNotFoundError as error:
            _drop_traceback(error)
            if any(code in str(error) for code in BUCKETS):
                raise
            return None

    async def _asked(self, attempts: Attempts, ask: Callable[[], Awaitable[R]]) -> R:
        with self._traffic.count_request(), anyio.fail_after(attempts.left_s):
            return await ask()

    def _attempts(self, path: str, mib: int = 1) -> Attempts:
        return Attempts(printable(path), self._http.retries, mib * self._http.deadline_s, self._traffic)

    def _store(self, base: str) -> Any:
        if base not in self._stores:
            self._stores[base] = open_store(base, self._options, self._http)
        return self._stores[base]


async def _next(attempts: Attempts, parts: AsyncIterator[Any]) -> Any:
    """Return the next block of a body, or page of a listing; an empty one at the end."""
    with anyio.fail_after(attempts.left_s):
        return await anext(parts, b"")


def _drop_traceback(error: Exception) -> None:
    """Drop the traceback of an error of obstore's, which may keep the error until its next call.

    Through the traceback's frames, a storage that was closed would keep its connections.
    """
    error.__traceback__ = None


async def _wait_or_raise(attempts: Attempts, error: Exception, position: int) -> None:
    """Wait before the next attempt, or raise the error if there is none."""
    _drop_traceback(error)
    meant = meaning(attempts.what, error)
    if isinstance(meant, ReadError):
        raise meant from None
    await attempts.back_off(meant, position)


def _version_of(meta: Any) -> KnownVersion:
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name) is not None}


Version = tuple[str | None, tuple[int, object] | None]
"""An ETag; and, for a store that has none, what else tells versions apart."""


def _version(meta: Any) -> Version:
    return _etag(meta), (meta["size"], meta["last_modified"])


def _same(path: str, known: Version | None, now: Version, position: int) -> Version:
    if known is None:
        return now
    if known[0] is not None and now[0] is not None:
        if known[0] != now[0]:
            raise _changed_error(path, position, known[0], now[0])
    elif known[1] is not None and known[1] != now[1]:
        raise ReadError(f"{path} changed while it was read, at byte {position:,}: read it again from its start")
    return now


def _changed_error(path: str, position: int, before: str | None, now: str | None) -> ReadError:
    tags = f"its ETag was {printable(str(before))} and is {printable(str(now))}"
    return ReadError(f"{path} has changed, at byte {position:,}: {tags}; read it again from its start")


def _options(position: int, stop: int | None, known: Version | None) -> dict[str, Any]:
    etag = None if known is None else known[0]
    can_be_sent = etag is not None and etag.isprintable()  # a listing's XML may hold anything; obstore panics then
    options: dict[str, Any] = {"if_match": etag} if can_be_sent else {}
    if stop is not None:
        options["range"] = (position, stop)
    elif position:
        options["range"] = {"offset": position}
    return options


def _object_of(path: str, meta: Any) -> FoundObject:
    return FoundObject(path, meta["size"], _etag(meta))


def _etag(meta: Any) -> str | None:
    """Return an ETag as HTTP writes it: Azure's listings leave the quotes out."""
    etag: str | None = meta["e_tag"]
    return etag if etag is None or etag.endswith('"') else f'"{etag}"'


STATUS = re.compile(r"status code: (\d{3})(?: ([\w ]+))?")

CODE = re.compile(r"<Code>\s*(.*?)\s*</Code>", re.DOTALL)

MESSAGE = re.compile(r"<Message>\s*(.*?)\s*(?:\n|</Message>)", re.DOTALL)

METADATA = re.compile(r"://169\.254\.|metadata\.google\.internal|/latest/api/token|/computeMetadata/|/identity/oauth2/")
"""Where a machine in a cloud asks who it is: tried when nothing else says with which credentials to read."""

CERTIFICATE = re.compile(r"certificate|UnknownIssuer|CertExpired|NotValidForName", re.IGNORECASE)

REGIONS = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")

BUCKETS = ("NoSuchBucket", "ContainerNotFound")

WAYS = {
    "s3": (
        'AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or storage_options={"access_key_id": …, "secret_access_key": …} '
        "(the files in ~/.aws are not read)"
    ),
    "gs": 'GOOGLE_APPLICATION_CREDENTIALS, or storage_options={"service_account_path": …}',
    "az": (
        "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or "
        'storage_options={"account_name": …, "account_key": …}'
    ),
}
"""What says with which credentials to read, by the first two letters of a scheme."""


def past_end(error: Exception) -> bool:
    text = str(error)
    return _status(text) == 416 or "Wanted range starting at" in text  # obstore's own word, where the store sent less


def other_version(error: Exception) -> bool:
    return _status(str(error)) == 412 or type(error).__name__ == "PreconditionError"


def meaning(path: str, error: Exception) -> ReadError | TransientError:
    """Return what an operation on `path`, a URL of a store as messages show it, has failed with.

    Returns:
      TransientError: another try may do better; ReadError: it would not.
    """
    text = str(error)
    status, said = _status(text), _server_text(text)
    if METADATA.search(text) and (status is None or status < 500):
        return ReadError(f"{path}: no credentials were found. {_give_credentials(path)}")
    if isinstance(error, TransientError):
        return error
    if isinstance(error, TimeoutError):
        return TransientError("no answer came in time")
    if type(error).__name__ == "InvalidPathError" or "Could not parse path" in text:
        return ReadError(f"{path}: a key with an empty part, '.' or '..' in it can't be read or listed: {_first(text)}")
    if CERTIFICATE.search(text):
        return ReadError(
            f"{path}: the server's certificate is not trusted: {_certificate(text)}; give the authority's own by "
            'storage_options={"client_options": {"root_certificate": PEM}}'
        )
    if "builder error" in text and "http://" in text:
        return ReadError(f'{path}: the endpoint is plain http: allow it, storage_options={{"allow_http": True}}')
    if "without LOCATION" in text or any(code in text for code in REGIONS):
        return ReadError(f"{path}: the bucket is in another region: {said}. {_give_region(text)}")
    if status is not None and not (status in (408, 429) or status >= 500):
        return ReadError(f"{path}: {said}: {_advice(path, text, status)}")
    if isinstance(error, FileNotFoundError):
        return ReadError(f"{path}: {said}: {_advice(path, text, 404)}")
    return TransientError(said)


def _advice(path: str, text: str, status: int) -> str:
    if any(code in text for code in BUCKETS):
        return "there is no such bucket (or container): check its name, and the endpoint"
    if status == 404:
        return "there is no such object: check its bucket and key; it may have been there when it was listed"
    if status in (401, 403):
        return f"check who this reads as, and what they may read. {_give_credentials(path)}"
    return "another try would get the same"


def _give_credentials(path: str) -> str:
    way = next((way for scheme, way in WAYS.items() if path.lower().startswith(scheme)), WAYS["az"])
    return f'Set {way}; or storage_options={{"skip_signature": True}} for what is public'


def _give_region(text: str) -> str:
    found = re.search(r"<Region>\s*(.*?)\s*</Region>|expecting '(.*?)'", text)
    region = printable(found[1] or found[2]) if found else "…"
    return f'Set AWS_REGION, or storage_options={{"region": "{region}"}}'


def _status(text: str) -> int | None:
    found = STATUS.search(text)
    return int(found[1]) if found else None


def _server_text(text: str) -> str:
    """Return what the server said, in short."""
    status, code, message = STATUS.search(text), CODE.search(text), MESSAGE.search(text)
    if status is not None:
        words = [f"{status[1]} {status[2] or ''}".strip(), *(found[1] for found in (code, message) if found)]
        return printable("the server answered " + ": ".join(words))
    if "dns error" in text:
        return "the name of the server can't be looked up"
    if "Connection refused" in text or "ConnectionRefused" in text:
        return "the server refuses connections"
    if "TimedOut" in text or "timed out" in text:
        return "the server stalled"
    return _first(text)


def _first(text: str) -> str:
    return printable(text.strip().partition("\n")[0])


def _certificate(text: str) -> str:
    found = re.search(r"InvalidCertificate\(\s*([\w ]+)", text)
    return found[1] if found else "see the server's own page"
