"""How a host process is started: a new interpreter, which inherits its descriptors and nothing else.

It is not a fork (this process has threads, and locks that they hold), and not one of `multiprocessing`'s, which imports
the user's main module again: scripts without a guard and notebooks would not work.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from streamline.hosts.environment import environment

__all__ = ["start"]


def start(number: int, env: Mapping[str, str], attend: str, fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Start the interpreter of host `number`, which inherits `fds` and nothing else."""
    path = [entry for entry in sys.path if isinstance(entry, str)]
    arguments = ", ".join(map(repr, (number, attend, *fds)))
    program = (
        f"'streamline process {number}'; import sys; sys.path[:] = {path!r}; "
        f"from streamline.hosts.child import main; main({arguments})"
    )
    with _sigint_blocked():
        return subprocess.Popen(
            [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", program],  # type: ignore[attr-defined]
            stdin=subprocess.DEVNULL,
            env=environment(env),
            pass_fds=fds,
        )


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT in this thread: a child started meanwhile has it blocked from its first instruction on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
