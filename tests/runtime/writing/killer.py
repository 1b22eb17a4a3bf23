"""A program that kills a job that writes shards, at each of its operations in turn, and looks at what is left.

For each number n a copy of this process (a fork: importing takes longer than the job) runs the job and is killed, with
SIGKILL, at its operation n: before it, or with half of what it writes. Another copy looks at the folder, resumes the
job and reads what it has written. Ends when a job comes to its end before operation n.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import numpy as np

import streamline as sl
from streamline.io.storage import object_store, output_folder
from streamline.io.storage.manifest import Manifest, parse_manifest
from streamline.io.storage.options import Access
from streamline.runtime.writing import output_format, write

ITEMS: dict[str, list[Any]] = {
    "jsonl": [{"id": number, "text": "x" * number} for number in range(6)],
    "npy": [np.arange(4) + number for number in range(6)],
    "parquet": [{"id": number, "text": "x" * number} for number in range(6)],
    "tar": [{"__key__": f"{number:03d}", "txt": b"x" * number} for number in range(6)],
}
SHARD_BYTES = {"jsonl": 40, "npy": 200, "parquet": 30, "tar": 1500}
PART = 5 * 2**20  # S3 takes no smaller one


def items_of(job: dict[str, Any]) -> list[Any]:
    return ["x" * (PART + 1), "y" * (PART + 1)] if job["large"] else ITEMS[job["format"]]


def plain(item: Any) -> Any:
    return item.tolist() if isinstance(item, np.ndarray) else item


class Killer:
    """Counts the operations of this process, and kills it at one of them."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.main = threading.get_ident()

    def due(self) -> bool:
        self.left -= 1
        return self.left < 0

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def on_disk(self) -> None:
        """Count what the job does to files."""
        for name in ("open", "fsync", "replace", "unlink", "mkdir"):
            setattr(os, name, partial(self.before, getattr(os, name)))
        real = os.write

        def half(descriptor: int, content: Any) -> int:
            if threading.get_ident() == self.main and self.due():
                real(descriptor, bytes(content)[: len(content) // 2])
                self.kill()
            return real(descriptor, content)

        os.write = half

    def before(self, real: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if threading.get_ident() == self.main and self.due():
            self.kill()
        return real(*args, **options)

    def in_store(self) -> None:
        """Count requests, each before it is made and after its answer, and the parts that are read for an upload."""
        asked, file = object_store.ObjectStorage._asked, TemporaryFile
        killer = self

        async def ask(self: Any, *args: Any) -> Any:
            if killer.due():
                killer.kill()
            answer = await asked(self, *args)
            if killer.due():
                killer.kill()
            return answer

        class Counted:
            def __init__(self, **options: Any) -> None:
                self.file = file(**options)

            def read(self, size: int = -1) -> bytes:
                if killer.due():
                    killer.kill()
                return bytes(self.file.read(size))

            def __getattr__(self, name: str) -> Any:
                return getattr(self.file, name)

        vars(output_folder)["TemporaryFile"] = Counted
        object_store.ObjectStorage._asked = ask  # type: ignore[method-assign, assignment]


def run(job: dict[str, Any], folder: str, kill_at: int | None = None) -> None:
    object_store.PART_BYTES = PART
    if kill_at is not None:
        killer = Killer(kill_at)
        killer.in_store() if job["storage_options"] else killer.on_disk()
    write(
        sl.from_items(items_of(job)).shard(2), folder, output_format(job["format"]), resume=True, rank=0, world_size=1,
        compression=job["compression"],
        shard_bytes=2 * PART if job["large"] else SHARD_BYTES[job["format"]], storage_options=job["storage_options"],
    )  # fmt: skip


def items_in(job: dict[str, Any], path: Any) -> list[Any]:
    reader: Any = getattr(sl, f"read_{job['format']}")
    found = list(reader(path, storage_options=job["storage_options"]))
    if job["format"] == "tar":
        return [{name: item[name] for name in ("__key__", "txt")} for item in found]
    return list(map(plain, found))


def manifest_in(job: dict[str, Any], folder: str) -> Manifest | None:
    access = Access(storage_options=job["storage_options"])
    with output_folder.output_folder(folder, access, "looked at") as out:
        content = out.manifest("manifest.json")
    return None if content is None else parse_manifest(content, folder)


def look(job: dict[str, Any], folder: str, whole: Manifest) -> None:
    """Check what a kill has left: what counts is a beginning of what is written, in whole shards."""
    found = manifest_in(job, folder)
    if found is None:
        return
    assert sizes(found) == sizes(whole)[: len(found.shards)], (found, whole)
    if found.shards:
        there = items_in(job, [f"{folder}/{shard.name}" for shard in found.shards])
        assert there == list(map(plain, items_of(job)))[: found.items], there
    if not found.complete:
        refused = ""
        try:
            items_in(job, folder)
        except sl.errors.ReadError as error:
            refused = str(error)
        assert "isn't written to its end" in refused


def sizes(manifest: Manifest) -> list[tuple[int, int]]:
    return [(shard.items, shard.bytes) for shard in manifest.shards]


def finish(job: dict[str, Any], folder: str, whole_folder: str, *, killed: bool = True) -> None:
    whole = manifest_in(job, whole_folder)
    assert whole is not None
    if killed:
        look(job, folder, whole)
        run(job, folder)
    assert items_in(job, folder) == list(map(plain, items_of(job)))
    found = manifest_in(job, folder)
    assert found is not None
    assert found.complete
    assert sizes(found) == sizes(whole)
    if not job["storage_options"]:
        assert contents(folder) == contents(whole_folder)


def contents(folder: str) -> dict[str, bytes]:
    """Return what is in a folder, hidden files too, but for the state."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name != "manifest.json"}


def in_fork(work: Callable[[], object]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # from 3.12 on: pyarrow has threads, which the fork doesn't use
        pid = os.fork()
    if not pid:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    job = json.loads(sys.argv[1])
    whole = f"{job['folder']}/whole"
    with TemporaryDirectory() as other:  # imports what the copies need, which takes longer than all else
        local = {**job, "storage_options": None, "large": False}
        run(local, other)
        finish(local, other, other, killed=False)
    for thread in set(threading.enumerate()) - {threading.main_thread()}:
        thread.join(60)  # on a busy machine, one that has nothing more to do may still be ending
    assert threading.active_count() == 1
    assert in_fork(lambda: run(job, whole)) == 0
    for at in count(0, job["step"]):
        folder = f"{job['folder']}/{at}"
        code = in_fork(lambda at=at, folder=folder: run(job, folder, at))  # type: ignore[misc]
        killed = code == -signal.SIGKILL
        assert killed or code == 0, f"killed at {at}: exit code {code}"
        code = in_fork(lambda folder=folder, killed=killed: finish(job, folder, whole, killed=killed))  # type: ignore[misc]
        assert code == 0, f"after a kill at operation {at}"
        if not killed:
            print(at)
            return


if __name__ == "__main__":
    main()
