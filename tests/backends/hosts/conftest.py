"""Host processes that do what a test tells them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import streamline as sl
import streamline.backends.hosts.connection
import streamline.backends.hosts.remote_worker
from streamline.backends.base import Backend
from streamline.backends.hosts.child_process import HostProcess
from streamline.backends.hosts.plan_shipping import Shipped, ship
from tests.backends.hosts.disturbing import quiet
from tests.backends.hosts.echo_client import Echo
from tests.copying_backend import Copying

ECHO = "echo_host:serve_socket"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no host be killed because the machine does much else while it is asked to end."""
    for module in (streamline.backends.hosts.remote_worker, streamline.backends.hosts.connection):
        monkeypatch.setattr(module, "CLOSE_S", 200.0)


@pytest.fixture(scope="session")
def echo_importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        yield


@pytest.fixture
def quietly(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Lets nothing be logged of hosts that end."""
    with quiet(caplog):
        yield


@pytest.fixture
def new_host(echo_importable: None) -> Iterator[Callable[..., HostProcess]]:
    """Makes hosts that are closed after the test."""
    made: list[HostProcess] = []

    def make(number: int = 0, **options: Any) -> HostProcess:
        made.append(HostProcess(number, entry_point=ECHO, **options))
        return made[-1]

    yield make
    for host in made:
        host.close(0.5)


@pytest.fixture
def shipped() -> Iterator[Shipped]:
    nothing = ship(None)
    yield nothing
    nothing.close()


@pytest.fixture
def new_echo(new_host: Callable[..., HostProcess], shipped: Shipped) -> Iterator[Callable[..., Echo]]:
    """Makes hosts with a link each."""
    made: list[Echo] = []

    def make(number: int = 0, answer: Callable[[Any], Any] | None = None, **options: Any) -> Echo:
        made.append(Echo(new_host(number, **options), shipped, answer))
        return made[-1]

    yield make
    for echo in made:
        echo.sock.close()


@pytest.fixture(params=["copying", "threads", "processes"])
def hosts(processes: Backend, request: pytest.FixtureRequest) -> Backend:
    """Two hosts of each kind."""
    kinds: dict[str, Backend] = {"copying": Copying(2), "threads": sl.Threads(2), "processes": processes}
    return kinds[request.param]
