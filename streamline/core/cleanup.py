"""What is done when an object is gone, at the latest, whatever Ctrl-C strikes.

Python drops an exception that comes out of a finalizer, a `KeyboardInterrupt` too, and with it the rest of the work. So
an object has two finalizers: what the first one was cut off in, the second one does. Work that is called by hand is
taken off them after it is done, not before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ParamSpec
from weakref import finalize

P = ParamSpec("P")


class Cleanup:
    """Work for the moment when `thing` is gone; idempotent, as it starts anew if it was cut off.

    Args:
      work: holds no reference to `thing`; neither do its arguments. Also done at the interpreter's exit.
    """

    def __init__(self, thing: object, work: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> None:
        self._work = partial(work, *args, **kwargs)
        self._finalizers = [finalize(thing, self._work) for _ in range(2)]

    def not_at_exit(self) -> Cleanup:
        """Skip it at the interpreter's exit; return this."""
        for one in self._finalizers:
            one.atexit = False
        return self

    def __call__(self) -> None:
        """Do it now, unless it is done."""
        if self._finalizers[0].alive:
            self._work()
            self.detach()

    def detach(self) -> None:
        """Never do it."""
        for one in reversed(self._finalizers):
            one.detach()
