"""What a child says reaches the parent: prints, logging records, questions."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from streamline.backends.hosts.stdio_relay import asker
from tests.backends.hosts.echo_client import Echo

NewEcho = Callable[..., Any]


def test_prints_are_marked_line_by_line(new_echo: NewEcho, capsys: pytest.CaptureFixture[str]) -> None:
    echo = new_echo(2)

    def talk() -> int:
        print("one\ntwo", end="", flush=True)
        print(" and a half")
        sys.stdout.buffer.write("drei ☃\n".encode())
        sys.stdout.flush()
        print("to stderr", file=sys.stderr)
        return sys.stdout.fileno()

    assert echo.call(talk) == 1
    echo.close()
    out, err = capsys.readouterr()
    assert out == "[process 2] one\n[process 2] two and a half\n[process 2] drei ☃\n"
    assert err == "[process 2] to stderr\n"


def test_many_threads_do_not_cut_each_others_lines(new_echo: NewEcho, capsys: pytest.CaptureFixture[str]) -> None:
    echo = new_echo(0)

    def talk() -> None:
        def lines(name: str) -> None:
            for _ in range(200):
                sys.stdout.write(name * 300 + "\n")

        threads = [threading.Thread(target=lines, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    echo.call(talk)
    echo.close()
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(f"[process 0] {name * 300}" for name in "abcd" for _ in range(200))


class Tagged:
    """An extra that the parent can't make again, nor the child pickle."""

    def __reduce__(self) -> Any:
        raise TypeError("no")

    def __repr__(self) -> str:
        return "Tagged()"


def test_records_reach_the_parents_loggers(new_echo: NewEcho, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="some.where")
    echo = new_echo(2)

    def talk() -> None:
        logger = logging.getLogger("some.where")
        logger.debug("%s is %d", "one", 1, extra={"plain": [1], "odd": Tagged()})
        try:
            _ = {"here": 1}["missing"]
        except KeyError:
            logger.exception("it failed")
        logging.getLogger("else.where").debug("the parent wouldn't show this")

    echo.call(talk)
    echo.close()
    first, second = caplog.records
    assert (first.name, first.levelno, first.getMessage()) == ("some.where", logging.DEBUG, "one is 1")
    assert (first.processName, first.process) == ("streamline process 2", echo.host.pid)
    assert (vars(first)["plain"], vars(first)["odd"]) == ([1], "Tagged()")
    assert "KeyError: 'missing'" in (second.exc_text or "")


def test_a_record_that_the_parents_logger_does_not_want_stays_unseen(
    new_echo: NewEcho, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="some.where")
    echo = new_echo(0)

    def talk() -> None:
        logging.getLogger("some.where").info("said")

    echo.call(talk)
    caplog.set_level(logging.ERROR, logger="some.where")
    seen = len(caplog.records)
    echo.call(talk)
    echo.close()
    assert seen <= len(caplog.records) <= 1


@pytest.mark.long
def test_a_question_is_answered_in_the_parent(new_echo: NewEcho) -> None:
    asked: list[Any] = []

    def answer(question: Any) -> Any:
        asked.append(question)
        if question == "raise":
            raise LookupError("not here")
        if question == "odd":
            return Tagged()
        return question * 2

    echo = new_echo(0, answer)

    def ask(question: Any) -> Callable[[], Any]:
        def asking() -> Any:
            ask_parent = asker()
            assert ask_parent is not None
            return ask_parent(question)

        return asking

    assert asker() is None
    assert echo.call(ask(21)) == 42
    assert isinstance(failure := echo.call(ask("raise")), LookupError)
    assert str(failure) == "not here"
    assert "can't be sent to the process that asked: Tagged()" in str(echo.call(ask("odd")))
    assert asked == [21, "raise", "odd"]


@pytest.mark.long
def test_each_running_has_its_own_answers(new_echo: NewEcho, shipped: Any) -> None:
    echo = new_echo(0, lambda _: "first")
    second = Echo(echo.host, shipped, lambda _: "second")
    third = Echo(echo.host, shipped)

    def ask() -> Any:
        ask_parent = asker()
        assert ask_parent is not None
        return ask_parent(None)

    assert [echo.call(ask), second.call(ask)] == ["first", "second"]
    assert "no handler answers" in str(third.call(ask))
    for other in (second, third):
        other.sock.close()
