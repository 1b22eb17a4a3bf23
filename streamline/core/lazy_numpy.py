"""NumPy, imported on first use: without it a process starts in two thirds of the CPU time.

`np` imports NumPy. `loaded_np` doesn't: it is for `isinstance` checks, and before NumPy is imported there are no
arrays. Such a check then takes half a microsecond: code that makes one for each item looks into `sys.modules` first.
All modules of the package import both from here.
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

    def _import_attribute(name: str) -> Any:
        found = getattr(import_module("numpy"), name)
        setattr(np, name, found)
        return found

    def _loaded_attribute(name: str) -> Any:
        found = getattr(sys.modules.get("numpy"), name, _Absent)  # absent, too, while another thread imports it
        if found is not _Absent:
            setattr(loaded_np, name, found)
        return found

    np, loaded_np = ModuleType("numpy"), ModuleType("numpy")
    np.__getattr__, loaded_np.__getattr__ = _import_attribute, _loaded_attribute


def has_more(kind: type) -> bool:
    """Whether arrays of a class have a mask or a unit, say, which a plain array would lose."""
    return issubclass(kind, loaded_np.ndarray) and kind not in (np.ndarray, np.memmap)


__all__ = ["has_more", "loaded_np", "np"]
