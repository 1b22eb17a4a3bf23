"""How http(s) URLs are read, as users say it: apart from the reading, which takes 0.2 s to import."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from streamline.errors import PlanTypeError
from streamline.options import check_int, check_seconds

__all__ = ["HttpOptions"]


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """How http(s) URLs are read.

    Attributes:
      retries: attempts after the first that may fail in a row without a byte of progress, >= 0.
      timeout_s: seconds of silence after which a connection counts as dropped; > 0; `math.inf` for none.
      headers: sent with every request: `{"Authorization": "Bearer …"}`.

    Raises:
      PlanTypeError: an option of the wrong type.
      PlanError: one out of range.
    """

    retries: int = 5
    timeout_s: float = 60.0
    headers: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        check_int("HttpOptions(retries=)", self.retries, 0)
        if self.timeout_s != math.inf:
            check_seconds("HttpOptions(timeout_s=)", self.timeout_s)
        if self.headers is not None:
            _check_headers(self.headers)


def _check_headers(headers: object) -> None:
    """Insist on strings by name; a value may be a secret, and is in no message."""
    wanted = 'HttpOptions(headers=) is a mapping of strings to strings, {"Authorization": "Bearer …"}'
    if not isinstance(headers, Mapping):
        raise PlanTypeError(f"{wanted}, got {type(headers).__name__}")
    for name, value in headers.items():
        if not isinstance(name, str):
            raise PlanTypeError(f"{wanted}, got the name {name!r}, which is of type {type(name).__name__}")
        if not isinstance(value, str):
            raise PlanTypeError(f"{wanted}, got a value of type {type(value).__name__} for {name!r}")
