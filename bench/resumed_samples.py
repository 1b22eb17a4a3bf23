"""How many samples does a resume lose or repeat? `python -m bench.resumed_samples [--smoke]`.

Every case reads the same samples, is stopped three times in mid-epoch, and goes on each time from the state that it
gave with its last batch, in a fresh loader, written as its documentation says. Not a matter of speed: counts only.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import streamline as sl
from bench import report
from bench.suite import peer

BATCH = 10
SAMPLES, SMOKE_SAMPLES = 20_000, 2_000
STOPS = (0.17, 0.43, 0.71)
"""After which part of all batches a run is stopped."""

WINDOW = 512
SLOW_EVERY, SLOW_S = 100, 0.002
HEADING = """\
## How many samples does a resume lose or repeat?

{n:,} samples in batches of 10; each case is stopped three times in mid-epoch, and goes on from the state that it gave
with its last batch, in a fresh loader.
"""

Batches = Iterator[Any]
Save = Callable[[], Any]
Start = Callable[[int, Any], tuple[Batches, Save]]
"""Takes the number of samples and a state or None; returns batches, and what gives the state after the last one."""


@dataclass(frozen=True)
class Case:
    """One row: a library, as its documentation says that it is resumed."""

    name: str
    start: Start
    peers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Count:
    """What became of the samples of one case."""

    lost: int
    repeated: int


def sometimes_slow(x: int) -> int:
    """One call in a hundred waits, as one request in a hundred does."""
    if x % SLOW_EVERY == 0:
        time.sleep(SLOW_S)
    return x


class SlowItems:
    """A map-style dataset."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return sometimes_slow(index)


# streamline


def ours(pipeline: Callable[[int], sl.Pipeline[Any]]) -> Start:
    def start(n: int, state: Any) -> tuple[Batches, Save]:
        resume = None if state is None else sl.Snapshot.from_json(state)
        stream = pipeline(n).open(resume=resume).sync_stream()
        return stream, lambda: stream.snapshot().to_json()

    return start


def index_shuffled(n: int) -> sl.Pipeline[Any]:
    return sl.from_items(range(n)).shuffle(seed=0).shard(2).merge().batch(BATCH)


def window_shuffled(n: int) -> sl.Pipeline[Any]:
    return sl.from_iterable(lambda: iter(range(n))).shuffle(window=WINDOW).batch(BATCH)


def as_completed(n: int) -> sl.Pipeline[Any]:
    pipe = sl.from_items(range(n)).shard(2).map(sometimes_slow, executor="thread", concurrency=4, ordered=False)
    return pipe.merge("best_effort").batch(BATCH)


# Peers


def torch_data_loader(n: int, state: Any) -> tuple[Batches, Save]:
    """It has no state: what one has is to begin anew."""
    data = peer("torch.utils.data")
    generator = peer("torch").Generator().manual_seed(0)
    return iter(data.DataLoader(range(n), BATCH, shuffle=True, num_workers=2, generator=generator)), lambda: "none"


def stateful(dataset: Callable[[int], Any], **options: Any) -> Start:
    def start(n: int, state: Any) -> tuple[Batches, Save]:
        generator = peer("torch").Generator().manual_seed(0)
        library = peer("torchdata.stateful_dataloader")
        loader = library.StatefulDataLoader(dataset(n), BATCH, num_workers=2, generator=generator, **options)
        if state is not None:
            loader.load_state_dict(state)
        return iter(loader), loader.state_dict

    return start


def nodes(**options: Any) -> Start:
    def start(n: int, state: Any) -> tuple[Batches, Save]:
        library, generator = peer("torchdata.nodes"), peer("torch").Generator().manual_seed(0)
        sampler = peer("torch.utils.data").RandomSampler(range(n), generator=generator)
        node = library.ParallelMapper(library.SamplerWrapper(sampler), sometimes_slow, num_workers=4, **options)
        loader = library.Loader(library.Prefetcher(library.Batcher(node, BATCH), prefetch_factor=8))
        if state is not None:
            loader.load_state_dict(state)
        return iter(loader), loader.state_dict

    return start


def _grain(dataset: Any, state: Any) -> tuple[Batches, Save]:
    iterator = iter(dataset)
    if state is not None:
        iterator.set_state(state)
    return iterator, iterator.get_state


def grain_indexed(n: int, state: Any) -> tuple[Batches, Save]:
    return _grain(peer("grain").MapDataset.source(range(n)).shuffle(seed=0).batch(BATCH).to_iter_dataset(), state)


