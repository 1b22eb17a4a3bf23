"""Datasets and frames as other libraries' are met: by module, class and methods."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from streamline.sources.foreign_datasets import WORKER


def worker_info() -> Any:
    """As torch's `get_worker_info`."""
    return getattr(sys.modules.get(WORKER), "_worker_info", None)


IterableDataset: Any = type("IterableDataset", (), {"__module__": "torch.utils.data.dataset"})
Sampler: Any = type("Sampler", (), {"__module__": "torch.utils.data.sampler"})


class Numbers(IterableDataset):  # type: ignore[misc]
    """Iterates all, whichever worker it is."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        yield from range(self.length)


class Splitting(Numbers):
    """Iterates a worker's part."""

    def __iter__(self) -> Iterator[Any]:
        info = worker_info()
        yield from range(0 if info is None else info.id, self.length, 1 if info is None else info.num_workers)


class Numbered(Numbers):
    """Yields its epoch and its worker's seed with each number."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.length):
            yield self.epoch, worker_info().seed, number


class StatefulNumbers(Splitting):
    """As torchdata's: the place is in the dataset. A resumed one must not begin before its place."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.at: list[int] = [0]

    def __iter__(self) -> Iterator[Any]:
        while self.at[0] < self.length:
            info = worker_info()
            self.at[0] += 1
            if info is None or (self.at[0] - 1) % info.num_workers == info.id:
                yield self.at[0] - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at[0]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at[0] = state["at"]


class DataFrame:
    """A frame of pandas or polars."""

    def __new__(cls, library: str, rows: list[Any] = []) -> Any:  # noqa: B006 - never changed
        return object.__new__(type("DataFrame", (cls,), {"__module__": library}))

    def __init__(self, library: str, rows: list[Any] = []) -> None:  # noqa: B006
        self.rows, self.columns = rows, list(rows[0]) if rows else []

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def iloc(self) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return _Selected(self.rows[key] if isinstance(key, slice) else [self.rows[at] for at in key])


class _Selected:
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def items(self) -> Iterator[Any]:
        for name in self.rows[0]:
            yield name, SimpleNamespace(dtype="str", tolist=lambda name=name: [row[name] for row in self.rows])

    def to_dicts(self) -> list[Any]:
        return self.rows


class Dataset:
    """As Hugging Face's: rows by slices or lists of indices, as columns."""

    __module__ = "datasets.arrow_dataset"
    format: dict[str, Any] = {"type": None}  # noqa: RUF012

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows
        self.column_names = list(rows[0])
        self.asked: list[Any] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> Any:
        self.asked.append(key)
        rows = self.rows[key] if isinstance(key, slice) else [self.rows[at] for at in key]
        return {name: [row[name] for row in rows] for name in self.column_names}

    @staticmethod
    def iterable(length: int) -> Any:
        """Return an `IterableDataset`."""
        return HuggingFaceNumbers(length)


class _IterableDataset(StatefulNumbers):
    __module__ = "datasets.iterable_dataset"

    def __init__(self, length: int, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(length)
        self.rank, self.world_size, self.num_shards = rank, world_size, 1

    def part(self, rank: int, world_size: int) -> Any:
        return type(self)(self.length, rank, world_size)

    def __iter__(self) -> Iterator[Any]:
        for number in super().__iter__():
            if number % self.world_size == self.rank:
                yield number


_IterableDataset.__name__ = "IterableDataset"
HuggingFaceNumbers = _IterableDataset

DatasetDict: Any = type("DatasetDict", (dict,), {"__module__": "datasets.dataset_dict"})
