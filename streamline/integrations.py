"""The old path of what `streamline.training` has for trainers. It goes on, and warns.

from streamline.integrations.lightning import LightningLoader  # now: streamline.training.trainers
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import Any

__path__: list[str] = []  # so that the import system looks for submodules, and finds those below

MOVED = {
    "accelerate": "streamline.training.trainers",
    "lightning": "streamline.training.trainers",
    "torch_dataset": "streamline.training.torch_dataset",
    "transformers": "streamline.training.transformers",
    "views": "streamline.training.trainers",
}


class _MovedModule(ModuleType):
    """Imports the new module when something of it is asked for: some need torch."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        new = MOVED[self.__name__.rpartition(".")[2]]
        warnings.warn(f"{self.__name__} is {new} now", DeprecationWarning, stacklevel=2)
        return getattr(import_module(new), name)


for _name in MOVED:
    sys.modules[f"{__name__}.{_name}"] = globals()[_name] = _MovedModule(f"{__name__}.{_name}")
