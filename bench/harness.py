"""Runs suites: each case in its own process, rounds interleaved A B C A B C, every run's items verified."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import inspect
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

from bench import report
from bench.suite import Case, Result, Suite, Tally

WARM_UPS = 1
# A healthy round takes about a second; the first one also imports the peer and prepares its data.
ROUND_TIMEOUT_S = 120.0
# A suite of `--smoke` takes a second: one that stands still for this long hangs.
SMOKE_TIMEOUT_S = 60.0

# Not fork: a child must not inherit what an earlier case has imported or started.
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Options:
    """How to run, for every suite alike.

    Args:
      rounds: measured ones, after the warm-up.
      use_uvloop: run async cases, floors included, on uvloop.
      smoke: run our own cases and floors once, with few items, only to see that they are right.
    """

    rounds: int = 5
    use_uvloop: bool = False
    smoke: bool = False


def loop_factory(use_uvloop: bool) -> Callable[[], asyncio.AbstractEventLoop]:
    if not use_uvloop:
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop


def run_once(suite: Suite, case: Case, items: int, use_uvloop: bool) -> float:
    """Run a case once and return its figure in the suite's unit.

    Raises:
      WrongItemsError: it delivered something else than it had to.
    """
    if case.prepare is not None:
        case.prepare(items)
    gc.collect()  # one case's garbage is not the next one's time
    tally = _timed_on_loop(case.run, items, use_uvloop) if _is_async(case) else _timed(case.run, items)
    if suite.expected is not None:
        tally.check(suite.expected(items))
    if tally.mb is not None:
        return tally.mb
    assert tally.seconds is not None
    return tally.seconds * 1e3 if suite.unit == "ms" else items / tally.seconds


def _is_async(case: Case) -> bool:
    return inspect.iscoroutinefunction(case.run)


def _timed(run: Callable[[int], Any], items: int) -> Tally:
    start = perf_counter()
    tally: Tally = run(items)
    return _with_seconds(tally, perf_counter() - start)


def _timed_on_loop(run: Callable[[int], Any], items: int, use_uvloop: bool) -> Tally:
    async def timed() -> Tally:
        start = perf_counter()  # in here: starting and ending a loop is no throughput
        tally: Tally = await run(items)
        return _with_seconds(tally, perf_counter() - start)

    with asyncio.Runner(loop_factory=loop_factory(use_uvloop)) as runner:
        return runner.run(timed())


def _with_seconds(tally: Tally, seconds: float) -> Tally:
    return tally if tally.seconds is not None else replace(tally, seconds=seconds)


def serve(suite: Suite, case: Case, use_uvloop: bool, calls: Connection) -> None:
    """Be the process of one case: one round for each call, until told to stop."""
    while calls.recv():
        try:
            calls.send(run_once(suite, case, case.items, use_uvloop))
        except Exception as error:
            traceback.print_exc()
            calls.send(f"{type(error).__name__}: {error}")


class Lane:
    """One case in its process, so that imports, threads and allocators of the others stay out of its figures."""

    def __init__(self, suite: Suite, case: Case, options: Options) -> None:
        self._calls, theirs = SPAWN.Pipe()
        # Not a daemon: peers may start processes of their own.
        self._process = SPAWN.Process(target=serve, args=(suite, case, options.use_uvloop, theirs))
        self._process.start()
        theirs.close()  # else its death would not be seen as the end of the pipe
        self._rounds: list[float] = []
        self._problem = ""

    def run_round(self) -> None:
        """Run and keep one round; after a failure do nothing any more."""
        if self._problem:
            return
        answer = self._ask()
        if isinstance(answer, str):
            self._problem = answer
        else:
            self._rounds.append(answer)

    def _ask(self) -> float | str:
        try:
            self._calls.send(True)
            if not self._calls.poll(ROUND_TIMEOUT_S):
                return f"no answer within {ROUND_TIMEOUT_S:g} s"
            answer: float | str = self._calls.recv()
            return answer
        except (EOFError, OSError):
            self._process.join()
            return f"its process died with exit code {self._process.exitcode}"

    def result(self) -> Result:
        if self._problem:
            return Result(problem=f"failed: {self._problem}", failed=True)
        return Result(tuple(self._rounds[WARM_UPS:]))

    def close(self) -> None:
        with suppress(OSError):  # it is dead already
            self._calls.send(False)
        self._process.join(0 if self._problem else 10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def measure(suite: Suite, options: Options) -> dict[str, Result]:
    """Return each case's measured rounds, in the table's order."""
    missing = {case.name: case.missing() for case in suite.cases}
    lanes = {case.name: Lane(suite, case, options) for case in suite.cases if not missing[case.name]}
    try:
        for _ in range(WARM_UPS + options.rounds):
            for lane in lanes.values():
                lane.run_round()
    finally:
        for lane in lanes.values():
            lane.close()
    absent = {name: Result(problem=f"not installed: {module}") for name, module in missing.items() if module}
    return {case.name: absent.get(case.name) or lanes[case.name].result() for case in suite.cases}


def smoke(suite: Suite, options: Options) -> dict[str, Result]:
    """Run every case but the peers' once, in this process, with few items; one that hangs says where, and ends it."""
    faulthandler.dump_traceback_later(SMOKE_TIMEOUT_S, exit=True)
    try:
        return {case.name: _smoke(suite, case, options) for case in suite.cases if not case.peers}
    finally:
        faulthandler.cancel_dump_traceback_later()


def _smoke(suite: Suite, case: Case, options: Options) -> Result:
    try:
        run_once(suite, case, suite.smoke_items, options.use_uvloop)
    except Exception as error:
        traceback.print_exc()
        return Result(problem=f"failed: {type(error).__name__}: {error}", failed=True)
    return Result()


def run(suites: Sequence[Suite], options: Options) -> tuple[str, bool]:
    """Run suites and print each as soon as it is known.

    Returns:
      The Markdown that was printed, and whether every case ran and was right (a missed target is not a failure).
    """
    sections, sound, where = [], True, report.where(options.use_uvloop)
    for suite in suites:
        results = smoke(suite, options) if options.smoke else measure(suite, options)
        sound = sound and not any(result.failed for result in results.values())
        sections.append(report.checklist(suite, results) if options.smoke else report.table(suite, results, where))
        print(sections[-1], flush=True)
    return "\n".join(sections), sound


def parser() -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    result = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    result.add_argument("--rounds", type=int, default=5, help="measured rounds per case (default 5)")
    result.add_argument("--uvloop", action="store_true", help="run async cases on uvloop")
    result.add_argument("--smoke", action="store_true", help="run our cases once with few items; fail on wrong items")
    return result


def options_of(arguments: argparse.Namespace) -> Options:
    """Read the parsed options."""
    return Options(arguments.rounds, arguments.uvloop, arguments.smoke)


def main(suites: Sequence[Suite]) -> None:
    """Be the command line of one benchmark file; exit with 1 where a case failed."""
    options = options_of(parser().parse_args())
    print(report.where(options.use_uvloop), report.versions(), sep="\n")
    _, sound = run(suites, options)
    sys.exit(not sound)
