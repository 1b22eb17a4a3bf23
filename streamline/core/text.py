"""How things look in a message: items and exceptions, whatever their methods do; sizes, numbers, a plan's steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamline.core.state import Json

Entry = dict[str, Json]
"""What a fingerprint says of one step of a plan: kind, name, options."""

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
    """Return text that can be written as UTF-8: lone surrogates become escapes."""
    return text.encode(errors="backslashreplace").decode()


def said(thing: object, how: Any) -> str:
    """Return an object's `repr` or `str`; a user's own may fail, which must not end the run."""
    try:
        return str(how(thing))
    except Exception as error:
        return f"<{type(thing).__name__} whose {how.__name__} raised {type(error).__name__}>"


def shorten(text: str, most: int) -> str:
    """Return a text of at most so many characters; one that was longer ends with "…"."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def some(ranks: Sequence[int]) -> str:
    """Return numbers for a message, the first ten of them."""
    shown = ", ".join(map(str, ranks[:10]))
    return shown if len(ranks) <= 10 else f"{shown} and {len(ranks) - 10} more"


def counted(number: int, what: str) -> str:
    """Return a number of things for a person: "1 shard", "2,000 shards", "2 processes"."""
    return f"{number:,} {what}{'' if number == 1 else 'es' if what.endswith('s') else 's'}"


def in_bytes(size: int) -> str:
    """Return a size for a person: "64 MiB"."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size / (1 << power):.3g} {unit}"
    return f"{size:,} bytes"


def line_of(entry: Entry) -> str:
    """Return an entry for a person: "batch 'batch' (size=32)"."""
    options = ", ".join(f"{key}={value!r}" for key, value in (entry.get("options") or {}).items())
    return f"{entry.get('kind')} {entry.get('name')!r} ({options})"


def found_otherwise(name: str, again: str) -> str:
    """Say why a stage that reads `again` what is downstream of a change rules that out."""
    then = "and would find other items there: finish the epoch as it was, or begin anew"
    return f"{name!r} downstream of it {again}, {then}"
