"""Seeing that a local file stays what it was: it is read in pieces, and has no ETag that would tell."""

from __future__ import annotations

import os

from streamline.errors import ReadError

__all__ = ["Unchanged"]


class Unchanged:
    """What a local file was like when it was opened. Does (sync) I/O.

    Args:
      path: of the file.
      size: in bytes, as the listing says; None: it doesn't.

    Raises:
      ReadError: it has another size, or can't be looked at.
    """

    def __init__(self, path: str, size: int | None) -> None:
        self._path = path
        self._was = self._look()
        if size is not None and self._was[0] != size:
            raise ReadError(f"{path} has {self._was[0]:,} bytes, expected {size:,}: has it been replaced?")

    def check(self) -> None:
        """Check that the file is still the same.

        Raises:
          ReadError: it was written to, replaced, or removed.
        """
        if (now := self._look()) != self._was:
            what = (
                f"it had {self._was[0]:,} bytes, and has {now[0]:,}" if now[0] != self._was[0] else "with as many bytes"
            )
            raise ReadError(
                f"{self._path} changed while it was read: somebody has written to it, or replaced it ({what})"
            )

    def _look(self) -> tuple[int, int, int]:
        try:
            status = os.stat(self._path)  # noqa: PTH116 - a Path costs more than the call
        except OSError as error:
            raise ReadError(f"can't read {self._path}: {error.strerror or error}") from error
        return status.st_size, status.st_mtime_ns, status.st_ino
