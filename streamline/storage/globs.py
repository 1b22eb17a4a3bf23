"""Globs over the keys of an object store, as a shell has them over files. Pure.

`*` and `?` stop at a slash, `[abc]` and `[!abc]` are one character, `**` is any number of directories, none too; as
the last part, everything below. A bracket makes a character plain: [*], [?], [[].
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import translate

__all__ = ["DEEP", "Glob", "is_glob"]

MAGIC = re.compile(r"[*?\[]")

DEEP = "**"


def is_glob(path: str) -> bool:
    """Whether a path has anything in it that a glob gives a meaning to."""
    return MAGIC.search(path) is not None


class Glob:
    """A glob over keys, compiled.

    Attributes:
      directory: the keys that it matches are all below it; "": it may be any.
      deep: whether it may match keys of subdirectories too.
    """

    def __init__(self, pattern: str) -> None:
        parts = pattern.split("/")
        plain = next((at for at, part in enumerate(parts) if is_glob(part)), len(parts) - 1)
        self.directory = "/".join(parts[:plain])
        self.deep = plain < len(parts) - 1 or parts[-1] == DEEP
        self._parts = tuple(None if part == DEEP else re.compile(translate(part)).match for part in parts)
        self._fewest = sum(part is not None for part in self._parts) + (self._parts[-1] is None)
        self._most = None if None in self._parts else len(parts)

    def matches(self, key: str) -> bool:
        """Whether a key is one of those that are meant."""
        names = key.split("/")
        if len(names) < self._fewest or (self._most is not None and len(names) > self._most):
            return False
        return _match(self._parts, names)


def _match(parts: tuple[Callable[[str], object] | None, ...], names: list[str]) -> bool:
    for at, part in enumerate(parts):
        if part is None:
            rest = parts[at + 1 :]
            if not rest:
                return len(names) > at
            return any(_match(rest, names[skip:]) for skip in range(at, len(names)))
        if at >= len(names) or part(names[at]) is None:
            return False
    return len(parts) == len(names)
