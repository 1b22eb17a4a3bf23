"""`.scan`: a fold that gives an output for each item. State: what the function carries on to the next item."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import msgspec

from streamline.core.flow import Chunk, Lists, StageRun
from streamline.core.options import check_function, is_async, type_and_repr
from streamline.core.pace import map_in_slices
from streamline.core.replay import Adapter
from streamline.core.state import Json, Over, State, States
from streamline.core.user_function import json_copy
from streamline.errors import PlanError, PlanTypeError
from streamline.transforms.base import Stage

In = TypeVar("In")
Out = TypeVar("Out")

PLAIN = (bool, int, str, type(None))


class ScanPart(msgspec.Struct, frozen=True):
    """The stage's part of a saved state."""

    carry: Any


@dataclass(frozen=True, kw_only=True)
class Scan(Stage[In, Out]):
    """Gives the outputs of `fn(carry, item) -> (carry, output)`, of which the first call is given `init`."""

    kind: ClassVar[str] = "scan"
    accepted_changes: ClassVar[Mapping[str, str]] = {
        "fn": "the new function is given what the old one carried on",
        "init": "what is carried on stays as it is; passes from here on begin with the new value",
        "added": "it begins here, with init",
        "removed": "the items from here on come as they are",
    }
    order_preserving: ClassVar[frozenset[str]] = frozenset(accepted_changes)
    state_type: ClassVar[Any] = ScanPart
    one_to_one = True

    fn: Callable[[Any, In], tuple[Any, Out]]
    init: Json

    @property
    def initial_state(self) -> ScanPart:
        return ScanPart(json_copy(self.init, self._whose))

    async def lists(self, run: StageRun[In]) -> Lists[Out]:
        fold = _Fold(self.fn, json_copy(run.own.carry, self._whose), self._whose)
        way = "await it in a .map before; a scan takes each item after the one before"
        async with aclosing(map_in_slices(run, fold, str(self), way)) as parts:
            async for chunk, made in parts:
                carries = [carry for carry, _ in made]
                after = None if chunk.progress is None else Over(self.name, ScanPart(fold.saved), chunk.progress)
                part = [Chunk([out for _, out in made], _CarriedStates(self.name, carries, chunk.states), after)]
                chunk.items = ()
                del chunk, made, carries
                yield part.pop()

    @property
    def _whose(self) -> str:
        return f"what {self} carries on"


class _Fold(Adapter):
    """Calls `fn` on what it carries and an item; gives a copy of what it carries then, and the output."""

    def __init__(self, fn: Callable[[Any, Any], tuple[Any, Any]], carry: Json, whose: str) -> None:
        self.fn = self.__wrapped__ = fn
        self.saved = carry
        self._whose = whose

    def __call__(self, item: Any) -> tuple[Json, Any]:
        # A function that fails may have changed what it was given, and the next item needs it as it was.
        found: Any = self.fn(_copy(self.saved, self._whose), item)
        if not isinstance(found, tuple) or len(found) != 2:
            raise PlanTypeError(
                f".scan(fn) returns what it carries on and an output, (carry, output), got {type_and_repr(found)}"
            )
        self.saved = _copy(found[0], self._whose)
        return self.saved, found[1]

    def around(self, fn: Callable[..., Any]) -> _Fold:
        return _Fold(fn, self.saved, self._whose)


def _copy(carry: Json, whose: str) -> Json:
    plain = type(carry) in PLAIN or (type(carry) is float and math.isfinite(carry))
    return carry if plain else json_copy(carry, whose)


class _CarriedStates:
    __slots__ = ("_carries", "_name", "_states")

    def __init__(self, name: str, carries: Sequence[Json], states: States) -> None:
        self._name, self._carries, self._states = name, carries, states

    def __getitem__(self, index: int, /) -> State:
        return Over(self._name, ScanPart(self._carries[index]), self._states[index])


def check_scan(fn: Callable[..., Any], init: object) -> None:
    """Check the options of `.scan`; see `Pipeline`."""
    check_function(".scan(fn)", fn)
    if is_async(fn):
        raise PlanError(".scan takes a sync function: await what it needs in a .map before")
    json_copy(init, ".scan(init)")
