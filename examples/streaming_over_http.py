"""Compressed shards over HTTP: one connection breaks in the middle, and the run is stopped; each row comes once."""

from __future__ import annotations

import gzip
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import streamline as sl

SHARDS = {
    f"/part-{part}.jsonl.gz": gzip.compress(
        b"".join(json.dumps({"id": 1000 * part + row}).encode() + b"\n" for row in range(1000)), mtime=0
    )
    for part in range(4)
}
to_be_cut = {"/part-2.jsonl.gz"}


class Server(BaseHTTPRequestHandler):
    """Answers with a range of a shard; the first time that it sends part 2, it breaks off in the middle."""

    def do_GET(self) -> None:
        body, asked = SHARDS[self.path], self.headers["Range"] or ""
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, stop = int(first or 0), min(int(last or len(body)) + 1, len(body))
        self.send_response(206 if asked else 200)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(body)}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", '"1"')
        self.end_headers()
        if self.path in to_be_cut and stop - start == len(body):
            to_be_cut.discard(self.path)
            stop = len(body) // 2
        self.wfile.write(body[start:stop])

    def log_message(self, *_: object) -> None: ...


with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
    Thread(target=server.serve_forever, daemon=True).start()
    pipe = sl.read_jsonl(f"http://127.0.0.1:{server.server_port}/part-{{0..3}}.jsonl.gz").shard(2).merge()

    with pipe.open() as stream:
        ids = [next(stream)["id"] for _ in range(2500)]
        snapshot = stream.snapshot()
        print("broken connections, each followed by a request for the rest:", stream.stats().reads[0].retries)
    print(pipe.explain(snapshot))
    with pipe.open(resume=snapshot) as stream:
        ids += [row["id"] for row in stream]
    print(f"{len(ids):,} rows, each exactly once: {sorted(ids) == list(range(4000))}")
    server.shutdown()
