"""What the oracle says of stages and sources that take more than a few lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from streamline.core.flow import Site
from streamline.sources.mix import Mix
from streamline.sources.sampler import Numbers
from streamline.transforms.bucket import BucketByLength
from streamline.transforms.pack import Pack

__all__ = ["bucketed", "mixed", "packed"]

NOTHING: Any = object()


def bucketed(stage: BucketByLength[Any, Any], items: Iterator[Any]) -> Iterator[Any]:
    """Yield batches out of buckets, looked for one by one."""
    buckets: list[list[Any]] = [[] for _ in stage.batch_size]
    for item in items:
        length = stage.length(item)
        number = sum(length > boundary for boundary in stage.boundaries)
        buckets[number].append(item)
        if len(buckets[number]) == stage.batch_size[number]:
            yield stage.collate(buckets[number])
            buckets[number] = []
    if not stage.drop_remainder:
        yield from (stage.collate(bucket) for bucket in buckets if bucket)


def packed(stage: Pack, items: Iterator[Any]) -> Iterator[Any]:
    """Yield blocks, token by token."""
    block: list[tuple[int, int, int]] = []  # token, segment, position
    dtype = np.dtype(np.int64)
    for item in items:
        document = np.asarray(item if stage.key is None else item[stage.key])
        dtype = document.dtype if len(document) else dtype
        segment, position = block[-1][1] + 1 if block else 1, 0
        for token in [*document.tolist(), *([stage.eos] if stage.eos is not None and len(document) else [])]:
            block.append((token, segment, position))
            position += 1
            if len(block) == stage.length:
                yield _block(block, dtype)
                block, segment, position = [], 1, 0
    if block and not stage.drop_remainder:
        yield _block(block + [(0, 0, 0)] * (stage.length - len(block)), dtype)


def _block(block: list[tuple[int, int, int]], dtype: np.dtype[Any]) -> dict[str, Any]:
    tokens, segments, positions = zip(*block, strict=True)
    return {
        "tokens": np.array(tokens, dtype),
        "segment_ids": np.array(segments, np.int32),
        "positions": np.array(positions, np.int32),
    }


def mixed(mix: Mix[Any], parts: dict[str, Iterator[Any]], site: Site) -> Iterator[Any]:
    """Yield one shard of a mixture, draw by draw."""
    draws, numbers, left, n = mix.draws, Numbers(site), dict(parts), 0
    while left:
        served = n * site.num_shards + site.shard
        begun = [dict(weights) for start, weights in draws.schedule if start <= served]
        later = [dict(weights) for start, weights in draws.schedule if start > served]
        found = [{name: weights[name] for name in sorted(left) if weights[name]} for weights in (begun[-1], *later)]
        weights = next((weights for weights in found if weights), None)
        if weights is None:
            return
        number = numbers.of(draws.seed, n, 1)[0] * sum(weights.values())
        picked = list(weights)[-1]
        for name, weight in weights.items():
            if number < weight:
                picked = name
                break
            number -= weight
        item = next(left[picked], NOTHING)
        if item is NOTHING:
            del left[picked]
            if mix.stop == "first":
                return
        else:
            n += 1
            yield item
