import gzip
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import streamline as sl
from streamline import demo
from streamline.demo import DemoError, TrainStep

ROOT = Path(demo.__file__).parents[1]  # so that child processes import this very package
PROGRAM = "import sys; from streamline.demo import run_demo; sys.exit(run_demo(quick=True))"


def start_demo(temporary: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "TMPDIR": str(temporary), "COLUMNS": "100"}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        cwd=ROOT,
    )  # fmt: skip


def wait_refused(url: str) -> None:
    """Return when no server listens at `url`: a process that isn't ours to wait for has no other event to give."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=100)
        except urllib.error.HTTPError as answer:
            answer.close()
            time.sleep(0.02)
        except OSError:
            return
    pytest.fail("the server still answers")


@pytest.mark.long
def test_a_killed_and_resumed_training_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    with start_demo(tmp_path) as process:
        out, _ = process.communicate()
    assert process.returncode == 0, out
    for words in ("bit for bit", "by SIGKILL", "standard library", "uninterrupted", "resumed"):
        assert words in out
    losses = [float(loss) for loss in re.findall(r"uninterrupted +batch +\d+ +loss ([\d.]+)", out)]
    assert losses[-1] < losses[0] < 5.0  # it learns: a guess costs ln 256 = 5.5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize(("number", "presses"), [(signal.SIGTERM, 1), (signal.SIGINT, 3)])
def test_an_interrupted_demo_leaves_no_process_and_no_file(
    tmp_path: Path, number: signal.Signals, presses: int
) -> None:
    with start_demo(tmp_path) as process:
        assert process.stdout is not None
        seen = ""
        while "http://" not in seen:
            line = process.stdout.readline()
            assert line, seen
            seen += line
        for _ in range(presses):
            process.send_signal(number)
        seen += process.stdout.read()
    assert process.returncode == 130, seen
    assert list(tmp_path.iterdir()) == []
    wait_refused(re.findall(r"http://[\d.:]+", seen)[0])


async def test_a_trainer_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = tmp_path / "hangs"
    hangs.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    hangs.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hangs))
    monkeypatch.setattr(demo, "TRAINER_LIMIT_S", 0.1)
    with pytest.raises(DemoError, match="killed trainer did not end within 0 s"):
        await demo.train("killed", "http://127.0.0.1:1", tmp_path / "checkpoint.npz", Console(file=io.StringIO()))


@pytest.mark.long
async def test_a_trainer_that_fails_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken.npz"
    broken.write_bytes(b"no checkpoint")
    with pytest.raises(DemoError, match=r"first trainer ended with exit code 1, after 0 steps\n(.|\n)*allow_pickle"):
        await demo.train("first", "http://127.0.0.1:1", broken, Console(file=io.StringIO()))


STEPS = [TrainStep(n, n * 32, 1 / n, f"chain {n}", f"model {n}") for n in range(1, 21)]


def test_a_resumed_run_that_repeats_some_batches_equals_the_whole_one() -> None:
    demo.check("killed", STEPS[:10], STEPS[:10])
    demo.check("resumed", STEPS[8:], STEPS[8:])


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([*STEPS[:4], STEPS[4]._replace(chain="other"), *STEPS[5:]], r"Expected .*chain='chain 5'.* got .*'other'"),
        ([*STEPS[:7], STEPS[7]._replace(loss=7.0), *STEPS[8:]], r"Expected .*step=8, .* got .*loss=7\.0"),
        ([*STEPS[:-1], STEPS[-1]._replace(model="others")], r"Expected .*model='model 20'.* got .*'others'"),
        (STEPS[:3] + STEPS[4:], r"Expected .*step=4, .* got .*step=5, "),
        ([], r"Expected .*step=1, .* got None"),
        (STEPS[1:], r"Expected .*step=1, .* got .*step=2, "),
        (STEPS[:-1], r"Expected .*step=20, .* got None"),
        ([*STEPS, STEPS[-1]], r"Expected None, got .*step=20, "),
    ],
)
def test_the_first_difference_fails_the_demo_and_is_named(
    monkeypatch: pytest.MonkeyPatch, steps: list[TrainStep], message: str
) -> None:
    async def compare(*_: object) -> str:
        demo.check("resumed", steps, STEPS)
        return "the same"

    monkeypatch.setattr(demo, "compare", compare)
    out = io.StringIO()
    assert demo.run_demo(quick=True, console=Console(file=out, width=100)) == 1
    assert re.search(f"FAILED: the resumed run differs from the uninterrupted one. {message}", out.getvalue())
    assert "bit for bit" not in out.getvalue()


def test_the_shards_dealt_back_in_turn_are_the_files_texts(tmp_path: Path) -> None:
    library, target = tmp_path / "library", tmp_path / "shards"
    library.mkdir()
    target.mkdir()
    texts = {"a.py": "äöü€" * 500, "b.py": "x" * 25, "c.py": 'print("c")\r\n'}
    for name, text in (texts | {"empty.py": "", "notes.txt": "no source"}).items():
        (library / name).write_bytes(text.encode())
    records, description = demo.write_corpus(target, root=library)
    assert (records, "4 files" in description) == (4, True)
    shards = [gzip.decompress(path.read_bytes()).splitlines() for path in sorted(target.iterdir())]
    found: dict[str, str] = {}
    for index in range(records):
        record = json.loads(shards[index % demo.SHARDS][index // demo.SHARDS])
        found[record["path"]] = found.get(record["path"], "") + record["text"]
    assert found == texts
    with pytest.raises(FileNotFoundError, match="found none in"):
        demo.write_corpus(target, root=target)


def test_a_short_record_repeats_and_a_long_one_is_cut() -> None:
    for text in ("abc", "ä" * demo.RECORD_BYTES):
        encoded = demo.encode({"path": "a.py", "text": text})
        assert (encoded.shape, encoded.dtype) == ((demo.RECORD_BYTES,), np.dtype(np.uint8))
        assert encoded.tobytes() == (text.encode() * demo.RECORD_BYTES)[: demo.RECORD_BYTES]


def test_a_kill_while_saving_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint changes in one step: the file's replacement."""
    batch = np.arange(64, dtype=np.uint8).reshape(2, 32)
    trainer = demo.Trainer(tmp_path / "checkpoint.npz")
    with sl.from_items(range(2)).shard(1).merge().open() as stream:
        snapshot = stream.snapshot()
    trainer.learn(batch)
    trainer.save(snapshot)
    second = trainer.learn(batch)
    monkeypatch.setattr(Path, "replace", lambda self, target: None)
    trainer.save(snapshot)
    resumed = demo.Trainer(tmp_path / "checkpoint.npz")
    found = resumed.resume()
    assert found is not None
    assert found.to_json() == snapshot.to_json()
    assert (resumed.steps, resumed.learn(batch)) == (1, second)
