"""What a host process takes over from its parent, beside its environment: paths, directory, levels of logging."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import NamedTuple

__all__ = ["Surroundings", "surroundings"]


class Surroundings(NamedTuple):
    """They are taken over anew with every running.

    Attributes:
      path: `sys.path`.
      directory: the working directory; None: it is gone.
      disabled: what `logging.disable` was told.
      levels: of the loggers that have one; "" is the root.
    """

    path: list[str]
    directory: str | None
    disabled: int
    levels: dict[str, int]

    def adopt(self) -> None:
        """Make them this process's own."""
        sys.path[:] = self.path
        if self.directory is not None:
            with contextlib.suppress(OSError):  # then what needs it says so
                os.chdir(self.directory)
        logging.disable(self.disabled)
        for name, level in self.levels.items():
            logging.getLogger(name).setLevel(level)


def surroundings() -> Surroundings:
    """Return this process's."""
    try:
        directory = os.getcwd()  # noqa: PTH109 - a string is what crosses
    except FileNotFoundError:
        directory = None
    known = [(name, logger) for name, logger in list(logging.root.manager.loggerDict.items())]
    levels = {name: logger.level for name, logger in known if isinstance(logger, logging.Logger) and logger.level}
    return Surroundings(
        [entry for entry in sys.path if isinstance(entry, str)],
        directory,
        logging.root.manager.disable,
        {"": logging.root.level, **levels},
    )
