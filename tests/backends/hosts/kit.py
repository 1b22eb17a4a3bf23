"""What tests of hosts share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from streamline.backends.base import Backend


def on_each(backends: Sequence[Backend]) -> pytest.MarkDecorator:
    """Run a test once with each of these as its argument `backend`."""
    return pytest.mark.parametrize("backend", backends, ids=lambda backend: type(backend).__name__)


def odd(item: int) -> bool:
    """Not one in four; here, so that a host that calls it imports no module of tests with all their pipelines."""
    return item % 4 != 0
