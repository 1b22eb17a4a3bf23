"""In a host process, which imports a test module for one function of it, pytest and Hypothesis are stand-ins.

The two take more than half of the CPU time until such a host is up, and all that a module asks of them while it is
imported is decorators and strategies. What else is asked of pytest, `pytest.raises` for one, imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any


class _Anything:
    """A mark, a strategy, a setting: what is made of it is the same again, and what it decorates stays as it is."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and isinstance(args[0], FunctionType | type) and not options else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return (lambda _: self) if name == "composite" else self  # which makes a strategy of a function

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __or__(self, other: Any) -> Any:
        return self


ANYTHING = _Anything()


class _StandIn(ModuleType):
    """A module that `find_spec` finds."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)


class _Pytest(_StandIn):
    """Marks, parameters and fixtures, and the real module for all else."""

    mark = fixture = param = ANYTHING

    def __getattr__(self, name: str) -> Any:
        if sys.modules[self.__name__] is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


class _Hypothesis(_StandIn):
    """Any name of it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(ANYTHING, name)


if sys.orig_argv[-1].startswith("'streamline process "):
    sys.modules["pytest"] = _Pytest("pytest")
    for part in ("", ".strategies", ".extra", ".extra.numpy", ".stateful"):
        sys.modules[f"hypothesis{part}"] = _Hypothesis(f"hypothesis{part}")
