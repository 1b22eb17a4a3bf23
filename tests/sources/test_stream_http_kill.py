"""A process that reads server-sent events into a journal is killed at any moment: each event comes out exactly once."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

CHILD = """
import asyncio, json, sys
from pathlib import Path
import streamline as sl
from streamline.sources import disk_journal as directory, http_stream as http_reader

url, folder = sys.argv[1], Path(sys.argv[2])
directory.SEGMENT_BYTES = 300
http_reader.PAUSE_S = 0.01


async def main():
    pipe = sl.stream_http(url, framing="sse", journal=folder / "journal").shard(3).shuffle(window=5).merge()
    snapshot = sl.Snapshot.load(folder / "ckpt.json", missing_ok=True)
    seen = []
    if snapshot is not None:
        seen = json.loads((folder / f"seen-{sum(snapshot.produced)}.json").read_text())
    async with pipe.open(resume=snapshot) as stream:
        async for event in stream:
            seen.append(int(event.data))
            if len(seen) % 7 == 0:
                snapshot = stream.snapshot()
                (folder / f"seen-{len(seen)}.json").write_text(json.dumps(seen))
                snapshot.save(folder / "ckpt.json")
    print(json.dumps(seen))


asyncio.run(main())
"""

EVENTS = 200


def serve(listening: socket.socket, most: int) -> bool:
    """Answer a request with up to `most` events behind the one that it names; whether there was none left: 204."""
    connection, _ = listening.accept()
    with connection, suppress(ConnectionError):  # it may be one of a child that is gone
        connection.settimeout(200)
        head = b""
        while b"\r\n\r\n" not in head:
            if not (data := connection.recv(4096)):
                return False
            head += data
        match = re.search(rb"last-event-id: (\d+)", head, re.IGNORECASE)
        first = int(match[1]) + 1 if match else 0
        if first == EVENTS:
            connection.sendall(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
            return True
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        for at in range(first, min(EVENTS, first + most)):
            connection.sendall(b"id: %d\ndata: %d\n\n" % (at, at))
    return False


@pytest.mark.long
def test_killed_again_and_again_every_event_comes_out_exactly_once(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    random = Random(7)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(200)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/feed"
        command = [sys.executable, str(script), url, str(tmp_path)]
        for _ in range(2):
            with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as child:
                for _ in range(random.randrange(1, 3)):
                    serve(listening, random.choice((1, 20, 50)))
                child.kill()
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as last:
            while not serve(listening, 60):
                pass
            output, _ = last.communicate(timeout=200)
    assert last.returncode == 0
    assert sorted(json.loads(output)) == list(range(EVENTS))
