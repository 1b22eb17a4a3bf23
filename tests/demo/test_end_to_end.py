"""The demo itself, small: real server, real trainers, real kill."""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from streamline.demo import feed
from streamline.demo.feed import RECORD_BYTES, encode

PROGRAM = "import sys; from streamline.demo.run import run_demo; sys.exit(run_demo(quick=True))"


def start_demo(temporary: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "TMPDIR": str(temporary), "COLUMNS": "100"}
    command = [sys.executable, "-c", PROGRAM]
    root = Path(feed.__file__).parents[2]  # so that the child imports this very package
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=root
    )


def test_a_short_record_repeats_and_a_long_one_is_cut() -> None:
    for text in ("abc", "ä" * RECORD_BYTES, "x"):
        encoded = encode({"path": "a.py", "text": text})
        assert (encoded.shape, encoded.dtype) == ((RECORD_BYTES,), np.dtype(np.uint8))
        assert encoded.tobytes() == (text.encode() * RECORD_BYTES)[:RECORD_BYTES]


@pytest.mark.timeout(120)
def test_a_killed_and_resumed_training_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    with start_demo(tmp_path) as demo:
        out, _ = demo.communicate()
    assert demo.returncode == 0, out
    assert "bit for bit" in out
    first, last = map(float, re.findall(r"loss\D+([\d.]+) → ([\d.]+)", out)[0])
    assert first > 5.4
    assert last < first - 1.5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("at", "number", "presses"),
    [("http://", signal.SIGTERM, 1), ("http://", signal.SIGINT, 3), ("uninterrupted", signal.SIGINT, 1)],
)
def test_an_interrupted_demo_leaves_nothing_behind(
    tmp_path: Path, at: str, number: signal.Signals, presses: int
) -> None:
    with start_demo(tmp_path) as demo:
        assert demo.stdout is not None
        seen = ""
        while at not in seen:
            line = demo.stdout.readline()
            assert line, seen
            seen += line
        for _ in range(presses):
            demo.send_signal(number)
        seen += demo.stdout.read()
    assert demo.returncode == 130, seen
    assert list(tmp_path.iterdir()) == []
    url = re.findall(r"http://[\d.:]+", seen)[0]
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(url, timeout=200)
