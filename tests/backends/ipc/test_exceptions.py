"""Exceptions arrive as the user's own, whatever is wrong with them; items that were left out, as much as is needed."""

from __future__ import annotations

import asyncio
import linecache
import pickle
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline as sl
from streamline.backends.ipc import exceptions as parts
from streamline.backends.ipc.exceptions import (
    pickle_exception,
    pickle_skipped,
    unpickle_exception,
    unpickle_skipped,
)
from streamline.core.error_policy import Failure
from streamline.core.replay import FailedCall
from streamline.core.text import cut
from streamline.core.tracebacks import trace_of
from streamline.errors import PlanError, StageError, StreamlineError
from tests.laws.profile import examples


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """Return it with a traceback."""
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def crossed(error: BaseException) -> BaseException:
    return unpickle_exception(pickle_exception(raised(error), "process 2"))


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


class PlainError(Exception):
    pass


class PickyError(Exception):
    """Can't be made of its `args`."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code


class GrowingError(Exception):
    """Says more each time it is made."""

    def __init__(self, message: str) -> None:
        super().__init__(f"failed: {message}")


class SlottedError(ValueError):
    __slots__ = ("field",)

    def __init__(self, field: str, *, hint: str) -> None:
        super().__init__(hint)
        self.field = field


class PickyOSError(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(2, "nothing there", path)


@dataclass(frozen=True)
class FrozenError(Exception):
    code: int


class RefusesReduceError(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("I am not to be pickled")


class ExitsError(Exception):
    def __reduce__(self) -> Any:
        return sys.exit, (3,)


class InterruptsError(Exception):
    def __reduce__(self) -> Any:
        return _interrupt, ()


def _interrupt() -> None:
    raise KeyboardInterrupt


class LoadsAsSomethingElseError(Exception):
    def __reduce__(self) -> Any:
        return ValueError, ("somebody else",)


class SilentError(Exception):
    def __str__(self) -> str:
        raise SystemExit("no words")


class WeirdError(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise LookupError(name)


class RestoresError(Exception):
    """Pickles by its own rules, which are kept."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self.restored = False

    def __reduce__(self) -> Any:
        return RestoresError, self.args, {"restored": True}

    def __setstate__(self, state: Any) -> None:
        self.restored = state["restored"]


WHOLE = [
    ValueError("bad", 3, None),
    KeyError("missing"),
    OSError(13, "no", "a file"),
    FileNotFoundError(2, "no", "a file", None, "another"),
    UnicodeDecodeError("utf-8", b"\xff\xfe", 0, 1, "bad byte"),
    ImportError("no such thing", name="thing", path="/there"),
    SyntaxError("bad", ("file.py", 3, 1, "x = = 2", 3, 2)),
    StopIteration(7),
    KeyboardInterrupt(),
    SystemExit(3),
    asyncio.CancelledError("why"),
    PlanError("wrong"),
    PlainError("bad", [1, {"a": b"b"}]),
    GrowingError("so"),
    FrozenError(3),
    Exception(),
    ValueError("\ud800 lone"),
]


@pytest.mark.parametrize("error", WHOLE, ids=lambda error: type(error).__name__)
def test_it_is_the_same_type_and_says_the_same(error: BaseException) -> None:
    found = crossed(error)
    assert type(found) is type(error)
    assert found.args == error.args
    assert str(found) == str(error)
    assert {name: value for name, value in vars(found).items() if name != "__notes__"} == vars(error)
    for name in ("errno", "strerror", "filename", "filename2", "object", "reason", "name", "path", "code", "lineno"):
        assert getattr(found, name, None) == getattr(error, name, None)


def test_what_it_was_made_of_need_not_be_its_arguments() -> None:
    picky, slotted, missing = (
        crossed(PickyError(3, "so")),
        crossed(SlottedError("size", hint="less")),
        crossed(PickyOSError("a")),
    )
    assert isinstance(picky, PickyError)
    assert (picky.code, str(picky)) == (3, "3: so")
    assert isinstance(slotted, SlottedError)
    assert (slotted.field, slotted.args) == ("size", ("less",))
    assert isinstance(missing, PickyOSError)
    assert (missing.errno, missing.filename) == (2, "a")
    restored = crossed(RestoresError(4))
    assert isinstance(restored, RestoresError)
    assert restored.restored


