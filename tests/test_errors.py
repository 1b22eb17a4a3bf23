"""What messages are made of."""

from __future__ import annotations

import pytest

from streamline.errors import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("part-000.jsonl (copy) [1] 100%", "part-000.jsonl (copy) [1] 100%"),
        ("Größe 東京\u3000a\xa0b ∑ 🎉", "Größe 東京\u3000a\xa0b ∑ 🎉"),
        ("a\\b", "a\\b"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x9b31m\x7f\x00", r"\x9b31m\x7f\x00"),
        ("a\r\nb\tc", r"a\r\nb\tc"),
        ("\u202egpj.exe\u2066", r"\u202egpj.exe\u2066"),
        ("zero\u200bwidth\ufeff", r"zero\u200bwidth\ufeff"),
        ("a\u2028b\u2029c", r"a\u2028b\u2029c"),
        ("\udcff", r"\udcff"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_what_would_act_on_a_terminal_is_escaped_and_nothing_else(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown, "what is escaped stays as it is"
    shown.encode("utf-8")
