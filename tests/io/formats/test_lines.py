import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamline.errors import DataError
from streamline.io.formats import line_decoding as lines
from streamline.io.formats.line_decoding import Splitter, check_lengths, decode_json, decode_text

pieces = st.lists(st.sampled_from([b"\n", b"\r\n", b"\r", b"a", b"bc" * 40, b"", "ö€".encode()]), max_size=60).map(
    b"".join
)


def split(splitter: Splitter, blocks: Sequence[bytes]) -> list[bytes]:
    slices = []
    for block in blocks:
        splitter.feed(block)
        while raw := splitter.cut():
            slices.append(raw)
            splitter.learn(raw.count(b"\n"), len(raw))
    if rest := splitter.rest():
        slices.append(rest)
    return slices


@given(pieces, st.integers(1, 300), st.integers(1, 9))
def test_slices_are_whole_lines_in_order(data: bytes, block_bytes: int, per_slice: int) -> None:
    blocks = [data[at : at + block_bytes] for at in range(0, len(data), block_bytes)]
    slices = split(Splitter(lines=per_slice), blocks)
    assert b"".join(slices) == data
    assert all(raw.endswith(b"\n") for raw in slices[:-1])


def test_a_line_over_many_blocks_comes_whole() -> None:
    blocks = [b"x" * 1000] * 1000 + [b"y\nz"]
    assert [len(raw) for raw in split(Splitter(), blocks)] == [1_000_002, 1]


def test_slices_get_as_long_as_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "FIRST_SLICE_BYTES", 3)
    counts = [raw.count(b"\n") for raw in split(Splitter(lines=50), [b"abcd\n" * 1000])]
    assert counts[0] == 1
    assert set(counts[1:-1]) == {50}


def test_the_splitter_knows_when_nothing_is_left() -> None:
    splitter = Splitter()
    splitter.feed(b"a\nb\nc")
    assert splitter.cut() == b"a\nb\n"
    assert not splitter.empty
    assert splitter.cut() == b""
    assert not splitter.empty
    assert splitter.rest() == b"c"
    assert splitter.empty


def test_a_line_that_never_ends_is_an_error_before_memory_is_gone() -> None:
    splitter = Splitter(max_line_bytes=100)
    splitter.feed(b"ok\n" + b"x" * 60)
    assert splitter.cut() == b"ok\n"
    assert splitter.cut() == b""
    splitter.feed(b"x" * 60)
    with pytest.raises(DataError, match="a line of at most 100 bytes"):
        splitter.cut()


def test_a_line_inside_a_slice_may_be_too_long_too() -> None:
    assert check_lengths(b"abc\n" * 10, 3) is None
    fault = check_lengths(b"ab\nabcd\nab\n", 3)
    assert fault is not None
    assert (fault.line, fault.at) == (1, 3)


@given(pieces)
def test_text_is_what_python_reads(data: bytes) -> None:
    expected = data.decode().replace("\r\n", "\n").split("\n")
    decoded = decode_text(data)
    assert decoded.items == (expected if expected[-1] else expected[:-1])
    assert (decoded.lines, decoded.kept, decoded.fault) == (len(decoded.items), None, None)


@pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"a\xe2\x82", b"\xed\xa0\x80", b"\xc0\xaf"])
@pytest.mark.parametrize("line", range(4))
def test_text_that_is_not_utf8_stops_at_its_line(bad: bytes, line: int) -> None:
    good = ["eins", "zwö", "", "vier"]
    data = [text.encode() for text in good]
    data[line] += bad
    decoded = decode_text(b"\n".join(data) + b"\n")
    assert decoded.items == good[:line]
    assert decoded.fault is not None
    assert decoded.fault.line == decoded.lines == line
    assert decoded.fault.at == len(b"".join(one + b"\n" for one in data[:line]))
    assert decoded.fault.reason.startswith("expected UTF-8, got 0x")


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(values, max_size=6), st.sampled_from(["\n", "\r\n", " \n"]))
def test_json_is_one_value_a_line(records: list[Any], end: str) -> None:
    decoded = decode_json("".join(json.dumps(record) + end for record in records).encode())
    assert decoded.items == records
    assert decoded.fault is None


