"""What a run needs of the machine of a worker: modules to import, and files under the paths that the trainer listed.

Looked for before the first item, so that a machine which lacks something is named at the start, and not hours later.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any

from streamline.backends.hosts.plan_shipping import load
from streamline.errors import HostError
from streamline.io.storage.base import FoundObject

MOST_FILES = 100
"""Files that are looked for at the most, one in each folder first: a look takes a millisecond on a file server."""


def load_here(payload: int) -> Any:
    """Return what `plan_shipping.load` returns.

    Raises:
      HostError: this machine lacks a module or a file that the run needs, or has another version of it.
    """
    try:
        spec = load(payload)
    except (ImportError, AttributeError) as error:  # the latter: an older module, without the function
        raise HostError(
            _unlike(f"can't load the pipeline's functions: {type(error).__name__}: {error}", CODE)
        ) from error
    except FileNotFoundError as error:  # of a memory map
        raise HostError(_unlike(f"has no file {error.filename}, which the pipeline maps", FILES)) from error
    for found in _looked_for(spec.plan.source.local_files):
        if (lack := _lack(found)) is not None:
            raise HostError(_unlike(lack, FILES))
    return spec


CODE = (
    "Install there what is installed here, in the same versions; or put the module's folder on a file system that both "
    "machines have (of this process's sys.path, the folders that are there are used); or send it by value: "
    "`cloudpickle.register_pickle_by_value(module)` before the pipeline is opened; or, on a Ray cluster, let Ray bring "
    "it: ray.init(runtime_env={'py_modules': [...]})"
)

FILES = (
    "Workers read files under the same paths as this process: put them on a file system that all machines have, or "
    "into an object store"
)


def _unlike(lack: str, advice: str) -> str:
    return f"the machine {socket.gethostname()} {lack}. {advice}"


def _looked_for(files: Iterable[FoundObject]) -> Iterator[FoundObject]:
    """Yield the first file of each folder, then others, up to `MOST_FILES`."""
    firsts: dict[PurePath, FoundObject] = {}
    others: list[FoundObject] = []
    for found in files:
        if firsts.setdefault(PurePath(found.path).parent, found) is not found and len(others) < MOST_FILES:
            others.append(found)
    yield from [*firsts.values(), *others][:MOST_FILES]


def _lack(found: FoundObject) -> str | None:
    """Return how this machine's file is unlike the listed one; one that has grown may be."""
    try:
        size = os.stat(found.path).st_size  # noqa: PTH116 - a string, as it is opened
    except FileNotFoundError:
        return f"has no file {found.path}"
    except OSError as error:
        return f"can't read {found.path}: {error.strerror}"
    if found.size is not None and size < found.size:
        return f"has another file {found.path}: it has {size:,} bytes there, and {found.size:,} here"
    return None
