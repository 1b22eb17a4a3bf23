"""A real Prometheus, which scrapes what a test tells it to."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.servers.absent import absent
from tests.servers.shared import START_S, free_port

__all__ = ["Prometheus", "prometheus", "prometheus_program"]

INSTALL = "run .ci/servers (as root, or with sudo): it installs prometheus, which these tests need"

CONFIG = {"scrape_interval": "200ms", "scrape_timeout": "200ms"}

LOOK_S = 0.1
"""Between two looks at what it has scraped: it doesn't say when it has."""


@dataclass(frozen=True)
class Prometheus:
    """One that runs. Its API is asked as Grafana asks it."""

    url: str

    def ask(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer; a query that it refuses raises, with its reason."""
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}") as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with closing(error):
                raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def query(self, expression: str) -> list[dict[str, str]]:
        """Return the labels of each value of an instant query."""
        return [one["metric"] for one in self.ask("query", query=expression)["result"]]

    def wait_for(self, expression: str, count: int = 1) -> list[dict[str, str]]:
        """Wait until a query has so many values, and return their labels."""
        deadline = time.monotonic() + START_S
        while len(found := self.query(expression)) < count:
            assert time.monotonic() < deadline, f"{len(found)} values instead of {count} of {expression}"
            time.sleep(LOOK_S)
        return found


def prometheus_program() -> str:
    """Return its path; without it, a test ends here."""
    return shutil.which("prometheus") or absent(f"Prometheus isn't here: {INSTALL}")


@contextmanager
def prometheus(program: str, home: Path, targets: Sequence[str]) -> Iterator[Prometheus]:
    """Start it over HOST:PORT addresses; `home` is its folder."""
    config = {"scrape_configs": [CONFIG | {"job_name": "training", "static_configs": [{"targets": list(targets)}]}]}
    (home / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    options = [f"--config.file={home}/prometheus.yml", f"--storage.tsdb.path={home}/data"]
    options += [f"--web.listen-address=127.0.0.1:{port}"]
    with (home / "log").open("w") as log:
        process = subprocess.Popen([program, *options], stdout=log, stderr=log)
    try:
        _wait_until_ready(process, port, home / "log")
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready"):
                return
        except urllib.error.HTTPError as error:
            error.close()  # it isn't yet
        except OSError:
            time.sleep(LOOK_S)
