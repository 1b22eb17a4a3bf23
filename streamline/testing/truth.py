"""What is to be delivered, and how what was delivered is compared with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

__all__ = ["Truth", "atoms", "same"]


class Truth:
    """What is to be delivered.

    Args:
      items: by an uninterrupted run.
      choosing: their order is open: results are compared as multisets of `atoms`.
      workers: what each worker delivers, in its order; None where the stages behind it don't let that be seen.
    """

    def __init__(self, items: Sequence[Any], choosing: bool, workers: Sequence[Sequence[Any]] | None = None) -> None:
        self.items = list(items)
        self.choosing = choosing
        self._counter = Counter(atoms(self.items))
        self._orders = None if workers is None else [[repr(item) for item in worker] for worker in workers]

    def insist_whole(self, law: str, where: str, before: Sequence[Any], rest: Sequence[Any]) -> None:
        """Insist that `before` and `rest` are together all that is to be delivered."""
        if not self.choosing:
            expected = self.items[len(before) :]
            if not same(list(rest), expected):
                raise AssertionError(f"{law}: {where}: expected {expected}, got {list(rest)}")
            return
        whole = [*before, *rest]
        found = Counter(atoms(whole))
        lost, surplus = self._counter - found, found - self._counter
        if lost or surplus:
            raise AssertionError(
                f"{law}: {where}: expected the same multiset, lost {_shown(lost)}, got too often {_shown(surplus)}; "
                f"delivered before {list(before)}, then {list(rest)}"
            )
        self._insist_orders(law, where, whole)

    def insist_part(self, law: str, where: str, before: Sequence[Any]) -> None:
        """Insist that `before` may be what is delivered first."""
        expected = self.items[: len(before)]
        if not self.choosing and not same(list(before), expected):
            raise AssertionError(f"{law}: {where}: expected {expected} first, got {list(before)}")
        if surplus := Counter(atoms(before)) - self._counter:
            raise AssertionError(f"{law}: {where}: got too often {_shown(surplus)} (delivered {list(before)})")

    def _insist_orders(self, law: str, where: str, whole: Sequence[Any]) -> None:
        if self._orders is None:
            return
        owner = {item: worker for worker, order in enumerate(self._orders) for item in order}
        if len(owner) < sum(map(len, self._orders)):
            return  # equal items: there is no telling whose they are
        for worker, order in enumerate(self._orders):
            found = [shown for item in whole if owner[shown := repr(item)] == worker]
            if found != order:
                raise AssertionError(f"{law}: {where}: expected worker {worker} in its order {order}, got {found}")


def atoms(items: Any) -> Iterator[str]:
    """Yield the `repr` of whatever is in lists, tuples and arrays, however deep: batches of a choosing flow differ."""
    if isinstance(items, list | tuple):
        for item in items:
            yield from atoms(item)
    elif hasattr(items, "tolist"):
        yield from atoms(items.tolist())
    else:
        yield repr(items)


def same(ours: Any, theirs: Any) -> bool:
    """Whether two results are equal, part by part; arrays and NaN included."""
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if hasattr(ours, "tolist") and hasattr(theirs, "tolist"):
        return same(ours.tolist(), theirs.tolist())
    return repr(ours) == repr(theirs)


def _shown(counter: Iterable[str]) -> str:
    elements = counter.elements() if isinstance(counter, Counter) else counter
    return "[" + ", ".join(sorted(elements)) + "]"
