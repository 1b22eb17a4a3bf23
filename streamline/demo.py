"""`streamline demo`: kill a trainer half-way, resume it, and compare with a run that was left alone.

`run_demo` writes the running Python's standard library as gzipped JSONL, serves it over HTTP on loopback with the
latency of an object store, and starts one trainer after another: `python -m streamline.demo URL CHECKPOINT …`, which
streams, learns, saves, and may be told to kill itself. It resumes where CHECKPOINT exists. Each line on its stdout is a
`TrainStep` as JSON.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import math
import os
import signal
import sys
import sysconfig
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, create_subprocess_exec
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from aiohttp import web
from numpy.typing import NDArray
from rich.console import Console

import streamline as sl

SHARDS, WORKERS, WINDOW, BATCH_SIZE, RECORD_BYTES, SAVE_EVERY = 8, 4, 256, 32, 1024, 8
LATENCY_S = 0.02  # of a request, as to an object store in the same region
TRAINER_LIMIT_S = 120.0  # several times what the slowest machine takes: a longer one hangs

Batch = NDArray[np.uint8]


class DemoError(Exception):
    """A trainer failed, or did otherwise than the one that was left alone."""


class TrainStep(NamedTuple):
    """One batch, after the model has learnt from it."""

    step: int  # of the whole training, from 1
    items: int  # so far, in the whole training
    loss: float
    chain: str  # SHA-256 over all batches so far
    model: str  # SHA-256 over its weights


def write_corpus(target: Path, every: int = 1, root: Path | None = None) -> tuple[int, str]:
    """Write `part-000.jsonl.gz` and so on, record i to file i mod SHARDS; return their number and a summary."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    files = sorted(root.glob("*.py"))[::every]
    if not files:
        raise FileNotFoundError(f"the demo streams the standard library's .py files, and found none in {root}")
    lines: list[bytes] = []
    for path in files:
        text = path.read_bytes().decode("utf-8", errors="replace")
        parts = (text[start : start + RECORD_BYTES] for start in range(0, len(text), RECORD_BYTES))
        lines += [json.dumps({"path": path.name, "text": part}).encode() + b"\n" for part in parts]
    for shard in range(SHARDS):
        packed = gzip.compress(b"".join(lines[shard::SHARDS]), compresslevel=6, mtime=0)
        (target / f"part-{shard:03d}.jsonl.gz").write_bytes(packed)
    version = sys.version.split()[0]
    return len(lines), f"Python {version}'s standard library: {len(files)} files, {len(lines):,} records"


def encode(record: dict[str, str]) -> Batch:
    """Return a record's text as exactly `RECORD_BYTES` bytes: a short one repeats, a long one is cut."""
    return np.resize(np.frombuffer(record["text"].encode(), np.uint8), RECORD_BYTES)


def pipeline(base_url: str) -> sl.Pipeline[Batch]:
    """Return batches [rows, RECORD_BYTES] of the records in `SHARDS` files; the last batch is smaller."""
    records = sl.read_jsonl(f"{base_url}/part-{{000..{SHARDS - 1:03d}}}.jsonl.gz")
    return records.shard(WORKERS).shuffle(window=WINDOW, seed=0).map(encode).merge().batch(BATCH_SIZE)