@pytest.mark.parametrize("kind", [RefusesReduceError, ExitsError, InterruptsError, LoadsAsSomethingElseError])
def test_methods_that_prevent_its_pickling_do_not_prevent_its_arrival(kind: type[Exception]) -> None:
    error = kind("so", 3)
    vars(error)["more"] = [1]
    found = crossed(error)
    assert type(found) is kind
    assert (found.args, vars(found)["more"]) == (("so", 3), [1])


def test_attributes_of_which_one_cannot_be_pickled_are_omitted_and_named() -> None:
    error = PickyError(3, "so")
    with socket.socket() as connection:
        vars(error).update(connection=connection, tries=2)
        found = crossed(error)
    assert isinstance(found, PickyError)
    assert found.args == error.args
    assert not vars(found).keys() & {"code", "connection", "tries"}
    assert "since it can't be pickled: its attributes code, connection, tries" in notes(found)


def test_in_the_place_of_arguments_that_cannot_be_pickled_it_has_its_text() -> None:
    error = PickyError(3, "so")
    error.args = ("message", threading.Lock(), 5)
    found = crossed(error)
    assert isinstance(found, PickyError)
    assert (found.args, str(found)) == ((str(error),), str(error))
    assert "since it can't be pickled: its arguments, its attributes code" in notes(found)


def test_classes_that_are_only_here_are_found_here() -> None:
    class LocalError(Exception):
        def __init__(self, number: int) -> None:
            self.number = number

    found = crossed(LocalError(3))
    assert isinstance(found, LocalError)
    assert found.number == 3


def test_what_cannot_be_had_at_all_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "pickle_or_none", lambda *args, **options: None)
    found = crossed(PickyError(3, "so"))
    assert type(found) is StageError
    assert str(found).endswith("PickyError: 3: so")
    assert "this stands for a" in notes(found)
    assert "in raised" in notes(found)


def test_carrying_never_raises() -> None:
    silent, weird = crossed(SilentError("a")), unpickle_exception(pickle_exception(WeirdError("b")))
    assert isinstance(silent, SilentError)
    assert isinstance(weird, StageError | WeirdError)
    (record,), note = pickle.loads(pickle_exception(PlainError("a")))
    record.pickled = b"rubbish"
    nowhere = pickle.dumps(([record], note))
    assert str(unpickle_exception(nowhere)).endswith("PlainError: a")


