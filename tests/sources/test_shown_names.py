"""Names of files, URLs among them, in all that is printed of a pipeline, a run and a snapshot.

A URL may have a signature in it, with which its reader can read the file, too; a file's name may be no UTF-8.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import streamline as sl
from streamline.cli import main
from streamline.core.state import At
from streamline.core.tasks import MergeWait, Session, WaitedWorker
from streamline.errors import DataError, PlanError, ResumeError
from streamline.observe import exporters, page, progress
from streamline.observe.stats import Stats
from streamline.observe.watchdog import Watched
from streamline.pipeline import Pipeline
from tests.servers.nginx import Nginx

SECRET = "s3cret"

LINES = b"".join(b'{"n":%d}\n' % n for n in range(8))


def odd(n: dict[str, int]) -> int:
    if not n["n"] % 2:
        raise ValueError(f"{n['n']} is even")
    return n["n"]


@pytest.fixture(scope="module", autouse=True)
def _files(nginx: Nginx) -> None:
    nginx.put("shown.jsonl", LINES)
    nginx.put("bad.jsonl", b"{no")


@pytest.fixture(params=["a signed URL", "a name that is no UTF-8"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nginx: Nginx) -> str:
    """Return the path of a file with `LINES`, in the current directory or on a server."""
    monkeypatch.chdir(tmp_path)
    if request.param == "a signed URL":
        return nginx.url(f"shown.jsonl?X-Amz-Signature={SECRET}&v=1")
    name = os.fsdecode(b"caf\xe9\x1b.jsonl")
    Path(name).write_bytes(LINES)
    return name


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Look at what is logged by each test."""
    with caplog.at_level(logging.DEBUG):
        yield
    for record in caplog.get_records("call"):
        check(record.getMessage())


def check(text: object) -> str:
    """Return text that can be printed, and gives no secret away."""
    shown = str(text)
    assert shown.encode()
    assert SECRET not in shown
    assert "\x1b" not in shown
    return shown


def pipe_of(path: str) -> Pipeline[int]:
    return sl.read_jsonl(path, name="rows").map(odd)


def snapshot_of(path: str) -> sl.Snapshot:
    with pipe_of(path).open(on_error="skip", record=sl.Recorder("steps")) as stream:
        next(stream)
        return sl.Snapshot.from_json(stream.snapshot().to_json())


def test_a_plan_and_its_pictures(path: str) -> None:
    pipe = pipe_of(path)
    assert "jsonl" in check(pipe)
    check(pipe._repr_html_())
    check(pipe.draw())
    check(pipe.draw().svg)
    check(repr(pipe.plan))


def test_a_check(path: str) -> None:
    report = pipe_of(path).check()
    assert "is even" in check(report)
    check(repr(report))


def test_a_snapshot_and_what_a_resume_will_do(path: str) -> None:
    snapshot = snapshot_of(path)
    listing: Any = snapshot.listing
    assert [file["path"] for file in listing] == [path], "a resume needs it"
    check(repr(snapshot))
    explanation = pipe_of(path).explain(snapshot)
    assert "jsonl" in check(explanation)
    check(explanation.lines)
    snapshot.save("run.json")
    result = CliRunner().invoke(main, ["inspect", "run.json"])
    assert result.exit_code == 0
    assert "jsonl" in check(result.output)
    result = CliRunner().invoke(main, ["steps", "steps", "0"])
    assert result.exit_code == 0
    assert "jsonl" in check(result.output)


def test_the_refusal_of_a_snapshot_of_other_data(path: str) -> None:
    snapshot = snapshot_of(path)
    Path("other.jsonl").write_bytes(LINES)
    other = pipe_of("other.jsonl")
    explanation = other.explain(snapshot)
    assert not explanation.fits
    assert "jsonl is gone" in check(explanation).replace("?X-Amz-Signature=…&v=1", "")
    with pytest.raises(ResumeError, match="gone") as caught:
        other.open(resume=snapshot).resolved  # noqa: B018 - it compares them
    check(caught.value)
    check(repr(caught.value))


def test_items_that_fail(path: str) -> None:
    with pytest.raises(ValueError, match="even") as caught:
        list(pipe_of(path))
    assert "line 1" in check(caught.value.__notes__)
    with pipe_of(path).open(on_error="skip", dead_letters="dead.jsonl") as stream:
        assert list(stream) == [1, 3, 5, 7]
        errors = stream.errors
    check(errors)
    check(repr(errors))
    check(errors.last[0].position)
    assert "line 1" in json.loads(check(Path("dead.jsonl").read_text()).split("\n")[0])["position"]


def test_a_stalled_worker(path: str) -> None:
    session = Session()
    session.services.add(
        MergeWait, MergeWait(lambda: [WaitedWorker(0, At("read_jsonl", {"file": path, "line": 1, "byte": 8}))])
    )
    watched = Watched(session, "read_jsonl")
    watched.warn(30.0, watched.report(100.0))


def test_items_that_are_no_json(path: str) -> None:
    if "://" in path:
        path = path.replace("shown", "bad")
    else:
        Path(path).write_bytes(b"{no")
    with pytest.raises(DataError, match="expected one JSON value") as caught:
        list(sl.read_jsonl(path))
    check(caught.value)
    check(repr(caught.value))


def test_names_of_stages_and_components_that_are_files_names(path: str) -> None:
    pipe = sl.mix({path: sl.read_jsonl(path), "other": sl.from_items([{"n": 1}])}).map(lambda n: n, name=f"<{path}>")
    check(pipe)
    check(pipe.draw())
    check(pipe.draw().svg)
    with pipe.open() as stream, stream.trace("trace.json"):
        list(stream)
        stats: Stats = stream.stats()
        check(pipe.explain(stream.snapshot()))
    check(Path("trace.json").read_bytes().decode())
    check(stats)
    check(progress.lines(stats, None, 0, 200).plain)
    check(page.stream_update(stats, stats, page.StreamFacts(), {}))
    check(exporters.exposition([({"stream": path, "rank": "0"}, exporters.Reading(stats, stats))]))
    check(list(sl.metrics.scalars(stats)))


@pytest.mark.parametrize("read", [sl.read_lines, lambda url: sl.stream_http(url, framing="lines")])
@pytest.mark.parametrize("url", [f"http:///u:{SECRET}@h", f"HTTPS://?sig={SECRET}", "https://"])
def test_a_url_without_a_host_is_refused_where_it_is_written(read: Callable[[str], Any], url: str) -> None:
    with pytest.raises(PlanError, match="expected https://HOST/PATH, got ") as caught:
        read(url)
    check(caught.value)
