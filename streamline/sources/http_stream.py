"""A live source that is an endless HTTP response, as written in a plan."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from streamline.core.item_codec import Codec
from streamline.core.meters import Traffic
from streamline.core.state import Json
from streamline.sources.framing import Framing, ServerSentEvent
from streamline.sources.http_request import EndlessRequest
from streamline.sources.live import MarkedStream


@dataclass(frozen=True)
class HttpFeed(MarkedStream[Any]):
    """The items of a URL's response. The mark of a server-sent event is its id."""

    kind: ClassVar[str] = "stream_http"

    request: EndlessRequest

    def __str__(self) -> str:
        return f"{self.kind} {self.request.url!r} ({self.request.framing})"

    def options(self) -> dict[str, Any]:
        return {"framing": self.request.framing}

    def prepare(self) -> None:
        import_module("streamline.sources.http_stream_reader")  # aiohttp takes 0.2 s

    def after(self, mark: Json, traffic: Traffic) -> AsyncIterator[Any]:
        from streamline.sources.http_stream_reader import read

        return read(self.request, mark if isinstance(mark, str) else "", traffic)

    def mark(self, item: Any) -> Json:
        return (item.id or None) if isinstance(item, ServerSentEvent) else None


def codec_of(framing: Framing) -> Codec:
    return Codec(list, _event) if framing == "sse" else Codec()


def _event(form: list[str]) -> ServerSentEvent:
    return ServerSentEvent(*form)
