"""The examples run, as users run them, and print what they promise; any warning fails them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES = 60

EXPECTED: dict[str, list[str]] = {
    "async_loop": [r"shard into 4", r"first batch: \(50, 8, 8\)", r"1000 records in \d+\.\d s; .* 20 s"],
    "best_effort": [
        r"strict\n  workers in order of arrival: (0123){10}\.\.\.\n  half .*: 1\n",
        r"max_lead=8\n.*\n.*skew \(items ahead of the slowest\): [2-8]\n",
        r"max_lead=32\n.*\n.*skew \(items ahead of the slowest\): (9|[12]\d|3[012])\n",
        r"the same items: True",
    ],
    "custom_stage": [r"\| the quick brown fox ", r"exact: True"],
    "http_shards": [r"4,000 rows, each exactly once: True", r"  /part-002\.jsonl from byte [\d,]+\n$"],
    "many_ranks": [
        r"saved: rank-00000-of-00002\.json rank-00001-of-00002\.json",
        r"rank 0: 15 samples, 8 before the stop, 7 behind it",
        r"in both: 0\n",
        r"in one of them: 30 of 30",
    ],
    "plain_loop_with_resume": [
        r"starting from the beginning\n  120 records",
        r"resuming behind .*\n  300 records",
        r"every record exactly once: True",
    ],
}


def run(path: Path, *arguments: str) -> str:
    command = [sys.executable, "-W", "error", str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=50)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_every_example_is_expected() -> None:
    assert [path.stem for path in EXAMPLES] == sorted(EXPECTED)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_what_it_promises(path: Path) -> None:
    printed = run(path)
    for pattern in EXPECTED[path.stem]:
        assert re.search(pattern, printed), f"{pattern} is not in:\n{printed}"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
