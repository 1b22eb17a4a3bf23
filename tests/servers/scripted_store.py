"""A loopback server in threads of its own that answers as a store does, except where a test's script says otherwise."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from obstore.store import from_url

Answer = Callable[["Handler"], None]


@dataclass
class ScriptedStore:
    """Serves `objects` by key; request number i is answered by `script[i]`, those behind it as they should be."""

    endpoint: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    etag: str | None = '"v1"'
    script: list[Answer] = field(default_factory=list)
    requests: list[dict[str, str]] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "endpoint": self.endpoint,
            "region": "r",
            "access_key_id": "a",
            "secret_access_key": "b",
            "allow_http": True,
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: ScriptedStore

    def do_GET(self) -> None:
        self.close_connection = True
        self.store.requests.append(
            {"method": self.command, "path": self.path, **{k.lower(): v for k, v in self.headers.items()}}
        )
        answer = self.store.script.pop(0) if self.store.script else serve
        answer(self)

    do_HEAD = do_PUT = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


def serve(handler: Handler, *, cut: int | None = None, told: int | None = None, stall: bool = False) -> None:
    """Answer as a store does. cut: bytes of the body that are sent before the connection breaks, or stalls."""
    store = handler.store
    key = unquote(urlsplit(handler.path).path).split("/", 2)[-1]
    data = store.objects.get(key)
    if data is None:
        return refuse(handler, 404, "NoSuchKey", "The specified key does not exist.")
    if (wanted := handler.headers.get("If-Match")) is not None and wanted != store.etag:
        return refuse(handler, 412, "PreconditionFailed", "At least one of the pre-conditions did not hold")
    start, stop = 0, len(data)
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range", ""))
    if asked:
        start, stop = int(asked[1]), min(len(data), int(asked[2]) + 1 if asked[2] else len(data))
        if start >= len(data):
            return refuse(handler, 416, "InvalidRange", "The requested range is not satisfiable")
    handler.send_response(206 if asked else 200)
    if asked:
        handler.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
    if store.etag:
        handler.send_header("ETag", store.etag)
    handler.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
    handler.send_header("Connection", "close")
    handler.send_header("Content-Length", str(stop - start if told is None else told))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(data[start:stop][:cut])
        handler.wfile.flush()
    if stall:
        store.release.wait(200)
    return None


def refuse(handler: Handler, status: int, code: str, message: str, extra: str = "") -> None:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message>{extra}</Error>".encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/xml")
    handler.send_header("Connection", "close")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


def cut(at: int) -> Answer:
    return partial(serve, cut=at)


def refusal(status: int, code: str = "Code", message: str = "Message", extra: str = "") -> Answer:
    return partial(refuse, status=status, code=code, message=message, extra=extra)


@pytest.fixture(scope="session")
def obstore_is_warm() -> None:
    """obstore's threads, with their files, begin with the first request of a process, and stay."""
    store = from_url(
        "s3://b",
        config={"endpoint": "http://127.0.0.1:9", "skip_signature": True},
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    with pytest.raises(Exception, match="error"):
        store.head("warm")


@pytest.fixture
def scripted(obstore_is_warm: None) -> Iterator[ScriptedStore]:
    made = ScriptedStore()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Scripted", (Handler,), {"store": made}))
    server.daemon_threads = True
    made.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.release.set()
    server.shutdown()
    server.server_close()
    thread.join()
