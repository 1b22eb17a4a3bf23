"""What an HTTP server's answer means: decided here, without I/O (RFC 9110, sections 13 to 15)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import PurePosixPath
from typing import NamedTuple

from streamline.errors import ReadError, printable
from streamline.io.storage.base import MODIFIED, too_short
from streamline.io.storage.retry import TransientError

CONTENT_RANGE = re.compile(r"[Bb][Yy][Tt][Ee][Ss] (?:([0-9]{1,18})-([0-9]{1,18})|\*)/([0-9]{1,18}|\*)")

PLAIN_ENCODINGS = ("", "identity", "aws-chunked", "utf-8", "binary")
"""Values of Content-Encoding with which the bytes are the object's own: some uploaders set them."""

ENCODING_OF_SUFFIX = {
    ".gz": "gzip",
    ".tgz": "gzip",
    ".zst": "zstd",
    ".bz2": "bzip2",
    ".xz": "xz",
    ".br": "br",
    ".z": "compress",
}
"""Some servers tell what an object's name says, too: then the bytes are those of the file."""

MESSAGE_TAGS = [re.compile(rf"<{tag}>(.*?)</{tag}>", re.DOTALL | re.IGNORECASE) for tag in ("message", "title")]
"""Where an answer's content says in a few words what is wrong: in the XML of stores, in the HTML of servers."""

MESSAGE_CHARS = 200


class Version(NamedTuple):
    """What tells one version of an object from another, as far as the server says. Printable, and fit for a snapshot.

    Attributes:
      settled: whether `modified` was a second old when the server answered. Before, another change within that second
        would have the same date (RFC 9110, 8.8.2.2); and servers that make the date up tell the current one.
    """

    etag: str | None
    modified: str | None
    total: int | None
    settled: bool = True

    @classmethod
    def of(cls, tag: str | None, total: int | None = None) -> Version | None:
        """Return what a tag and a size say; None: nothing is known of either."""
        if tag is not None and tag.startswith(MODIFIED):
            return cls(None, tag.removeprefix(MODIFIED), total)
        return None if tag is None and total is None else cls(tag, None, total)

    @property
    def tag(self) -> str | None:
        """What names this version from one request to the next: the ETag, else the date; None: nothing does."""
        if self.etag:
            return self.etag
        return MODIFIED + self.modified if self.modified and self.settled else None

    @property
    def if_range(self) -> str | None:
        """What to ask for the rest of this version with: a weak ETag may not be used for that.

        Nor is one that may hold something escaped: as it came, it can't be sent (control characters, no UTF-8).
        """
        usable = [one for one in (self.etag, self.modified) if one and not one.startswith("W/") and "\\" not in one]
        return usable[0] if usable else None

    def differs(self, later: Version) -> str | None:
        """Return how another version differs; None: no difference is known."""
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


class Answer(NamedTuple):
    """What is going to come.

    Attributes:
      first: the offset in the object of the first byte that comes.
      stop: the offset after the last one; None: known only when the body ends.
      whole: whether the object ends there, even if its size is unknown.
    """

    first: int
    stop: int | None
    version: Version
    whole: bool


def ask(position: int, stop: int | None, known: Version | None) -> dict[str, str]:
    """Return the headers that ask for bytes `position` to `stop` of a version, or of the current one."""
    headers = {"Accept-Encoding": "identity"}  # compressed on the fly, a range would count other bytes
    if position or stop is not None:
        headers["Range"] = f"bytes={position}-" + ("" if stop is None else str(stop - 1))
        if known is not None and known.if_range is not None:
            headers["If-Range"] = known.if_range
    return headers


def understand(
    url: str, status: int, headers: Mapping[str, str], position: int, known: Version | None, strict: bool = False
) -> Answer:
    """Return what an answer to `ask` means.

    Args:
      position: the first byte that was asked for.
      known: the version that has been read up to there; None: nothing has.
      strict: refuse an object whose versions can't be sent apart.

    Raises:
      TransientError: another try may do better.
      ReadError: another try would not.
    """
    if status in (408, 429) or status >= 500:
        raise TransientError(f"the server answered {status_name(status)}", retry_after_s(headers.get("Retry-After")))
    if status in (200, 206) and (encoding := headers.get("Content-Encoding")):
        _check_encoding(url, encoding)
    if status == 200:
        answer = _whole(url, headers)
    elif status == 206:
        answer = _range(url, headers, position)
    elif status == 416:
        answer = _past_end(url, headers, position)
    else:
        raise refusal(url, status)
    if known is not None:
        _check_same(url, known, answer, position)
    if strict and status != 416:
        _check_named(url, known, answer.version)
    if answer.stop is not None and answer.stop < position:
        raise too_short(url, answer.stop, position)
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
    sent = headers.get("Content-Range", "")
    match = CONTENT_RANGE.fullmatch(sent.strip())
    if match is None or match[1] is None:
        raise ReadError(f"{url}: asked for bytes from {position:,} on, expected a Content-Range, got {sent!r}")
    first, stop, total = int(match[1]), int(match[2]) + 1, _number(match[3])
    if first != position or stop <= first or (total is not None and stop > total):
        raise ReadError(f"{url}: asked for bytes from {position:,} on, got Content-Range {sent!r}")
    length = headers.get("Content-Length")
    if length != str(stop - first) and _number(length) not in (None, stop - first):
        raise ReadError(f"{url}: Content-Range {sent!r} and Content-Length {length} contradict each other")
    return Answer(first, stop, _version(headers, total), whole=False)


