"""Who the peers are, which of them is asked for an object, and what is said to it. No I/O but the look-up of names.

All machines have the same list, so all rank the peers alike for each object (rendezvous hashing), without talking to
each other: the first of the ranking fetches the object from the store for all. When a peer is lost, only its objects go
to others, each to the next of its ranking.

Source: D. Thaler and C. Ravishankar, "Using name-based mappings to increase hit rates", 1998.
"""

from __future__ import annotations

import hashlib
import logging
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from time import monotonic
from urllib.parse import quote, unquote

from streamline.core.options import parse_address
from streamline.errors import PlanError, PlanTypeError
from streamline.io.storage.base import FoundObject
from streamline.io.storage.paths import braces, is_url

logger = logging.getLogger(__name__)

PAUSE_S = 1.0
"""How long a peer that failed isn't asked; doubled each time that it fails again, ..."""

MAX_PAUSE_S = 60.0
"""... up to this. Then one request tries it again: a lost machine costs each process one stall a minute."""


def check_peers(peers: object) -> tuple[tuple[str, int], ...]:
    """Return hosts and ports of `peers=`: "HOST:PORT" or several of them, with braces.

    Raises:
      PlanTypeError, PlanError: it isn't that.
    """
    texts = [peers] if isinstance(peers, str) else peers
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise PlanTypeError(f'expected peers as "HOST:PORT" or a list of them, got {type(peers).__name__}')
    listed = tuple(parse_address("peers", one.strip()) for text in texts for one in braces(text))
    if not listed:
        raise PlanError('expected peers as addresses, "node{0..3}:7078" say, got none')
    if not all(port for _, port in listed):
        raise PlanError("expected peers with ports that all machines know, got port 0")
    if len(set(listed)) < len(listed):
        raise PlanError("expected each of peers once")
    return listed


@dataclass(eq=False)
class Peer:
    """A machine that may be asked. What fails in one event loop of this process, all know.

    Attributes:
      name: the same on all machines.
      host: its IP address, as seen from here.
      failures: since this process knows it.
    """

    name: str
    host: str
    port: int
    failures: int = 0
    _until: float = 0.0
    _pause_s: float = 0.0

    def may_be_asked(self) -> bool:
        """Whether it isn't paused; after a pause only one caller is told so, until the peer has answered that one."""
        now = monotonic()
        if now < self._until:
            return False
        if self._pause_s:
            self._until = now + self._pause_s
        return True

    def failed(self, seen: int, *, refused: bool = False) -> bool:
        """Pause it; return whether that is news.

        Args:
          seen: `failures` when it was asked: what else was asked of it meanwhile fails, too, and counts once.
          refused: it doesn't listen, not yet perhaps. To ask costs nothing, so the pause stays short.
        """
        if seen != self.failures:
            return False
        self.failures += 1
        news, longer_s = not self._pause_s, min(MAX_PAUSE_S, max(PAUSE_S, 2 * self._pause_s))
        self._pause_s = PAUSE_S if refused else longer_s
        self._until = monotonic() + self._pause_s
        return news

    def answered(self) -> None:
        """It is well."""
        self._until = self._pause_s = 0.0

    @property
    def is_loopback(self) -> bool:
        return ip_address(self.host.partition("%")[0]).is_loopback


def look_up(listed: Iterable[tuple[str, int]]) -> list[Peer]:
    """Return the peers of a list; a name with several addresses stands for as many. Blocks.

    A name that can't be looked up is left out, and the log says so.
    """
    found: list[Peer] = []
    for host, port in listed:
        try:
            answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            logger.warning("peers=: %s can't be looked up, going on without it: %s", host, error)
            continue
        family = min(answer[0] for answer in answers)  # IPv4 first: a machine with both is one peer
        hosts = sorted({str(answer[4][0]) for answer in answers if answer[0] == family})
        found += [Peer(f"{host if len(hosts) == 1 else one}:{port}", one, port) for one in hosts]
    return found


def chosen(peers: Iterable[Peer], name: str) -> Peer | None:
    """Return the peer to ask for an object: of those that aren't paused, the first of its ranking."""
    for peer in sorted(peers, key=lambda peer: hashlib.blake2b(f"{peer.name} {name}".encode(), digest_size=8).digest()):
        if peer.may_be_asked():
            return peer
    return None


def can_be_asked_for(found: FoundObject) -> bool:
    """Whether a peer may be told of an object: its URL has no password and no signature in it."""
    etag, path = str(found.etag), found.path
    return etag.isascii() and etag.isprintable() and not (is_url(path) and ("@" in path or "?" in path))


TARGET = re.compile(r"/objects/([0-9a-f]{64})")

RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")

PATH, SIZE = "Streamline-Path", "Streamline-Size"


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """Bytes `start` to `stop` of an object.

    Attributes:
      name: the digest under which it is kept.
      found: the object, of the version that is wanted.
    """

    name: str
    found: FoundObject
    start: int
    stop: int

    @property
    def target(self) -> str:
        return f"/objects/{self.name}"

    def headers(self) -> dict[str, str]:
        headers = {
            "Range": f"bytes={self.start}-{self.stop - 1}",
            "If-Match": str(self.found.etag),
            PATH: quote(self.found.path, errors="surrogatepass"),
        }
        return headers if self.found.size is None else {**headers, SIZE: str(self.found.size)}

    def answer(self) -> dict[str, str]:
        """Return the headers of an answer that has the bytes."""
        whole = "*" if self.found.size is None else self.found.size
        return {"Content-Range": f"bytes {self.start}-{self.stop - 1}/{whole}", "ETag": str(self.found.etag)}

    @classmethod
    def of(cls, target: str, headers: Mapping[str, str]) -> PeerRequest:
        """Return what a request says; `ValueError`: nothing that makes sense."""
        named, span = TARGET.fullmatch(target), RANGE.fullmatch(headers.get("Range", ""))
        etag, path, size = headers.get("If-Match"), headers.get(PATH), headers.get(SIZE)
        if named is None or span is None or not etag or not path or not (size is None or size.isdecimal()):
            raise ValueError("expected /objects/DIGEST with Range, If-Match and the path")
        start, stop = int(span[1]), int(span[2]) + 1
        total = None if size is None else int(size)
        if start >= stop or (total is not None and stop > total):
            raise ValueError("expected a range within the object")
        return cls(named[1], FoundObject(unquote(path, errors="surrogatepass"), total, etag), start, stop)