def test_the_traceback_is_a_note_from_the_users_own_frames_on() -> None:
    pipe = sl.from_items(range(3)).map(lambda item: 1 // (item - 1))
    with pipe.open() as stream, pytest.raises(ZeroDivisionError) as caught:
        list(stream)
    before, trace = list(caught.value.__notes__), caught.value.__traceback__
    assert trace is not None
    error = caught.value.with_traceback(trace.tb_next)  # as in a host, without a loop around it
    found = unpickle_exception(pickle_exception(error, "process 2"))
    assert found.__notes__[:-1] == before
    note = found.__notes__[-1]
    assert note.startswith("the traceback in process 2 (pid ")
    assert "1 // (item - 1)" in note
    assert "streamline/" not in note.replace("\\", "/")
    assert found.__traceback__ is None
    assert list(caught.value.__notes__) == before
    assert note in "".join(traceback.format_exception(found))


def test_frames_of_a_notebooks_cells_get_their_lines_here() -> None:
    source = "def f(n):\n    return n / 0\n"
    names: dict[str, Any] = {}
    exec(compile(source, "<cell 3>", "exec"), names)
    with pytest.raises(ZeroDivisionError) as failed:
        names["f"](1)
    data = pickle_exception(failed.value)
    linecache.cache["<cell 3>"] = (len(source), None, source.splitlines(keepends=True), "<cell 3>")
    try:
        assert (
            'File "<cell 3>", line 2, in f\n    return n / 0\nZeroDivisionError'
            in unpickle_exception(data).__notes__[-1]
        )
    finally:
        del linecache.cache["<cell 3>"]


def test_of_an_endless_message_the_end_of_the_traceback_is_kept() -> None:
    found = crossed(ValueError("x" * 300_000))
    assert len(str(found)) == 300_000
    assert len(notes(found)) < 70_000


def test_causes_and_contexts_come_along() -> None:
    cause, context = PickyError(1, "deep"), KeyError("first")
    cause.__context__ = context
    context.__context__ = cause  # round and round
    found = unpickle_exception(pickle_exception(raised(FrozenError(3), cause)))
    assert isinstance(found.__cause__, PickyError)
    assert isinstance(found.__cause__.__context__, KeyError)
    assert found.__cause__.__context__.__context__ is found.__cause__
    assert found.__suppress_context__
    assert "direct cause" in notes(found)
    first = error = Exception("0")
    for number in range(500):
        error.__context__ = Exception(str(number))
        error = error.__context__
    assert unpickle_exception(pickle_exception(first)).args == ("0",)


def test_groups_are_carried_member_by_member() -> None:
    class Mine(ExceptionGroup[Exception]):
        def __init__(self, message: str, members: list[Exception]) -> None:
            self.extra = 3

    inner = ExceptionGroup("inner", [ExitsError("a"), RefusesReduceError("b")])
    inner.add_note("of the inner one")
    found = crossed(Mine("outer", [PickyError(1, "c"), inner]))
    assert isinstance(found, Mine)
    assert (found.message, found.extra) == ("outer", 3)
    assert isinstance(found.exceptions[0], PickyError)
    group = found.exceptions[1]
    assert isinstance(group, ExceptionGroup)
    assert list(map(type, group.exceptions)) == [ExitsError, RefusesReduceError]
    assert notes(group) == "of the inner one"
    base = crossed(BaseExceptionGroup("b", [KeyboardInterrupt(), ValueError(1)]))
    assert isinstance(base, BaseExceptionGroup)
    assert not isinstance(base, ExceptionGroup)


def fails(item: Any) -> Any:
    raise ValueError(f"bad {item}")


def failure_of(item: Any, fn: Any = fails) -> BaseException:
    with sl.from_items([item]).map(fn).open() as stream, pytest.raises(ValueError, match="bad") as caught:
        list(stream)
    return caught.value


def test_replay_calls_the_programs_own_function_on_the_item() -> None:
    found = unpickle_exception(pickle_exception(failure_of({"a": 3})))
    with pytest.raises(ValueError, match=r"bad \{'a': 3\}"):
        sl.replay(found)
    assert sl.replay(found, fn=len) == 1
    call = vars(found)["_streamline_call"]
    assert isinstance(call, FailedCall)
    assert call.fn is fails


def test_a_lambda_and_a_seeded_map_are_replayed_too() -> None:
    seen = failure_of(3, lambda item: fails(item))
    with pytest.raises(ValueError, match="bad 3"):
        sl.replay(unpickle_exception(pickle_exception(seen)))
    with sl.from_items([1]).map(lambda item, rng: fails(rng.random()), seed=1).open() as stream:
        with pytest.raises(ValueError, match="bad") as caught:
            list(stream)
        with pytest.raises(ValueError, match="bad") as again:
            sl.replay(unpickle_exception(pickle_exception(caught.value)))
    assert str(again.value) == str(caught.value)


@pytest.mark.parametrize("item", [np.zeros(1 << 18), threading.Lock()], ids=["too large", "a lock"])
def test_without_its_item_it_is_not_replayed(item: Any) -> None:
    with pytest.raises(PlanError, match="isn't here"):
        sl.replay(unpickle_exception(pickle_exception(failure_of(item))))


def test_other_exceptions_have_no_call() -> None:
    with pytest.raises(PlanError, match="carries no item"):
        sl.replay(crossed(ValueError("of somebody else")))


def test_pickled_by_others_it_omits_its_item() -> None:
    found = pickle.loads(pickle.dumps(unpickle_exception(pickle_exception(failure_of(3)))))
    with pytest.raises(PlanError, match="copied or pickled"):
        sl.replay(found)


# Items that were left out ---------------------------------------------------------------------------------------------


def left(item: Any, error: Exception | None = None) -> Failure:
    failed = raised(error or ValueError("bad"))
    assert isinstance(failed, Exception)
    trace = trace_of(failed)
    failed.__traceback__ = None
    return Failure(stage="load", kind="map", shard=3, position="line 7", item=item, error=failed, items=2, trace=trace)


def test_a_record_arrives_as_it_was() -> None:
    failure = left({"a": np.arange(3)}, PickyError(3, "so"))
    found = unpickle_skipped(pickle_skipped(failure, "process 2"))
    for name in ("stage", "kind", "shard", "position", "items", "traceback"):
        assert getattr(found, name) == getattr(failure, name)
    assert repr(found.item) == repr(failure.item)
    assert isinstance(found.error, PickyError)
    assert not hasattr(found.error, "__notes__")
    assert "in raised" in found.traceback


class Item:
    lock = None

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __repr__(self) -> str:
        return "Item(" + "x" * 3000 + ")"


class Mute(Item):
    def __repr__(self) -> str:
        raise SystemExit


@pytest.mark.parametrize("item", [Item(), b"ab" * (1 << 20), "\ud800" * (1 << 20), ["x" * (1 << 21)]], ids=type)
def test_the_dead_letter_of_an_item_that_stays_in_its_host_is_the_same(item: Any) -> None:
    data = pickle_skipped(left(item))
    assert len(data) < 20_000
    assert cut(repr(unpickle_skipped(data).item)) == cut(repr(item))


def test_a_record_is_carried_whatever_the_item_does() -> None:
    assert "Mute whose repr raised SystemExit" in repr(unpickle_skipped(pickle_skipped(left(Mute()))).item)
    assert "Silent" in unpickle_skipped(pickle_skipped(left(1, SilentError("a")))).traceback


# Any ------------------------------------------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=5,
)
nasty = st.builds(threading.Lock) | st.just(sys) | st.builds(lambda: (i for i in "a"))
kinds = st.sampled_from(
    [
        ValueError,
        PlainError,
        KeyError,
        RefusesReduceError,
        ExitsError,
        LoadsAsSomethingElseError,
        RuntimeError,
        SystemExit,
        StreamlineError,
    ]
)
names = st.sampled_from(["a", "b", "__slots__", "args_", "é"])


