"""What is counted of one host: a thread or a process in which workers run, as the running sees it."""

from __future__ import annotations

from collections.abc import Callable

from streamline.meters.names import HostKind, host_label

__all__ = ["HostMeter"]


class HostMeter:
    """One host of one running. Its writer is the running's event loop.

    Args:
      pid: tells the process; None: there is none yet.
      resident: tells how many bytes of memory it holds; 0: that can't be told.
      stacks: tells what its threads are at, for a person; "": that can't be told.

    Attributes:
      shards: of its workers.
      items: of theirs that have arrived, of `bytes` bytes.
      arrival_s: that taking them in has held the event loop.
      restarts: how many times another one has taken its place.
      alive: it has been started, and hasn't ended.
    """

    def __init__(
        self,
        number: int,
        kind: HostKind,
        pid: Callable[[], int | None],
        resident: Callable[[], int] = lambda: 0,
        stacks: Callable[[], str] = lambda: "",
    ) -> None:
        self.number = number
        self.kind: HostKind = kind
        self.stacks = stacks
        self.shards: set[int] = set()
        self.items = 0
        self.bytes = 0
        self.arrival_s = 0.0
        self.restarts = 0
        self.alive = False
        self._pid = pid
        self._last_pid: int | None = None
        self._resident = resident
        self._seen_bytes = 0

    def __str__(self) -> str:
        return host_label(self.number, self.kind, self.pid)

    @property
    def pid(self) -> int | None:
        """Of its process, the last one if it has ended; None: there was none yet."""
        self._last_pid = self._pid() or self._last_pid
        return self._last_pid

    @property
    def resident_bytes(self) -> int:
        """Memory that it holds, or held when it was last seen. From any thread."""
        if self.alive:
            self._seen_bytes = self._resident() or self._seen_bytes
        return self._seen_bytes

    def gone(self) -> None:
        """There is no host for now: its pid and its memory stay what they were at last."""
        self._last_pid, self._seen_bytes = self.pid, self.resident_bytes
        self.alive = False
