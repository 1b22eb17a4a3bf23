"""NumPy, imported when something of it is first used: without it a process starts in two thirds of the CPU time.

`np` is NumPy, and imports it. `loaded_np` never does: it is for asking whether something is an array, of which there
are none in a process that hasn't imported NumPy. Where that is so, asking takes half a microsecond: what asks for each
item or list looks into `sys.modules` first. All modules of the package take both from here.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as loaded_np
    import numpy as np
else:

    class _Absent:
        """Stands for every class of a NumPy that isn't imported: it has no instances."""

    def _imported(name: str) -> Any:
        found = getattr(import_module("numpy"), name)
        setattr(np, name, found)  # from now on it is found as in any module
        return found

    def _loaded(name: str) -> Any:
        found = getattr(sys.modules.get("numpy"), name, _Absent)  # absent, too, while another thread imports it
        if found is not _Absent:
            setattr(loaded_np, name, found)
        return found

    np, loaded_np = ModuleType("numpy"), ModuleType("numpy")
    np.__getattr__, loaded_np.__getattr__ = _imported, _loaded


def has_more(kind: type) -> bool:
    """Whether arrays of a class have more than their values, a mask or a unit, which a plain array would lose."""
    return issubclass(kind, loaded_np.ndarray) and kind not in (np.ndarray, np.memmap)


__all__ = ["has_more", "loaded_np", "np"]
