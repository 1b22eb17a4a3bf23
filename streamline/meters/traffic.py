"""What a source's reading costs: requests, tries again, bytes; and what a cache saves of it."""

from __future__ import annotations

__all__ = ["Traffic"]


class Traffic:
    """What one source has asked of servers, in one event loop, its only writer. May be read in any thread.

    Attributes:
      requests: that were sent, tries again and redirects among them.
      retries: tries again, each behind a failure.
      bytes: that arrived of objects; what arrived twice counts twice.
      hits: objects, or ranges of one, that were read from the cache on disk.
      misses: those that weren't there.
      kept_bytes: that were read from it.
      hedged: requests that were sent again because their answer was late.
    """

    __slots__ = ("bytes", "hedged", "hits", "kept_bytes", "misses", "requests", "retries")

    def __init__(
        self,
        requests: int = 0,
        retries: int = 0,
        bytes: int = 0,
        hits: int = 0,
        misses: int = 0,
        kept_bytes: int = 0,
        hedged: int = 0,
    ) -> None:
        self.requests = requests
        self.retries = retries
        self.bytes = bytes
        self.hits = hits
        self.misses = misses
        self.kept_bytes = kept_bytes
        self.hedged = hedged

    def add(self, other: Traffic) -> None:
        """Count what another has counted, too."""
        self.requests += other.requests
        self.retries += other.retries
        self.bytes += other.bytes
        self.hits += other.hits
        self.misses += other.misses
        self.kept_bytes += other.kept_bytes
        self.hedged += other.hedged

    def hedge(self) -> None:
        """A request is sent again, for its answer is late."""
        self.hedged += 1

    def counts(self) -> tuple[int, int, int, int, int, int, int]:
        """Return requests, retries and bytes; hits, misses and bytes of the cache; requests that were hedged."""
        return self.requests, self.retries, self.bytes, self.hits, self.misses, self.kept_bytes, self.hedged
