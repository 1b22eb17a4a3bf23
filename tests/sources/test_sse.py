"""Server-sent events as the standard has them, cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamline.errors import DataError
from streamline.sources.framing import LineFramer, ServerSentEvent, SseFramer, framer_of
from tests.laws.profile import examples

E = ServerSentEvent

TABLE: dict[str, tuple[bytes, list[ServerSentEvent]]] = {
    "several lines of data": (b"data: YHOO\ndata: +2\ndata: 10\n\n", [E("YHOO\n+2\n10")]),
    "comment, ids, no data": (
        b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n\n",
        [E("first event", id="1"), E("second event"), E(" third event")],
    ),
    "empty data": (b"data\n\ndata\ndata\n\ndata:", [E(""), E("\n")]),
    "one space": (b"data:test\n\ndata: test\n\n", [E("test"), E("test")]),
    "types": (b"event: add\ndata: 1\n\nevent:\ndata: 2\n\nevent: lost\n\ndata: 3\n\n", [E("1", "add"), E("2"), E("3")]),
    "all line ends": (b"data: a\rdata: b\r\ndata: c\n\r\ndata: d\r\rdata: e\n\n", [E("a\nb\nc"), E("d"), E("e")]),
    "byte order mark": (b"\xef\xbb\xbfdata: 1\n\n\xef\xbb\xbfdata: 2\n\n", [E("1")]),
    "unknown fields": (b"foo: bar\ndata: 1\nData: 2\nfoo\n\n", [E("1")]),
    "an id stays": (
        b"id: 7\ndata: a\n\ndata: b\n\nid: 8\n\ndata: c\n\n",
        [E("a", id="7"), E("b", id="7"), E("c", id="8")],
    ),
    "an id with a NUL": (b"id: 1\ndata: a\n\nid: 2\x003\ndata: b\n\n", [E("a", id="1"), E("b", id="1")]),
    "cut off": (b"data: a\n\nid: 9\ndata: b\n", [E("a")]),
    "colons": (b"data: a:b: c\n\ndata::\n\n", [E("a:b: c"), E(":")]),
    "no UTF-8": (b"data: \xff\n\n", [E("\ufffd")]),
    "unicode": ("data: né\u2028x\u0085\n\n".encode(), [E("né\u2028x\u0085")]),
}


@pytest.mark.parametrize("name", TABLE)
def test_events_are_those_of_the_standard_wherever_the_bytes_are_cut(name: str) -> None:
    content, events = TABLE[name]
    for first in range(len(content) + 1):
        for second in range(first, len(content) + 1):
            parser = SseFramer(1000)
            pieces = (content[:first], content[first:second], content[second:])
            assert [event for piece in pieces for event in parser.feed(piece)] == events


def test_the_id_of_an_event_that_is_cut_off_is_not_that_of_the_last_event() -> None:
    parser = SseFramer(1000, "5")
    assert list(parser.feed(b"data: a\n\nid: 6\ndata: b\n")) == [E("a", id="5")]
    assert parser.last_id == "5"
    assert parser.waiting == len(b"id: 6\ndata: b\n")


@pytest.mark.parametrize(
    ("value", "retry_s"),
    [("1500", 1.5), ("0", 0.0), ("1.5", None), ("-1", None), ("", None), ("²", None), ("9" * 400, 86_400.0)],
)
def test_retry_is_a_number_of_milliseconds_or_nothing(value: str, retry_s: float | None) -> None:
    parser = SseFramer(1000)
    assert list(parser.feed(f"retry: {value}\n\n".encode())) == []
    assert parser.retry_s == retry_s


def test_an_event_that_is_too_long_is_an_error_and_comments_without_end_are_not() -> None:
    parser = SseFramer(50)
    for _ in range(100):
        assert list(parser.feed(b": still here\r\n")) == []
    with pytest.raises(DataError, match=r"event of at most 50 bytes.*max_item_bytes"):
        list(parser.feed(b"data: 0123456789\n" * 4))
    parser = SseFramer(50)
    for _ in range(50):
        assert list(parser.feed(b"x")) == []
    with pytest.raises(DataError, match="at most 50 bytes"):
        list(parser.feed(b"x"))


@examples(50)
@given(st.lists(st.sampled_from([b"data", b"id", b"event", b"retry", b":", b" ", b"\n", b"\r", b"\r\n", b"1", b"\0"])))
def test_where_bytes_are_cut_never_matters(tokens: list[bytes]) -> None:
    whole, parts = SseFramer(1000), SseFramer(1000)
    events = list(whole.feed(b"".join(tokens)))
    assert [event for token in tokens for i in range(len(token)) for event in parts.feed(token[i : i + 1])] == events
    assert (parts.last_id, parts.retry_s) == (whole.last_id, whole.retry_s)


@pytest.mark.parametrize(("framing", "items"), [("lines", ["a", "1", "", "xyz"]), ("jsonl", None), ("bytes", None)])
def test_lines_are_cut_at_their_ends_only(framing: str, items: list[str] | None) -> None:
    content = b"a\r\n1\n\nxyz" if framing == "lines" else b'{"a":1}\n\n[2]\n"x"'
    items = items or [{"a": 1}, [2], "x"]  # type: ignore[list-item]
    for cut in range(len(content) + 1):
        framer = framer_of(framing, 7, "")  # type: ignore[arg-type]
        found = [item for piece in (content[:cut], content[cut:]) if piece for item in framer.feed(piece)]
        if framing == "bytes":
            assert b"".join(found) == content
            continue
        assert found == items[:-1]
        assert framer.waiting == 3
        assert list(framer.finish()) == items[-1:]
        assert framer.waiting == 0


def test_what_is_before_a_bad_line_comes_first() -> None:
    framer = framer_of("jsonl", 100, "")
    assert isinstance(framer, LineFramer)
    assert list(framer.feed(b"1\n")) == [1]
    items = framer.feed(b"2\n{oops}\n3\n")
    assert next(items) == 2
    with pytest.raises(DataError, match=r"line 3 of this connection: expected one JSON value, got '{oops}'"):
        next(items)
    framer = framer_of("lines", 4, "")
    items = framer.feed(b"ab\nabcde\nc\n")
    assert next(items) == "ab"
    with pytest.raises(DataError, match="a line of at most 4 bytes"):
        next(items)
