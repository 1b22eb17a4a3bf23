"""The dashboard in docs/grafana.json, over a real Prometheus that scrapes two ranks of a job, one of which is slow."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from streamline.observe.metrics import METRICS
from tests.servers.prometheus import Prometheus, prometheus, prometheus_program
from tests.serving import serving

DASHBOARD = json.loads(Path("docs/grafana.json").read_text(encoding="utf-8"))

PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"]}

SLOW = "The slowest rank"

RATE = "4s"
"""What Grafana makes of $__rate_interval, at least: a handful of scrapes."""

RANK = """
import logging, sys, time
import streamline as sl

rank, url, decode_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")

def decode(record):
    time.sleep(decode_s)
    return record

pipe = sl.read_jsonl(url).shard(2, mode="replicated").repeat().map(decode).merge().batch(4, collate=None)
with pipe.open(rank=rank, world_size=2, ends="allow", backend=sl.Threads(1), metrics="127.0.0.1:0") as stream:
    for batch in stream:
        time.sleep(0.05)  # the training step
"""


@contextmanager
def training(rank: int, url: str, decode_s: float) -> Iterator[Iterator[str]]:
    """Run a rank, and yield the lines that it prints."""
    program = [sys.executable, "-c", RANK, str(rank), url, str(decode_s)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield iter(process.stdout)
        finally:
            process.kill()


def address_in(lines: Iterator[str]) -> str:
    """Return where a rank's metrics are, as its log says."""
    found = (re.search(r"metrics at http://(\S+)/metrics", line) for line in lines)
    return next(one[1] for one in found if one is not None)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped both ranks for some seconds. Rank 1 takes a hundred times as long for a record."""
    program = prometheus_program()
    records = b"".join(b'{"number": %d}\n' % number for number in range(64))
    with serving() as server, ExitStack() as ranks:
        server.objects["a.jsonl"] = records
        running = [
            ranks.enter_context(training(rank, server.url("a.jsonl"), decode_s))
            for rank, decode_s in enumerate((0.0005, 0.05))
        ]
        targets = [address_in(lines) for lines in running]
        with prometheus(program, tmp_path_factory.mktemp("prometheus"), targets) as found:
            found.wait_for(expression(PANELS[SLOW]["targets"][0]["expr"]))
            yield found


def expression(text: str, rank: str = ".*") -> str:
    """Return a query of the dashboard as Grafana sends it."""
    values = {"$stream": ".*", "$rank": rank, "$__rate_interval": RATE}
    for name, value in values.items():
        text = text.replace(name, value)
    assert "$" not in text
    return text


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


@pytest.mark.long
@pytest.mark.parametrize("title", [title for title in PANELS if title != SLOW])
def test_every_query_has_values_of_every_rank(title: str, scraped: Prometheus) -> None:
    for target in PANELS[title]["targets"]:
        assert "$rank" in target["expr"]
        for rank in ("0", "1"):
            found = scraped.wait_for(expression(target["expr"], rank))
            assert {labels["rank"] for labels in found if "rank" in labels} <= {rank}
            named = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            assert all(labels.get(name) for labels in found for name in named)


@pytest.mark.long
def test_the_slow_rank_is_named_and_no_other(scraped: Prometheus) -> None:
    (slow,) = scraped.query(expression(PANELS[SLOW]["targets"][0]["expr"]))
    assert (slow["stream"], slow["rank"]) == ("read_jsonl", "1")


@pytest.mark.long
def test_tables_have_a_row_for_each_rank(scraped: Prometheus) -> None:
    for title, panel in PANELS.items():
        if panel["type"] == "table":
            for target in panel["targets"]:
                found = scraped.wait_for(expression(target["expr"]), 2)
                assert {labels["rank"] for labels in found} == {"0", "1"}, title


@pytest.mark.long
def test_what_the_slow_rank_waits_for_is_its_slow_stage(scraped: Prometheus) -> None:
    most = 'topk(1, streamline_stage_exposed_share_ratio{rank="1"})'
    assert [labels["stage"] for labels in scraped.wait_for(most)] == ["decode"]


@pytest.mark.long
def test_its_variables_have_the_values_of_the_job(scraped: Prometheus) -> None:
    for variable, values in (("stream", ["read_jsonl"]), ("rank", ["0", "1"])):
        (query,) = (one["query"]["query"] for one in DASHBOARD["templating"]["list"] if one["name"] == variable)
        name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert scraped.ask(f"label/{label}/values", **{"match[]": name}) == values


# Without a Prometheus -------------------------------------------------------------------------------------------------
def test_it_asks_for_metrics_and_labels_that_there_are() -> None:
    table: dict[str, set[str]] = {metric.prometheus_name: {"stream", "rank", *metric.labels} for metric in METRICS}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for text in expressions():
        asked = re.findall(r"(streamline_\w+)\{(.*?)\}", text)
        assert asked
        by = {name for names in re.findall(r"(?:by|on) \(([\w, ]+)\)", text) for name in names.split(", ")}
        assert all({*re.findall(r"(\w+)=", selected), *by} <= table[name] for name, selected in asked)


def test_a_panel_is_repeated_for_each_rank() -> None:
    repeated: list[Any] = [panel for panel in DASHBOARD["panels"] if panel.get("repeat") == "rank"]
    assert [panel["title"] for panel in repeated] == ["Rank $rank: exposed wait"]
