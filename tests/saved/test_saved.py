"""What earlier versions have saved is resumed: snapshots of each kind of stage and source, journals, caches, spills."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import streamline as sl
from streamline.snapshot.file_format import FORMAT_VERSION, MAGIC
from streamline.sources.base import Source
from streamline.sources.live import FedSource
from streamline.transforms.base import Stage
from streamline.transforms.limit import Stride
from tests.saved.plans import FREE, PLANS, shown

HERE = Path(__file__).parent

FORMATS = range(1, FORMAT_VERSION + 1)

NEWER = dict.fromkeys(
    [
        *("batch by cost", "concat", "enumerate", "from_huggingface", "from_torch", "groups", "map of lists", "sample"),
        *("read_array_record", "read_hdf5", "read_lance", "read_mds", "read_tfrecord", "scan", "window"),
    ],
    2,
)
"""Plans that earlier formats don't have, and the first that does."""


@pytest.mark.parametrize(
    ("name", "saved_format"),
    [(name, saved_format) for name in PLANS for saved_format in FORMATS if saved_format >= NEWER.get(name, 1)],
)
def test_a_run_that_an_earlier_version_saved_is_resumed(
    name: str, saved_format: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = HERE / f"format_{saved_format}"
    record = json.loads((saved / "snapshots" / f"{name}.json").read_text())
    assert json.loads(record["snapshot"])[MAGIC] == saved_format
    for folder in (HERE / "files", saved / "folders"):
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    Path("feed").write_text("")
    Path("snapshot.json").write_text(record["snapshot"])
    with PLANS[name]().open(resume=sl.Snapshot.load("snapshot.json"), on_error="skip") as stream:
        after = [shown(item) for item in stream]
    if name in FREE:
        assert Counter(after) == Counter(record["after"])
    else:
        assert after == record["after"]


def kinds(base: type[Any]) -> set[type[Any]]:
    """Return the package's own kinds, without those that other kinds derive from."""
    below = [kind for kind in base.__subclasses__() if kind.__module__.startswith("streamline.")]
    return {leaf for kind in below if ".testing" not in kind.__module__ for leaf in kinds(kind) or {kind}}


def test_each_kind_of_stage_and_source_is_saved() -> None:
    plans = [plan() for plan in PLANS.values()]
    saved = {type(part) for plan in plans for part in (plan.source, *plan.settled().stages)}
    assert (kinds(Stage) | kinds(Source)) - saved == {
        FedSource,
        Stride,
    }  # parts that plans make of others by themselves
