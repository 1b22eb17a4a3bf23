"""Reading the live page, as a browser does."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from typing import Any


def asked(url: str, path: str = "", **options: Any) -> tuple[str, Any]:
    request = urllib.request.Request(url + path, **options)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode(), answer.headers


def updates(url: str, kind: str = "events") -> Iterator[str]:
    """Yield the updates of a page as they come."""
    with urllib.request.urlopen(url + kind, timeout=60) as answer:
        lines: list[str] = []
        for line in answer:
            if line.strip():
                lines.append(line.decode().removeprefix("data: ").rstrip("\n"))
            else:
                yield "\n".join(lines)
                lines.clear()


def update(url: str) -> Any:
    with closing(updates(url)) as found:  # type: ignore[type-var]
        return json.loads(next(found))
