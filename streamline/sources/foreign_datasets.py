"""Iterable datasets of torch and of Hugging Face, which split themselves: neither library is imported here.

Each worker iterates a copy of the dataset, its part of it, once for each pass. A dataset of torch finds out which part
that is by `get_worker_info()`: shard s of n is worker s of n there. One of Hugging Face is split as for n nodes: by its
own shards, if n divides their number and nothing in it counts over all of them, else by the item. Both get the epoch,
if they have `set_epoch`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from streamline.core.flow import Site
from streamline.core.forks import ForkSafeLock
from streamline.core.lazy_numpy import np
from streamline.core.options import type_and_repr
from streamline.core.text import quantity
from streamline.errors import PlanError, PlanTypeError
from streamline.sources.base import Mode, epoch_number
from streamline.sources.foreign_state import foreign, parts_of
from streamline.sources.iterable import IteratedSource
from streamline.sources.single_use import Use
from streamline.sources.table_rows import check_rows

T = TypeVar("T")

WORKER = "torch.utils.data._utils.worker"
"""Where torch keeps which worker a process is: `get_worker_info()` returns its `_worker_info`."""

_one_worker = ForkSafeLock()
"""Held while a dataset believes to be some worker: there is one such belief in a process."""


class _AsWorker:
    """`with _AsWorker(dataset, site):` torch says that this is worker s of n; without shards, that it is none."""

    def __init__(self, dataset: Any, site: Site | None) -> None:
        self._module: Any = sys.modules.get(WORKER)
        self._info = self._before = None
        if self._module is not None and site is not None and site.num_shards > 1:
            (seed,) = np.random.SeedSequence([site.shard, *site.epoch]).generate_state(1)
            self._info = self._module.WorkerInfo(
                id=site.shard, num_workers=site.num_shards, seed=int(seed), dataset=dataset
            )

    def __enter__(self) -> None:
        _one_worker.acquire()
        if self._module is not None:
            self._before, self._module._worker_info = self._module._worker_info, self._info

    def __exit__(self, *_: object) -> None:
        if self._module is not None:
            self._module._worker_info = self._before
        _one_worker.release()


class _WorkersPart(Iterable[T]):
    """A dataset as one worker sees it; what else it has, a state for one, is the dataset's."""

    def __init__(self, dataset: Any, site: Site | None) -> None:
        self._dataset = dataset
        self._worker = _AsWorker(dataset, site)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __iter__(self) -> Iterator[T]:
        with self._worker:
            iterator = iter(self._dataset)
        while True:
            with self._worker:
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item


@dataclass(frozen=True, kw_only=True)
class DatasetSource(IteratedSource[T]):
    """Iterates a part of an iterable dataset, which splits itself. State: as of `IteratedSource`."""

    modes: ClassVar[tuple[Mode, ...]] = ("custom",)

    dataset: Any

    @property
    def shared(self) -> dict[int, Any]:
        """What copies of the dataset have in common, by identity, as for `deepcopy`."""
        return {}

    def use(self) -> Use:
        return Use(self.kind, self.dataset)

    def for_pass(self, site: Site) -> Any:
        """Return a dataset of its own for one pass: one that has a state keeps its place anywhere in itself."""
        made = copy(self.dataset) if foreign(self.dataset) is None else deepcopy(self.dataset, self.shared)
        if callable(set_epoch := getattr(made, "set_epoch", None)):
            set_epoch(epoch_number(site.epoch))
        return made


@dataclass(frozen=True, kw_only=True)
class TorchSource(DatasetSource[T]):
    """An `IterableDataset` of torch."""

    kind: ClassVar[str] = "from_torch"

    def how_read(self, num_shards: int) -> str:
        return f": it splits itself, as worker s of {num_shards:,}" if num_shards > 1 else ""

    def make(self, site: Site) -> Iterable[T]:
        return _WorkersPart(self.for_pass(site), site)


