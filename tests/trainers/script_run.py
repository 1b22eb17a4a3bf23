"""A script as people write it: a tokenizer, a database, torch modules and a dataclass, run in processes."""

# mypy: ignore-errors

from __future__ import annotations

import functools
import sqlite3
import sys
import threading
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import streamline as sl

PATH = sys.argv[1]
WORDS = ["[UNK]", "the", "cat", "sat"]

tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()


@dataclass(frozen=True, slots=True)
class Sample:
    ids: list[int]
    label: str | None
    vector: torch.Tensor


class Embedding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(len(WORDS), 2)
        self.linear = torch.nn.Linear(2, 2)
        self.lock = threading.Lock()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with self.lock:
            return self.linear(self.table(ids))


def normed(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm()


class Database:
    def __init__(self, path: str) -> None:
        self.path = path

    @functools.cached_property
    def connection(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, check_same_thread=False)

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def label(self, n: int) -> str:
        found: tuple[str] = self.connection.execute("select label from labels where n = ?", (n,)).fetchone()
        return found[0]


database, embedding, cosine = Database(PATH), Embedding(), normed
generator = torch.Generator().manual_seed(3)
with database.connection as connection:  # it is in use here already
    connection.execute("create table labels (n, label)")
    connection.executemany("insert into labels values (?, ?)", [(n, f"label {n}") for n in range(4)])


@functools.cache
def tokens(text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text).ids
    return ids


def prepared(n: int) -> Sample:
    ids = tokens("the cat sat")
    assert 0 <= float(torch.rand(1, generator=generator)) < 1
    with torch.no_grad():
        return Sample(ids, database.label(n), cosine(embedding(torch.tensor(ids))))


def outcome(backend: Any) -> list[Sample]:
    with sl.from_items(range(4)).shard(2).map(prepared).merge().open(backend=backend) as stream:
        return list(stream)


here, there = outcome(sl.Inline()), outcome(sl.Processes(1))
assert [(sample.ids, sample.label) for sample in there] == [([1, 2, 3], f"label {n}") for n in range(4)]
assert all(torch.equal(one.vector, other.vector) for one, other in zip(here, there, strict=True))
assert all(type(sample) is Sample for sample in there)
print("all is well")