def grain_window(n: int, state: Any) -> tuple[Batches, Save]:
    library = peer("grain")
    stream = library.MapDataset.source(range(n)).to_iter_dataset()
    return _grain(library.experimental.WindowShuffleIterDataset(stream, window_size=WINDOW, seed=0).batch(BATCH), state)


def hugging_face(n: int, state: Any) -> tuple[Batches, Save]:
    library = peer("datasets")
    stream = library.IterableDataset.from_generator(_rows, gen_kwargs={"n": n})
    dataset = stream.shuffle(seed=0, buffer_size=WINDOW).batch(BATCH)
    if state is not None:
        dataset.load_state_dict(state)
    return (batch["x"] for batch in dataset), dataset.state_dict


def _rows(n: int) -> Iterator[dict[str, int]]:
    yield from ({"x": x} for x in range(n))


TABLES: dict[str, tuple[Case, ...]] = {
    "a whole index, shuffled": (
        Case("streamline, 2 shards", ours(index_shuffled)),
        Case("torch DataLoader, 2 workers (it has no state)", torch_data_loader, ("torch",)),
        Case("torchdata StatefulDataLoader, 2 workers", stateful(range, shuffle=True), ("torch", "torchdata")),
        Case("torchdata.nodes, 4 threads", nodes(), ("torch", "torchdata")),
        Case("grain", grain_indexed, ("grain",)),
    ),
    f"a stream, shuffled in a window of {WINDOW}": (
        Case("streamline", ours(window_shuffled)),
        Case("grain WindowShuffleIterDataset", grain_window, ("grain",)),
        Case("Hugging Face IterableDataset", hugging_face, ("datasets",)),
    ),
    "results as they are completed, one call in a hundred slow": (
        Case("streamline, 2 shards, 4 threads each, best-effort merge", ours(as_completed)),
        Case(
            "torchdata StatefulDataLoader(in_order=False), 2 workers",
            stateful(SlowItems, shuffle=True, in_order=False),
            ("torch", "torchdata"),
        ),
        Case(
            "torchdata.nodes ParallelMapper(in_order=False), 4 threads", nodes(in_order=False), ("torch", "torchdata")
        ),
    ),
}


def count(case: Case, n: int) -> Count:
    """Run a case to its end, with three stops on the way, and compare what came with what there is."""
    seen: Counter[int] = Counter()
    state: Any = None
    total = 0
    for stop in [*(int(part * n / BATCH) for part in STOPS), None]:
        batches, save = case.start(n, state)
        for batch in batches:
            seen.update(int(x) for x in batch)
            total += 1
            if total == stop:
                state = save()
                break
        close = getattr(batches, "close", None)
        if close is not None:
            close()
        del batches, save
    return Count(lost=n - len(seen), repeated=sum(seen.values()) - len(seen))


def table(title: str, cases: tuple[Case, ...], n: int) -> tuple[str, bool]:
    """Return a table, and whether our own row is without a fault."""
    lines = [f"### {title[0].upper()}{title[1:]}\n", "| | lost | repeated |", "|---|---:|---:|"]
    sound = True
    for case in cases:
        missing = next((name for name in case.peers if importlib.util.find_spec(name) is None), None)
        if missing is not None:
            lines.append(f"| {case.name} | not measured | {missing} is not installed |")
            continue
        found = count(case, n)
        sound = sound and (bool(case.peers) or found == Count(0, 0))
        lines.append(f"| {case.name} | {found.lost:,} | {found.repeated:,} |")
    return "\n".join(lines) + "\n", sound


def run(smoke: bool) -> tuple[str, bool]:
    """Return the tables as Markdown, and whether our own rows are without a fault; a smoke test leaves peers out."""
    n = SMOKE_SAMPLES if smoke else SAMPLES
    parts = [HEADING.format(n=n)]
    sound = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peers' own: what they count is what matters here
        logging.disable(logging.WARNING)
        for title, cases in TABLES.items():
            text, good = table(title, tuple(case for case in cases if not (smoke and case.peers)), n)
            parts.append(text)
            sound = sound and good
        logging.disable(logging.NOTSET)
    return "\n".join(parts), sound


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="fewer samples, and no peers")
    print(report.where(use_uvloop=True), report.versions(), sep="\n")
    text, sound = run(parser.parse_args().smoke)
    print(text)
    sys.exit(not sound)


if __name__ == "__main__":
    main()
