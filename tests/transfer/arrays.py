"""Arrays and containers that a transfer meets."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Sample:
    image: Any
    label: str
    weight: Any = field(init=False)  # which nobody sets


def nested() -> dict[str, Any]:
    return {
        "list": [np.arange(3, dtype=np.int16), "name", None],
        "tuple": (np.array([1.5], np.float32), 3),
        "pair": Pair(np.array(True), {"deep": np.zeros((2, 0))}),
        "sample": Sample(np.arange(6, dtype=np.uint8).reshape(2, 3), "a"),
        "ordered": OrderedDict(z=np.array([65535], np.uint16), a=b"bytes"),
        "frozen": MappingProxyType({3: np.array([7], np.int8)}),
        "names": {("a", 1): ["b", None]},
    }


def odd_arrays() -> list[Any]:
    read_only = np.arange(4)
    read_only.flags.writeable = False
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    return [
        read_only,
        table.T,
        table[::-1, ::2],
        table[:1][::-1],  # contiguous all the same, as is whatever has a row or none
        np.zeros((0, 4))[::-1],
        np.ones(1, [("a", "i4"), ("x", "f8")])["x"],
        np.asfortranarray(table),
        np.broadcast_to(np.int8(3), (2, 2)),
        np.arange(4, dtype=">i4"),
        np.array(2.5),
        np.zeros(0, np.int64),
        np.array([1, 2], np.float16),
        np.array([1 + 2j], np.complex64),
    ]
