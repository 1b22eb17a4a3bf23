"""What is counted of one channel while it is in use."""

from __future__ import annotations

__all__ = ["ChannelMeter"]


class ChannelMeter:
    """One channel: who fills it, and how full it was."""

    __slots__ = ("capacity", "depth", "items", "name", "peak", "shard")

    def __init__(self, name: str, shard: int, capacity: int) -> None:
        self.name = name
        self.shard = shard
        self.capacity = capacity
        self.items = 0
        self.depth = 0
        self.peak = 0
