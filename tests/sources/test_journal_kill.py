"""A process that reads a live feed is killed at random moments: what its feed took for kept comes out exactly once."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests.laws.profile import SEEDS

CHILD = """
import asyncio, json, sys
from pathlib import Path
import streamline as sl
from streamline.sources import disk_journal as directory

port, folder, kind, shape = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
directory.SEGMENT_BYTES = 300  # so that files are begun and removed all the time


async def feed():
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while line := await reader.readline():
            yield int(line)
            writer.write(b"k")  # asked for the next one: the last one is kept
    finally:
        writer.close()


async def main():
    pipe = sl.from_stream(feed, journal=folder / "journal").shard(3)
    if shape == "shuffled":
        pipe = pipe.shuffle(window=5)
    pipe = pipe.merge(kind)
    snapshot = sl.Snapshot.load(folder / "ckpt.json", missing_ok=True)
    seen = []
    if snapshot is not None:
        seen = json.loads((folder / f"seen-{sum(snapshot.produced)}.json").read_text())
    async with pipe.open(resume=snapshot) as stream:
        async for item in stream:
            seen.append(item)
            if len(seen) % 7 == 0:
                snapshot = stream.snapshot()
                (folder / f"seen-{len(seen)}.json").write_text(json.dumps(seen))  # as a trainer its model
                snapshot.save(folder / "ckpt.json")
    print(json.dumps(seen))


asyncio.run(main())
"""


class Feed:
    """The server: it gives each number once, the next one when the last one was taken for kept.

    Attributes:
      given: numbers given so far.
      kept: those that were taken for kept.
    """

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.settimeout(200)
        self.port = self.server.getsockname()[1]
        self.given = 0
        self.kept: set[int] = set()

    def serve(self, count: int) -> socket.socket:
        """Accept a connection, and give `count` numbers on it."""
        connection, _ = self.server.accept()
        connection.settimeout(200)
        for _ in range(count):
            connection.sendall(b"%d\n" % self.given)
            self.given += 1
            assert connection.recv(1) == b"k"
            self.kept.add(self.given - 1)
        return connection


@pytest.mark.long
@pytest.mark.parametrize(("kind", "shape"), [("strict", "plain"), ("best_effort", "shuffled")])
def test_killed_again_and_again_every_item_that_was_kept_comes_out_exactly_once(
    tmp_path: Path, kind: str, shape: str
) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    random, feed = Random(kind), Feed()
    command = [sys.executable, str(script), str(feed.port), str(tmp_path), kind, shape]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with feed.server:
        for _ in SEEDS:
            with (
                subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as child,
                feed.serve(random.choice((0, 1, 3, 20, 50, 90))) as connection,
            ):
                for _ in range(random.randrange(3)):  # some more are on their way, or in the child, at the kill
                    connection.sendall(b"%d\n" % feed.given)
                    feed.given += 1
                child.kill()
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as last:
            feed.serve(20).close()
            output, _ = last.communicate(timeout=200)
    assert last.returncode == 0
    seen = Counter(json.loads(output))
    assert set(seen.values()) == {1}
    assert feed.kept <= set(seen)
    assert set(seen) <= set(range(feed.given))
