"""`streamline demo`: kill a trainer half-way, resume it, and compare with a run that was left alone.

With `--cluster`, the workers of another run are on three nodes instead, one of which is killed: each is an agent on
this machine (`streamline worker`). `run_demo` writes the running Python's standard library as gzipped JSONL and
starts two more kinds of child processes:

- `python -m streamline.demo server DIRECTORY`: HTTP on loopback, with the latency of an object store. It prints its
  port, and ends when its stdin closes, so it never outlives the process that started it, however that one ends.
- `python -m streamline.demo trainer URL CHECKPOINT`: streams, learns, saves, and may be told to kill itself. It resumes
  where CHECKPOINT exists. Each line on stdout is a step: the fields of `TrainStep` as a JSON object.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import click
import numpy as np
from aiohttp import web
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress
from rich.table import Table

import streamline as sl

WORKERS, BATCH_SIZE, RECORD_BYTES = 4, 32, 1024
LATENCY_MS = 20.0  # a request, as from an object store in the same region
TRAINER_LIMIT_S, SERVER_EXIT_S = 120.0, 5.0  # several times what the slowest machine takes: a longer one hangs
HOSTS = 2, 1, 1  # of each node: together one a worker, so all have some
SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"})

Size = namedtuple("Size", ["max_files", "shards", "window", "save_every"])
FULL = Size(max_files=None, shards=16, window=1024, save_every=25)
QUICK = Size(max_files=60, shards=8, window=64, save_every=8)
Batch = NDArray[np.uint8]


class DemoError(Exception):
    """A step of the demo failed; unlike a difference between two runs, which is the demo's result."""


@dataclass(frozen=True)
class TrainStep:
    """One batch, after the model has learnt from it."""

    step: int  # of the whole training, from 1
    items: int  # so far, in the whole training
    loss: float
    chain: str  # SHA-256 over all batches so far
    items_per_s: float  # of this run so far, as are the next two
    limit: str  # what takes the most time
    waiting: float  # the share of the time that the model waits for data
    model: str  # SHA-256 over weights and optimiser
    snapshot_bytes: int  # of the last checkpoint's snapshot; 0 before there is one


@dataclass(frozen=True)
class TrainerRun:
    """What one trainer process did."""

    steps: tuple[TrainStep, ...]
    exit_code: int  # negative: the signal that killed it
    errors: str  # what it wrote to stderr


def write_corpus(target: Path, shards: int, max_files: int | None = None, root: Path | None = None) -> tuple[int, str]:
    """Write `part-000.jsonl.gz` and so on, record i to file i mod `shards`; return their number and a summary."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files = sorted(path for path in files if path.is_file())
    if not files:
        raise FileNotFoundError(f"the demo streams the standard library's .py files, and found none below {root}")
    if max_files is not None:  # spread over the whole library
        files = files[:: max(1, len(files) // max_files)][:max_files]
    lines: list[bytes] = []
    text_bytes = stored_bytes = 0
    for path in files:
        text = path.read_bytes().decode("utf-8", errors="replace")
        text_bytes += len(text.encode())
        for start in range(0, len(text), RECORD_BYTES):
            record = {"path": path.relative_to(root).as_posix(), "text": text[start : start + RECORD_BYTES]}
            lines.append(json.dumps(record).encode() + b"\n")
    for shard in range(shards):
        packed = gzip.compress(b"".join(lines[shard::shards]), compresslevel=6, mtime=0)
        stored_bytes += (target / f"part-{shard:03d}.jsonl.gz").write_bytes(packed)
    return len(lines), (
        f"Python {sys.version.split()[0]}'s standard library: {len(files)} files, {text_bytes / 1e6:.1f} MB of "
        f"text, {len(lines):,} records in {shards} shards ({stored_bytes / 1e6:.1f} MB gzipped)"
    )


def encode(record: dict[str, str]) -> Batch:
    """Return a record's text as exactly `RECORD_BYTES` bytes: a short one repeats, a long one is cut."""
    return np.resize(np.frombuffer(record["text"].encode(), np.uint8), RECORD_BYTES)


def pipeline(base_url: str, shards: int, window: int) -> sl.Pipeline[Batch]:
    """Return batches [rows, RECORD_BYTES] of the records in `shards` files; the last batch is smaller."""
    records = sl.read_jsonl(f"{base_url}/part-{{000..{shards - 1:03d}}}.jsonl.gz")
    return records.shard(WORKERS).shuffle(window=window, seed=0).map(encode).merge().batch(BATCH_SIZE)


