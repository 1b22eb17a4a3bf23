"""ArrayRecord files, written by the library itself: every record from every place on, and damage."""

from __future__ import annotations

import pytest

import streamline as sl
from streamline.errors import PlanError


def test_what_is_remote_is_refused_where_it_is_written() -> None:
    with pytest.raises(PlanError, match=r"reads local files only.*copy s3://bucket/a"):
        sl.read_array_record("s3://bucket/a")


def test_without_array_record_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamline.core.options.find_spec", lambda module: None)
    with pytest.raises(PlanError, match=r"read_array_record needs array_record.*streamline-data\[array_record\]"):
        sl.read_array_record("a")
