"""hf:// paths through huggingface_hub, of a Hub on the loopback: listed, read by ranges, at one commit, resumed."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlparse

import huggingface_hub
import pytest

import streamline as sl
from streamline.errors import ReadError
from streamline.io.storage import hub
from streamline.testing.checks import check_resume

REPO = "me/data"


class Hub:
    """A repository of datasets: commits by name, and what "main" is.

    Attributes:
      short: how many answers to come lack their last byte.
      fails: returns the status to answer a request for a path with; 0: as it should be.
      asked: (method, path, range), in order.
    """

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.main = ""
        self.short = 0
        self.fails: Callable[[str], int] = lambda path: 0
        self.asked: list[tuple[str, str, str]] = []

    def commit(self, **files: bytes) -> str:
        content = {name.replace("__", "/").replace("_", "."): data for name, data in files.items()}
        self.main = hashlib.sha1(repr(content).encode()).hexdigest()
        self.commits[self.main] = content
        return self.main

    def answer(self, path: str, asked_range: str, query: str) -> tuple[int, bytes, dict[str, str]]:
        """Return status, body and headers."""
        if status := self.fails(path):
            return status, b"{}", {}
        api, resolve = f"/api/datasets/{REPO}", f"/datasets/{REPO}/resolve/"
        if path.startswith(resolve):
            revision, _, name = path.removeprefix(resolve).partition("/")
            return self.body(self.files(revision)[name], asked_range)
        if path.startswith(f"{api}/tree/"):
            revision, _, directory = path.removeprefix(f"{api}/tree/").partition("/")
            return (
                200,
                json.dumps(list(self.entries(revision, directory, "recursive=true" in query.lower()))).encode(),
                {},
            )
        if path == api or path.startswith(f"{api}/revision/"):
            revision = path.removeprefix(f"{api}/revision/") if path != api else "main"
            if revision != "main" and revision not in self.commits:
                return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
            sha = self.main if revision == "main" else revision
            known = {"id": REPO, "sha": sha, "private": False, "disabled": False, "gated": False, "downloads": 0}
            return 200, json.dumps({**known, "likes": 0, "tags": [], "siblings": []}).encode(), {}
        return 404, b"{}", {"X-Error-Code": "RepoNotFound"}

    def files(self, revision: str) -> dict[str, bytes]:
        return self.commits[self.main if revision == "main" else revision]

    def body(self, data: bytes, asked: str) -> tuple[int, bytes, dict[str, str]]:
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(len(data), int(last) + 1) - (self.short > 0)
        self.short = max(0, self.short - 1)
        return 206, data[start:stop], {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}

    def entries(self, revision: str, directory: str, recursive: bool) -> Iterator[dict[str, Any]]:
        below, seen = f"{directory}/" if directory else "", set()
        for name, data in self.files(revision).items():
            if name.startswith(below):
                inner, slash, _ = name.removeprefix(below).partition("/")
                if slash and inner not in seen:
                    seen.add(inner)
                    yield {"type": "directory", "oid": "0", "size": 0, "path": below + inner}
                if not slash or recursive:
                    oid = hashlib.sha1(data).hexdigest()
                    large = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 9}
                    entry = {"type": "file", "oid": oid, "size": len(data), "path": name}
                    yield {**entry, "lfs": large} if name.endswith(".gz") else entry


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Hub, dict[str, Any]]]:
    """A Hub, and the `storage_options` that lead to it."""
    repository = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlparse(self.path)
            asked = self.headers.get("Range", "")
            repository.asked.append((self.command, unquote(url.path), asked))
            status, body, headers = repository.answer(unquote(url.path), asked, url.query)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="hub")
    thread.start()
    yield repository, {"endpoint": f"http://127.0.0.1:{server.server_port}", "token": False}
    huggingface_hub.close_session()
    server.shutdown()
    server.server_close()
    thread.join()


def numbers(first: int, stop: int) -> bytes:
    return "".join(f"line {n}\n" for n in range(first, stop)).encode()


LINES = [f"line {n}" for n in range(30)]
PATTERN = f"hf://datasets/{REPO}/train/*.txt"


def test_files_are_listed_read_by_ranges_and_resumed_at_every_item(
    served: tuple[Hub, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, options = served
    repository.commit(train__a_txt=numbers(0, 20), train__b_txt=numbers(20, 30), other_txt=b"x\n", train__c_md=b"")
    monkeypatch.setattr(hub, "BLOCK_BYTES", 50)
    pipe = sl.read_lines(PATTERN, storage_options=options)
    assert list(pipe) == LINES
    parts = [asked for _, path, asked in repository.asked if path.endswith("a.txt")]
    assert parts[:2] == ["bytes=0-49", "bytes=50-99"]
    assert sorted(sl.read_lines(f"hf://datasets/{REPO}@main/**/*.txt", storage_options=options)) == sorted(
        [*LINES, "x"]
    )
    check_resume(pipe.shard(2), generations=1)
    with pipe.open() as stream:
        next(stream)
        assert stream.stats().reads[0].requests > 0


def test_a_branch_that_moves_is_read_at_one_commit_and_a_resume_says_what_changed(
    served: tuple[Hub, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, options = served
    first = repository.commit(train__a_txt=numbers(0, 20), train__b_txt=numbers(20, 30))
    monkeypatch.setattr(hub, "BLOCK_BYTES", 16)
    with sl.read_lines(PATTERN, storage_options=options).open() as stream:
        found = [next(stream) for _ in range(3)]
        repository.commit(train__a_txt=numbers(50, 70), train__b_txt=numbers(20, 30))
        found += list(stream)
        snapshot = stream.snapshot()
    assert found == LINES
    with pytest.raises(sl.errors.ResumeError, match=r"a\.txt"):
        sl.read_lines(PATTERN, storage_options=options).open(resume=snapshot).__enter__()
    pinned = f"hf://datasets/{REPO}@{first}/train/*.txt"
    assert list(sl.read_lines(pinned, storage_options=options)) == LINES


def test_what_the_hub_refuses_is_said_and_what_passes_is_tried_again(served: tuple[Hub, dict[str, Any]]) -> None:
    repository, options = served
    repository.commit(train__a_txt=numbers(0, 30))
    for path, words in (
        (f"hf://datasets/{REPO}/train/none.txt", "there is no such file, repository or revision"),
        ("hf://datasets/me/other/a.txt", "no such file, repository or revision.*HF_TOKEN"),
        (f"hf://datasets/{REPO}@nowhere/a.txt", "no such file, repository or revision"),
        (f"hf://datasets/{REPO}/train", r"is a directory: write hf://datasets/me/data/train/\*"),
    ):
        with pytest.raises(ReadError, match=words):
            list(sl.read_lines(path, storage_options=options))
    repository.short = 1
    with sl.read_lines(PATTERN, storage_options=options).open() as stream:
        assert list(stream) == LINES
        assert stream.stats().reads[0].retries == 1
    repository.fails = lambda path: 403 if "/resolve/" in path else 0
    with pytest.raises(ReadError, match=r"the Hub answered 403.*private or gated"):
        list(sl.read_lines(PATTERN, storage_options=options))
