"""The random generators that a whole process shares: those of `random`, of NumPy and of torch.

A function that draws from them gets numbers that depend on all earlier draws: another run, or a resume, has others. For
libraries that take no generator, they can be seeded for each call, and restored after it.
"""

from __future__ import annotations

import random
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from streamline.core.lazy_numpy import np
from streamline.errors import PlanError, printable

if TYPE_CHECKING:
    from streamline.core.flow import Site

CHECKED_LISTS = 8
"""Lists of a map that are checked: a function may draw for some items only."""


def torch_generator(words: Sequence[int]) -> Any:
    """Return a torch generator, seeded by the first of an item's random words. Imports torch."""
    generator = import_module("torch").Generator()
    generator.manual_seed(words[0])
    return generator


@contextmanager
def set_globally(words: Sequence[int]) -> Iterator[None]:
    """Seed the process's generators by three random words of an item, and restore them after the block."""
    torch = import_module("torch") if find_spec("torch") is not None else None  # else the call may import, and draw
    before = random.getstate(), np.random.get_state(), None if torch is None else torch.get_rng_state()
    random.seed(words[0])
    np.random.seed(words[1] % 2**32)
    if torch is not None:
        torch.default_generator.manual_seed(words[2])
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        if torch is not None:
            torch.set_rng_state(before[2])


def check_alone(stage: str, site: Site) -> None:
    """Raise where other code may draw from the process's generators during a call."""
    where = site.tasks.session.where
    if where.startswith("process") or not threading.current_thread().name.startswith("streamline"):
        return
    raise PlanError(
        f"{stage} sets the random generators of the whole process for each call (seed_globals=True), and runs in a "
        "thread beside others that may draw from them, your loop's: put it before .merge and use "
        "open(backend=sl.Processes(n)); or `async with`, or .debug(). A function that takes rng= or generator= needs "
        "none of that"
    )


class Look:
    """Warns if a map's function draws from the generators of its process, a worker's, which differ in each run."""

    def __init__(self, stage: str, site: Site) -> None:
        self._stage = stage
        self.left = CHECKED_LISTS if site.shard == 0 and site.tasks.session.where.startswith("process") else 0
        self._before: Any = None

    def begin(self) -> None:
        self._before = _states()

    def end(self) -> None:
        """Warn, once, if the calls since `begin` drew."""
        self.left -= 1
        drawn = [name for name, state in _states().items() if self._before.get(name, state) != state]
        if drawn:
            self.left = 0
            warnings.warn(
                f"{printable(self._stage)} draws from {' and '.join(drawn)}, which all of its process shares: its "
                "random numbers are others in each run and after a resume. .map(fn, seed=0) gives fn a generator of "
                "its own, rng= or generator=; for a library that takes none, .map(fn, seed=0, seed_globals=True)",
                RuntimeWarning,
                stacklevel=2,
            )


def _states() -> dict[str, Any]:
    found: dict[str, Any] = {"random": hash(random.getstate())}
    if "numpy" in sys.modules:  # it and torch are checked once something has imported them
        legacy: Any = np.random.get_state()
        found["numpy.random"] = legacy[1].tobytes(), legacy[2:]
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "get_rng_state"):
        found["torch"] = bytes(torch.get_rng_state().numpy())
    return found
