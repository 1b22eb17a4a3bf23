"""Another hash for other code, the same for the same code, whatever else has moved."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from streamline.plan.fingerprint import PYTHON, changed, code_hash


def made(text: str, name: str = "f") -> Any:
    """Return what `text` calls `name`, compiled as a file of its own."""
    scope: dict[str, Any] = {"functools": functools}
    exec(compile(text, f"{abs(hash(text))}.py", "exec"), scope)
    return scope[name]


SAME = {
    "a comment": ("def f(x):\n    return x", "# why\n\ndef f(x):  # because\n    return x"),
    "a docstring": ('def f(x):\n    "one"\n    return x', 'def f(x):\n    "another"\n    return x'),
    "a new docstring": ("def f(x):\n    return x", 'def f(x):\n    "one"\n    return x'),
    "a local's name": ("def f(x):\n    a = x\n    return a", "def f(x):\n    b = x\n    return b"),
    "an annotation": ("def f(x):\n    return x", "def f(x: int) -> int:\n    return x"),
    "the order of a set": ("def f(x):\n    return x in {'a', 'b', 'c'}", "def f(x):\n    return x in {'c', 'b', 'a'}"),
    "a line": ("def f(x): return g(x)", "\n\n\ndef f(x):\n\n    return g(\n        x\n    )"),
}

OTHER = {
    "a constant": ("def f(x):\n    return x + 1", "def f(x):\n    return x + 2"),
    "an operator": ("def f(x):\n    return x + 1", "def f(x):\n    return x - 1"),
    "a called name": ("def f(x):\n    return g(x)", "def f(x):\n    return h(x)"),
    "a default": ("def f(x, y=1):\n    return x", "def f(x, y=2):\n    return x"),
    "a keyword's default": ("def f(x, *, y=1):\n    return x", "def f(x, *, y=2):\n    return x"),
    "an argument's name": ("def f(x, y):\n    return x", "def f(x, z):\n    return x"),
    "an inner function": (
        "def f(x):\n    return [y + 1 for y in x]",
        "def f(x):\n    return [y + 2 for y in x]",
    ),
    "a string in an inner function": (
        "def f(x):\n    return list(y['a'] for y in x)",
        "def f(x):\n    return list(y['b'] for y in x)",
    ),
    "a type of constant": ("def f(x):\n    return 1", "def f(x):\n    return 1.0"),
    "asynchronous": ("def f(x):\n    return x", "async def f(x):\n    return x"),
    "a partial's argument": (
        "def g(x, y):\n    return x\nf = functools.partial(g, y=1)",
        "def g(x, y):\n    return x\nf = functools.partial(g, y=2)",
    ),
    "a partial's function": (
        "def g(x, y):\n    return x\nf = functools.partial(g, y=1)",
        "def g(x, y):\n    return y\nf = functools.partial(g, y=1)",
    ),
    "a method": (
        "class C:\n    def g(self, x):\n        return x\nf = C().g",
        "class C:\n    def g(self, x):\n        return -x\nf = C().g",
    ),
    "a call of an object": (
        "class C:\n    def __call__(self, x):\n        return x\nf = C()",
        "class C:\n    def __call__(self, x):\n        return -x\nf = C()",
    ),
    "a class": (
        "class f:\n    def __init__(self, x):\n        self.x = x",
        "class f:\n    def __init__(self, x):\n        self.x = -x",
    ),
    "what is decorated": (
        "def d(g):\n    return lambda x: g(x)\n@d\ndef f(x):\n    return x",
        "def d(g):\n    return lambda x: g(x)\n@d\ndef f(x):\n    return -x",
    ),
    "what is wrapped": (
        "f = functools.lru_cache(lambda x: x)",
        "f = functools.lru_cache(lambda x: -x)",
    ),
    "a lambda": ("f = lambda x: x", "f = lambda x: x * 2"),
}


@pytest.mark.parametrize("name", SAME)
def test_what_does_nothing_else_has_the_same_hash(name: str) -> None:
    one, other = map(made, SAME[name])
    assert code_hash(one) == code_hash(other)
    assert not changed(code_hash(one), code_hash(other))


@pytest.mark.parametrize("name", OTHER)
def test_what_does_something_else_has_another_hash(name: str) -> None:
    one, other = map(made, OTHER[name])
    assert code_hash(one) != code_hash(other)
    assert changed(code_hash(one), code_hash(other))


def test_a_function_that_knows_itself_is_hashed() -> None:
    def count(x: int) -> int:
        return x and count(x - 1)

    assert code_hash(count) == code_hash(count)


@pytest.mark.parametrize("fn", [len, int, str.upper, "abc".join, functools.partial(print, end=""), print, object()])
def test_anything_has_a_hash(fn: Any) -> None:
    assert code_hash(fn).startswith(f"{PYTHON}:")
    assert "0x" not in code_hash(fn)


def test_another_process_has_the_same_hash() -> None:
    """No addresses, no order of a set that depends on the seed of hashes."""
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from streamline.plan.fingerprint import code_hash\n"
        "def f(x, y=len, *z):\n    return [a for a in x if a in {'a', 'b', 'c'}] + [lambda: y]\n"
        "print(code_hash(f))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program, *sys.path], capture_output=True, text=True, check=True, timeout=200
        ).stdout
        for _ in range(2)
    }
    assert len(outputs) == 1


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("a:1", "b:2"), ("a:1", None), (None, "a:1"), ("a:1", 3), ("a:1", "a:1"), (PYTHON + ":1", "cpython-27-O0:2")],
)
def test_what_can_not_be_compared_has_not_changed(ours: Any, theirs: Any) -> None:
    assert not changed(ours, theirs)


def test_the_values_that_a_function_has_closed_over_do_not_count() -> None:
    def make(n: int) -> Callable[[], int]:
        return lambda: n

    assert code_hash(make(1)) == code_hash(make(2))


def test_what_was_looked_at_is_not_taken_for_what_comes_later_in_its_place() -> None:
    """What has been looked at is known by its id, which something else may get once it is gone."""

    def closing_over(default: int) -> Callable[[int], int]:
        def inner(x: int, *, by: int = default) -> int:
            return x * by

        def outer(x: int, *, by: int = 1) -> int:
            return inner(x) + by

        return outer

    assert len({code_hash(closing_over(default)) for default in range(50)}) == 50
    assert len({code_hash(closing_over(1)) for _ in range(50)}) == 1
