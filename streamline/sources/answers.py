"""What an HTTP server's answer means: decided here, without I/O (RFC 9110, sections 13 to 15)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from streamline.errors import ReadError

__all__ = ["Answer", "TransientError", "Version", "ask", "retry_after_s", "understand"]

CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


class TransientError(Exception):
    """An answer that may be another one next time.

    Attributes:
      retry_after_s: how long the server asks to wait; None if it doesn't.
    """

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Version:
    """What tells one version of an object from another, as far as the server says."""

    etag: str | None
    modified: str | None
    total: int | None

    @property
    def if_range(self) -> str | None:
        """What to ask for the rest of this version with: a weak ETag may not be used for that."""
        return self.etag if self.etag and not self.etag.startswith("W/") else self.modified

    def differs(self, later: Version) -> str | None:
        """Return how another version differs; None if it doesn't, as far as can be told."""
        if self.etag and later.etag and self.etag.removeprefix("W/") != later.etag.removeprefix("W/"):
            return f"its ETag was {self.etag} and is {later.etag}"
        if not (self.etag and later.etag) and self.modified and later.modified and self.modified != later.modified:
            return f"it was last modified {self.modified}, and now {later.modified}"
        if self.total is not None and later.total is not None and self.total != later.total:
            return f"it had {self.total:,} bytes and has {later.total:,}"
        return None

    def comparable(self, later: Version) -> bool:
        """Whether there is anything to compare two versions by."""
        pairs = ((self.etag, later.etag), (self.modified, later.modified), (self.total, later.total))
        return any(mine is not None and its is not None for mine, its in pairs)


@dataclass(frozen=True)
class Answer:
    """What is going to come.

    Attributes:
      first: the offset in the object of the first byte that comes.
      stop: the offset behind the last one; None: when the server says that it was the last.
      version: of the object.
      whole: whether the object ends there, even if its size was not told.
    """

    first: int
    stop: int | None
    version: Version
    whole: bool


def ask(position: int, stop: int | None, known: Version | None) -> dict[str, str]:
    """Return the headers that ask for bytes `position` to `stop` of a version, or of whichever there is."""
    headers = {"Accept-Encoding": "identity"}  # compressed on the fly, a range would count other bytes
    if position or stop is not None:
        headers["Range"] = f"bytes={position}-" + ("" if stop is None else str(stop - 1))
        if known is not None and known.if_range is not None:
            headers["If-Range"] = known.if_range
    return headers


def understand(url: str, status: int, headers: Mapping[str, str], position: int, known: Version | None) -> Answer:
    """Return what an answer to `ask` means.

    Args:
      url: for messages.
      status: of the answer.
      headers: likewise, by case-insensitive name.
      position: the first byte that was asked for.
      known: the version that has been read up to there; None: nothing has.

    Raises:
      TransientError: another try may do better.
      ReadError: another try would not.
    """
    if status in (408, 429) or status >= 500:
        raise TransientError(f"the server answered {_status(status)}", retry_after_s(headers.get("Retry-After")))
    if status == 200:
        answer = _whole(url, headers)
    elif status == 206:
        answer = _range(url, headers, position)
    elif status == 416:
        answer = _behind_end(url, headers, position)
    else:
        raise ReadError(f"{url}: the server answered {_status(status)}: {_advice(status)}")
    if known is not None:
        _check_same(url, known, answer, position)
    if answer.stop is not None and answer.stop < position:
        raise ReadError(f"{url} has {answer.stop:,} bytes, expected more than {position:,}: has it been replaced?")
    return answer


def _whole(url: str, headers: Mapping[str, str]) -> Answer:
    length = _number(headers.get("Content-Length"))
    if length is None and "chunked" not in headers.get("Transfer-Encoding", "").lower():
        raise ReadError(
            f"{url}: the server tells no length and sends no chunks, so a broken connection would look like the end: "
            "serve it with Content-Length, or read a local copy"
        )
    return Answer(0, length, _version(headers, length), whole=True)


def _range(url: str, headers: Mapping[str, str], position: int) -> Answer:
    told = headers.get("Content-Range", "")
    match = CONTENT_RANGE.fullmatch(told.strip())
    if match is None or match[1] is None:
        raise ReadError(f"{url}: asked for bytes from {position:,} on, expected a Content-Range, got {told!r}")
    first, stop, total = int(match[1]), int(match[2]) + 1, _number(match[3])
    if first != position or stop <= first or (total is not None and stop > total):
        raise ReadError(f"{url}: asked for bytes from {position:,} on, got Content-Range {told!r}")
    length = _number(headers.get("Content-Length"))
    if length is not None and length != stop - first:
        raise ReadError(f"{url}: Content-Range {told!r} and Content-Length {length} contradict each other")
    return Answer(first, stop, _version(headers, total), whole=False)


def _behind_end(url: str, headers: Mapping[str, str], position: int) -> Answer:
    match = CONTENT_RANGE.fullmatch(headers.get("Content-Range", "").strip())
    total = None if match is None else _number(match[3])
    if total != position:
        size = "an unknown number of" if total is None else f"{total:,}"
        raise ReadError(f"{url} has {size} bytes, expected more than {position:,}: has it been replaced?")
    return Answer(position, position, Version(None, None, total), whole=True)


def _check_same(url: str, known: Version, answer: Answer, position: int) -> None:
    if how := known.differs(answer.version):
        raise ReadError(f"{url} changed while it was read, at byte {position:,}: {how}; read it again from its start")
    if answer.first != position and not known.comparable(answer.version):
        raise ReadError(
            f"{url}: the connection broke at byte {position:,}, and the server neither goes on from there nor tells "
            "(by ETag, Last-Modified or Content-Length) that it is still the same file"
        )


def _version(headers: Mapping[str, str], total: int | None) -> Version:
    return Version(headers.get("ETag"), headers.get("Last-Modified"), total)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() else None


def retry_after_s(told: str | None, now: datetime | None = None) -> float | None:
    """Return the seconds that a Retry-After header asks for, given as seconds or as a date; None if it says nothing."""
    if told is None:
        return None
    if (seconds := _number(told)) is not None:
        return float(seconds)
    try:
        date = parsedate_to_datetime(told)
    except ValueError:
        return None
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max(0.0, (date - (now or datetime.now(UTC))).total_seconds())


def _status(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def _advice(status: int) -> str:
    if status in (401, 407):
        return 'give credentials, http=HttpOptions(headers={"Authorization": ...})'
    if status == 403:
        return "check the credentials, and whether a signed URL has expired"
    if status in (404, 410):
        return "check the URL, and the numbers in its braces if it was written with any"
    return "another try would get the same; open the URL with another program to see what it says"
