"""What a script defines itself goes to its children by value, and comes back as what it was: in real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import pickle, sys
from streamline.backends.ipc.state_codec import ColumnEncoder
from streamline.backends.ipc.exceptions import pickle_exception, pickle_skipped
from streamline.core.error_policy import Failure
from streamline.core.tracebacks import trace_of
from streamline.core.replay import FailedCall



def failed(fn, item):
    try:
        fn(item)
    except BaseException as error:
        FailedCall(fn, item).attach(error)
        return error


def answer(fn, item):
    error, record = failed(fn, item), None
    if isinstance(error, Exception):
        about = {"stage": "s", "kind": "map", "shard": 0, "position": "", "trace": trace_of(error)}
        record = pickle_skipped(Failure(item=item, error=error, **about), "process 2")
    return pickle_exception(error, "process 2"), record


fns, item, state = pickle.load(sys.stdin.buffer)
states = [ColumnEncoder(choosing).dump_state(state) for choosing in (False, True)]
pickle.dump(([answer(fn, item) for fn in fns], states), sys.stdout.buffer)
"""

SCRIPT = """
import pickle, subprocess, sys, threading
import streamline as sl
from streamline.backends.hosts.plan_shipping import dumps
from streamline.backends.ipc.state_codec import ColumnDecoder
from streamline.backends.ipc.exceptions import unpickle_exception, unpickle_skipped
from streamline.core.state import At

print("the script runs")
calls = []


class Mine(Exception):
    made = 0

    def __init__(self, code, reason):
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.lock = threading.Lock()


class Item:
    def __init__(self, number):
        self.number = number


class Position(At):
    pass


def fails(item):
    calls.append(item)
    raise Mine(item.number, "bad")


def groups(item):
    raise ExceptionGroup("both", [Mine(1, "a"), ValueError(item.number)])


def leaves(item):
    raise SystemExit(item.number)


def local():
    class Local(Exception):
        def __init__(self, *, number):
            self.number = number

    def fails(item):
        raise Local(number=item.number)

    return Local, fails


Local, fails_locally = local()
sent = dumps(([fails, groups, leaves, fails_locally], Item(3), Position("source", 7)))
Mine.made = 6  # the child has 0
child = subprocess.run([sys.executable, "-c", CHILD], input=sent, capture_output=True, check=False)
assert not child.stderr, child.stderr.decode()
[(data, record), (group, _), (leaving, _), (of_local, _)], (state, chosen) = pickle.loads(child.stdout)

error = unpickle_exception(data)
assert type(error) is Mine, type(error)
assert (str(error), Mine.made) == ("3: bad", 6), Mine.made
left, trace = error.__notes__
assert "its attributes code, lock" in left, left
assert trace.startswith("the traceback in process 2 (pid ") and "raise Mine(item.number" in trace, trace
try:
    sl.replay(error)
except Mine as again:
    assert [item.number for item in calls] == [3] and type(calls[0]) is Item
assert sl.replay(error, fn=lambda item: item.number) == 3

failure = unpickle_skipped(record)
assert type(failure.error) is Mine and type(failure.item) is Item and failure.item.number == 3
assert "raise Mine(item.number" in failure.traceback

assert type(ColumnDecoder(False).load_state(state)) is Position
assert ColumnDecoder(True).load_state(chosen).json() == {"source": 7}

group = unpickle_exception(group)
assert type(group) is ExceptionGroup and type(group.exceptions[0]) is Mine, group
leaving = unpickle_exception(leaving)
assert type(leaving) is SystemExit and leaving.code == 3
found = unpickle_exception(of_local)
assert type(found) is Local and found.number == 3, type(found)
assert Mine.made == 6
print("all is well")
"""


@pytest.mark.long
def test_classes_of_a_script_come_back_as_its_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"CHILD = {CHILD!r}\n{SCRIPT}")
    done = subprocess.run([sys.executable, "-X", "dev", str(script)], capture_output=True, text=True, timeout=200)
    assert (done.stdout, done.stderr) == ("the script runs\nall is well\n", "")
