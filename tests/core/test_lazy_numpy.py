"""NumPy comes where the first array does: in the consumer, in a host process, and in a host of another machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

import streamline as sl
from streamline.backends.base import Backend
from streamline.core.lazy_numpy import loaded_np, np
from streamline.testing.laws import same
from tests.backends.remote.machines import machines

HERE = "'numpy' in __import__('sys').modules"

MADE = "__import__('numpy')"

LATE = [
    *[HERE, "[1, 2.5, None]", "{'a': b'x'}"] * 6,
    f"{MADE}.arange(6, dtype='int16').reshape(2, 3)",
    HERE,
    *[f"{MADE}.full(3, {n})" for n in range(20)],  # columns
    *[f"{{'n': {n}, 'x': {MADE}.full((2, 2), {n} / 2)}}" for n in range(20)],
    f"{MADE}.arange(40_000)[::-2]",  # shared memory
    f"{MADE}.float32(1.5)",
    f"{MADE}.array(7)",
    f"{MADE}.array([(1, 2.5)], dtype=[('a', 'i4'), ('b', 'f8')])",
    f"{MADE}.array([None, 'x'], dtype=object)",
    f"{MADE}.array(['2020-01-01'], dtype='M8[D]')",
]
"""What a host evaluates: it has no NumPy until the 19th item imports it, and gives the first array."""


def printed(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=200)
    return done.stdout.splitlines()


def test_it_is_numpy() -> None:
    assert np.ndarray is numpy.ndarray is loaded_np.ndarray
    assert np.random is numpy.random
    assert np.__getattr__("lib") is numpy.lib
    with pytest.raises(AttributeError, match=r"numpy.* has no attribute 'nothing'"):
        np.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_without_numpy_nothing_is_an_array_and_asking_does_not_import_it() -> None:
    lines = printed(
        "import sys\n"
        "from streamline.core.lazy_numpy import loaded_np, np\n"
        "print(isinstance(1, loaded_np.ndarray | loaded_np.generic), 'numpy' in sys.modules)\n"
        "sys.modules['numpy'] = None\n"
        "print(isinstance(1, loaded_np.ndarray))\n"
        "del sys.modules['numpy']\n"
        "print(type(np.zeros(2)) is loaded_np.ndarray, isinstance(np.int8(1), loaded_np.generic))\n"
    )
    assert lines == ["False False", "False", "True True"]


def check_late_arrays(backend: Backend) -> None:
    expected = [eval(text) for text in LATE]
    with sl.from_items(LATE).map(eval).open(backend=backend) as stream:
        found = list(stream)
    assert [item for item in found if isinstance(item, bool)] == [False] * 6 + [True]
    for item, text, other in zip(found, LATE, expected, strict=True):
        if text != HERE:
            assert type(item) is type(other)
            assert same(item, other), text


def test_arrays_that_come_late_out_of_a_process_that_had_no_numpy() -> None:
    check_late_arrays(sl.Processes(1))


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[sl.Remote]:
    with machines(tmp_path, hosts=1) as backend:
        yield backend


@pytest.mark.long
def test_and_out_of_a_host_of_another_machine(remote: sl.Remote) -> None:
    check_late_arrays(remote)


@pytest.mark.long
def test_a_consumer_without_numpy_gets_arrays_and_resumes_before_them() -> None:
    lines = printed(
        "import sys\n"
        "import streamline as sl\n"
        "if __name__ == '__main__':\n"
        "    with sl.Processes(1) as processes:\n"
        "        with sl.from_items(['{}', '1']).map(eval).open(backend=processes) as stream:\n"
        "            print(list(stream), stream.snapshot().produced, 'numpy' in sys.modules)\n"
        f"        pipe = sl.from_items(['0', '1', \"{MADE}.full(30_000, 7)\", '3']).map(eval)\n"
        "        with pipe.open(backend=processes) as stream:\n"
        "            print(next(stream))\n"
        "            state = stream.snapshot()\n"
        "        with pipe.open(backend=processes, resume=state) as stream:\n"
        "            print([item if isinstance(item, int) else item[:2].tolist() for item in stream])\n"
    )
    assert lines == ["[{}, 1] [2] False", "0", "[1, [7, 7], 3]"]


def test_draws_from_a_numpy_that_a_call_imports_are_seen(capfd: pytest.CaptureFixture[str]) -> None:
    with sl.from_items([f"{MADE}.random.random()"] * 200).map(eval).open(backend=sl.Processes(1)) as stream:
        assert len(list(stream)) == 200
    assert "draws from numpy.random" in capfd.readouterr().err
