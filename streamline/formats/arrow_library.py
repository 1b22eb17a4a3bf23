"""pyarrow, where it is needed: an extra, imported late."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from streamline.errors import PlanError

__all__ = ["Predicate", "require_pyarrow"]


def require_pyarrow(function: str) -> None:
    """Check that pyarrow is installed, without importing it.

    Raises:
      PlanError: it isn't; it names the extra.
    """
    if find_spec("pyarrow") is None:
        raise PlanError(f"{function} needs pyarrow, which is not installed: pip install 'streamline[arrow]'")


@dataclass(frozen=True)
class Predicate:
    """A `pyarrow.compute.Expression` that can be compared and hashed: an expression's own == makes another expression.

    Attributes:
      text: for a person, and for the fingerprint.
      pickled: the expression.
    """

    text: str
    pickled: bytes = field(repr=False)

    @classmethod
    def of(cls, expression: Any) -> Predicate:
        """Return the predicate that an expression is."""
        return cls(str(expression), pickle.dumps(expression))

    @property
    def expression(self) -> Any:
        """The expression. Imports pyarrow."""
        return pickle.loads(self.pickled)
