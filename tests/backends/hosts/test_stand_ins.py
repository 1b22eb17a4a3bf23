"""What a host process imports of the tools of the test module that it gets a function of: see `tests/__init__.py`."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import streamline as sl

assert find_spec("pytest"), "there is"
assert find_spec("hypothesis"), "there is"


@st.composite
def pairs(draw: st.DrawFn) -> tuple[int, int]:
    return draw(st.integers()), draw(st.integers() | st.just(3))


@pytest.mark.parametrize("number", [1, 2])
@settings(max_examples=1, suppress_health_check=list(HealthCheck))
@given(pairs(), st.lists(st.integers()).map(len))
def decorated(pair: tuple[int, int], length: int, number: int) -> None:
    """Be as tests are."""


def tools(item: int) -> list[str]:
    """Return which tools are here, for an odd item after an exception that pytest awaits."""
    if item % 2:
        with pytest.raises(ValueError, match=f"{item}"):
            raise ValueError(item)
    return sorted({"_pytest", "hypothesis.core"} & set(sys.modules))


@pytest.mark.long
def test_a_host_imports_the_tools_of_a_test_module_when_it_uses_them() -> None:
    assert tools(0) == ["_pytest", "hypothesis.core"]
    with sl.from_items(range(2)).map(tools).open(backend=sl.Processes(1)) as stream:
        assert list(stream) == [[], ["_pytest"]]