@dataclass(frozen=True, kw_only=True)
class HuggingFaceSource(DatasetSource[T]):
    """An `IterableDataset` of Hugging Face."""

    kind: ClassVar[str] = "from_huggingface"

    @property
    def shared(self) -> dict[int, Any]:
        """The file systems that it has opened: a copy of one adds itself to the dict that is being copied."""
        return {id(kept): kept for name, kept in vars(self.dataset).items() if name.endswith("__hffs_cache")}

    def how_read(self, num_shards: int) -> str:
        own = int(getattr(self.dataset, "num_shards", 1))
        if num_shards == 1:
            return ""
        of_it = f"{quantity(own, 'shard')} of its own"
        whole = own % num_shards or counts_rows(self.dataset)
        return f": everything is read {num_shards:,} times, of {of_it}" if whole else f": {of_it}"

    def check_split(self, mode: Mode, num_shards: int) -> None:
        if num_shards > 1 and getattr(self.dataset, "_distributed", None):
            raise PlanError(
                f".shard({num_shards}) of what split_dataset_by_node has split would give other rows than that: give "
                "from_huggingface the whole dataset, .shard and the ranks split it"
            )

    def make(self, site: Site) -> Iterable[T]:
        made = self.for_pass(site)
        if site.num_shards > 1:
            from datasets.distributed import split_dataset_by_node

            how = {"strategy": "examples"} if counts_rows(made) else {}
            made = split_dataset_by_node(made, rank=site.shard, world_size=site.num_shards, **how)
        return _WorkersPart(made, None)  # in a worker of a DataLoader, it would split itself once more


def counts_rows(part: Any) -> bool:
    """Whether a Hugging Face dataset, or a part of one, counts over all its shards, so that some would give other rows.

    A user's function of batches is taken to make the same of a row in any batch.
    """
    return (
        type(part).__name__.startswith(("Skip", "Take", "Step"))
        or bool(getattr(part, "with_indices", False) or getattr(part, "drop_last_batch", False))
        or getattr(part, "stopping_strategy", "") in ("first_exhausted", "all_exhausted")
        or getattr(getattr(part, "function", None), "__name__", "") in ("_batch_fn", "_batch_arrow_table")  # .batch
        or any(map(counts_rows, parts_of(part)))
    )


def library_of(data: object, name: str) -> str | None:
    """Return the library of a class called `name` that `data` is an instance of; None: it is of no such class."""
    found = (base.__module__.partition(".")[0] for base in type(data).__mro__ if base.__name__ == name)
    return next(found, None)


def is_torch_iterable(dataset: object) -> bool:
    """Whether a dataset is an `IterableDataset` of torch.

    Raises:
      PlanTypeError: it is something else than a dataset, which is read in another way.
    """
    kind, way = type(dataset).__name__, None
    if library_of(dataset, "DataLoader") == "torch":
        way = "what makes batches here is .batch(32): sl.from_torch(loader.dataset)"
    elif library_of(dataset, "Sampler") == "torch":
        way = "an order is a .shuffle(seed=0) here, a part of it .shard(n): sl.from_torch(dataset)"
    elif library_of(dataset, "IterableDataset") == "datasets":
        way = "it is one of Hugging Face: sl.from_huggingface(dataset)"
    elif isinstance(dataset, type):
        way = "an instance of it is a dataset"
    if way is not None:
        raise PlanTypeError(f"from_torch reads a dataset of torch, got {kind}: {way}")
    if library_of(dataset, "IterableDataset") == "torch":
        return True
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return False
    raise PlanTypeError(
        f"from_torch reads a dataset of torch, got {type_and_repr(dataset)}: one with __getitem__ and __len__, or an "
        "IterableDataset; of other iterables, sl.from_iterable(make)"
    )


def is_huggingface_iterable(dataset: object) -> bool:
    """Whether it is an `IterableDataset` of Hugging Face, and no `Dataset`; a PlanTypeError if it is neither."""
    if library_of(dataset, "IterableDataset") == "datasets":
        check_rows("from_huggingface", dataset)
        return True
    if library_of(dataset, "Dataset") == "datasets":
        return False
    for kind in ("DatasetDict", "IterableDatasetDict"):
        if library_of(dataset, kind) == "datasets":
            names = list(dataset)  # type: ignore[call-overload]
            raise PlanTypeError(
                f"from_huggingface reads one split, got a {kind} of {', '.join(map(repr, names)) or 'none'}: "
                f"sl.from_huggingface(data[{names[0] if names else 'train'!r}])"
            )
    if isinstance(dataset, str):
        raise PlanTypeError(
            f"from_huggingface reads a dataset, got the name {dataset!r}: sl.from_huggingface(datasets.load_dataset("
            f'{dataset!r}, split="train", streaming=True))'
        )
    raise PlanTypeError(
        f"from_huggingface reads a Dataset or an IterableDataset of datasets, got {type_and_repr(dataset)}: "
        "sl.from_items(data) reads what has an index, sl.from_iterable(make) what is iterated"
    )
