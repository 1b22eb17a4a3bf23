"""The examples run, as users run them, and print what they promise; any warning fails them."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES = 60

NEED_TORCH = {"ddp_two_ranks", "teacher_and_student", "torch_kill_and_resume"}
"""`make test-trainers` runs them."""

NEED_RAY = {"ray_workers"}
"""`make test-ray` runs them."""

EXPECTED: dict[str, list[str]] = {
    "async_loop": [r"shard into 4", r"first batch: \(50, 8, 8\)", r"1000 records in \d+\.\d s; .* 20 s"],
    "best_effort": [
        r"strict\n  workers in order of arrival: (0123){10}\.\.\.\n  half .*: 1\n",
        r"max_lead=8\n.*\n.*skew \(items ahead of the slowest\): [2-8]\n",
        r"max_lead=32\n.*\n.*skew \(items ahead of the slowest\): (9|[12]\d|3[012])\n",
        r"the same items: True",
    ],
    "custom_source": [
        r"stood: \{'table': \{'page': 4, 'done': 2\}\} \{'table': \{'page': 5, 'done': 1\}\}\n",
        r"after the resume: 4 5 6 7 8\n",
        r"exactly once: True\n",
        r"from everywhere, exact: True\n",
    ],
    "custom_stage": [r"\| the quick brown fox ", r"exact: True"],
    "evaluate_while_paused": [r"(step \d0, \d00 items .*\n  requests of .*: 0\n){4}each item used: True"],
    "ddp_two_ranks": [
        r"rank 0: 5 steps, 0 of them padding; ends=\"drop\", agreed on the way: 0 dropped, 0 padded",
        r"rank 1: 5 steps, 0 of them padding; ends=\"drop\", agreed on the way: \d+ dropped or more, 0 padded",
        r"rank 0: 10 steps, 5 of them padding; ends=\"pad\", agreed on the way: 0 dropped, 5 padded",
        r"rank 1: 10 steps, 0 of them padding; ends=\"pad\", agreed on the way: 0 dropped, 0 padded",
        r"rank 0: 5 steps, .*; ends=\"allow\", agreed alone",
        r"rank 1: 10 steps, .*; ends=\"allow\", agreed alone",
    ],
    "epochs": [
        r"epochs are shuffled differently: True",
        r"going on in epoch 1, after step 3 of 5",
        r"\ninterrupted = uninterrupted: True",
        r"going on in epoch 2, after step 0 of 5",
        r"also after an epoch's last batch: True",
    ],
    "live_feed": [
        r"read once by one reader, handed out to 4 workers in turn; journalled in /",
        r"5 batches, then a snapshot; the server has forgotten \d+\n7 batches, then a crash",
        r"every record: True\nsent twice, and so twice here: [012]\n$",
    ],
    "lost_node": [
        r"hosts that were lost and replaced: 2\n",
        r"the same batches and the same model, bit for bit: True\n$",
    ],
    "many_ranks": [
        r"saved: rank-00000-of-00002\.json rank-00001-of-00002\.json",
        r"rank 0: 15 samples, 8 before the stop, 7 after it",
        r"in both: 0\n",
        r"in one of them: 30 of 30",
    ],
    "one_stream_two_trainers": [
        r"before the stop: 70 and 50 samples\nat the end: 200 and 200 samples\n",
        r"each sample went to one of them, once: True\n$",
    ],
    "parquet_columns": [
        r"\{'id': 500, 'text': 'text 500'\}\n",
        r"texts\.parquet, group 1, row 161\n",
        r"each wanted row, once: True\nmean year: 2019\.5\n$",
    ],
    "ray_workers": [
        r"nodes: 2, hosts: 2\n",
        r"killed: an actor with its host\n",
        r"the same items in the same order: True\n$",
    ],
    "regenerating_cache": [
        r"a batch: \(64, 16\), of \d+ texts\n",
        r"though the teacher has moved on: True\nwaited for cycles: True\n$",
    ],
    "shared_pool": [
        r"processes, in all epochs: 2\ntraining and validation share them: True\n",
        r"validation is the same each time: True\n$",
    ],
    "skip_bad_items": [
        r"crashed after 300 saved and 50 lost; \d+ skipped by then",
        r"log: 147 items were skipped: mean 143, read_jsonl 4; see .*bad\.jsonl\n",
        r"every record delivered or skipped: True",
        r"a dead letter for each, none twice: True",
        r"replay of the last: TypeError; mended: 2\n",
    ],
    "streaming_over_http": [
        r"broken connections, each followed by a request for the rest: 1\n",
        r"part-2\.jsonl\.gz, line 250, .*\(decompresses [\d,]+ bytes to get there\)\n",
        r"4,000 rows, each exactly once: True\n$",
    ],
    "teacher_and_student": [
        r"unbroken: exit code 0\n(loss 0\.\d+, .*\n)killed: exit code -9\nagain: exit code 0\n"
        r"from step 50: \1$"
    ],
    "torch_kill_and_resume": [
        r"unbroken: exit code 0\n(y = .*\n)killed: exit code -9\nagain: exit code 0\n"
        r"going on in epoch 1, after step 20 of 50\n\1$"
    ],
    "webdataset_images": [
        r"train-0\.tar, byte 32,768, sample 16\n",
        r"a batch: \(16, 8, 8\) float32 ",
        r"8 batches, bit for bit those of the uninterrupted run: True\n$",
    ],
    "plain_loop_with_resume": [
        r"starting from the beginning\n  120 records",
        r"resuming after .*\n  300 records",
        r"every record exactly once: True",
    ],
}


def run(path: Path, *arguments: str) -> str:
    command = [sys.executable, "-W", "error", str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" or path.stem in NEED_RAY  # Ray says there what has died
    return done.stdout


def test_every_example_is_expected() -> None:
    assert [path.stem for path in EXAMPLES] == sorted(EXPECTED)
    assert set(EXPECTED) >= NEED_TORCH | NEED_RAY


def test_the_readme_links_every_example() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES if f"(examples/{path.name})" not in readme] == []


@pytest.mark.long
@pytest.mark.parametrize(
    "path",
    [
        path
        for path in EXAMPLES
        if (path.stem not in NEED_TORCH or find_spec("torch")) and (path.stem not in NEED_RAY or find_spec("ray"))
    ],
    ids=lambda path: path.stem,
)
def test_an_example_prints_what_it_promises(path: Path) -> None:
    printed = run(path)
    for pattern in EXPECTED[path.stem]:
        assert re.search(pattern, printed), f"{pattern} is not in:\n{printed}"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
