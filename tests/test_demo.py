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
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

import streamline as sl
from streamline import demo
from streamline.demo import DemoError, TrainerRun, TrainStep, difference

ROOT = Path(demo.__file__).parents[1]  # so that child processes import this very package
PROGRAM = "import sys; from streamline.demo import run_demo; sys.exit(run_demo(quick=True, cluster={cluster}))"


def start_demo(temporary: Path, *, cluster: bool = False) -> subprocess.Popen[str]:
    environment = {**os.environ, "TMPDIR": str(temporary), "COLUMNS": "100"}
    program = PROGRAM.format(cluster=cluster)
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
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


def test_a_killed_and_resumed_training_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    with start_demo(tmp_path) as process:
        out, _ = process.communicate()
    assert process.returncode == 0, out
    for words in ("bit for bit", "by SIGKILL", "standard library", "limit: model", "uninterrupted", "resumed"):
        assert words in out
    first, last = map(float, re.findall(r"loss\D+([\d.]+) → ([\d.]+)", out)[0])
    assert first > 5.4
    assert last < first - 1.5
    assert list(tmp_path.iterdir()) == []


def test_a_training_on_nodes_of_which_one_is_killed_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    with start_demo(tmp_path, cluster=True) as process:
        out, _ = process.communicate()
    assert process.returncode == 0, out
    for words in ("one is killed and replaced", "bit for bit", "uninterrupted", "on nodes", "exit code 0"):
        assert words in out
    assert list(tmp_path.iterdir()) == []


def test_nodes_of_which_none_was_lost_prove_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.Nodes, "_start", lambda *_: None)
    monkeypatch.setattr(demo, "training", lambda *_: replace(WHOLE, errors="a trainer's log"))
    monkeypatch.setattr(demo, "check", lambda *_, **__: None)
    monkeypatch.setattr(demo.Rehearsal, "undisturbed", lambda *_: WHOLE)
    with pytest.raises(DemoError, match=r"should have lost a node with 2 hosts\na trainer's log"):
        demo.compare_with_nodes(tmp_path, demo.QUICK, Console(file=io.StringIO()))


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


def test_the_server_ends_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    parent = (
        "import pathlib, time\n"
        "from streamline.demo import serving\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "with serving(folder, folder / 'log') as url:\n"
        "    print(url, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        process.kill()
    wait_refused(url)


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="does not exist"), demo.serving(tmp_path / "missing", tmp_path / "log"):
        pytest.fail("it must not come to this")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["server", "missing"], "does not exist"),
        (["trainer", "http://127.0.0.1:1"], "Missing argument 'CHECKPOINT'"),
        (["trainer", "http://127.0.0.1:1", "checkpoint.npz", "--die-at", "soon"], "'soon' is not a valid integer"),
        (["other"], "No such command 'other'"),
    ],
)
def test_bad_arguments_of_a_child_process_are_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(demo.main, arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("line", "limit_s", "message"), [("", 0.1, "did not end within 0 s"), ("hello\n", 100.0, "got 'hello")]
)
def test_a_trainer_that_hangs_or_reports_nonsense_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, limit_s: float, message: str
) -> None:
    code = f"import time; print({line!r}, end='', flush=True); time.sleep(60)"
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, errors: int, stdin: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code]
        started.append(subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=errors, text=True))
        return started[0]

    monkeypatch.setattr(demo, "start", start)
    monkeypatch.setattr(demo, "TRAINER_LIMIT_S", limit_s)
    with pytest.raises(DemoError, match=message):
        demo.training([], tmp_path / "log", lambda step: None)
    assert started[0].returncode == -signal.SIGKILL


STEPS = tuple(TrainStep(n, n * 32, 1 / n, f"chain {n}", 10.0, "model", 0.1, f"model {n}", 9) for n in range(1, 21))
WHOLE = TrainerRun(STEPS, 0, "")
KILLED = TrainerRun(STEPS[:10], -signal.SIGKILL, "")
RESUMED = TrainerRun(STEPS[7:], 0, "")


def changed(run: TrainerRun, index: int, **values: object) -> TrainerRun:
    """Return `run` with other values in one of its steps."""
    steps = list(run.steps)
    steps[index] = replace(steps[index], **values)  # type: ignore[arg-type]
    return replace(run, steps=tuple(steps))


def test_a_resumed_run_that_repeats_some_batches_equals_the_whole_one() -> None:
    assert difference(WHOLE, KILLED, RESUMED) is None