class Trainer:
    """A byte-level language model, what was delivered to it, and the file where the two are saved together.

    The model predicts a byte from the one before it: a softmax over a table, learnt by gradient descent. It is exactly
    repeatable: the same batches give the same weights, bit for bit.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.weights = np.zeros((256, 256))
        self.steps, self.items, self.chain = 0, 0, ""

    def resume(self) -> sl.Snapshot | None:
        """Load the checkpoint, if there is one, and return its snapshot of the stream."""
        if not self.checkpoint.exists():
            return None
        with np.load(self.checkpoint, allow_pickle=False) as saved:
            self.steps, self.items, self.chain = int(saved["steps"]), int(saved["items"]), str(saved["chain"])
            self.weights = saved["weights"]
            return sl.Snapshot.from_json(str(saved["snapshot"]))

    def save(self, snapshot: sl.Snapshot) -> None:
        """Replace the checkpoint by one of this step; a kill at any moment leaves the old one or the new one, whole."""
        new = self.checkpoint.with_suffix(".new.npz")
        account: Any = {"steps": self.steps, "items": self.items, "chain": self.chain, "snapshot": snapshot.to_json()}
        np.savez(new, weights=self.weights, **account)
        new.replace(self.checkpoint)

    def learn(self, batch: Batch) -> TrainStep:
        """Learn from a batch of shape [rows, length], any number of rows."""
        pairs = np.bincount(256 * batch[:, :-1].ravel().astype(int) + batch[:, 1:].ravel(), minlength=256 * 256)
        counts = pairs.reshape(256, 256)  # [byte before, byte]
        rows = counts.sum(axis=1, keepdims=True)
        odds = np.exp(self.weights)
        odds /= odds.sum(axis=1, keepdims=True)
        loss = -float((counts * np.log(odds)).sum() / counts.sum())  # nats a byte
        self.weights += 4.0 * (counts - odds * rows) / np.maximum(rows, 32)
        # The digest covers values, shape and dtype of this batch and everything before it.
        link = hashlib.sha256(f"{self.chain} {batch.dtype} {batch.shape}".encode() + batch.tobytes())
        self.steps, self.items, self.chain = self.steps + 1, self.items + len(batch), link.hexdigest()
        return TrainStep(self.steps, self.items, loss, self.chain, hashlib.sha256(self.weights.tobytes()).hexdigest())


def main(url: str, checkpoint: str, die_at: str) -> None:
    """Train on the shards below URL, saving to and resuming from CHECKPOINT; die after so many batches, if not "0"."""
    trainer = Trainer(Path(checkpoint))
    with pipeline(url).open(resume=trainer.resume()) as stream:
        for batch in stream:
            step = trainer.learn(batch)
            print(json.dumps(step), flush=True)
            if step.step == int(die_at):
                os.kill(os.getpid(), signal.SIGKILL)  # no exit handlers, no finally: as the kernel's OOM killer does it
            if step.step % SAVE_EVERY == 0:
                trainer.save(stream.snapshot())


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[str]:
    """Serve the files of `directory` over HTTP, each request after `LATENCY_S`, and give the base URL."""

    async def serve_file(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(LATENCY_S)
        path = directory / Path(request.match_info["name"]).name
        return web.FileResponse(path, headers={"Content-Type": "application/gzip"})  # no Content-Encoding

    app = web.Application()
    app.router.add_get("/{name}", serve_file)  # HEAD too
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def train(name: str, url: str, checkpoint: Path, console: Console, die_at: int = 0) -> list[TrainStep]:
    """Run a trainer process to its end, and return its steps; raise DemoError where it doesn't end as it should."""
    steps: list[TrainStep] = []
    command = sys.executable, "-m", "streamline.demo", url, str(checkpoint), str(die_at)
    # A process group of its own: Ctrl-C goes to the parent alone, which ends its children in order.
    trainer = await create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, process_group=0)
    assert trainer.stdout is not None
    assert trainer.stderr is not None
    errors = asyncio.create_task(trainer.stderr.read())
    try:
        async with asyncio.timeout(TRAINER_LIMIT_S):
            async for line in trainer.stdout:
                steps.append(TrainStep(*json.loads(line)))
                if steps[-1].step % SAVE_EVERY == 0:
                    console.print(f"{name:<13}  batch {steps[-1].step:>3}  loss {steps[-1].loss:.2f}")
            exit_code = await trainer.wait()
    except TimeoutError as error:
        raise DemoError(f"the {name} trainer did not end within {TRAINER_LIMIT_S:.0f} s") from error
    finally:
        if trainer.returncode is None:
            trainer.kill()
            await trainer.wait()
        text = (await errors).decode()
    if exit_code != (-signal.SIGKILL if die_at else 0):
        raise DemoError(f"the {name} trainer ended with exit code {exit_code}, after {len(steps)} steps\n{text}")
    return steps


async def compare(every: int, console: Console) -> str:
    """Kill a trainer, resume it, and say in what it equals one left alone; a DemoError if it doesn't, or one failed."""
    cancel_at_signals()
    with tempfile.TemporaryDirectory(prefix="streamline-demo-") as name:
        folder = Path(name)
        records, summary = write_corpus(folder, every)
        saved = math.ceil(records / BATCH_SIZE) // 2 // SAVE_EVERY * SAVE_EVERY
        die_at = saved + 2  # some work is lost, and must be redone
        async with serving(folder) as url:
            console.print(f"{summary}, at {url}, {LATENCY_S * 1000:.0f} ms a request", soft_wrap=True)
            whole = await train("uninterrupted", url, folder / "whole.npz", console)
            if not whole or whole[-1].items != records:  # two equal halves would prove nothing
                raise DemoError(f"the uninterrupted run delivered {whole[-1:]} of {records} records")
            killed = await train("killed", url, folder / "model.npz", console, die_at)
            check("killed", killed, whole[:die_at])
            console.print(f"killed by SIGKILL at batch {die_at}")
            resumed = await train("resumed", url, folder / "model.npz", console)
            check("resumed", resumed, whole[saved:])
    chain, model = whole[-1].chain[:12], whole[-1].model[:12]
    return f"the same {len(whole)} batches (SHA-256 {chain}) and ended with the same model ({model})"


def check(name: str, steps: list[TrainStep], wanted: list[TrainStep]) -> None:
    """Refuse a run that took other steps than the uninterrupted one, or got or learnt something else."""
    for step, want in zip_longest(steps, wanted):
        if step != want:
            raise DemoError(f"the {name} run differs from the uninterrupted one. Expected {want}, got {step}")


def cancel_at_signals() -> None:
    """Let SIGTERM and SIGHUP cancel the present task as Ctrl-C does: only the first, or one would cut the clean-up."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, lambda: task.cancelling() or task.cancel())


def run_demo(quick: bool = False, console: Console | None = None) -> int:
    """Run the demo (`quick`: on some files); return 0 for equal runs, 1 for a difference or failure, 130 for Ctrl-C."""
    console = Console(highlight=False) if console is None else console
    began = time.monotonic()
    try:
        same = asyncio.run(compare(4 if quick else 1, console))
    except (DemoError, OSError) as error:
        console.print(f"FAILED: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("interrupted: the server is stopped and the temporary folder removed")
        return 130  # what shells report for Ctrl-C
    same = f"Killed and resumed, the training got {same} as the uninterrupted one, bit for bit"
    console.print(f"{same} ({time.monotonic() - began:.0f} s).", soft_wrap=True, style="green")
    return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
