"""The ranks of a job, a program of its own: each does what its stdin says, a line a command, a line an answer."""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

import streamline as sl
import streamline.backends.processes
import streamline.constructors  # with all that the ranks need, before they are forked
from streamline.backends.hosts import shared_runs
from streamline.core.error_policy import Failure

LENGTH = 96
SHARDS = 4


class Row:
    """A class of the main program: it crosses by value."""

    def __init__(self, number: int) -> None:
        self.number = number


def noted(number: int) -> int:
    """Note in a file, one line for each call in whatever process, that an item is made."""
    if "STALL_S" in os.environ:
        shared_runs.STALL_S = float(os.environ["STALL_S"])
    with open(os.environ["READS"], "ab", buffering=0) as file:  # noqa: PTH123 - one write, which appends
        file.write(b"%d\n" % number)
    return number


def array(number: int) -> dict[str, Any]:
    return {"row": Row(noted(number)), "pixels": np.full((256, 256), number, np.float32)}


def faulty(number: int) -> int:
    if number % 10 == 3:
        raise ValueError(f"number {number}")
    return noted(number)


def poisonous(number: int) -> int:
    if number == 5:
        os._exit(3)
    return noted(number)


def of_items(fn: Callable[[int], Any], length: int = LENGTH) -> sl.Pipeline[Any]:
    return sl.from_items(range(length)).shard(SHARDS).map(fn).merge()


PIPES: dict[str, Callable[[], sl.Pipeline[Any]]] = {
    "items": lambda: of_items(noted),
    "others": lambda: of_items(lambda number: -noted(number)),
    "arrays": lambda: of_items(array),
    "faulty": lambda: of_items(faulty),
    "poisonous": lambda: of_items(poisonous),
    "long": lambda: of_items(noted, 100_000),
    "windows": lambda: (
        sl.from_items(range(LENGTH)).shard(SHARDS).shuffle(window=8).map(noted).merge().batch(3, collate=None)
    ),
}


def told(item: Any, *, spoil: bool) -> Any:
    """Return an item as JSON; then write over its array, if it has one, and is to be spoilt."""
    if not isinstance(item, dict):
        return item
    pixels = item["pixels"]
    assert isinstance(item["row"], Row)
    assert (pixels == pixels[0, 0]).all()
    number = [item["row"].number, int(pixels[0, 0])]
    if spoil:
        pixels[:] = -1
    return number


class RankProgram:
    """The streams of this process, by name."""

    def __init__(self) -> None:
        self.streams: dict[str, Any] = {}
        self.asked: list[str] = []

    def handler(self, failure: Failure) -> Literal["skip"]:
        self.asked.append(str(failure.error))
        return "skip"

    def open(self, name: str, pipe: str, backend: dict[str, Any], resume: str | None = None, **options: Any) -> None:
        if options.get("on_error") == "handler":
            options["on_error"] = self.handler
        kind = getattr(sl, backend.pop("kind", "Processes"))
        hosts = backend.pop("n", 2)
        where = sl.Inline() if kind is sl.Inline else kind(hosts, **backend)
        at = None if resume is None else sl.Snapshot.from_json(resume)
        options = {"rank": 0, "world_size": 1, **options}
        opened = PIPES[pipe]().open(backend=where, resume=at, **options)
        self.streams[name] = opened.__enter__()

    def take(self, name: str, items: int | None = None, *, spoil: bool = False) -> list[Any]:
        stream = self.streams[name]
        taken: list[Any] = []
        for item in stream if items != 0 else ():
            taken.append(told(item, spoil=spoil))
            if len(taken) == items:
                break
        return taken

    def snapshot(self, name: str) -> str:
        return str(self.streams[name].snapshot().to_json())

    def pause(self, name: str) -> bool:
        with self.streams[name].paused():
            return True

    def skipped(self, name: str) -> tuple[int, list[str]]:
        errors = self.streams[name].errors
        return errors.total, self.asked

    def hosts(self, name: str) -> list[int]:
        return [host.pid for host in self.streams[name].stats().hosts]

    def close(self, name: str) -> None:
        self.streams.pop(name).close()


def forked(orders: socket.socket) -> None:
    """Fork a rank for each pair of descriptors that comes, its stdin and stdout; return in the rank.

    With them comes the rank's environment. An order without descriptors is the pid of a rank that ends. Each order is
    answered: with a pid, with an exit code.
    """
    while True:
        order, fds, _, _ = socket.recv_fds(orders, 2**17, 2)
        if not order:
            sys.exit()
        answer = os.fork() if fds else os.waitstatus_to_exitcode(os.waitpid(int(order), 0)[1])
        if fds and not answer:
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
            os.environ.clear()
            os.environ.update(json.loads(order))
        for fd in fds:
            os.close(fd)
        if fds and not answer:
            return orders.close()
        orders.send(str(answer).encode())


def main() -> None:
    forked(socket.socket(fileno=int(sys.argv[1])))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints what happens in its cluster
    program = RankProgram()
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            answer = {"result": getattr(program, method)(**arguments)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    for name in list(program.streams):
        program.close(name)


if __name__ == "__main__":
    main()