def _past_end(url: str, headers: Mapping[str, str], position: int) -> Answer:
    match = CONTENT_RANGE.fullmatch(headers.get("Content-Range", "").strip())
    total = None if match is None else _number(match[3])
    if total is None or total > position:
        raise too_short(url, total, position)
    return Answer(position, total, Version(None, None, total), whole=True)


def _check_same(url: str, known: Version, answer: Answer, position: int) -> None:
    if how := known.differs(answer.version):
        when = f"while it was read, at byte {position:,}" if position else "since it was listed"
        raise ReadError(f"{url} changed {when}: {how}; read it again from its start")
    if answer.first != position and not known.comparable(answer.version):
        raise ReadError(
            f"{url}: the connection broke at byte {position:,}, and the server neither goes on from there nor tells "
            "(by ETag, Last-Modified or Content-Length) that it is still the same file"
        )


def _check_named(url: str, known: Version | None, now: Version) -> None:
    if now.tag is None:
        raise ReadError(
            f"{url}: the server tells neither an ETag nor a Last-Modified that is a second old, so it could be "
            "replaced by one of the same length unnoticed, and HttpOptions(require_validator=True) refuses that: "
            "let the server tell one, read a local copy, or leave require_validator out"
        )
    if known is not None and known.tag and not (known.etag and now.etag) and not (known.modified and now.modified):
        before = "an ETag" if known.etag else "a Last-Modified"
        raise ReadError(
            f"{url}: expected {before}, as the server sent before, got none, so the two can't be compared, and "
            "HttpOptions(require_validator=True) refuses that: let all servers of that name send the same"
        )


def _version(headers: Mapping[str, str], total: int | None) -> Version:
    etag, modified = (None if sent is None else printable(sent) for sent in map(headers.get, ("ETag", "Last-Modified")))
    return Version(
        etag, modified, total, etag is not None or modified is None or _settled(modified, headers.get("Date"))
    )


def _settled(modified: str, answered: str | None) -> bool:
    """Whether a date is a second or more before that of the answer, if that has one."""
    if answered is None:
        return True
    try:
        age = parsedate_to_datetime(answered) - parsedate_to_datetime(modified)
    except (ValueError, TypeError, OverflowError):
        return True  # no dates, but they can be compared
    return age.total_seconds() >= 1


def _check_encoding(url: str, sent: str) -> None:
    """Insist on the object's own bytes: it was asked for as it is (`Accept-Encoding: identity`)."""
    if not sent:
        return
    encoding = sent.strip().lower()
    suffix = PurePosixPath(url.split("?")[0].lower()).suffix
    if encoding not in PLAIN_ENCODINGS and encoding.removeprefix("x-") != ENCODING_OF_SUFFIX.get(suffix):
        raise ReadError(
            f"{url}: the server sends it compressed (Content-Encoding: {printable(sent)}), though it was asked for as "
            "it is: its size and positions would be another's; switch that off there, or store it under a name that "
            "says so (.gz)"
        )


def _number(text: str | None) -> int | None:
    """Return a number that a header tells; None if it tells none that can be."""
    text = text.strip() if text else ""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None


def retry_after_s(sent: str | None, now: datetime | None = None) -> float | None:
    """Return the seconds that a Retry-After header asks for, given as seconds or as a date; None if it says nothing."""
    if sent is None:
        return None
    if (seconds := _number(sent)) is not None:
        return float(seconds)
    try:
        date = parsedate_to_datetime(sent)
        date = date if date.tzinfo else date.replace(tzinfo=UTC)
        return max(0.0, (date - (now or datetime.now(UTC))).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return None


def status_name(status: int) -> str:
    """Return a status with its name: "404 Not Found"."""
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def refusal(url: str, status: int, content: str = "") -> ReadError:
    """Return the error for an answer that another try would get again.

    Args:
      content: how the answer's content begins; what it says to people is shown.
    """
    words = next((found[1] for pattern in MESSAGE_TAGS if (found := pattern.search(content))), content)
    words = printable(" ".join(re.sub(r"<[^>]*>", " ", words).split())[:MESSAGE_CHARS])
    said = f" ({words})" if words and words != status_name(status) else ""
    return ReadError(f"{url}: the server answered {status_name(status)}{said}: {_advice(status)}")


def _advice(status: int) -> str:
    if status == 401:
        return 'give credentials, http=HttpOptions(auth=("user", "password")) or auth="token"'
    if status == 407:
        return 'give the proxy credentials, http=HttpOptions(proxy="http://user:password@host:3128")'
    if status == 403:
        return "check the credentials, and whether a signed URL has expired"
    if status in (404, 410):
        return "check the URL, and the numbers in its braces if it was written with any"
    return "another try would get the same; open the URL with another program to see what it says"