@given(st.lists(st.sampled_from([b"1", b"", b"  ", b"\r", b"null", b"\t"]), max_size=12))
def test_blank_lines_are_no_values_but_count(texts: list[bytes]) -> None:
    decoded = decode_json(b"".join(text + b"\n" for text in texts))
    wanted = [index for index, text in enumerate(texts) if text.strip()]
    assert decoded.items == [json.loads(texts[index]) for index in wanted]
    assert decoded.lines == len(texts)
    assert list(range(len(texts)) if decoded.kept is None else decoded.kept) == wanted


BAD_JSON = {
    b'{"a" 1}': "byte 5",
    b'{"a":': "truncated",
    b"1 2": "trailing characters",
    b"[1,": "truncated",
    b"nope": "malformed",
    b"nan": "expected one JSON value",
    b"'a'": "malformed",
    b'"\xff"': "expected UTF-8, got 0xff",
    b"\xff": "expected UTF-8, got 0xff",
    b"\xef\xbb\xbf1": "got a byte order mark, which is none but at a file's beginning",
    b"[" * 100_000 + b"]" * 100_000: "recursion",
    b"1" * 5000: "out of range",
    b'"\x01"': "malformed",
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("bad", BAD_JSON, ids=lambda bad: repr(bad[:12]))
@pytest.mark.parametrize("line", range(4))
def test_json_that_is_none_stops_at_its_line(bad: bytes, line: int) -> None:
    texts = [b"1", b"", b'{"a": 2}', b"4"]
    texts[line] = bad
    decoded = decode_json(b"\n".join(texts))
    assert decoded.items == [json.loads(text) for text in texts[:line] if text]
    assert decoded.fault is not None
    assert decoded.fault.line == decoded.lines == line
    assert decoded.fault.at == len(b"".join(one + b"\n" for one in texts[:line]))
    assert BAD_JSON[bad] in decoded.fault.reason


odd_values = st.recursive(
    st.floats() | st.integers() | st.text(st.characters() | st.sampled_from("\ud800\udfff")) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(odd_values, max_size=9))
def test_whatever_json_writes_is_read_as_it_reads_it(records: list[Any]) -> None:
    texts = [json.dumps(record) for record in records]
    decoded = decode_json("\n".join(texts).encode())
    assert decoded.fault is None
    assert [json.dumps(item) for item in decoded.items] == texts  # so that NaN is NaN


@pytest.mark.parametrize(
    "text",
    ['"\\ud800"', "[NaN, -Infinity]", "1e999", "-1E+400", '{"a": 1, "a": NaN}', "9" * 4000, "[" * 400 + "]" * 400],
)
@pytest.mark.parametrize("line", range(3))
def test_what_json_takes_for_a_value_is_one_in_any_line(text: str, line: int) -> None:
    texts = ["1", "", '{"a": 2}']
    texts[line] = text
    decoded = decode_json("\n".join(texts).encode())
    assert decoded.fault is None
    assert decoded.lines == 3
    assert [json.dumps(item) for item in decoded.items] == [json.dumps(json.loads(one)) for one in texts if one]


TOKENS = [*(bytes([code]) for code in b'{}[],:"1a \n\r\\'), b'{"a":1}', b"[1,2]", b'"x"', b"\r\n", b"\xff"]


def test_all_lines_at_once_are_what_they_are_one_by_one() -> None:
    draw = random.Random(0)
    for raw in (b"".join(draw.choices(TOKENS, k=draw.randint(0, 12))) for _ in range(5000)):
        at_once, one_by_one = decode_json(raw), lines._decode_each(raw)
        assert (at_once.items, at_once.lines, at_once.kept) == (one_by_one.items, one_by_one.lines, one_by_one.kept)
        assert (at_once.fault is None) == (one_by_one.fault is None), raw
        if at_once.fault and one_by_one.fault:
            assert replace(at_once.fault, cause=None) == replace(one_by_one.fault, cause=None), raw


@pytest.mark.parametrize(
    "raw", [b'1 2\n{"a":\n1}\n', b"1,2\n[3\n4]\n", b"\n1 2\n", b"[1\n,2] 3\n", b"[1,\n2] 3", b"1 2\n \n"]
)
def test_two_values_in_a_line_do_not_make_up_for_one_over_two_lines(raw: bytes) -> None:
    decoded = decode_json(raw)
    assert decoded.fault is not None
    assert decoded.fault.line == decoded.lines


def test_a_value_may_not_span_lines() -> None:
    decoded = decode_json(b'{"a":\n1}\n')
    assert decoded.items == []
    assert decoded.fault is not None
    assert decoded.fault.line == 0
