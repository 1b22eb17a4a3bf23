"""A snapshot written down: every damage is found, and told apart from what never was a snapshot."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamline.errors import SnapshotError
from streamline.snapshot.file_format import FORMAT_VERSION, decode, encode, one_line

Tree: TypeAlias = dict[str, Any]

PATH = Path("ckpt") / "snap.json"
BODY: Tree = {
    "epoch": 1,
    "listing": [{"path": "ä.jsonl", "size": 500}],
    "state": {"merge": {"produced": [3, 4], "workers": [{"rows": 17, "p": 0.1}, {"rows": 18, "p": 1e300}]}, "take": 7},
}
CONTENT = encode(BODY)

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters())  # also half a surrogate pair, as in a file name that isn't UTF-8
TREES: st.SearchStrategy[Any] = st.recursive(
    SCALARS | TEXT, lambda children: st.lists(children) | st.dictionaries(TEXT, children), max_leaves=20
)


def edited(change: Callable[[Tree], Any]) -> bytes:
    """Return the content after a change to its tree, with the checksum as it was."""
    tree = json.loads(CONTENT)
    change(tree)
    return json.dumps(tree).encode()


def exactly(tree: Any) -> str:
    """Tell apart what `==` doesn't: 1, 1.0 and True; 0.0 and -0.0."""
    return repr(tree)


@pytest.mark.long
@settings(deadline=None)
@given(st.dictionaries(TEXT, TREES, max_size=5))
def test_any_tree_comes_back_as_it_was(body: Tree) -> None:
    assert exactly(decode(encode(body), PATH)) == exactly(body)
    assert exactly(json.loads(one_line(body))) == exactly(body)
    assert "\n" not in one_line(body)


def test_the_state_of_a_random_generator_is_kept_to_the_last_bit() -> None:
    body = {"rng": {"state": 2**128 - 1, "inc": -(2**127), "p": 0.1 + 0.2}}
    assert decode(encode(body), PATH) == body


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((1, 2), r"\['take'\]\['seen'\]\[1\] is of type tuple; keep dicts, lists"),
        ({3: "a"}, r"\['seen'\]\[1\] has the key 3, which would come back as a string"),
        ({"a": {None: 1}}, r"\['seen'\]\[1\]\['a'\] has the key None"),
        (float("nan"), r"\['seen'\]\[1\] is nan"),
        (float("-inf"), r"\['seen'\]\[1\] is -inf"),
        (b"bytes", r"\['seen'\]\[1\] is of type bytes"),
        ({1, 2}, r"\['seen'\]\[1\] is of type set"),
    ],
)
@pytest.mark.parametrize("write", [encode, one_line])
def test_what_json_would_change_is_refused_with_its_place(
    write: Callable[[Tree], object], value: Any, message: str
) -> None:
    with pytest.raises(SnapshotError, match=message):
        write({"take": {"seen": [0, value]}})


def test_a_person_can_read_it() -> None:
    lines = CONTENT.decode("ascii").splitlines()
    assert lines[1] == f' "streamline_snapshot": {FORMAT_VERSION},'
    assert '  "epoch": 1,' in lines
    assert '    "produced": [3, 4],' in lines
    assert '     {"rows": 17, "p": 0.1},' in lines


def test_another_tool_may_lay_it_out_anew() -> None:
    again = json.dumps(json.loads(CONTENT), indent=4, ensure_ascii=False, sort_keys=True)
    assert decode(again.encode(), PATH) == BODY


@pytest.mark.parametrize("content", [b"", b"\n", b"\0" * 4096])
def test_an_empty_file_is_said_to_be_empty(content: bytes) -> None:
    with pytest.raises(SnapshotError, match=rf"^{PATH} is empty \({len(content)} bytes"):
        decode(content, PATH)


@pytest.mark.parametrize("content", [b"hello", b"PK\x03\x04\xff", b"\x80\x04K", b"[" * 100_000, b"{} {}"])
def test_what_is_not_json_is_no_snapshot(content: bytes) -> None:
    with pytest.raises(SnapshotError, match=rf"^{PATH} is no streamline snapshot: expected JSON \("):
        decode(content, PATH)


@pytest.mark.parametrize("content", ["{}", "[]", "17", '{"epoch": 3}', one_line(BODY)])
def test_other_json_is_no_snapshot(content: str) -> None:
    with pytest.raises(SnapshotError, match=rf"^{PATH} is JSON, but no streamline snapshot"):
        decode(content.encode(), PATH)


@pytest.mark.parametrize("other", [2, 3, 7])
def test_another_version_names_both_and_says_what_can_be_done(other: int) -> None:
    content = edited(lambda tree: tree.update(streamline_snapshot=other, more={}))
    way = "reads format 1: upgrade streamline, unless a version before 0.1.0 wrote it: that one can't be resumed"
    with pytest.raises(SnapshotError, match=rf"^{PATH} is of format {other}, and this streamline {way}$"):
        decode(content, PATH)


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree["body"].update(epoch=5),
        lambda tree: tree["body"].update(epoch=True),
        lambda tree: tree["body"].update(more=5),
        lambda tree: tree["body"]["state"].update(take=7.0),
        lambda tree: tree["body"]["state"]["merge"]["workers"].reverse(),
        lambda tree: tree.update(sha256=tree["sha256"].upper()),
        lambda tree: tree.update(sha256=None),
        lambda tree: tree.update(more=1),
        lambda tree: tree.pop("sha256"),
        lambda tree: tree.pop("body"),
        lambda tree: tree.update(streamline_snapshot=True),
        lambda tree: tree.update(streamline_snapshot=0),
        lambda tree: tree.update(streamline_snapshot="1"),
    ],
)
def test_what_was_edited_is_damaged(change: Callable[[Tree], Any]) -> None:
    with pytest.raises(SnapshotError, match=rf"^{PATH} is damaged"):
        decode(edited(change), PATH)


def test_every_truncation_is_called_one() -> None:
    for length in range(1, len(CONTENT) - 1):
        cut = r"cut short after .* bytes: use an earlier snapshot"
        with pytest.raises(SnapshotError, match=rf"^{PATH} is {cut}"):
            decode(CONTENT[:length], PATH)
    assert decode(CONTENT[:-1], PATH) == BODY


@pytest.mark.parametrize("bits", [*(1 << bit for bit in range(8)), 0xFF])
def test_every_flip_in_a_byte_is_found_or_changes_nothing(bits: int) -> None:
    refused = 0
    for index in range(len(CONTENT)):
        flipped = bytearray(CONTENT)
        flipped[index] ^= bits
        try:
            body = decode(bytes(flipped), PATH)
        except SnapshotError:
            refused += 1
        else:
            assert exactly(body) == exactly(BODY)
    assert refused > 0.8 * len(CONTENT)  # the rest is white space


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(CONTENT)), st.integers(0, 50), st.binary(max_size=20))
def test_any_damage_is_found_or_changes_nothing(start: int, removed: int, inserted: bytes) -> None:
    try:
        body = decode(CONTENT[:start] + inserted + CONTENT[start + removed :], PATH)
    except SnapshotError:
        return
    assert exactly(body) == exactly(BODY)
