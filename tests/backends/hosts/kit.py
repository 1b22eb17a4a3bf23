"""What tests of hosts share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from streamline.backends.base import Backend


def on_each(backends: Sequence[Backend]) -> pytest.MarkDecorator:
    """Run a test once with each of these as its argument `backend`."""
    return pytest.mark.parametrize("backend", backends, ids=lambda backend: type(backend).__name__)
