"""Memory while files are streamed for a long time: it should stand still. By hand, for it takes minutes.

    python -m bench.steady_files [--gb 20] [lines npy csv jsonl gzip tar parquet arrow http-files http-lines rounds]

Files are sparse where their format allows, or small and read many times under many names. What is printed: the
resident memory of this process, in MiB, every GB, and its growth from a quarter of the way on.

`rounds` opens and closes a stream over HTTP 1,000 times, left after 0 to 9 items, and prints what is left open.
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import tarfile
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import streamline as sl
from bench.nginx import Nginx

GB = 10**9

PAGE = os.sysconf("SC_PAGESIZE")


def resident() -> float:
    """Return the resident memory of this process, in MiB; of mapped files only what is its own (RssAnon)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise LookupError("the kernel doesn't tell RssAnon")


Size = Callable[[Any], int]
Made = tuple[sl.Pipeline[Any], Size]


def many(folder: Path, name: str, data: bytes, gb: float) -> list[str]:
    """Return as many names for one file as it takes to read so many GB."""
    (folder / name).write_bytes(data)
    count = max(1, int(gb * GB / len(data)))
    for number in range(count):
        os.link(folder / name, folder / f"{number:06}-{name}")
    return [str(folder / f"{number:06}-{name}") for number in range(count)]


def text_lines(size: int = 64 << 20) -> bytes:
    return b"".join(b'{"id": %d, "text": "%s"}\n' % (number, b"x" * 200) for number in range(size // 230))


def lines(folder: Path, gb: float) -> Made:
    return sl.read_lines(many(folder, "x.txt", text_lines(), gb)), lambda item: len(item) + 1


def jsonl(folder: Path, gb: float) -> Made:
    return sl.read_jsonl(many(folder, "x.jsonl", text_lines(), gb)), lambda item: 232


def records(folder: Path, gb: float) -> Made:
    data = b"id,text\n" + b"".join(b'%d,"%s"\n' % (number, b"x" * 200) for number in range(300_000))
    return sl.read_csv(many(folder, "x.csv", data, gb)), lambda item: 210


def gzipped(folder: Path, gb: float) -> Made:
    packer = zlib.compressobj(1, wbits=31)
    data = packer.compress(text_lines()) + packer.flush()
    names = many(folder, "x.gz", data, gb * len(data) / (64 << 20))
    return sl.read_lines(names), lambda item: len(item) + 1


def rows(folder: Path, gb: float) -> Made:
    """Rows of 4 KB of one sparse file."""
    path, count = folder / "x.npy", int(gb * GB / 4096)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (count, 4096)})
        file.truncate(file.tell() + count * 4096)
    return sl.read_npy(path).map(lambda row: row.copy()), lambda item: 4096


def samples(folder: Path, gb: float) -> Made:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for number in range(500):
            info = tarfile.TarInfo(f"{number}.bin")
            info.size = 200_000
            tar.addfile(info, io.BytesIO(bytes(info.size)))
    return sl.read_tar(many(folder, "x.tar", file.getvalue(), gb)), lambda item: len(item["bin"])


def table() -> Any:
    import pyarrow as pa

    dice = np.random.default_rng(0)
    return pa.table({f"c{column}": dice.random(500_000) for column in range(8)})


def groups(folder: Path, gb: float) -> Made:
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(table(), file, row_group_size=100_000, compression="none", use_dictionary=False)
    names = many(folder, "x.parquet", file.getvalue(), gb)
    return sl.read_parquet(names, batch_rows=10_000), lambda item: item.nbytes


def batches(folder: Path, gb: float) -> Made:
    import pyarrow.ipc as ipc

    file, data = io.BytesIO(), table()
    with ipc.new_file(file, data.schema) as writer:
        writer.write_table(data, max_chunksize=100_000)
    names = many(folder, "x.arrow", file.getvalue(), gb)
    return sl.read_arrow(names, batch_rows=10_000), lambda item: item.nbytes


LOCAL: dict[str, Callable[[Path, float], Made]] = {
    "lines": lines,
    "jsonl": jsonl,
    "csv": records,
    "gzip": gzipped,
    "npy": rows,
    "tar": samples,
    "parquet": groups,
    "arrow": batches,
}


def urls(server: Nginx, name: str, data: bytes, gb: float) -> list[str]:
    return [server.url(Path(path).name) for path in many(server.files, name, data, gb)]


def remote_files(server: Nginx, gb: float) -> Made:
    return sl.read_files(urls(server, "x.bin", bytes(2 << 20), gb)), lambda item: len(item.data)


def remote_lines(server: Nginx, gb: float) -> Made:
    return sl.read_lines(urls(server, "x.txt", text_lines(), gb)), lambda item: len(item) + 1


REMOTE: dict[str, Callable[[Nginx, float], Made]] = {"http-files": remote_files, "http-lines": remote_lines}


def watch(name: str, made: Made, gb: float) -> None:
    """Read it all, and print what the process holds on the way."""
    pipe, size = made
    done, seen, began = 0, list[float](), time.perf_counter()
    print(f"{name}: {resident():.0f} MiB before", flush=True)
    with pipe.open() as stream:
        for item in stream:
            done += size(item)
            if done >= (len(seen) + 1) * GB:
                seen.append(resident())
                print(f"{name}: {done / GB:.1f} GB, {seen[-1]:.0f} MiB", flush=True)
    rate = done / GB / (time.perf_counter() - began)
    later = seen[len(seen) // 4 :]
    growth = max(later) - later[0] if later else 0.0
    print(f"{name}: {done / GB:.1f} GB at {rate:.2f} GB/s; growth since a quarter of it {growth:+.1f} MiB", flush=True)


def opened() -> dict[str, float]:
    """Return what this process has open and holds."""
    gc.collect()
    return {
        "files": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "threads": threading.active_count(),
        "MiB": round(resident(), 1),
    }


def rounds(server: Nginx, count: int = 1000) -> None:
    """Open and close a stream again and again."""
    data = b"".join(b"%d\n" % number for number in range(100_000))
    (server.files / "x.txt").write_bytes(data)
    (server.files / "y.txt").write_bytes(data)
    pipe = sl.read_lines([server.url("x.txt"), server.url("y.txt")]).shard(2)
    for number in range(count + 1):
        if number % (count // 5) == 0:
            print(f"rounds: {number:,}: {opened()}", flush=True)
        with pipe.open() as stream:
            for _ in zip(range(number % 10), stream, strict=False):
                pass


@contextmanager
def served(names: Sequence[str]) -> Iterator[Nginx | None]:
    """Run a server if one of these needs it."""
    server = Nginx() if {*REMOTE, "rounds"} & set(names) else None
    try:
        yield server
    finally:
        if server is not None:
            server.close()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=20.0)
    parser.add_argument("what", nargs="*", default=[*LOCAL, *REMOTE, "rounds"])
    options = parser.parse_args()
    with served(options.what) as server:
        for name in options.what:
            if name in LOCAL:
                with tempfile.TemporaryDirectory() as folder:
                    watch(name, LOCAL[name](Path(folder), options.gb), options.gb)
            elif server is not None and name in REMOTE:
                watch(name, REMOTE[name](server, options.gb), options.gb)
            elif server is not None:
                rounds(server)


if __name__ == "__main__":
    main()
