import gzip
import json
from pathlib import Path

import pytest

from streamline.demo.corpus import records, source_files, standard_library, write_corpus


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "library"
    for name, text in {
        "b.py": "x" * 25,
        "a.py": "äöü€" * 5,
        "empty.py": "",
        "deep/er/c.py": 'print("c")\r\n',
        "deep/test/t.py": "a test",
        "site-packages/s.py": "installed",
        "notes.txt": "no source",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return root


def read(shards: tuple[Path, ...]) -> list[list[dict[str, str]]]:
    return [[json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()] for path in shards]


def test_files_are_sorted_and_leave_out_tests_and_installed_packages(library: Path) -> None:
    assert [path.relative_to(library).as_posix() for path in source_files(library)] == [
        "a.py",
        "b.py",
        "deep/er/c.py",
        "empty.py",
    ]


def test_the_shards_dealt_back_in_turn_are_the_files_texts(library: Path, tmp_path: Path) -> None:
    target = tmp_path / "shards"
    target.mkdir()
    corpus = write_corpus(target, shards=3, chunk_chars=10, root=library)
    shards = read(corpus.shards)
    in_order = [shards[i % 3][i // 3] for i in range(corpus.records)]
    assert in_order == list(records(library, source_files(library), 10))
    texts: dict[str, str] = {}
    for record in in_order:
        assert 0 < len(record["text"]) <= 10
        texts[record["path"]] = texts.get(record["path"], "") + record["text"]
    assert texts == {name: (library / name).read_bytes().decode() for name in ("a.py", "b.py", "deep/er/c.py")}


def test_its_account_is_what_was_written(library: Path, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, shards=3, chunk_chars=10, root=library)
    assert (corpus.files, corpus.records) == (4, 2 + 3 + 2)
    assert corpus.text_bytes == sum(path.stat().st_size for path in source_files(library))
    assert corpus.stored_bytes == sum(path.stat().st_size for path in tmp_path.glob("part-*"))
    assert [path.name for path in corpus.shards] == [f"part-00{i}.jsonl.gz" for i in range(3)]


def test_the_same_library_gives_the_same_bytes(tmp_path: Path) -> None:
    written = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        corpus = write_corpus(tmp_path / name, shards=4, chunk_chars=1024, max_files=20)
        written.append([path.read_bytes() for path in corpus.shards])
    assert written[0] == written[1]


def test_max_files_spreads_over_the_whole_library(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, shards=2, chunk_chars=1024, max_files=10)
    assert corpus.files == 10
    names = {record["path"] for shard in read(corpus.shards) for record in shard}
    everything = [path.relative_to(standard_library()).as_posix() for path in source_files(standard_library())]
    assert names & set(everything[: len(everything) // 2])
    assert names & set(everything[len(everything) // 2 :])


def test_a_library_without_sources_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="found none below"):
        write_corpus(tmp_path, shards=1, chunk_chars=10, root=tmp_path)
