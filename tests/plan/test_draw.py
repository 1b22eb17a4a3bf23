"""Plans as pictures."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streamline as sl
from streamline.errors import PlanError
from streamline.plan.draw import Box, column

SVG = "{http://www.w3.org/2000/svg}"


async def fetch(x: Any) -> Any:
    return x


def tokenize(x: Any) -> Any:
    return x


def long_one() -> sl.Pipeline[Any]:
    return (
        sl.read_jsonl("train/part-*.jsonl")
        .shuffle_files(seed=1)
        .shard(16)
        .map(fetch, concurrency=64)
        .shuffle(window=4096)
        .merge("best_effort", max_lead=4)
        .batch(32)
        .prefetch(8, bytes=64 << 20)
    )


def words(text: str) -> list[str]:
    """Return what is written in an SVG, tooltips apart."""
    return [element.text or "" for element in ElementTree.fromstring(text).iter(f"{SVG}text")]


def test_a_picture_shows_source_tasks_channels_and_merge_from_top_to_bottom() -> None:
    assert words(long_one().draw().svg) == [
        "source",
        "read_jsonl 'train/part-*.jsonl'",
        "shuffle_files(seed=1)",
        "mode file",
        "shard into 16",
        "a worker for each shard: 16 of these",
        "task",
        "read_jsonl",
        "up to 512 items",
        "task, 64 calls at once",
        "map(fetch, concurrency=64)",
        "up to 384 items",
        "task",
        "holds up to 8,192",
        "shuffle(window=4096, seed=0)",
        "up to 256 items each",
        "task",
        "merge (best effort: max_skips_per_round=2, max_lead=4)",
        "holds up to 32",
        "batch(size=32)",
        "up to 8 batches, 64 MiB",
        "task",
        "passes items on",
        "up to 16 batches",
        "up to 128 batches more in a plain loop",
        "your loop",
    ]


def test_a_merge_with_nothing_behind_it_is_the_consumers() -> None:
    shown = words(sl.from_items(range(10)).shard(2).draw().svg)
    assert shown[-4:-2] == ["in the consumer's task; in a plain loop, beside it", "merge (strict)"]


def test_threads_are_told_from_calls() -> None:
    pipe = sl.from_items(range(10)).map(tokenize, executor="thread", concurrency=4)
    assert "task, 4 threads at once" in words(pipe.draw().svg)


def test_both_pictures_say_the_same() -> None:
    drawing = long_one().draw()
    labels = " ".join(re.findall(r'"(.*)"', drawing.mermaid))
    labels = re.sub(r"#(\d+);", lambda found: chr(int(found[1])), re.sub(r"<.*?>|·", " ", labels))
    for text in words(drawing.svg):
        assert text in labels


def test_each_box_of_a_flowchart_leads_to_the_next() -> None:
    lines = str(long_one().draw()).splitlines()
    nodes = [line.split("[")[0].split("(")[0].strip() for line in lines if re.match(r"  n\d+[\[(]", line)]
    links = [line.strip() for line in lines if "-->" in line]
    assert lines[0] == "flowchart TB"
    assert nodes == [f"n{number}" for number in range(12)]
    assert links == [f"n{number} --> n{number + 1}" for number in range(11)]


NAMES = st.text(min_size=1, max_size=80)


@settings(max_examples=60, deadline=None)
@given(NAMES)
def test_any_name_makes_a_picture_that_parses(name: str) -> None:
    """Quotes, angle brackets, control characters, surrogates, Mermaid's own words."""
    drawing = sl.from_items(range(3)).map(tokenize, name=f"{name}!").draw()
    ElementTree.fromstring(drawing.svg)
    drawing.svg.encode()
    for line in drawing.mermaid.splitlines():
        if line.startswith("  n") and "-->" not in line:
            assert re.fullmatch(r'  n\d+(\["[^"]*"\]|\(\["[^"]*"\]\))', line)
    drawing.mermaid.encode()


def test_what_is_too_long_is_cut_and_stands_in_a_tooltip() -> None:
    name = "x" * 200
    text = sl.from_items(range(3)).map(tokenize, name=name).draw().svg
    tips = [title.text for title in ElementTree.fromstring(text).iter(f"{SVG}title")]
    assert f"map({name})" in tips
    assert max(map(len, words(text))) < 80
    wide = column("", [Box("", [("語" * 200, "")])])
    assert len(words(wide)[0]) < 40  # they are twice as wide


def test_boxes_do_not_overlap_and_stay_on_the_page() -> None:
    root = ElementTree.fromstring(long_one().draw().svg)
    page, *rects = list(root.iter(f"{SVG}rect"))
    edges = [(float(rect.get("y", 0)), float(rect.get("y", 0)) + float(rect.get("height", 0))) for rect in rects]
    assert max(bottom for _, bottom in edges) < float(page.get("height", 0))
    solid = [edge for edge, rect in zip(edges, rects, strict=True) if rect.get("class") in ("sl-box", "sl-pill")]
    assert all(above[1] < below[0] for above, below in pairwise(solid))


@pytest.mark.parametrize(("name", "begins"), [("a.svg", "<svg "), ("a.mmd", "flowchart"), ("a.md", "```mermaid\nflow")])
def test_the_suffix_says_what_is_saved(name: str, begins: str, tmp_path: Path) -> None:
    sl.from_items(range(3)).draw().save(tmp_path / name)
    assert (tmp_path / name).read_text(encoding="utf-8").startswith(begins)


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"saved as \.svg, .* ends in '\.png'"):
        sl.from_items(range(3)).draw().save(tmp_path / "plan.png")
    assert not list(tmp_path.iterdir())


def test_a_notebook_shows_it_as_svg() -> None:
    drawing = sl.from_items(range(3)).draw()
    assert drawing._repr_svg_() == drawing.svg
    assert drawing._repr_mimebundle_(include=None) == {"image/svg+xml": drawing.svg, "text/plain": drawing.mermaid}


def test_nothing_is_looked_up_for_a_picture() -> None:
    assert "read_lines 'nowhere/*.txt'" in words(sl.read_lines("nowhere/*.txt").draw().svg)


def test_the_page_on_watching_shows_what_is_printed_and_drawn() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "watching.md").read_text(encoding="utf-8")
    code, output = re.findall(r"```(?:python)?\n(.*?)```", page, re.DOTALL)[:2]
    names: dict[str, Any] = {}
    exec(code.replace("print(pipe)", ""), names)
    assert f"{names['pipe']}\n" == output
    assert names["pipe"].draw().svg == (docs / "plan.svg").read_text(encoding="utf-8")


def test_the_reader_of_a_feed_is_one_for_all_workers() -> None:
    async def feed() -> AsyncIterator[int]:
        yield 1

    picture = sl.from_stream(feed).shard(4).map(abs).draw()
    for text in (picture.svg, picture.mermaid):
        assert "one reader for all, in turn" in text
        assert "up to 256 items each, more while another starves" in text
        inside = text[text.index("a worker for each shard") :]
        assert "stream" not in inside
