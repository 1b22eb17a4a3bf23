"""An nginx of our own, on a free port, over a folder of ours: what remote reading is measured against."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path
from tempfile import mkdtemp

__all__ = ["Nginx"]

ECHO = Path("/usr/lib/nginx/modules/ngx_http_echo_module.so")
"""Debian's nginx-extras."""

STARTS_S = 10.0

CONFIGURATION = """
load_module {echo};
worker_processes 1;
daemon off;
user root;
pid {folder}/pid;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  sendfile on;
  keepalive_requests 1000000;
  client_body_temp_path {folder}/body;
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    root {folder};
    location ~ ^/slow/(.*)$ {{ set $rest $1; echo_sleep 0.03; echo_exec /files/$rest; }}
  }}
}}
"""
"""`/files/x` is answered at once, `/slow/x` is the same 30 ms later. One worker: the other core is the reader's."""


class Nginx:
    """A running server; `files` is the folder that it serves."""

    def __init__(self) -> None:
        self._folder = Path(mkdtemp(prefix="streamline-bench-"))
        self.files = self._folder / "files"
        self.files.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        configuration = self._folder / "nginx.conf"
        configuration.write_text(CONFIGURATION.format(echo=ECHO, folder=self._folder, port=self.port))
        log = self._folder / "errors"
        self._process = subprocess.Popen(["nginx", "-e", str(log), "-c", str(configuration)])
        self._wait()

    def url(self, name: str, *, slow: bool = False) -> str:
        """Return the URL of a file, 30 ms away if `slow`."""
        return f"http://127.0.0.1:{self.port}/{'slow' if slow else 'files'}/{name}"

    def close(self) -> None:
        """Stop the server and remove its files."""
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self._folder)

    @staticmethod
    def missing() -> bool:
        """Whether there is no nginx that this can start."""
        return shutil.which("nginx") is None or not ECHO.exists()

    def _wait(self) -> None:
        until = time.monotonic() + STARTS_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                if time.monotonic() > until or self._process.poll() is not None:
                    raise
                time.sleep(0.02)
            else:
                return
