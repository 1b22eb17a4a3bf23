"""What ends the host process in which it runs, at one item. Imported by many: NumPy would be half of their start."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
from collections.abc import AsyncIterator, Iterator
from random import SystemRandom
from typing import TYPE_CHECKING

import anyio

import streamline as sl

if TYPE_CHECKING:
    import numpy as np

LENGTH, POISON = 24, 13
"""Items, of two shards in one process: the poison is item 7 of shard 1, counted from 1."""


def dies(item: int) -> int:
    if item == POISON:
        os._exit(3)
    return item


def crashes(item: int) -> int:
    if item == POISON:
        ctypes.string_at(0)
    return item


def hangs_up(item: int) -> int:
    if item == POISON:
        os.closerange(3, 256)
    return item


def dies_at_its_second_try(item: int) -> int:
    """Fails as a busy server does: not twice at the same items."""
    if (os.getpid(), item) not in _tried and (item == POISON or _dice.random() < 0.5):
        _tried.add((os.getpid(), item))
        raise ConnectionError("busy")
    return dies(item)


async def dies_at_its_second_try_later(item: int) -> int:
    await anyio.lowlevel.checkpoint()
    return dies_at_its_second_try(item)


_dice = SystemRandom()
_tried: set[tuple[int, int]] = set()


async def dies_later(item: int) -> int:
    await anyio.lowlevel.checkpoint()
    return dies(item)


def dies_unfolding(item: int) -> Iterator[int]:
    yield item
    yield dies(item)


def dies_drawing(item: int, rng: np.random.Generator) -> int:
    return dies(item)


def dies_collating(items: list[int]) -> list[int]:
    return [dies(item) for item in items]


@sl.stage(stateless=True)
async def stage(items: AsyncIterator[int]) -> AsyncIterator[int]:
    async for item in items:
        yield dies(item)


class Dangerous:
    """A dataset of which one item can't be read."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return dies(index)


def greedy(item: int) -> int:
    if item == POISON:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, hard))
        try:
            return len(bytearray(1 << 32))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return item


def kills_its_loop(item: int) -> int:
    if item == POISON:
        asyncio.get_running_loop().stop()
    return item
