"""The programs of docs/cluster.md that take Ray run, and print what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

ROOT = Path(__file__).parents[2]

PROGRAMS = re.findall(
    r"^<!-- not run: Ray .*? -->\n```python\n(.*?)^```$",
    (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8"),
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.parametrize("program", PROGRAMS, ids=["ray", "ray_train"])
def test_a_program_of_the_page_prints_what_it_says(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"^ *print\(.*\)  # (.*)$", program, re.MULTILINE)
    assert done.stdout.splitlines()[-len(said) :] == said
