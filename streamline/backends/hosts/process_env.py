"""What a host process takes over from its parent, beside its environment: paths, directory, levels of logging.

The environment of a host process: what is other than in its parent's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["ProcessEnv", "environment", "surroundings"]


GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Empty: a context on a GPU costs half a gigabyte, and none is needed to load data."""


LIBRARIES = ("OMP_NUM", "OPENBLAS_NUM", "MKL_NUM", "BLIS_NUM", "NUMEXPR_NUM", "VECLIB_MAXIMUM")


THREADS = tuple(f"{library}_THREADS" for library in LIBRARIES)
"""1: there are as many processes as there are cores."""


ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
"""glibc's: a worker makes arrays of the same sizes again and again. By default each of 128 KiB or more is given back to
the system, and its pages are faulted in anew: batches of 3 MiB took 1.7 times the CPU."""


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of a host process.

    Args:
      env: what its user has asked for.
    """
    ours = {**dict.fromkeys(GPUS, ""), **dict.fromkeys(THREADS, "1")}
    return {**ALLOCATOR, **os.environ, **ours, **env}


class ProcessEnv(NamedTuple):
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


def surroundings() -> ProcessEnv:
    """Return this process's."""
    try:
        directory = os.getcwd()  # noqa: PTH109 - a string is what crosses
    except FileNotFoundError:
        directory = None
    known = [(name, logger) for name, logger in list(logging.root.manager.loggerDict.items())]
    levels = {name: logger.level for name, logger in known if isinstance(logger, logging.Logger) and logger.level}
    return ProcessEnv(
        [entry for entry in sys.path if isinstance(entry, str)],
        directory,
        logging.root.manager.disable,
        {"": logging.root.level, **levels},
    )
