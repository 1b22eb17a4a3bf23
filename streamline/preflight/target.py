"""From "FILE.py:name" or "package.module:name" on a command line to what it names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import iscoroutinefunction, signature
from pathlib import Path
from types import ModuleType
from typing import Any

from streamline.errors import PlanError

__all__ = ["target"]

SHOWN = 8
"""Names that a message lists."""


def target(text: str, kind: type) -> Any:
    """Return the object of type `kind` that `text` names; a function is called, without arguments.

    The file is run as a module of another name than "__main__", so what stands behind `if __name__ == "__main__"`
    isn't.

    Raises:
      PlanError: there is no such file, module or name; it raises; or it is something else.
    """
    file, colon, name = text.rpartition(":")
    if not colon:
        file, name = text, ""
    if not file:
        raise PlanError(f"expected FILE.py:name or package.module:name, got {text!r}")
    is_file = file.endswith(".py") or "/" in file
    with _found_from(Path(file).parent if is_file else Path()):
        module = _loaded(file, is_file)
        there = sorted(key for key, value in vars(module).items() if isinstance(value, kind))
        if not name:
            raise PlanError(f"say which pipeline of {file}: {file}:NAME; {_listed(there)}")
        found: Any = module
        for part in name.split("."):
            if not hasattr(found, part):
                raise PlanError(f"{file} has no {name!r}; {_listed(there)}")
            found = getattr(found, part)
        if not isinstance(found, kind) and callable(found):
            found = _called(file, name, found)
    if not isinstance(found, kind):
        raise PlanError(f"{text} is no pipeline, but of type {type(found).__name__}; {_listed(there)}")
    return found


def _loaded(file: str, is_file: bool) -> ModuleType:
    if not is_file:
        try:
            found = importlib.util.find_spec(file)
        except (ImportError, ValueError) as error:
            raise PlanError(f"there is no module {file}: {error}") from error
        if found is None:
            raise PlanError(f"there is no module {file}: give FILE.py:name, or a module that can be imported here")
        module: ModuleType = _run(file, lambda: importlib.import_module(file))
        return module
    if not Path(file).is_file():
        raise PlanError(f"no such file: {file}" + ("" if Path(file).is_absolute() else f" (seen from {Path.cwd()})"))
    name = f"streamline_check_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise PlanError(f"{file} is no Python file: expected a name that ends in .py")
    made, loader = importlib.util.module_from_spec(spec), spec.loader
    sys.modules[name] = made  # dataclasses and pickle look there
    _run(file, lambda: loader.exec_module(made))
    return made


def _called(file: str, name: str, function: Any) -> Any:
    if iscoroutinefunction(function):
        raise PlanError(f"{name} in {file} is an async function: give a plain one that returns the pipeline")
    try:
        signature(function).bind()
    except TypeError as error:
        raise PlanError(f"{name} in {file} can't be called without arguments: {error}") from error
    except ValueError:
        pass  # a built-in that doesn't say
    return _run(f"{file}:{name}", function)


def _run(what: str, work: Any) -> Any:
    """Run a user's code, and translate what it raises."""
    try:
        return work()
    except SystemExit as error:
        raise PlanError(
            f'{what} ended the program (exit code {error.code}): put what runs it behind if __name__ == "__main__"'
        ) from error
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise PlanError(f"{what} raised {type(error).__name__}: {error} ({at.filename}, line {at.lineno})") from error


@contextmanager
def _found_from(folder: Path) -> Iterator[None]:
    """Import from a folder first, and show the script no arguments, as when it is run itself."""
    path, arguments = list(sys.path), list(sys.argv)
    sys.path.insert(0, str(folder.absolute()))
    sys.argv[1:] = []
    try:
        yield
    finally:
        sys.path[:], sys.argv[:] = path, arguments


def _listed(names: list[str]) -> str:
    return f"pipelines there: {', '.join(names[:SHOWN])}" if names else "there are no pipelines in it"
