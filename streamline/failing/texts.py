"""How items and exceptions look, for a person: what their own methods say, cut to a length, whatever those do."""

from __future__ import annotations

from typing import Any

__all__ = ["REPR_BYTES", "clean", "cut", "said"]

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
