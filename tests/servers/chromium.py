"""A real Chromium without a window, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.servers.absent import absent

__all__ = ["Browser", "chromium"]

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")

INSTALL = "run .ci/servers (as root, or with sudo): it installs chromium, which these tests need"


class Browser:
    """One tab.

    Attributes:
      complaints: what scripts raised, and what the page's policy refused.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self._socket = socket
        self._number = 0
        self._loaded = False

    async def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while (message := await self._told()).get("id") != self._number:
            pass
        assert "error" not in message, message
        return message["result"]

    async def open(self, url: str) -> None:
        """Go to a page, and wait until it is loaded."""
        self._loaded = False
        await self.call("Page.navigate", url=url)
        while not self._loaded:
            await self._told()

    async def _told(self) -> Any:
        message = await self._socket.receive_json()
        if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.complaints.append(str(message["params"]))
        self._loaded = self._loaded or message.get("method") == "Page.loadEventFired"
        return message

    async def run(self, script: str) -> Any:
        """Return what a script gives; a promise is waited for."""
        told = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until a condition in the page is true, looking at each change of it."""
        await self.run(f"""new Promise((done) => {{
            const look = () => {{ if ({condition}) {{ watch.disconnect(); done(); }} }};
            const watch = new MutationObserver(look);
            const all = {{subtree: true, childList: true, characterData: true, attributes: true}};
            watch.observe(document.documentElement, all);
            look();
        }})""")

    async def look(self, width: int, height: int, scheme: str) -> bytes:
        """Return a picture of the whole page at a size, "light" or "dark"."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        taken = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(taken["data"])


@asynccontextmanager
async def chromium(url: str, home: Path) -> AsyncIterator[Browser]:
    """Start it at a page; `home` is its folder."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        absent(f"Chromium isn't here: {INSTALL}")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--disable-extensions", "--disable-background-networking", "--disable-component-update"]
    options += ["--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={home}", "about:blank"]
    environment = {**os.environ, "HOME": str(home)}
    process = await asyncio.create_subprocess_exec(
        program, *options, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE, env=environment,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        found = None
        while found is None:
            line = await process.stderr.readline()
            assert line, "Chromium has ended before it listened"
            found = re.search(rb"listening on ws://([^/]+)/", line)
        drained = asyncio.create_task(process.stderr.read())
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{found[1].decode()}/json/list") as answer:
                (tab,) = [one for one in await answer.json() if one["type"] == "page"]
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                browser = Browser(socket)
                for domain in ("Runtime", "Log", "Page"):
                    await browser.call(f"{domain}.enable")
                await browser.open(url)
                yield browser
                await browser.call("Browser.close")
        await process.wait()
        await drained
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
