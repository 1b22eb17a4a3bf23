"""The laws, each as it is checked on a subject: what is expected, and how it is compared with what was delivered.

When a law is broken, an `AssertionError` begins with its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import anyio

from streamline.core.cursor import FlowReader
from streamline.core.flow import Flow
from streamline.core.tasks import Tasks
from streamline.testing.scripted import Script
from streamline.testing.subjects import Read, Subject, opened, read, settle


async def resume_law(tasks: Tasks, subject: Subject, truth: ExpectedItems, generations: int, dice: Random) -> None:
    """Order, then Resume: at every state that an uninterrupted run has, and several times in a row."""
    whole = await _read(tasks, subject, None, dice)
    truth.insist_whole("Order", f"an uninterrupted run of {subject}", [], _sound(whole, "Order"))
    for text, k in {text: k for k, _, text in whole.states}.items():
        rest = await _read(tasks, subject, text, dice, noting=False)
        where = f"from the state after item {k}, {text}, of {subject}"
        truth.insist_whole("Resume", where, whole.items[:k], _sound(rest, f"Resume: {where}"))
        truth.resumed.add((text, repr(whole.items[:k])))
    for _ in range(3):
        await _resume_in_a_row(tasks, subject, truth, generations, dice)


async def _resume_in_a_row(
    tasks: Tasks, subject: Subject, truth: ExpectedItems, generations: int, dice: Random
) -> None:
    """Resume again and again, from any state of the generation before: also those that it had before its first item.

    Every other generation is of what may have changed meanwhile.
    """
    items: list[Any] = []
    text: str | None = None
    points: list[int] = []
    before = now = subject
    for _ in range(generations):
        limit = dice.randrange(0, 1 + max(1, 2 * len(truth.items) // (generations + 1)))
        before, now = now, subject.changed(dice) if dice.random() < 0.5 else subject
        part = await _read(tasks, now, text, dice, limit, same=now is before)
        _sound(part, _Wording("Resume: in a row, at items {}, then from {}, of {}", (points, text, now)))
        k, _, text = dice.choice(part.states)
        items += part.items[:k]
        points.append(len(items))
    now = subject.changed(dice)
    rest = await _read(tasks, now, text, dice, same=False, noting=False)
    where = _Wording("in a row, at items {}, then from {}, of {}, begun as {}", (points, text, now, subject))
    truth.insist_whole("Resume", where, items, _sound(rest, _Wording("Resume: {}", (where,))))


async def quiescence_law(tasks: Tasks, subject: Subject, dice: Random) -> None:
    """Between two pulls the state stands still; and a state that was handed out stays what it was."""
    async with opened(tasks, subject, None) as flow:
        found = Read(flow.state, subject.write(flow.state))
        while True:
            part = await read(flow, subject.write, dice, limit=1)
            found.states += [(len(found.items) + k, state, text) for k, state, text in part.states]
            found.items += part.items
            before = subject.write(flow.state)
            await settle()
            _insist_same(
                before, subject.write(flow.state), f"after item {len(found.items)} of {subject}, while no pull was"
            )
            if not part.items:
                break
    for k, state, text in found.states:
        _insist_same(text, subject.write(state), f"after item {k} of {subject}, read again later")


async def close_law(tasks: Tasks, subject: Subject, dice: Random, script: Script | None) -> None:
    """`aclose`: what was opened is closed, at once, also when asked twice, after any number of items."""
    running = {task.id for task in anyio.get_running_tasks()}
    for limit in (0, 1, 2, 5, None):
        where = f"closed after {'the end' if limit is None else f'{limit} items'} of {subject}"
        async with opened(tasks, subject, None) as flow:
            serving = {task.id for task in anyio.get_running_tasks()} - running  # one: the owner of the others
            await read(flow, subject.write, dice, limit)
            await flow.aclose()
            if script is not None and script.record.opened != script.record.closed:
                begun, closed = script.record.opened, script.record.closed
                raise AssertionError(
                    f"Close: {where}: expected all {begun} sources that were opened to be closed, got {closed}"
                )
            await flow.aclose()
            if not subject.hosted:  # hosts stay until the run ends
                await _insist_none(running | serving, where)
        await _insist_none(running, where)


async def failure_law(
    tasks: Tasks, broken: Subject, mended: Subject, error: BaseException, truth: ExpectedItems, least: int, dice: Random
) -> None:
    """What comes before a failure, then the failure, for ever; a resume after a fix goes on there.

    And at each state before, unless Resume has read on from the same one after the same items.

    Args:
      broken: fails with `error`.
      mended: the same without the failure, for which `truth` holds.
      least: items that come before the failure at least.
    """
    async with opened(tasks, broken, None) as flow:
        found = await read(flow, broken.write, dice)
        where = f"after item {len(found.items)} of {broken}"
        failure = found.failure
        if failure is None:
            raise AssertionError(f"Failure: {where}: expected {error!r}, got the end")
        if failure is not error and not (broken.copies and _alike(failure, error)):
            raise AssertionError(f"Failure: {where}: expected {error!r} itself, got {failure!r}") from failure
        for _ in range(2):
            await _insist_fails(flow, failure, where)
    truth.insist_part("Failure", where, found.items)
    if len(found.items) < least:
        raise AssertionError(f"Failure: {where}: expected the {least} items before it, got {found.items}")
    for text, k in {text: k for k, _, text in found.states}.items():
        begun = (text, repr(found.items[:k]))
        if begun in truth.resumed and text != found.last:
            continue
        rest = await _read(tasks, mended, text, dice, noting=False)
        after = f"mended, from the state after item {k}, {text}, of {mended}"
        truth.insist_whole("Failure", after, found.items[:k], _sound(rest, f"Failure: {after}"))
        truth.resumed.add(begun)


async def bound_law(
    tasks: Tasks, subject: Subject, script: Script, allowed: Callable[[int], int], dice: Random
) -> None:
    """A consumer that stops, stops the source."""
    for limit in (1, 7):
        before = script.record.asked
        async with opened(tasks, subject, None) as flow:
            await read(flow, subject.write, dice, limit)
            await anyio.wait_all_tasks_blocked()
            asked = script.record.asked - before
        if asked > allowed(limit):
            raise AssertionError(
                f"Bound: the consumer stopped after item {limit} of {subject}: expected at most {allowed(limit)} "
                f"items to be asked for, got {asked}"
            )


async def _insist_none(others: set[int], where: str) -> None:
    """Insist that no tasks run but those."""
    await settle()
    if left := [task.name for task in anyio.get_running_tasks() if task.id not in others]:
        raise AssertionError(f"Close: {where}: expected no task to be left, got {left}")


def _alike(ours: BaseException, theirs: BaseException) -> bool:
    """Whether one may be the other's copy."""
    return type(ours) is type(theirs) and repr(ours) == repr(theirs)


