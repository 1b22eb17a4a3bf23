"""hf:// without huggingface_hub: what is refused, and what its errors mean. With it: `tests/trainers/test_hub.py`."""

from __future__ import annotations

import traceback
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

import streamline as sl
from streamline.errors import PlanError, ReadError
from streamline.io.storage import hub
from streamline.io.storage.hub import meaning
from streamline.io.storage.retry import Attempts, TransientError

PATH = "hf://datasets/me/data/a.txt"


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "find_spec", lambda name: None if name == "huggingface_hub" else find_spec(name))
    pipe = sl.read_lines(PATH)  # looks at nothing
    with pytest.raises(PlanError, match=r"not installed: pip install 'streamline-data\[hub\]'"):
        list(pipe)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("hf://datasets/me/data", r"expected hf://datasets/USER/REPO/PATH \(or hf://USER/REPO/PATH, of a model\)"),
        ("hf://me/model", r"expected hf://datasets/USER/REPO/PATH"),
        ("hf://datasets//data/a.txt", r"expected hf://datasets/USER/REPO/PATH"),
        ("hf://datasets/me/*/a.txt", "a repository's name can't be a glob"),
        ("hf://datasets/me/data/train/", r"is a directory: write hf://datasets/me/data/train/\* for the files"),
    ],
)
def test_paths_that_name_no_file_are_refused_where_they_are_written(path: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        sl.read_lines(path)


def answered(status: int, **headers: str) -> Exception:
    error: Any = OSError(f"{status} for it\nand more")
    error.response = SimpleNamespace(status_code=status, headers=headers)
    return error  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (answered(401), ReadError, "the Hub answered 401: 401 for it: for what is private or gated, log in"),
        (answered(404), ReadError, "no such file, repository or revision: 404 for it; if it is private"),
        (FileNotFoundError("gone"), ReadError, "no such file, repository or revision: gone"),
        (answered(400), ReadError, "the Hub answered 400: 400 for it"),
        (ValueError("no such path"), ReadError, "no such path: expected hf://"),
        (answered(503), TransientError, "503 for it"),
        (ConnectionError(), TransientError, "ConnectionError"),
        (ReadError("itself"), ReadError, "itself"),
    ],
    ids=str,
)
def test_what_an_error_means(error: Exception, kind: type[Exception], words: str) -> None:
    found = meaning(PATH, error)
    assert type(found) is kind
    assert words in str(found)


def test_a_server_that_asks_to_wait_is_heard() -> None:
    found = meaning(PATH, answered(429, **{"Retry-After": "7"}))
    assert isinstance(found, TransientError)
    assert found.retry_after_s == 7


async def test_the_signed_url_of_a_cdn_is_in_no_traceback() -> None:
    cause = OSError("Server error for url 'https://cdn-lfs.example/x?X-Amz-Signature=s3cret&v=1'")
    with pytest.raises(ReadError, match="Signature=…&v=1") as caught:
        await Attempts(PATH, retries=0).back_off(meaning(PATH, cause), 0, cause)  # type: ignore[arg-type]
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))
