"""What a host process takes over from its parent: environment, paths, directory, log levels."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Hidden: a context on a GPU costs half a gigabyte, and loading data needs none."""

LIBRARIES = ("OMP_NUM", "OPENBLAS_NUM", "MKL_NUM", "BLIS_NUM", "NUMEXPR_NUM", "VECLIB_MAXIMUM")

THREADS = tuple(f"{library}_THREADS" for library in LIBRARIES)
"""Set to 1: there are as many processes as cores."""

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
"""glibc's thresholds: by default each array of 128 KiB or more is returned to the system, and the next one faults its
pages in again: batches of 3 MiB took 1.7 times the CPU."""


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of a host process, with the user's changes."""
    defaults = {**dict.fromkeys(GPUS, ""), **dict.fromkeys(THREADS, "1")}
    return {**ALLOCATOR, **os.environ, **defaults, **env}


class ProcessEnv(NamedTuple):
    """Taken over again with every run.

    Attributes:
      path: `sys.path`.
      directory: the working directory; None: it was deleted.
      disabled: the argument of `logging.disable`.
      levels: of the loggers that have one; "" is the root.
    """

    path: list[str]
    directory: str | None
    disabled: int
    levels: dict[str, int]

    def adopt(self) -> None:
        """Apply them to this process."""
        sys.path[:] = self.path
        if self.directory is not None:
            with contextlib.suppress(OSError):  # then what needs it says so
                os.chdir(self.directory)
        logging.disable(self.disabled)
        for name, level in self.levels.items():
            logging.getLogger(name).setLevel(level)


def process_env() -> ProcessEnv:
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
