import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

from streamline.demo import children
from streamline.demo.children import DemoError, serving, start

CONTENT = bytes(range(256)) * 40
LATENCY_S = 0.05


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "part-000.jsonl.gz").write_bytes(CONTENT)
    errors = tmp_path_factory.mktemp("logs") / "server.log"
    with serving(folder, latency_ms=LATENCY_S * 1000, errors=errors) as base_url:
        yield f"{base_url}/part-000.jsonl.gz"


def get(url: str, method: str = "GET", **headers: str) -> tuple[int, Message, bytes]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with urllib.request.urlopen(urllib.request.Request(url, method=method, headers=named), timeout=200) as answer:
        return answer.status, answer.headers, answer.read()


def test_a_file_comes_whole_as_the_bytes_it_is(url: str) -> None:
    status, headers, body = get(url, Accept_Encoding="gzip, deflate")
    assert (status, body) == (200, CONTENT)
    assert headers["Content-Length"] == str(len(CONTENT))
    assert headers["Content-Type"] == "application/gzip"
    assert headers["Content-Encoding"] is None
    assert headers["Accept-Ranges"] == "bytes"


def test_head_tells_length_and_etag(url: str) -> None:
    _, headers, body = get(url, method="HEAD")
    assert body == b""
    assert headers["Content-Length"] == str(len(CONTENT))
    assert headers["ETag"] == get(url)[1]["ETag"] is not None


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [("bytes=0-0", 0, 0), ("bytes=100-199", 100, 199), ("bytes=10000-", 10_000, 10_239), ("bytes=-5", 10_235, 10_239)],
)
def test_a_range_comes_as_206_with_its_place(url: str, asked: str, first: int, last: int) -> None:
    status, headers, body = get(url, Range=asked)
    assert (status, body) == (206, CONTENT[first : last + 1])
    assert headers["Content-Range"] == f"bytes {first}-{last}/{len(CONTENT)}"


def test_a_range_of_the_known_version_comes_as_a_range(url: str) -> None:
    assert get(url, Range="bytes=5-", If_Range=get(url)[1]["ETag"])[0] == 206


@pytest.mark.parametrize(("path", "status"), [("missing", 404), ("..%2Fsecret", 404), ("", 404)])
def test_nothing_else_is_served(url: str, path: str, status: int) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(url.rsplit("/", 1)[0] + "/" + path)
    refused.value.close()
    assert refused.value.code == status


def test_each_request_waits_for_the_latency(url: str) -> None:
    begin = time.perf_counter()
    get(url, Range="bytes=0-9")
    assert time.perf_counter() - begin >= LATENCY_S


def test_it_ends_when_its_stdin_closes(tmp_path: Path) -> None:
    with (
        (tmp_path / "log").open("wb") as log,
        start("streamline.demo.server", [str(tmp_path)], errors=log, stdin=subprocess.PIPE) as server,
    ):
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stdout.readline().strip().isdigit()
        assert server.poll() is None
        server.stdin.close()
        assert server.wait(200) == 0
    assert (tmp_path / "log").read_bytes() == b""


def test_it_ends_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    parent = (
        "import pathlib, time\n"
        "from streamline.demo.children import serving\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "with serving(folder, latency_ms=0, errors=folder / 'log') as url:\n"
        "    print(url, flush=True)\n"
        "    time.sleep(60)\n"
    )
    root = Path(children.__file__).parents[2]  # so that the child imports this very package
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        process.kill()
    wait_refused(url)


def wait_refused(url: str) -> None:
    """Return when nobody listens at `url`: a process that isn't ours to wait for has no other event to give."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        try:
            get(url)
        except urllib.error.HTTPError as answer:
            answer.close()
            time.sleep(0.02)
        except OSError:
            return
    pytest.fail("the server still answers")


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(DemoError, match="does not exist"),
        serving(tmp_path / "missing", latency_ms=0, errors=tmp_path / "log"),
    ):
        pytest.fail("it must not come to this")
