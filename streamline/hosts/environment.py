"""The environment of a host process: what is other than in its parent's."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["environment"]

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
