import os
import re
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as example_of
from hypothesis import strategies as st

import streamline as sl
from streamline.errors import PlanError, PlanTypeError, ReadError
from streamline.io.storage.options import Access
from streamline.io.storage.paths import braces, given_paths
from streamline.io.storage.resolve import find


def expand(paths: Iterable[str]) -> list[str]:
    return [found.path for found in find(tuple(paths), Access())]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("a.txt", "b.txt", "c.jsonl", "deep/d.txt", "deep/er/e.txt", "star*.txt", "{x,y}.txt", "öl 100%.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("{a,b}", ["a", "b"]),
        ("p-{000..003}", ["p-000", "p-001", "p-002", "p-003"]),
        ("{8..11}", ["8", "9", "10", "11"]),
        ("{08..11}", ["08", "09", "10", "11"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{0..0}", ["0"]),
        ("{a,b}-{1..2}", ["a-1", "a-2", "b-1", "b-2"]),
        ("{a,b{1..2},c}", ["a", "b1", "b2", "c"]),
        ("{a,}x", ["ax", "x"]),
        ("{{a,b},{1..2}}", ["a", "b", "1", "2"]),
        ("plain", ["plain"]),
        ("x?q=*", ["x?q=*"]),
    ],
)
def test_braces_in_urls_stand_for_several(url: str, expected: list[str]) -> None:
    assert braces(f"https://host/{url}.jsonl") == [f"https://host/{one}.jsonl" for one in expected]


@example_of(st.integers(0, 99999), st.integers(0, 500), st.integers(1, 8))
def test_a_range_keeps_its_digits(first: int, more: int, width: int) -> None:
    low, high = str(first).zfill(width), str(first + more).zfill(width)
    found = [url.removeprefix("http://h/") for url in braces(f"http://h/{{{low}..{high}}}")]
    assert [int(text) for text in found] == list(range(first, first + more + 1))
    if low.startswith("0") and len(low) > 1:
        assert {len(text) for text in found} == {max(len(low), len(high))}


@pytest.mark.parametrize(
    "url", ["http://h/{a}.txt", "http://h/{a,b.txt", "http://h/a}b", "http://h/{1..x}", "http://h/{}"]
)
def test_braces_that_mean_nothing_in_a_url_are_refused(url: str) -> None:
    with pytest.raises(PlanError, match="braces that mean nothing"):
        braces(url)


def test_braces_that_mean_too_much_are_refused() -> None:
    with pytest.raises(PlanError, match="more than 1,000,000 files"):
        braces("http://h/{0..999999999999}")


def test_a_star_in_a_url_is_refused_with_the_way_out() -> None:
    with pytest.raises(PlanError, match=r"HTTP has no listing(.|\n)*\{000\.\.127\}"):
        given_paths("https://host/part-*.jsonl")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.jsonl", ["c.jsonl"]),
        ("?.txt", ["a.txt", "b.txt"]),
        ("[ab].txt", ["a.txt", "b.txt"]),
        ("deep/**/*.txt", ["deep/d.txt", "deep/er/e.txt"]),
        ("deep/*", ["deep/d.txt"]),  # deep/er is a directory
        ("{b,a}.txt", ["b.txt", "a.txt"]),
        ("{deep,.}/?.txt", ["deep/d.txt", "./a.txt", "./b.txt"]),
        ("./a.txt", ["./a.txt"]),
        ("star*.txt", ["star*.txt"]),  # it exists as it is written
        ("{x,y}.txt", ["{x,y}.txt"]),  # likewise
        ("öl 100%.txt", ["öl 100%.txt"]),
    ],
)
def test_local_paths_are_globs_unless_they_exist_as_written(folder: Path, pattern: str, expected: list[str]) -> None:
    assert expand(given_paths(pattern)) == expected


def test_paths_may_be_path_objects_and_lists_of_both(folder: Path) -> None:
    assert expand(given_paths(folder / "a.txt")) == [str(folder / "a.txt")]
    assert expand(given_paths([Path("b.txt"), "a.txt"])) == ["b.txt", "a.txt"]
    assert given_paths([Path("b.txt"), "http://h/x"]) == ("b.txt", "http://h/x")


