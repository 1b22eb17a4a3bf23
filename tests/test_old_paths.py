"""Old paths: each documented name is still found there, with a warning."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest

NEEDS = {"integrations.transformers": "transformers", "integrations.torch_dataset": "torch"}
"""Modules whose new place needs a library."""


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("integrations.accelerate", "AccelerateLoader", "training.trainers"),
        ("integrations.lightning", "LightningLoader", "training.trainers"),
        ("integrations.views", "OfAllRanks", "training.trainers"),
        ("integrations.transformers", "LoaderTrainer", "training.transformers"),
        ("integrations.torch_dataset", "TorchDataset", "training.torch_dataset"),
        ("sizes", "nbytes", "core.tree"),
    ],
)
def test_a_documented_name_is_found_at_its_old_path_with_a_warning(old: str, name: str, new: str) -> None:
    if old in NEEDS:
        pytest.importorskip(NEEDS[old])
    module = importlib.import_module(f"streamline.{old}")
    with pytest.warns(DeprecationWarning, match=rf"^streamline\.{re.escape(old)} is streamline\.{re.escape(new)} now$"):
        found = getattr(module, name)
    assert found is getattr(importlib.import_module(f"streamline.{new}"), name)


def test_the_old_path_is_imported_as_users_write_it_and_loads_nothing_by_itself() -> None:
    program = (
        "import sys, warnings\n"
        "warnings.simplefilter('error')\n"
        "import streamline.integrations.torch_dataset, streamline.integrations.transformers\n"
        "assert not {'torch', 'transformers', 'streamline.training.trainers'} & sys.modules.keys()\n"
        "warnings.simplefilter('always')\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    from streamline.integrations.lightning import LightningLoader\n"
        "    from streamline.integrations import lightning\n"
        "    assert lightning.LightningLoader is LightningLoader\n"
        "assert LightningLoader.__module__ == 'streamline.training.trainers', LightningLoader\n"
        "print(*{(str(one.message), one.category.__name__, one.filename) for one in seen})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = (
        "('streamline.integrations.lightning is streamline.training.trainers now', 'DeprecationWarning', '<string>')"
    )
    assert done.stdout.strip() == expected


def test_a_name_that_was_never_there_is_refused() -> None:
    module = importlib.import_module("streamline.integrations.lightning")
    warned = pytest.warns(DeprecationWarning, match=r"is streamline\.training\.trainers now")
    with warned, pytest.raises(AttributeError, match="NoSuchLoader"):
        _ = module.NoSuchLoader
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'streamline\.integrations\.never'"):
        importlib.import_module("streamline.integrations.never")
