"""Parts of messages: items and exceptions, whatever their methods do; sizes, numbers, a plan's steps."""

from __future__ import annotations

from collections.abc import Sequence
from reprlib import Repr
from typing import Any

from streamline.core.state import Json

Entry = dict[str, Json]
"""One step of a plan in a fingerprint: kind, name, options."""

REPR_BYTES = 1024
"""How much of an item's `repr` is kept."""


def cut(text: str) -> str:
    """Return the first kilobyte of a text, as UTF-8."""
    if len(text) <= REPR_BYTES // 4:
        return clean(text)
    raw = text[:REPR_BYTES].encode(errors="backslashreplace")
    if len(raw) <= REPR_BYTES and len(text) <= REPR_BYTES:
        return raw.decode()
    return raw[: REPR_BYTES - 3].decode(errors="ignore") + "…"


def clean(text: str) -> str:
    """Return text with lone surrogates escaped, which UTF-8 can't encode."""
    return text.encode(errors="backslashreplace").decode()


def safe_text(thing: object, how: Any) -> str:
    """Return an object's `repr` or `str`; a user's own may fail, which must not end the run."""
    try:
        return str(how(thing))
    except Exception as error:
        return f"<{type(thing).__name__} whose {how.__name__} raised {type(error).__name__}>"


def shorten(text: str, most: int) -> str:
    """Return a text of at most so many characters; one that was longer ends with "…"."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


class _Short(Repr):
    """A `repr` that looks at no more of a container than it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 4
        self.maxstring = self.maxother = 60

    def repr_bytes(self, thing: bytes | bytearray | memoryview, _: int) -> str:
        return f"<{len(thing):,} bytes>"

    repr_bytearray = repr_memoryview = repr_bytes

    def repr_instance(self, thing: object, level: int) -> str:
        names = getattr(type(thing), "_fields", None) or getattr(type(thing), "__dataclass_fields__", None)
        if names is None:
            return super().repr_instance(thing, level)
        parts = [f"{name}={self.repr1(getattr(thing, name), level - 1)}" for name in list(names)[: self.maxdict]]
        return f"{type(thing).__name__}({', '.join(parts)}{', ...' if len(names) > self.maxdict else ''})"


_short = _Short()

SHORT_CHARS = 200


def shortened(item: object) -> str:
    """Return an item's `repr` for a message: one line, of as few characters as a person needs to know it again."""
    return shorten(" ".join(safe_text(item, _short.repr).split()), SHORT_CHARS)


def some(ranks: Sequence[int]) -> str:
    """Return the first ten numbers as text."""
    shown = ", ".join(map(str, ranks[:10]))
    return shown if len(ranks) <= 10 else f"{shown} and {len(ranks) - 10} more"


def quantity(number: int, what: str) -> str:
    """Return a number of things: "1 shard", "2,000 shards", "2 processes"."""
    if number == 1:
        return f"1 {what}"
    return f"{number:,} {what}{'es' if what.endswith('s') else 's'}"


def in_bytes(size: int) -> str:
    """Return a size: "64 MiB"."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size / (1 << power):.3g} {unit}"
    return f"{size:,} bytes"


def line_of(entry: Entry) -> str:
    """Return an entry as a line: "batch 'batch' (size=32)"."""
    options = ", ".join(f"{key}={value!r}" for key, value in (entry.get("options") or {}).items())
    return f"{entry.get('kind')} {entry.get('name')!r} ({options})"


def replay_refusal(name: str, again: str) -> str:
    """Say why a change is refused upstream of a stage that replays, as it says by `again`."""
    then = "and would find other items there: finish the epoch as it was, or begin anew"
    return f"{name!r} downstream of it {again}, {then}"
