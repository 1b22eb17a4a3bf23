"""Files of the Hugging Face Hub, hf://datasets/USER/REPO@REVISION/PATH, through the file system of huggingface_hub.

A branch may move while its files are read. So a repository is read at the commit that it had when it was first asked
for; what a listing or a snapshot says of a file, an ETag made of its content, is compared with that commit's.

That library blocks, so each question and each block has a thread; it has no timeout but its own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar

from streamline.core.meters import Traffic
from streamline.core.threads import ThreadPool
from streamline.errors import PlanError, ReadError, install, printable
from streamline.io.storage.base import FoundObject, Storage, too_short
from streamline.io.storage.http_response import retry_after_s
from streamline.io.storage.options import HttpOptions
from streamline.io.storage.paths import DEEP, Glob, hub_path
from streamline.io.storage.retry import Attempts, TransientError

R = TypeVar("R")

BLOCK_BYTES = 4 * 2**20
"""Bytes of a request: one costs a redirect and a signature besides its round trip."""

CALLS_AT_ONCE = 32
"""Threads: questions and blocks on their way at once."""

GIVE_TOKEN = 'log in (`hf auth login`), set HF_TOKEN, or give storage_options={"token": …}'


class HubStorage(Storage):
    """Reads files of the Hub. `options`: of `HfFileSystem`, such as its token and endpoint.

    Raises:
      PlanError: huggingface_hub isn't installed.
    """

    def __init__(self, options: Mapping[str, Any] | None, http: HttpOptions | None, traffic: Traffic) -> None:
        if find_spec("huggingface_hub") is None:
            raise PlanError(f"hf:// is read by huggingface_hub, which is not installed: {install('hub')}")
        import huggingface_hub  # takes 0.2 s to import

        self._system: Any = huggingface_hub.HfFileSystem(**{**(options or {}), "skip_instance_cache": True})
        self._api: Any = huggingface_hub.HfApi(endpoint=self._system.endpoint, token=self._system.token)
        self._http = http or HttpOptions()
        self._traffic = traffic
        self._threads = ThreadPool(CALLS_AT_ONCE)
        self._commits: dict[tuple[str, str, str], str] = {}

    async def list(self, pattern: str) -> list[FoundObject]:
        """Return the files that a glob matches, sorted by path. Only what is below its plain directories is listed."""
        glob = Glob(hub_path(pattern))

        def look() -> list[FoundObject]:
            infos = self._below(glob)
            return [_object_of(f"hf://{name}", infos[name]) for name in sorted(infos) if glob.matches(name)]

        return await self._try(pattern, look)

    async def stat(self, path: str) -> FoundObject:
        return await self._try(path, lambda: _object_of(path, self._system.info(self._path_at_commit(path))))

    async def blocks(
        self, path: str, start: int = 0, stop: int | None = None, etag: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        attempts, position = self._attempts(path), start
        found = await self.stat(path)
        if etag is not None and found.etag != etag:
            raise ReadError(
                f"{printable(path)} has changed: its ETag was {printable(etag)} and is {found.etag}; read it again "
                "from its start, or name a commit, hf://datasets/USER/REPO@COMMIT/…"
            )
        size = found.size or 0
        if start > size or (stop is not None and stop > size):
            raise too_short(printable(path), size, min(start, size))
        end = size if stop is None else stop
        while position < end:
            upto = min(end, position + BLOCK_BYTES)
            block = await self._try(path, partial(self._read, path, position, upto), attempts, position)
            position += len(block)
            attempts.arrived(len(block))
            attempts.progress()
            yield block
            attempts.wanted()

    async def aclose(self) -> None:
        """Let the threads end."""
        self._threads.close()

    def _below(self, glob: Glob) -> dict[str, dict[str, Any]]:
        if glob.deep:
            found: dict[str, dict[str, Any]] = self._system.find(glob.directory, detail=True)
            return found
        listed = self._system.ls(glob.directory, detail=True)
        return {info["name"]: info for info in listed if info["type"] == "file"}

    def _read(self, path: str, start: int, stop: int) -> bytes:
        with self._system.open(self._path_at_commit(path), "rb", block_size=BLOCK_BYTES, cache_type="none") as file:
            file.seek(start)
            block: bytes = file.read(stop - start)
        if len(block) != stop - start:
            raise TransientError(f"{len(block):,} bytes came, expected {stop - start:,}")
        return block

    def _path_at_commit(self, path: str) -> str:
        """Return a path at the commit that its repository is read at."""
        at = self._system.resolve_path(hub_path(path))
        if not hasattr(at, "repo_id"):
            return hub_path(path)  # a bucket has no commits
        key = (at.repo_type, at.repo_id, at.revision)
        if key not in self._commits:
            info = self._api.repo_info(at.repo_id, repo_type=at.repo_type, revision=at.revision)
            self._commits.setdefault(key, info.sha)
        kind = "" if at.repo_type == "model" else f"{at.repo_type}s/"
        return f"{kind}{at.repo_id}@{self._commits[key]}/{at.path_in_repo}"

    async def _try(self, path: str, ask: Callable[[], R], attempts: Attempts | None = None, position: int = 0) -> R:
        attempts = attempts or self._attempts(path)
        while True:
            with self._traffic.count_request():
                result, error = await self._threads.run(partial(_outcome, ask))
            if error is None:
                return result  # type: ignore[return-value]
            meant = meaning(attempts.what, error)
            if isinstance(meant, ReadError):
                raise meant  # not from it: its text may have the signed URL of a CDN
            await attempts.back_off(meant, position, error)

    def _attempts(self, path: str) -> Attempts:
        return Attempts(printable(path), self._http.retries, self._http.deadline_s, self._traffic)


def _outcome(ask: Callable[[], R]) -> tuple[R | None, Exception | None]:
    try:
        return ask(), None
    except Exception as error:
        return None, error


def _object_of(path: str, info: Mapping[str, Any]) -> FoundObject:
    """Return what the file system says of a file. Its ETag is of the content, whatever the commit."""
    if info["type"] != "file":
        raise ReadError(f"{path} is a directory: write {path.rstrip('/')}/* for its files, or /{DEEP} for all below it")
    lfs = info.get("lfs") or {}
    content = lfs.get("sha256") or info.get("blob_id") or info.get("xet_hash")
    return FoundObject(path, info["size"], None if content is None else f'"{content}"')


def meaning(what: str, error: Exception) -> ReadError | TransientError:
    """Return what an operation on `what` failed with: a TransientError if another try may help, else a ReadError."""
    if isinstance(error, ReadError | TransientError):
        return error
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    said = printable(str(error).strip().partition("\n")[0]) or type(error).__name__
    if status in (401, 403):
        return ReadError(f"{what}: the Hub answered {status}: {said}: for what is private or gated, {GIVE_TOKEN}")
    if isinstance(error, FileNotFoundError) or status == 404:
        return ReadError(
            f"{what}: there is no such file, repository or revision: {said}; if it is private, {GIVE_TOKEN}"
        )
    if isinstance(error, ValueError | NotImplementedError):
        return ReadError(f"{what}: {said}: expected hf://datasets/USER/REPO/PATH")
    if status is None or status in (408, 429) or status >= 500:
        asked = getattr(response, "headers", {}).get("Retry-After")
        return TransientError(said, None if asked is None else retry_after_s(asked))
    return ReadError(f"{what}: the Hub answered {status}: {said}")