@st.composite
def exceptions(draw: st.DrawFn, depth: int = 2) -> BaseException:
    error: BaseException
    if depth and draw(st.integers(0, 3)) == 0:
        members = draw(st.lists(exceptions(depth - 1), min_size=1, max_size=3))
        error = BaseExceptionGroup(draw(st.text()), members)
    else:
        error = draw(kinds)(*draw(st.lists(values | nasty, max_size=3)))
    vars(error).update(draw(st.dictionaries(names, values | nasty, max_size=3)))
    for note in draw(st.lists(st.text(), max_size=2)):
        error.add_note(note)
    if depth and draw(st.booleans()):
        error.__cause__ = draw(exceptions(depth - 1))
    if depth and draw(st.booleans()):
        error.__context__ = draw(exceptions(depth - 1))
    return error


def insist_like(found: BaseException, error: BaseException) -> None:
    assert type(found) is type(error)
    if isinstance(error, BaseExceptionGroup):
        assert isinstance(found, BaseExceptionGroup)
        assert found.message == error.message
        for one, other in zip(found.exceptions, error.exceptions, strict=True):
            insist_like(one, other)
    else:
        assert found.args == error.args or ("its arguments" in notes(found) and isinstance(found.args[0], str))
    before = getattr(error, "__notes__", [])
    assert getattr(found, "__notes__", [])[: len(before)] == before
    for name, value in vars(error).items():
        if name != "__notes__":
            assert vars(found).get(name, value) == value
            assert name in vars(found) or name in notes(found)
    for inner, other in ((found.__cause__, error.__cause__), (found.__context__, error.__context__)):
        assert (inner is None) == (other is None)
        if inner is not None and other is not None:
            insist_like(inner, other)


@examples(100)
@given(exceptions())
def test_any_exception_arrives_with_all_that_can_be_sent(error: BaseException) -> None:
    insist_like(unpickle_exception(pickle_exception(error)), error)
