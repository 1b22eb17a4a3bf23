"""Servers that aren't here: tests that need one are counted and named at the end as not run; with CI=true they fail."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import pytest

__all__ = ["absent", "not_run"]

NOT_RUN = "not run: "


def absent(what: str) -> NoReturn:
    """End a test that needs a server which isn't here.

    Args:
      what: is missing, and how to install it.
    """
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what}; with CI=true all tests must run", pytrace=False)
    pytest.skip(NOT_RUN + what)


def not_run(skipped: Iterable[Any]) -> Iterator[str]:
    """Yield lines on the tests that `absent` has ended: how many, why, and their names.

    Args:
      skipped: the reports of all tests that were skipped.
    """
    found: defaultdict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for report in skipped:
        _, mark, why = str(report.longrepr[2]).partition(NOT_RUN)
        if mark:
            file, _, name = report.nodeid.partition("::")
            found[why][file, name.partition("[")[0]] += 1
    for why, names in found.items():
        total = names.total()
        yield f"{total} {'tests were' if total > 1 else 'test was'} not run: {why}"
        for (file, name), count in sorted(names.items()):
            yield f"  {file}::{name}" + (f" ({count})" if count > 1 else "")