def test_the_home_directory_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert expand(["~/a.txt"]) == [str(folder / "a.txt")]
    assert expand(["~/?.txt"]) == [str(folder / "a.txt"), str(folder / "b.txt")]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.txt", r"no such file: missing\.txt \(seen from .*\)"),
        ("*.parquet", r"no file matches \*\.parquet"),
        ("deep", r"deep is a directory: write deep/\*"),
        ("deep/e*", r"deep/e\* matches only directories"),
        ("a.txt/b", "no such file"),  # a path below a file
        ("{a,z}.txt", r"no such file: z\.txt"),
    ],
)
def test_local_paths_that_lead_nowhere_say_so(folder: Path, path: str, message: str) -> None:
    with pytest.raises(ReadError, match=message):
        expand([path])


def test_a_path_that_may_not_be_looked_at_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(ReadError, match=r"can't look at a\.txt: Permission denied"):
        expand(["a.txt"])


def test_a_file_given_twice_is_refused(folder: Path) -> None:
    with pytest.raises(PlanError, match=r"a\.txt is given twice"):
        expand(["a.txt", "*.txt"])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a.txt", "./a.txt"),
        (".//a.txt", "a.txt"),
        ("deep/../a.txt", "a.txt"),
        ("a.txt", "{folder}/a.txt"),
        ("~/a.txt", "{folder}/deep/./../a.txt"),
        ("./?.txt", "{a,nothing/../b}.txt"),
        ("deep//er/e.txt", "**/e.txt"),
    ],
)
def test_one_file_by_two_names_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, first: str, second: str
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    (folder / "nothing").mkdir()
    named = [name.format(folder=folder) if "folder" in name else name for name in (first, second)]
    with pytest.raises(PlanError, match="is given twice: a state names files") as caught:
        sl.read_lines(named).open()
    names = re.fullmatch(r"(.*), which is (.*), is given twice: .*", str(caught.value))
    assert names is not None
    assert names[1] != names[2]
    assert Path(names[1]).samefile(names[2])


def test_two_files_are_two_whatever_their_names_look_like(folder: Path) -> None:
    """After a link, ".." is another directory; and a link is a name of its own."""
    (folder / "link").symlink_to(folder / "deep" / "er")
    (folder / "deep" / "a.txt").write_text("another")
    (folder / "same.txt").symlink_to(folder / "a.txt")
    paths = ["a.txt", "link/../a.txt", "same.txt"]
    assert expand(paths) == paths
    with pytest.raises(PlanError, match=r"link/\.\./a\.txt is given twice"):
        expand([*paths, "link/../a.txt"])
    with pytest.raises(PlanError, match=r"^\./a\.txt, which is a\.txt, is given twice"):
        expand([*paths, "./a.txt"])


@pytest.mark.parametrize("paths", [[], "", ["a", ""], "a\0b", "file:///a.txt", "ftp://h/x", "s3n://b/k"])
def test_what_can_not_be_a_path_is_refused(paths: object) -> None:
    with pytest.raises(PlanError):
        given_paths(paths)  # type: ignore[arg-type]


@pytest.mark.parametrize("paths", [None, 3, b"bytes", [b"bytes"], [3], {"a": 1}.values()])
def test_what_is_of_another_type_is_refused(paths: object) -> None:
    with pytest.raises(PlanTypeError, match="expected a path"):
        given_paths(paths)  # type: ignore[arg-type]


def test_a_socket_is_refused_as_one_and_is_not_said_to_be_missing(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        with pytest.raises(ReadError, match=r"/s is not a regular file"):
            expand([str(tmp_path / "s")])


@pytest.mark.parametrize("read", [sl.read_lines, sl.read_parquet, sl.read_npy, sl.read_files])
def test_a_pipe_is_refused_when_the_pipeline_is_opened_split_or_not(read: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npy")
    for pipe in (read(tmp_path / "*"), read([tmp_path / "pipe.npy"]).shard(1, mode="contiguous")):
        with pytest.raises(ReadError, match=r"pipe\.npy is not a regular file: .*Read a pipe with from_stream"):
            list(pipe)


def test_a_glob_that_matches_a_link_to_nothing_names_it(tmp_path: Path) -> None:
    (tmp_path / "part-0").symlink_to("gone")
    with pytest.raises(ReadError, match=r"can't look at .*part-0: No such file or directory, and it is a link"):
        sl.read_lines(tmp_path / "part-*").open()
    (tmp_path / "loop-0").symlink_to("loop-0")
    with pytest.raises(ReadError, match=r"loop-0: Too many levels of symbolic links"):
        sl.read_lines(tmp_path / "loop-*").open()


def test_an_option_that_there_is_none_of_is_named_with_its_reader() -> None:
    options: Any = {"encoding": "latin-1"}
    with pytest.raises(PlanTypeError, match=r"read_lines takes no encoding=; .* it takes http=, concurrency="):
        sl.read_lines("x", **options)
