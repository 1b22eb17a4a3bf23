"""CSV: what the standard library makes of a whole file, record by record, from any record on; and what is bad in it."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.errors import DataError, PlanError, PlanTypeError
from streamline.io.formats.csv import Dialect, Records
from streamline.sources.files import Files
from tests.file_kit import Put, Read, check_every_resume
from tests.laws.profile import examples, in_turn
from tests.serving import named

FILES = {
    "0-plain": b"a,b\n1,2\n3,4\n",
    "1-empty": b"",
    "2-quoted": b'a,b\r\n"x\r\ny","q""q, z"\r\n\r\n"",\r\n',
    "3-header": b"a,b",
    "4-bom": '\ufeffb,a\nö,"€\n\n"\n5," 6"'.encode(),
    "5-blank": b"\n\r\n\na,b\n\n",
}
ITEMS = [
    {"a": "1", "b": "2"},
    {"a": "3", "b": "4"},
    {"a": "x\r\ny", "b": 'q"q, z'},
    {"a": "", "b": ""},
    {"b": "ö", "a": "€\n\n"},
    {"b": "5", "a": " 6"},
]


def read_csv(paths: Any, **options: Any) -> Files[Any]:
    source = sl.read_csv(paths, **options).plan.source
    assert isinstance(source, Files)
    return source


@pytest.mark.one_in(3)
async def test_records_resume_anywhere(put: Put, read: Read, slices: None) -> None:
    paths = [put(name, data) for name, data in FILES.items()]
    await check_every_resume(read, named(read_csv(paths)).resolved(), ITEMS)


@pytest.mark.one_in(5, 4)
async def test_rows_without_a_header_resume_anywhere(put: Put, read: Read, slices: None) -> None:
    paths = [put(name, data) for name, data in FILES.items()]
    rows = [row for data in FILES.values() for row in csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""))]
    expected = [row for row in rows if row]
    await check_every_resume(read, named(read_csv(paths, header=False)).resolved(), expected)
    as_dicts = [dict(zip("xy", row, strict=True)) for row in expected]
    await check_every_resume(read, named(read_csv(paths, header=["x", "y"])).resolved(), as_dicts)


async def test_a_state_names_the_line_and_the_byte_after_a_record(tmp_path: Path, read: Read) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes('\ufeffa\n"ö\n"\n\nx\n'.encode())
    whole = await read(read_csv(path))
    assert [state["read_csv"] for state in whole.states] == [
        {"file": str(path), "line": 3, "byte": 11},
        {"file": str(path), "line": 5, "byte": 14},
    ]
    assert whole.wheres[0] == f"{path} line 3 (ends at byte 11)"


async def test_other_delimiters_and_quotes(tmp_path: Path, read: Read) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"a\tb\n\"1\t'x\ty'\n")
    assert (await read(read_csv(path, delimiter="\t", quotechar="'"))).items == [{"a": '"1', "b": "x\ty"}]
    path.write_bytes(b'a\tb\n"1\t2"\n""\t"')
    whole = await check_every_resume(
        read,
        named(read_csv(path, delimiter="\t", quotechar=None)).resolved(),
        [{"a": '"1', "b": '2"'}, {"a": '""', "b": '"'}],
    )
    assert whole.failure is None


async def test_long_fields_are_read_and_the_limit_of_the_process_stays(put: Put, read: Read) -> None:
    text = "x\n" * 70_000  # more than the 131,072 characters that the csv module allows
    before = csv.field_size_limit()
    path = put("x", f'a,b\n1,"{text}"\n2,3\n'.encode())
    await check_every_resume(read, named(read_csv(path)).resolved(), [{"a": "1", "b": text}, {"a": "2", "b": "3"}])
    assert csv.field_size_limit() == before


FIELD = st.text(st.sampled_from("a\"\n\r,;'ö\u2028\x0c\x1c \0"), max_size=5)
TABLE = st.integers(1, 4).flatmap(lambda width: st.lists(st.lists(FIELD, min_size=width, max_size=width), max_size=9))


@given(TABLE, st.sampled_from(["\n", "\r\n"]), st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]), st.data())
@examples(150)
def test_what_is_written_is_read_wherever_slices_end(table: Any, end: str, quoting: Any, data: st.DataObject) -> None:
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator=end, quoting=quoting).writerows(table)
    text = file.getvalue()
    if "\r" in text.replace("\r\n", "") and quoting == csv.QUOTE_MINIMAL:
        return  # the writer doesn't quote a lone "\r"
    records = Records(Dialect(), None, len(table[0]) if table else 0, 10**6)
    raw, found = text.encode(), list[Any]()
    while raw:
        cuts = [at for at in range(1, len(raw)) if raw[at - 1 : at] == b"\n"]
        cut = data.draw(st.sampled_from([*cuts, len(raw)]))
        decoded, _ = records.decode(raw[:cut], cut == len(raw))
        assert decoded.fault is None
        found += decoded.items
        raw = _without(raw, decoded.lines)
    assert found == table


def _without(raw: bytes, lines: int) -> bytes:
    parts = raw.split(b"\n", lines)
    return parts[-1] if len(parts) > lines else b""


BAD = {
    b"1": "expected 2 fields, got 1: none for 'b'",
    b"1,2,3": "expected 2 fields, got 3: no column for '3'",
    b'1,"2"3': "expected CSV: ',' expected after '\"'",
    b'1,"\n\n2"3': "expected CSV: ',' expected after '\"'",
    b"1,2\r3": "expected CSV: a line ends with",
    b"1,\xff": "expected UTF-8, got 0xff (invalid start byte) in byte 2 of the line",
    b'1,"\n\xff"': "expected UTF-8, got 0xff (invalid start byte) in byte 0 of line 2 of the record",
    b'"\n",2,"\n"': "expected 2 fields, got 3",
    b"1," + b"x" * 99: "expected a record of at most 60 bytes",
    b'1,"' + b"x\n" * 50 + b'"': "expected a record of at most 60 bytes",
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("bad", "record"), in_turn(BAD, [0, 1, 3]), ids=range(len(in_turn(BAD, [0, 1, 3]))))
async def test_a_bad_record_fails_after_those_before(
    tmp_path: Path, read: Read, slices: None, bad: bytes, record: int
) -> None:
    texts = [b"1,2", b'"3\n",4', b"5,6"]
    good = [{"a": "1", "b": "2"}, {"a": "3\n", "b": "4"}, {"a": "5", "b": "6"}]
    texts.insert(record, bad)
    data = b"\n".join([b"a,b", *texts])
    before = b"".join(text + b"\n" for text in [b"a,b", *texts[:record]])
    (tmp_path / "x.csv").write_bytes(data)
    whole = await read(read_csv(tmp_path / "x.csv", max_record_bytes=60))
    assert whole.items == good[:record]
    assert isinstance(whole.failure, DataError)
    where = f"line {before.count(bytes([10])) + 1} (byte {len(before)}): {BAD[bad]}"
    assert where in str(whole.failure)
    if record:
        assert whole.end["read_csv"]["byte"] == len(before)


HEADERS = {
    b"a,b,a\n1,2,3\n": "line 1 (byte 0): expected a header that names each column once, got 'a' more than once",
    b"a,\xff\n1,2\n": "line 1 (byte 0): expected UTF-8, got 0xff",
    b'\n"a": 1\n': "line 2 (byte 1): expected CSV: ',' expected after '\"'",
    b'"a,b\n1,2\n': "line 1 (byte 0): expected the end of a field that is in quotes, got the end of the file",
    b"x" * 100: "line 1 (byte 0): expected a record of at most 60 bytes",
    b'"\n' + b"x\n" * 50 + b'"': "line 1 (byte 0): expected a record of at most 60 bytes",
    b"\xff\xfea\0\n\0": "line 1 (byte 0): expected UTF-8, got 0xff",
}


@pytest.mark.parametrize("data", HEADERS, ids=range(len(HEADERS)))
async def test_a_bad_header_fails(tmp_path: Path, read: Read, slices: None, data: bytes) -> None:
    (tmp_path / "x.csv").write_bytes(data)
    whole = await read(read_csv(tmp_path / "x.csv", max_record_bytes=60))
    assert whole.items == []
    assert isinstance(whole.failure, DataError)
    assert HEADERS[data] in str(whole.failure)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_bad_records_are_left_out_wherever_it_resumes(tmp_path: Path, slices: None, bad: bytes) -> None:
    texts = [b"1,2", bad, b'"3\n",4', bad, bad, b"5,6"]
    (tmp_path / "x.csv").write_bytes(b"a,b\n" + b"\n".join(texts) + b"\n")
    pipe = sl.read_csv(tmp_path / "x.csv", max_record_bytes=60)
    states = []
    with pipe.open(on_error="skip", max_errors=None) as stream:
        items = []
        for item in stream:
            items.append(item)
            states.append(stream.snapshot())
        assert stream.errors.total >= 3
    good = [{"a": "1", "b": "2"}, {"a": "3\n", "b": "4"}, {"a": "5", "b": "6"}]
    assert [item for item in items if item in good] == good
    for done, state in enumerate(states):
        with pipe.open(on_error="skip", max_errors=None, resume=sl.Snapshot.from_json(state.to_json())) as stream:
            assert list(stream) == items[done + 1 :]


def test_a_quote_that_is_not_closed_takes_only_its_line_with_it(tmp_path: Path, slices: None) -> None:
    (tmp_path / "x.csv").write_bytes(b'a,b\n1,"2\n3,4\n5,6\n')
    with sl.read_csv(tmp_path / "x.csv").open(on_error="skip", max_errors=None) as stream:
        assert list(stream) == [{"a": "3", "b": "4"}, {"a": "5", "b": "6"}]
        assert stream.errors.total == 1


def test_a_csv_file_is_not_split_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"a\n1\n")
    with pytest.raises(PlanError, match=r"a line end in a CSV file may stand inside quotes.*split it into several"):
        sl.read_csv(tmp_path / "x.csv").shard(2, mode="contiguous").first(1)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"header": "a,b"}, PlanTypeError),
        ({"header": [1]}, PlanTypeError),
        ({"header": []}, PlanError),
        ({"header": ["a", "a"]}, PlanError),
        ({"delimiter": ""}, PlanError),
        ({"delimiter": ",,"}, PlanError),
        ({"delimiter": None}, PlanTypeError),
        ({"delimiter": '"'}, PlanError),
        ({"quotechar": "\n"}, PlanError),
        ({"quotechar": 1}, PlanTypeError),
        ({"max_record_bytes": 0}, PlanError),
    ],
)
def test_options_are_checked_where_they_are_written(options: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="read_csv"):
        sl.read_csv("x.csv", **options)


def test_what_changes_items_is_in_the_fingerprint() -> None:
    plans: list[sl.Pipeline[Any]] = [
        sl.read_csv("x.csv"),
        sl.read_csv("x.csv", header=False),
        sl.read_csv("x.csv", header=["a"]),
        sl.read_csv("x.csv", delimiter=";"),
        sl.read_csv("x.csv", quotechar=None),
    ]
    assert len({json.dumps(plan.plan.source.options()) for plan in plans}) == len(plans)