@pytest.mark.parametrize(
    ("killed", "resumed", "message"),
    [
        (KILLED, changed(RESUMED, 4, chain="other"), "delivered differs from batch 12 on: other"),
        (changed(KILLED, 8, chain="other"), RESUMED, "delivered differs from batch 9 on"),
        (KILLED, changed(RESUMED, 7, loss=7.0), "loss or model differ at batch 15"),
        (KILLED, changed(RESUMED, -1, model="others"), "loss or model differ at batch 20"),
    ],
)
def test_the_first_difference_fails_the_demo_and_is_named(
    monkeypatch: pytest.MonkeyPatch, killed: TrainerRun, resumed: TrainerRun, message: str
) -> None:
    runs = {"uninterrupted": WHOLE, "killed": killed, "resumed": resumed}
    monkeypatch.setattr(demo, "compare_with_resumed", lambda *arguments: runs)
    out = io.StringIO()
    assert demo.run_demo(quick=True, console=Console(file=out, width=100)) == 1
    assert "FAILED: " in out.getvalue()
    assert message in out.getvalue()
    assert "bit for bit" not in out.getvalue()


@pytest.mark.parametrize(
    "run",
    [
        replace(RESUMED, exit_code=1),
        replace(RESUMED, steps=RESUMED.steps[:3] + RESUMED.steps[4:]),
        replace(RESUMED, steps=()),
        replace(RESUMED, steps=RESUMED.steps[1:]),
        replace(RESUMED, steps=RESUMED.steps[:-1]),
    ],
)
def test_a_run_that_ends_otherwise_than_planned_is_refused_with_its_errors(run: TrainerRun) -> None:
    demo.check("resumed", RESUMED, first=8, last=20, exit_code=0)
    demo.check("killed", KILLED, first=1, last=10, exit_code=-9)
    with pytest.raises(DemoError, match=r"expected the resumed run to take steps 8 to 20(.|\n)*a traceback"):
        demo.check("resumed", replace(run, errors="a traceback"), first=8, last=20, exit_code=0)


@pytest.mark.parametrize(("batches", "save_every", "step"), [(382, 25, 191), (100, 25, 51), (37, 8, 18)])
def test_the_kill_is_half_way_with_work_to_redo(batches: int, save_every: int, step: int) -> None:
    assert demo.kill_step(batches, save_every) == step


def test_too_few_batches_to_resume_are_refused() -> None:
    with pytest.raises(DemoError, match="too few"):
        demo.kill_step(16, 8)


def test_the_shards_dealt_back_in_turn_are_the_files_texts(tmp_path: Path) -> None:
    library, target = tmp_path / "library", tmp_path / "shards"
    target.mkdir()
    texts = {"a.py": "äöü€" * 500, "b.py": "x" * 25, "deep/c.py": 'print("c")\r\n'}
    others = {"empty.py": "", "deep/test/t.py": "a test", "site-packages/s.py": "installed", "notes.txt": "no source"}
    for name, text in (texts | others).items():
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_bytes(text.encode())
    records, description = demo.write_corpus(target, 3, root=library)
    assert (records, "4 files" in description) == (4, True)
    shards = [gzip.decompress(path.read_bytes()).splitlines() for path in sorted(target.iterdir())]
    found: dict[str, str] = {}
    for index in range(records):
        record = json.loads(shards[index % 3][index // 3])
        found[record["path"]] = found.get(record["path"], "") + record["text"]
    assert found == texts
    with pytest.raises(FileNotFoundError, match="found none below"):
        demo.write_corpus(target, 1, root=target)


def test_a_short_record_repeats_and_a_long_one_is_cut() -> None:
    for text in ("abc", "ä" * demo.RECORD_BYTES):
        encoded = demo.encode({"path": "a.py", "text": text})
        assert (encoded.shape, encoded.dtype) == ((demo.RECORD_BYTES,), np.dtype(np.uint8))
        assert encoded.tobytes() == (text.encode() * demo.RECORD_BYTES)[: demo.RECORD_BYTES]


def test_a_kill_while_saving_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint changes in one step: the file's replacement."""
    batch = np.arange(64, dtype=np.uint8).reshape(2, 32)
    trainer = demo.Trainer(tmp_path / "checkpoint.npz", 1, None)
    with sl.from_items(range(2)).shard(1).merge().open() as stream:
        snapshot = stream.snapshot()
    trainer.model.step(batch)
    trainer.save(snapshot)
    digest = trainer.model.digest()
    trainer.model.step(batch)
    monkeypatch.setattr(Path, "replace", lambda self, target: None)
    trainer.save(snapshot)
    resumed = demo.Trainer(tmp_path / "checkpoint.npz", 1, None)
    found = resumed.resume()
    assert found is not None
    assert found.to_json() == snapshot.to_json()
    assert (resumed.model.digest(), resumed.model.steps) == (digest, 1)
