"""The live page in a real browser: 64 workers, 30 stages, 64 ranks, dark and light, a phone's width."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

import streamline as sl
from streamline.backends.network.connections import Introduction
from streamline.backends.network.handshake import PeerHello
from streamline.observe.rank_lines import RankLine, StageLine, StreamLine, encoded
from streamline.observe.rank_publishing import Whereabouts
from tests.kit import LONGEST_S
from tests.servers.chromium import Browser, chromium
from tests.sharding.kit import MemoryStore

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


# All ranks ------------------------------------------------------------------------------------------------------------
def published(rank: int) -> bytes:
    """Return a line of a rank: of 64 with 30 stages; rank 7 waits most of its time for one of them."""
    slow = rank == 7
    waits = 0.9 if slow else 0.01 * (rank % 5)
    stages = [
        StageLine("read_jsonl", 0.0, 0.001, 4.0, 100.0),
        StageLine(MARKUP[:60], waits, 0.02 if slow else 0.002, 4.0),
    ]
    stages += [StageLine(f"map(transform_{at})", 0.0, 0.0001, 4.0, 100.0) for at in range(28)]
    verdict = ("slow", "map(x) limits", "<b>why</b>", "try more") if slow else ("good", "", "", "")
    stream = StreamLine("items", 0, 100, 10.0, 20.0, waits, 0.0, 0.0, verdict, tuple(stages))
    return encoded(RankLine(1e6, 1.0, (stream,)))


async def test_the_page_shows_all_ranks(tmp_path: Path) -> None:
    store = MemoryStore()
    with ExitStack() as stack:
        stream = stack.enter_context(
            sl.from_items(range(1000)).shard(64).merge().open(
                rank=0, world_size=64, ends=sl.Ends("allow", store), page=True
            )
        )  # fmt: skip
        next(stream)
        assert store.called.wait(LONGEST_S)
        where = msgspec.json.decode(next(iter(store.values.values())), type=Whereabouts)
        ranks = {}
        for rank in range(1, 63):
            hello = PeerHello(role="node", node="node<b>", pid=rank, ticket=f"{rank}/64")
            ranks[rank] = stack.enter_context(Introduction((where.hosts[0], where.port), where.key, hello).dial())
            ranks[rank].sendall(published(rank))
        async with chromium(str(stream.page), tmp_path / "browser") as browser:
            await browser.until("document.querySelector('#words').innerText === 'Rank 7 is the slowest'")
            await see_all_ranks(browser, tmp_path)
            await asyncio.to_thread(ranks[3].close)
            await browser.until("document.querySelector('#words').innerText === 'Rank 3 is lost'")
            assert await browser.run("document.querySelectorAll('.map tr.lost').length") == 1
            assert browser.complaints == []


async def see_all_ranks(browser: Browser, folder: Path) -> None:
    assert await browser.run("document.querySelectorAll('.map tbody tr').length") == 64
    heads = await browser.run("[...document.querySelectorAll('.map thead th')].map((one) => one.textContent)")
    assert heads[:2] + heads[-2:] == ["rank", "waits", "other", "items/s"]
    assert MARKUP[:60] in heads
    (slow,) = await browser.run(
        "[...document.querySelectorAll('.map .slowest')].map((row) => [...row.children].map((one) => one.textContent))"
    )
    assert slow[:2] == ["7", "90 %"]
    shade = "getComputedStyle(document.querySelector('.map tr{} td')).backgroundColor"
    assert await browser.run(shade.format(".slowest")) != await browser.run(shade.format(":not(.slowest)"))
    assert "63 missing" in await text(browser, ".map tr.gone")
    assert "nothing has come from rank 63" in await text(browser, "#ranks .more")
    assert "<b>, pid 7" in await text(browser, "#rest")
    assert "20 ms" in await text(browser, "#compared")
    assert await browser.run("document.title") == "Rank 7 is the slowest · streamline"
    for name, width, scheme in (("wide", 1280, "light"), ("dark", 1280, "dark"), ("phone", 390, "dark")):
        await asyncio.to_thread((folder / f"ranks-{name}.png").write_bytes, await browser.look(width, 844, scheme))
        assert await browser.run("document.documentElement.scrollWidth <= innerWidth")  # only the map scrolls sideways
        top, high = await browser.run(
            "(({top, height}) => [top, height])(document.querySelector('#ranks').getBoundingClientRect())"
        )
        assert 0 < top < 844
        assert 200 < high < 1200
