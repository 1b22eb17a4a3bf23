"""The live page in a real browser: 64 workers, 30 stages, dark and light, a phone's width."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

import streamline as sl
from tests.servers.chromium import Browser, chromium

MARKUP = "<script>document.title = 'owned'</script>"


def checked(item: int) -> int:
    if item % 1000 == 7:
        raise ValueError(f"{item} is <b>bad</b>")
    return item


def pipeline() -> sl.Pipeline[Any]:
    """64 workers and 30 stages over a mixture, one of them with markup for a name."""
    mixed = {"web": sl.from_items(range(10**9)), "code": sl.from_items(range(10**9))}
    pipe = sl.mix(mixed, weights={"web": 0.7, "code": 0.3}, seed=0).shard(64).map(checked, name=MARKUP)
    for _ in range(25):
        pipe = pipe.map(abs)
    return pipe.merge().batch(4)


async def text(browser: Browser, selector: str) -> str:
    return str(await browser.run(f"document.querySelector({selector!r}).innerText"))


@pytest.mark.long
async def test_the_page_shows_a_stream_that_runs(tmp_path: Path) -> None:
    options: Any = {"on_error": "skip", "max_errors": None, "backend": sl.Threads(2)}
    with pipeline().open(page=True, **options) as stream:
        over = threading.Event()

        def consume() -> None:
            for _ in stream:
                if over.wait(0.1):
                    return

        next(stream)
        saved = stream.snapshot().save(tmp_path / "run.json")
        logging.getLogger("streamline.watchdog").warning("the consumer has waited 40 s: <i>shard 3</i>")
        consumer = threading.Thread(target=consume)
        consumer.start()
        try:
            async with chromium(str(stream.page), tmp_path / "browser") as browser:
                await see(browser, stream.stats(), saved, tmp_path)
                over.set()
                consumer.join()
                stream.close()
                await browser.until("document.querySelector('#connection').className === 'lost'")
                assert [one for one in browser.complaints if "/events" not in one] == []
        finally:
            over.set()
            consumer.join()


async def see(browser: Browser, stats: sl.Stats, saved: Path, folder: Path) -> None:
    await browser.until("document.querySelectorAll('#letters li').length && document.querySelectorAll('.stage').length")
    boxes = await browser.run("[...document.querySelectorAll('#graph .stage b')].map((one) => one.textContent)")
    assert boxes == [str(stage) for stage in stats.stages]
    assert len(boxes) == 31
    assert await browser.run("document.querySelectorAll('.branch').length") == 2
    assert "64 workers" in await text(browser, "#graph")
    assert await browser.run("document.querySelectorAll('#hosts tbody tr').length") == 2
    assert str(saved) in await text(browser, "#facts")
    assert "<b>bad</b>" in await text(browser, "#letters")
    assert "<i>shard 3</i>" in await text(browser, "#events")
    assert await browser.run("document.scripts.length") == 1  # names are text, and the policy lets no other run
    assert await browser.run("document.title") != "owned"
    assert "70 %" in await text(browser, "#mixtures")
    before = await text(browser, "#facts")
    await browser.until(f"document.querySelector('#facts').innerText !== {before!r}")
    grounds = set()
    for name, width, scheme in (("wide", 1280, "light"), ("dark", 1280, "dark"), ("phone", 390, "dark")):
        await asyncio.to_thread((folder / f"{name}.png").write_bytes, await browser.look(width, 844, scheme))
        grounds.add(await browser.run("getComputedStyle(document.body).backgroundColor"))
        assert await browser.run("document.documentElement.scrollWidth <= innerWidth")
        top, high = await browser.run("(({top, height}) => [top, height])(words.getBoundingClientRect())")
        assert 0 <= top < 200
        assert high >= 25  # the verdict first, and large
    assert len(grounds) == 2