async def _insist_fails(flow: Flow[Any], error: BaseException, where: str) -> None:
    try:
        item = await anext(flow)
    except StopAsyncIteration:
        raise AssertionError(f"Failure: {where}: expected {error!r} on every further pull, got the end") from None
    except BaseException as failure:
        if failure is not error:
            raise AssertionError(
                f"Failure: {where}: expected {error!r} on every further pull, got {failure!r}"
            ) from failure
    else:
        raise AssertionError(f"Failure: {where}: expected {error!r} on every further pull, got the item {item!r}")


async def _read(
    tasks: Tasks,
    subject: Subject,
    text: str | None,
    dice: Random,
    limit: int | None = None,
    *,
    same: bool = True,
    noting: bool = True,
) -> Read:
    """Read a subject from a state on, and insist that it begins there: at the `same` text, if it has written that."""
    async with opened(tasks, subject, text) as flow:
        try:
            found = await read(dice.choice((flow, FlowReader(flow))), subject.write, dice, limit, noting=noting)
        except TimeoutError:
            begin = "the beginning" if text is None else f"the state {text}"
            raise AssertionError(f"Liveness: nothing more came from {subject}, opened at {begin}") from None
    if same and text is not None and found.states[0][2] != text:
        raise AssertionError(f"Resume: {subject} was opened at {text}, and says that it stands at {found.states[0][2]}")
    return found


@dataclass(frozen=True)
class _Wording:
    """Words that are put together when a law is broken: the picture of a pipeline takes as long as a short run."""

    words: str
    parts: tuple[object, ...]

    def __str__(self) -> str:
        return self.words.format(*self.parts)


def _sound(found: Read, what: object) -> list[Any]:
    """Return the items of a reading that must not have failed."""
    if found.failure is not None:
        raise AssertionError(f"{what}: failed after {len(found.items)} items with {found.failure!r}") from found.failure
    return found.items


def _insist_same(before: str, now: str, what: str) -> None:
    if before != now:
        raise AssertionError(f"Quiescence: the state {what} in progress changed: expected {before}, got {now}")


class ExpectedItems:
    """What is to be delivered.

    Args:
      items: by an uninterrupted run.
      choosing: their order is open: results are compared as multisets of `atoms`.
      workers: what each worker delivers, in its order; None where the stages after it don't let that be seen.

    Attributes:
      resumed: (a state's text, the items before it) from which the rest was read, and was right.
    """

    def __init__(self, items: Sequence[Any], choosing: bool, workers: Sequence[Sequence[Any]] | None = None) -> None:
        self.items = list(items)
        self.choosing = choosing
        self.resumed: set[tuple[str, str]] = set()
        self._counter = Counter(atoms(self.items))
        self._orders = None if workers is None else [[repr(item) for item in worker] for worker in workers]

    def insist_whole(self, law: str, where: object, before: Sequence[Any], rest: Sequence[Any]) -> None:
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

    def _insist_orders(self, law: str, where: object, whole: Sequence[Any]) -> None:
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
