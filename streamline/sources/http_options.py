"""How http(s) URLs are read, as users say it: apart from the reading, which takes 0.2 s to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from streamline.errors import PlanError

__all__ = ["HttpOptions"]


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """How http(s) URLs are read.

    Attributes:
      retries: attempts after the first that may fail in a row without a byte of progress, >= 0.
      timeout_s: seconds of silence after which a connection counts as dropped; > 0.
      headers: sent with every request: `{"Authorization": "Bearer …"}`.
    """

    retries: int = 5
    timeout_s: float = 60.0
    headers: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise PlanError(f"expected retries >= 0, got {self.retries}")
        if not self.timeout_s > 0:
            raise PlanError(f"expected timeout_s > 0, got {self.timeout_s}")
