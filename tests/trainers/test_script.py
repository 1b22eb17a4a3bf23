"""A whole script with what people load from libraries runs in processes as it does inline."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_a_script_with_a_tokenizer_a_database_modules_and_a_dataclass(tmp_path: Path) -> None:
    script = Path(__file__).with_name("script_run.py")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "labels.db")], capture_output=True, text=True, env=env, timeout=55
    )
    assert (done.stdout, done.returncode) == ("all is well\n", 0), done.stderr