def application(directory: Path, latency_s: float) -> web.Application:
    """Return an application that serves the files of one directory, each request after `latency_s` seconds."""
    files = {path.name: path for path in directory.iterdir() if path.is_file()}

    async def serve_file(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(latency_s)
        path = files.get(request.match_info["name"])
        if path is None:
            raise web.HTTPNotFound
        return web.FileResponse(path, headers={"Content-Type": "application/gzip"})  # no Content-Encoding

    app = web.Application()
    app.router.add_get("/{name}", serve_file)  # HEAD too
    return app


async def serve(directory: Path) -> None:
    """Serve `directory` on a free loopback port, print the port, and return when stdin closes."""
    runner = web.AppRunner(application(directory, LATENCY_MS / 1000), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        click.echo(runner.addresses[0][1])  # echo flushes
        await asyncio.to_thread(sys.stdin.buffer.read)  # a loop can't watch every kind of stdin (/dev/null, a file)
    finally:
        await runner.cleanup()


class ByteModel:
    """A byte-level language model, exactly repeatable: the same batches give the same weights, bit for bit.

    Bengio et al., "A Neural Probabilistic Language Model" (2003), over bytes: the embeddings of the last bytes, side by
    side, a tanh layer, a softmax over the next byte; trained by Adam (Kingma and Ba, 2015).
    """

    CONTEXT, EMBEDDING, HIDDEN = 12, 16, 128
    STRIDE = 16  # one byte in so many of each row is predicted, another one at each step: a step is cheap
    RATE, BETAS, EPSILON = 6e-3, (0.9, 0.999), 1e-8

    def __init__(self) -> None:
        rng, width = np.random.default_rng(0), self.CONTEXT * self.EMBEDDING
        shapes = (256, self.EMBEDDING), (width, self.HIDDEN), (self.HIDDEN, 256), (self.HIDDEN,), (256,)
        scales = 0.1, width**-0.5, 0.1 * self.HIDDEN**-0.5, 0.0, 0.0  # near the uniform guess: a loss of ln 256 = 5.55
        drawn = (rng.normal(0.0, scale, shape) for shape, scale in zip(shapes, scales, strict=True))
        self.weights: list[NDArray[np.float32]] = [layer.astype(np.float32) for layer in drawn]
        self.means, self.squares = ([np.zeros_like(layer) for layer in self.weights] for _ in range(2))
        self.steps = 0

    def step(self, batch: Batch) -> float:
        """Learn from a batch of shape [rows, length], any number of rows; return its mean loss in nats a byte."""
        windows = np.lib.stride_tricks.sliding_window_view(batch, self.CONTEXT + 1, axis=1)
        # 7 has no factor in common with STRIDE: so many steps visit every offset once.
        chosen = windows[:, self.steps * 7 % self.STRIDE :: self.STRIDE].reshape(-1, self.CONTEXT + 1)
        loss, gradient = self._differentiate(chosen[:, :-1], chosen[:, -1])
        self.steps += 1
        first, second = self.BETAS
        rate = self.RATE * math.sqrt(1 - second**self.steps) / (1 - first**self.steps)
        for weights, mean, square, slope in zip(self.weights, self.means, self.squares, gradient, strict=True):
            mean += (1 - first) * (slope - mean)
            square += (1 - second) * (slope * slope - square)
            weights -= rate * mean / (np.sqrt(square) + self.EPSILON)
        return loss

    def arrays(self) -> dict[str, Any]:
        parts = {"weights": self.weights, "means": self.means, "squares": self.squares}
        return {f"{name}{i}": array for name, arrays in parts.items() for i, array in enumerate(arrays)}

    def digest(self) -> str:
        return hashlib.sha256(b"".join(array.tobytes() for array in self.arrays().values())).hexdigest()

    def _differentiate(self, contexts: Batch, targets: Batch) -> tuple[float, list[NDArray[np.float32]]]:
        """Return the mean loss and its gradient."""
        embedding, weights, output, bias, output_bias = self.weights
        count, rows = len(targets), np.arange(len(targets))
        inputs = embedding[contexts].reshape(count, -1)
        hidden = np.tanh(inputs @ weights + bias)
        logits = hidden @ output + output_bias
        logits -= logits.max(axis=1, keepdims=True)
        odds = np.exp(logits)
        total = odds.sum(axis=1, keepdims=True)
        loss = float(np.mean(np.log(total[:, 0]) - logits[rows, targets]))
        error = odds / (total * count)
        error[rows, targets] -= 1 / count
        hidden_error = (error @ output.T) * (1 - hidden * hidden)
        embedding_error = (hidden_error @ weights.T).reshape(-1, self.EMBEDDING).T
        # Column by column with `bincount`: several times as fast as `np.add.at`, and adds in float64.
        columns = [np.bincount(contexts.ravel(), weights=column, minlength=256) for column in embedding_error]
        slopes = [np.stack(columns, axis=1).astype(np.float32), inputs.T @ hidden_error, hidden.T @ error]
        return loss, [*slopes, hidden_error.sum(axis=0), error.sum(axis=0)]


class Trainer:
    """One run: the model, what was delivered to it, and the file where the two are saved together."""

    def __init__(self, checkpoint: Path, save_every: int, die_at: int | None) -> None:
        self.checkpoint, self.save_every, self.die_at = checkpoint, save_every, die_at
        self.model, self.seconds = ByteModel(), {"input": 0.0, "model": 0.0, "saving": 0.0}
        self.items, self.items_here, self.chain, self.saved_bytes = 0, 0, "", 0

    def resume(self) -> sl.Snapshot | None:
        """Load the checkpoint, if there is one, and return its snapshot of the stream."""
        if not self.checkpoint.exists():
            return None
        with np.load(self.checkpoint, allow_pickle=False) as saved:
            self.model.steps, self.items, self.chain = int(saved["steps"]), int(saved["items"]), str(saved["chain"])
            for name, array in self.model.arrays().items():
                array[:] = saved[name]
            return sl.Snapshot.from_json(str(saved["snapshot"]))

    def save(self, snapshot: sl.Snapshot) -> None:
        """Replace the checkpoint by one of this step; a kill at any moment leaves the old one or the new one, whole."""
        new, text = self.checkpoint.with_suffix(".new.npz"), snapshot.to_json()
        account: Any = {"steps": self.model.steps, "items": self.items, "chain": self.chain, "snapshot": text}
        np.savez(new, **self.model.arrays(), **account)
        new.replace(self.checkpoint)
        self.saved_bytes = len(text.encode())

    def run(self, stream: Any) -> None:
        """Learn from every batch of the stream, and save every `save_every` of them."""
        batches: Iterator[Batch] = iter(stream)
        while True:
            with self.spent("input"):
                batch = next(batches, None)
            if batch is None:
                break
            with self.spent("model"):
                loss = self.model.step(batch)
            self.report(batch, loss)
            if self.model.steps == self.die_at:
                os.kill(os.getpid(), signal.SIGKILL)  # no exit handlers, no finally: as the kernel's OOM killer does it
            if self.model.steps % self.save_every == 0:
                with self.spent("saving"):
                    self.save(stream.snapshot())

    def report(self, batch: Batch, loss: float) -> None:
        """Print the step; the digest covers values, shape and dtype of its batch and everything before it."""
        link = hashlib.sha256(f"{self.chain} {batch.dtype} {batch.shape}".encode() + batch.tobytes())
        self.chain, self.items = link.hexdigest(), self.items + len(batch)
        self.items_here += len(batch)
        total = sum(self.seconds.values())
        rates = self.items_here / total, max(self.seconds, key=self.seconds.__getitem__), self.seconds["input"] / total
        step = TrainStep(self.model.steps, self.items, loss, self.chain, *rates, self.model.digest(), self.saved_bytes)
        print(json.dumps(asdict(step)), flush=True)

    @contextmanager
    def spent(self, part: str) -> Iterator[None]:
        """Count the body's time as spent on `part`."""
        start = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - start


def start(*arguments: str, errors: IO[bytes], stdin: int, module: str = "streamline.demo") -> subprocess.Popen[str]:
    """Start `python -m streamline.demo`, or another module: a new interpreter, never a fork of this one."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]))
    # One thread for the matrix products: the other core belongs to the data, and a sum split in two rounds otherwise.
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OPENBLAS", "OMP", "MKL", "VECLIB_MAXIMUM")}
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, **threads, "PYTHONPATH": path}
    # A process group of its own: Ctrl-C goes to the parent alone, which ends its children in order.
    return subprocess.Popen(
        command, stdin=stdin, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, process_group=0
    )


@contextmanager
def serving(directory: Path, errors: Path) -> Iterator[str]:
    """Serve the files of `directory` over HTTP and give the base URL."""
    with errors.open("wb") as log, start("server", str(directory), errors=log, stdin=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            port = server.stdout.readline().strip()
            if not port.isdigit():
                raise DemoError(f"expected the server to print its port, got {port!r}\n{errors.read_text()}")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.stdin.close()
            try:
                server.wait(SERVER_EXIT_S)
            except BaseException:  # it doesn't end, or a second Ctrl-C came while waiting
                server.kill()
                raise


def training(arguments: list[str], errors: Path, on_step: Callable[[TrainStep], None]) -> TrainerRun:
    """Run a trainer process to its end, however that comes, and return what it reported."""
    steps: list[TrainStep] = []
    with errors.open("wb") as log, start("trainer", *arguments, errors=log, stdin=subprocess.DEVNULL) as trainer:
        assert trainer.stdout is not None
        timer, begin = threading.Timer(TRAINER_LIMIT_S, trainer.kill), time.monotonic()
        timer.daemon = True  # an interrupt may come before it can be cancelled
        try:
            timer.start()
            for line in trainer.stdout:
                steps.append(TrainStep(**json.loads(line)))
                on_step(steps[-1])
            exit_code = trainer.wait()
        except (TypeError, ValueError) as error:
            trainer.kill()
            raise DemoError(f"expected a line of the trainer's report, got {line!r}") from error
        except BaseException:
            trainer.kill()
            raise
        finally:
            timer.cancel()
    if exit_code == -signal.SIGKILL and time.monotonic() - begin >= TRAINER_LIMIT_S:
        raise DemoError(f"the trainer did not end within {TRAINER_LIMIT_S:.0f} s\n{errors.read_text()}")
    return TrainerRun(tuple(steps), exit_code, errors.read_text())


def shown(console: Console, live: Progress, name: str, total: int) -> Callable[[TrainStep], None]:
    """Start the line of a run that is to come to batch `total`; return what shows a step of it."""
    task, printed_at = live.add_task(f"{name:<13}", total=total, status="starting"), time.monotonic()

    def show(step: TrainStep) -> None:
        nonlocal printed_at
        rate, limit = f"{step.items_per_s:,.0f} items/s", f"limit: {step.limit} ({step.waiting:.0%} waiting)"
        status = f"{rate}  loss {step.loss:.2f}  {limit}"
        live.update(task, completed=step.step, status=status)
        late = time.monotonic() - printed_at >= 2.0
        if not console.is_terminal and (late or step.step == total):
            printed_at = time.monotonic()
            console.print(f"{name:<13} {step.step:>4}/{total}  {status}", soft_wrap=True)

    return show


def table(runs: dict[str, TrainerRun]) -> Table:
    """Return the runs, which have steps, side by side."""
    view = Table("", *runs, title="one training, without and with a kill")
    rows: dict[str, Callable[[TrainerRun, TrainStep], str]] = {
        "ended": lambda run, last: "by SIGKILL" if run.exit_code == -signal.SIGKILL else f"exit code {run.exit_code}",
        "batches": lambda run, last: f"{run.steps[0].step} to {last.step}",
        "items/s": lambda run, last: f"{last.items_per_s:,.0f}",
        "loss": lambda run, last: f"{run.steps[0].loss:.2f} → {np.mean([step.loss for step in run.steps[-20:]]):.2f}",
        "limited by": lambda run, last: last.limit,
        "waiting for data": lambda run, last: f"{last.waiting:.0%}",
        "snapshot": lambda run, last: f"{last.snapshot_bytes:,} bytes",
        "batches SHA-256": lambda run, last: last.chain[:12],
        "model SHA-256": lambda run, last: last.model[:12],
    }
    for name, cell in rows.items():
        view.add_row(name, *(cell(run, run.steps[-1]) for run in runs.values()))
    return view


def run_demo(quick: bool = False, console: Console | None = None, *, cluster: bool = False) -> int:
    """Run the demo (`quick`: on some files); return 0 for equal runs, 1 for a difference or failure, 130 for Ctrl-C."""
    console = Console(highlight=False) if console is None else console
    begin = time.monotonic()
    try:
        with signals_as_interrupts(), tempfile.TemporaryDirectory(prefix="streamline-demo-") as folder:
            compare = compare_with_nodes if cluster else compare_with_resumed
            runs = compare(Path(folder), QUICK if quick else FULL, console)
    except (DemoError, OSError) as error:
        console.print(f"FAILED: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted: the server is stopped and the temporary folder removed")
        return 130  # what shells report for Ctrl-C
    console.print(table(runs))
    seconds = time.monotonic() - begin
    if problem := difference(*runs.values()):
        console.print(f"FAILED: {problem} ({seconds:.0f} s)", style="red", markup=False, soft_wrap=True)
        return 1
    same = "On three nodes, one of which was killed" if cluster else "Killed and resumed"
    same += f", the training got the same {len(runs['uninterrupted'].steps)} batches and ended with "
    same += f"the same model as the uninterrupted one, bit for bit ({seconds:.0f} s)."
    console.print(same, soft_wrap=True, style="green")
    return 0


class Rehearsal:
    """What the runs of one demo have in common: the records, served over HTTP, the screen, and when to kill what."""

    def __init__(self, folder: Path, size: Size, console: Console) -> None:
        self.folder, self.size, self.console = folder, size, console
        (folder / "shards").mkdir()
        self.records, self.description = write_corpus(folder / "shards", size.shards, size.max_files)
        self.batches = math.ceil(self.records / BATCH_SIZE)
        self.die_at = kill_step(self.batches, size.save_every)
        self.live = Progress(
            "{task.description}", BarColumn(None), MofNCompleteColumn(), "{task.fields[status]}",
            console=console, expand=True, disable=not console.is_terminal,
        )  # fmt: skip

    @contextmanager
    def begun(self, plan: str) -> Iterator[str]:
        """Serve the records, say what is going to happen, and give the base URL."""
        with serving(self.folder / "shards", self.folder / "server.log") as url, self.live:
            where = f"at {url}, {LATENCY_MS:.0f} ms a request"
            when = f"{plan} at batch {self.die_at} of {self.batches}"
            self.console.print(f"{self.description}\n{where}; {when}", soft_wrap=True)
            yield url

    def train(
        self, name: str, total: int, *arguments: str, on_step: Callable[[TrainStep], None] = lambda step: None
    ) -> TrainerRun:
        """Run a trainer that is to come to batch `total`; the arguments are those of its command."""
        show = shown(self.console, self.live, name, total)

        def both(step: TrainStep) -> None:
            show(step)
            on_step(step)

        quick = ["--quick"] if self.size is QUICK else []
        return training([*arguments, *quick], self.folder / "trainer.log", both)

    def undisturbed(self, url: str) -> TrainerRun:
        """Run a trainer that is left alone."""
        whole = self.train("uninterrupted", self.batches, url, str(self.folder / "undisturbed.npz"))
        check("uninterrupted", whole, first=1, last=self.batches, exit_code=0)
        if whole.steps[-1].items != self.records:  # two equal halves would prove nothing
            raise DemoError(f"the uninterrupted run delivered {whole.steps[-1].items} of {self.records} records")
        return whole


def compare_with_resumed(folder: Path, size: Size, console: Console) -> dict[str, TrainerRun]:
    """Kill a trainer and resume it; return all runs by name, or raise DemoError where one did not end as it should."""
    demo = Rehearsal(folder, size, console)
    batches, die_at, checkpoint = demo.batches, demo.die_at, str(folder / "disturbed.npz")
    with demo.begun("the second run kills itself") as url:
        whole = demo.undisturbed(url)
        killed = demo.train("killed", die_at, url, checkpoint, "--die-at", str(die_at))
        check("killed", killed, first=1, last=die_at, exit_code=-signal.SIGKILL)
        resumed = demo.train("resumed", batches, url, checkpoint)
        check("resumed", resumed, first=die_at // size.save_every * size.save_every + 1, last=batches, exit_code=0)
    return {"uninterrupted": whole, "killed": killed, "resumed": resumed}


def compare_with_nodes(folder: Path, size: Size, console: Console) -> dict[str, TrainerRun]:
    """Kill one of the nodes of a trainer; return all runs by name, or raise DemoError as above."""
    demo = Rehearsal(folder, size, console)
    with demo.begun("the second run's workers are on three nodes, and one is killed and replaced") as url:
        whole = demo.undisturbed(url)
        with Nodes(folder) as nodes:

            def kill_one(step: TrainStep) -> None:
                if step.step == demo.die_at:
                    nodes.replace_first()

            arguments = [str(folder / "nodes.npz"), "--listen", nodes.address, "--key-file", str(nodes.key)]
            on_nodes = demo.train("on nodes", demo.batches, url, *arguments, on_step=kill_one)
        check("on nodes", on_nodes, first=1, last=demo.batches, exit_code=0)
        if f"and {HOSTS[0]} hosts with it" not in on_nodes.errors:
            raise DemoError(f"the trainer should have lost a node with {HOSTS[0]} hosts\n{on_nodes.errors}")
    return {"uninterrupted": whole, "on nodes": on_nodes}


class Nodes:
    """Agents on this machine, each in a process group of its own, as if it were a machine.

    Attributes:
      address: which they dial.
      key: of both ends, a file.
    """

    def __init__(self, folder: Path) -> None:
        self.key = folder / "key"
        self.key.touch(mode=0o600)
        self.key.write_text(secrets.token_hex(32))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self._log = folder / "nodes.log"
        self._ending = ExitStack()

    def __enter__(self) -> Nodes:
        self._first, *_ = [self._start(hosts) for hosts in HOSTS]
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def replace_first(self) -> None:
        """Kill the node that has most hosts, and start another one."""
        os.killpg(self._first.pid, signal.SIGKILL)  # all that run on it at once, as a power cut does it
        self._start(HOSTS[0])

    def _start(self, hosts: int) -> subprocess.Popen[str]:
        command = ["worker", "--connect", self.address, "--key-file", str(self.key), "--hosts", str(hosts)]
        with self._log.open("ab") as log:
            node = start(*command, errors=log, stdin=subprocess.DEVNULL, module="streamline")
        self._ending.enter_context(node)  # waits for it
        self._ending.callback(node.kill)  # its hosts end with it
        return node


def kill_step(batches: int, save_every: int) -> int:
    """Return a batch half-way, after a checkpoint and before the next: some work is lost, and must be redone."""
    step = batches // 2
    if step <= save_every:
        raise DemoError(f"{batches} batches are too few to kill and resume, with a snapshot every {save_every}")
    return step + 1 if step % save_every == 0 else step


def check(name: str, run: TrainerRun, *, first: int, last: int, exit_code: int) -> None:
    """Refuse a run that was to go from one batch to another and to end so, and did not."""
    steps = [step.step for step in run.steps]
    if run.exit_code != exit_code or steps != list(range(first, last + 1)):
        raise DemoError(
            f"expected the {name} run to take steps {first} to {last} and to end with exit code {exit_code}; "
            f"it took {steps[:1]} to {steps[-1:]} and ended with {run.exit_code}\n{run.errors}"
        )


def difference(whole: TrainerRun, *others: TrainerRun) -> str | None:
    """Return what differs first from the uninterrupted run, or None; a batch seen twice must be equal both times."""
    wanted = {step.step: step for step in whole.steps}
    for step in (step for run in others for step in run.steps):
        want = wanted[step.step]
        if want.chain != step.chain:
            return f"the digest of what was delivered differs from batch {step.step} on: {step.chain} != {want.chain}"
        if (want.loss, want.model) != (step.loss, step.model):
            return f"loss or model differ at batch {step.step}, on the same data: {step.loss}, digest {step.model}"
    return None


@contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind as Ctrl-C does, and only the first: a later one would interrupt the clean-up."""
    interrupted = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    taken = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@click.group()
def main() -> None:
    """The demo's child processes; the demo itself is `streamline demo`."""


@main.command("server")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
def server_command(directory: Path) -> None:
    """Serve DIRECTORY's files on a free loopback port until stdin closes."""
    asyncio.run(serve(directory))


@main.command("trainer")
@click.argument("url")
@click.argument("checkpoint", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--quick", is_flag=True, help="The shards are those of the quick demo.")
@click.option("--die-at", type=int, default=None, help="Batch at which to kill this process with SIGKILL.")
@click.option("--listen", metavar="HOST:PORT", default=None, help="Where nodes dial: the workers run on them.")
@click.option("--key-file", type=click.Path(), default=None, help="The key of the nodes.")
def trainer_command(
    url: str, checkpoint: Path, quick: bool, die_at: int | None, listen: str | None, key_file: str | None
) -> None:
    """Train on the shards below URL, saving to and resuming from CHECKPOINT."""
    size = QUICK if quick else FULL
    trainer = Trainer(checkpoint, size.save_every, die_at)
    backend = sl.Remote(WORKERS, listen=listen, key_file=key_file) if listen else sl.Inline()
    with pipeline(url, size.shards, size.window).open(resume=trainer.resume(), backend=backend) as stream:
        trainer.run(stream)


if __name__ == "__main__":
    main()
