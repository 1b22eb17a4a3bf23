"""`stream_http`."""

from __future__ import annotations

from os import PathLike
from typing import Any, Literal, TypedDict, Unpack, overload

from streamline.io.storage.options import HttpOptions
from streamline.pipeline import Pipeline
from streamline.sources.framing import Framing, ServerSentEvent
from streamline.sources.http_request import GIVE_UP_S, IDLE_TIMEOUT_S, MAX_ITEM_BYTES, EndlessRequest
from streamline.sources.http_stream import HttpFeed, codec_of
from streamline.sources.live import MAX_AHEAD, MAX_AHEAD_BYTES, live_of

__all__ = ["stream_http"]


class _StreamHttpOptions(TypedDict, total=False):
    name: str
    http: HttpOptions | None
    idle_timeout_s: float
    give_up_s: float
    max_item_bytes: int
    max_ahead: int
    max_ahead_bytes: int
    partitioned: bool
    journal: str | PathLike[str] | None


@overload
def stream_http(url: str, *, framing: Literal["lines"], **options: Unpack[_StreamHttpOptions]) -> Pipeline[str]: ...
@overload
def stream_http(
    url: str, *, framing: Literal["sse"], **options: Unpack[_StreamHttpOptions]
) -> Pipeline[ServerSentEvent]: ...
@overload
def stream_http(url: str, *, framing: Literal["bytes"], **options: Unpack[_StreamHttpOptions]) -> Pipeline[bytes]: ...
@overload
def stream_http(url: str, *, framing: Literal["jsonl"], **options: Unpack[_StreamHttpOptions]) -> Pipeline[Any]: ...
def stream_http(
    url: str,
    *,
    framing: Framing,
    name: str = "stream_http",
    http: HttpOptions | None = None,
    idle_timeout_s: float = IDLE_TIMEOUT_S,
    give_up_s: float = GIVE_UP_S,
    max_item_bytes: int = MAX_ITEM_BYTES,
    max_ahead: int = MAX_AHEAD,
    max_ahead_bytes: int = MAX_AHEAD_BYTES,
    partitioned: bool = False,
    journal: str | PathLike[str] | None = None,
) -> Pipeline[Any]:
    """Read an endless HTTP response: a live source, read once and journalled as `from_stream`.

    It connects again whenever a connection ends, fails, or is silent for too long, behind a pause that doubles while
    nothing comes. What a dropped connection cuts off is never an item. With server-sent events, the server is told the
    last id that was read, behind a resume too, so nothing is lost or doubled if it goes on from there; for the other
    framings HTTP has no such word, and what the server sends between two connections is gone.

    Args:
      url: one http(s) URL.
      framing: "lines": text, each without its end; "jsonl": a JSON value a line, blank lines skipped; "sse":
        server-sent events, as `ServerSentEvent`; "bytes": as they come.
      name: its part of a state is kept under it.
      http: how it is asked for: headers, retries until the server has answered once.
      idle_timeout_s: seconds of silence behind which a connection counts as dropped; `math.inf`: none.
      give_up_s: seconds for which it may fail without an answer, once it has had one; `math.inf`: for ever.
      max_item_bytes: a longer line or event is an error.
      max_ahead, max_ahead_bytes, partitioned, journal: see `from_stream`.

    Raises:
      PlanTypeError: an option of the wrong type.
      PlanError: one out of range.
      While it runs: ReadError for a server that refuses (401, 404, ...) or has failed for too long, DataError for what
      can't be an item, and as `from_stream`.
    """
    request = EndlessRequest(
        url=url,
        framing=framing,
        http=http,
        idle_timeout_s=idle_timeout_s,
        give_up_s=give_up_s,
        max_item_bytes=max_item_bytes,
    )
    codec = codec_of(framing)
    return Pipeline(
        live_of(
            name,
            HttpFeed(request),
            encode=codec.encode,
            decode=codec.decode,
            max_ahead=max_ahead,
            max_ahead_bytes=max_ahead_bytes,
            partitioned=partitioned,
            journal=journal,
        )
    )
