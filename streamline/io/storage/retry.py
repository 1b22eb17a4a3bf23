"""Attempts at a request: how many, after which pause, and until when. Shared by all storages that ask servers.

Libraries (stamina, tenacity) wrap a call that is made again from its start. Here a body is yielded while it arrives,
so a try goes on at its byte, in a generator; each byte of progress forgives the failures before it; a pause may be one
that the server asked for; and time counts only while the server is waited for, never while the training loop holds
a block.
"""

from __future__ import annotations

import logging
import math
import random
from time import monotonic

import anyio

from streamline.core.meters import Traffic
from streamline.errors import ReadError, printable, printable_lines

logger = logging.getLogger("streamline.reading")  # as the docs call it

BACKOFF_S = 0.25
"""The first pause before another attempt; each doubles it, and a random part of up to a half is taken off.

Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015 (there: equal jitter)."""

MAX_BACKOFF_S = 20.0

DEADLINE_BYTES = 2**20
"""How much must come within `deadline_s`: time for a whole object would be too much for small ones, or too little for
large ones; time for one byte would let a server drip for days."""


class TransientError(Exception):
    """A failure that another try may not find again; the server asks to wait `retry_after_s`, None if it doesn't."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(printable(reason))
        self.retry_after_s = retry_after_s


class Attempts:
    """The attempts at one object, or at a part of it.

    Args:
      what: is read, for messages; printable.
      retries: attempts after the first that may fail in a row without a byte of progress.
      deadline_s: seconds that a MiB (or what is left, if it is less) may take of the server, all attempts and pauses
        together.
    """

    def __init__(self, what: str, retries: int, deadline_s: float = math.inf, traffic: Traffic | None = None) -> None:
        self.what = what
        self._retries = retries
        self._deadline_s = deadline_s
        self._traffic = traffic or Traffic()
        self._failed = 0
        self._bytes = 0
        self._used_s = 0.0
        self._since: float | None = monotonic()

    @property
    def left_s(self) -> float:
        return max(0.0, self._deadline_s - self._used())

    def arrived(self, size: int) -> None:
        """Bytes have come, new ones or not; a ReadError if too slowly."""
        self._traffic.bytes += size
        self._bytes += size
        if self._used() >= self._deadline_s:
            raise ReadError(
                f"{self.what}: too slow: {self._bytes:,} bytes in deadline_s={self._deadline_s:g} s, expected a MiB: "
                "look at the server and the way to it, or raise deadline_s"
            )
        if self._bytes >= DEADLINE_BYTES:
            self._bytes, self._used_s, self._since = 0, 0.0, monotonic()

    def progress(self) -> None:
        """There are new bytes: what has failed before is forgiven, and time stops until `wanted`."""
        self.forgive()
        self._used_s, self._since = self._used(), None

    def forgive(self) -> None:
        """There are new bytes, and more are waited for: what has failed before is forgiven."""
        self._failed = 0

    def wanted(self) -> None:
        """The reader wants more: time counts again."""
        self._since = monotonic()

    async def back_off(self, error: TransientError, position: int, cause: BaseException | None = None) -> None:
        """Wait before the next attempt.

        Args:
          position: the byte at which that goes on.
          cause: what was raised; None: `error` itself, as for one in whose text, which tracebacks print, is a secret.

        Raises:
          ReadError: there is none.
        """
        reason = str(error)
        if cause is None or printable_lines(str(cause)) != str(cause):
            cause = error
        self._failed += 1
        if self._failed > self._retries:
            raise ReadError(f"{self.what}: failed {self._times()} at byte {position:,}: {reason}") from cause
        pause_s = min(MAX_BACKOFF_S, BACKOFF_S * 2 ** (self._failed - 1)) * random.uniform(0.5, 1)
        asked_s = error.retry_after_s
        if asked_s is not None:
            pause_s += asked_s  # not at once: other clients were asked to wait as long
        if pause_s >= self.left_s:
            asks = "" if asked_s is None else f", and asks to wait {asked_s:,.0f} s"
            raise ReadError(
                f"{self.what}: gave up at byte {position:,}: failed {self._times()}, and deadline_s="
                f"{self._deadline_s:g} leaves {self.left_s:.1f} s: {reason}{asks}"
            ) from cause
        self._traffic.retries += 1
        what = printable(self.what)
        logger.info("%s: try %d at byte %s in %.2f s: %s", what, self._failed + 1, position, pause_s, reason)
        await anyio.sleep(pause_s)

    def _times(self) -> str:
        return "once" if self._failed == 1 else f"{self._failed} times in a row"

    def _used(self) -> float:
        return self._used_s + (0.0 if self._since is None else monotonic() - self._since)
