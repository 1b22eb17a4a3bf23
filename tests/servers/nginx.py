"""A real nginx: plain and TLS, with what servers do differently under a path of its own. One for each test process.

Under "/" the files of `root`. Under "/noranges/", "/chunked/", "/private/" (me, secret), "/token/" (secret), "/slow/"
(30 ms before each answer) the same files; "/packed/x" is x.gz, compressed on the way whatever was asked for;
"/through/8000/x" is x of the server on port 8000.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme

from tests.servers.absent import absent

__all__ = ["Nginx", "nginx"]

INSTALL = "run .ci/servers (as root, or with sudo): it installs nginx-extras, which these tests need"

START_S = 200.0

LOCATIONS = """
    location / { root ROOT; }
    location /noranges/ { alias ROOT/; max_ranges 0; }
    location /chunked/ { alias ROOT/; sub_filter_types *; sub_filter "never in any file" ""; }
    location /gzip/ { alias ROOT/; gzip on; gzip_types *; gzip_min_length 1; }
    location /packed/ { alias ROOT/; gzip_static always; }
    location /private/ { alias ROOT/; auth_basic "files"; auth_basic_user_file HOME/users; }
    location /token/ { alias ROOT/; if ($http_authorization != "Bearer secret") { return 401; } }
    location /slow/ { echo_sleep 0.03; echo_exec /slowed$uri; }
    location /slowed/slow/ { internal; alias ROOT/; }
    location /denied/ { deny all; }
    location /busy/ { return 503; }
    location /loop/ { return 302 /loop/; }
    location ~ "^/through/([0-9]+)/(.*)$" {
        proxy_pass http://127.0.0.1:$1/$2; proxy_http_version 1.1; proxy_buffering off; proxy_read_timeout 5s;
    }
    location /to/ { return 302 $arg_url; }
"""


@dataclass(frozen=True)
class Nginx:
    """A server that runs.

    Attributes:
      root: the folder of its files.
      home: its other files: "ca.pem", "client.pem", "other-ca.pem", "users".
      ports: by name: "plain"; with TLS: "tls", "expired" (its certificate has), "named" (a certificate for another
        name), "mutual" (wants a client's certificate).
    """

    root: Path
    home: Path
    ports: dict[str, int]

    def put(self, name: str, data: bytes) -> None:
        """Make a file, or replace it: whoever reads the one before still reads that."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".new")
        fresh.write_bytes(data)
        fresh.replace(path)

    def url(self, path: str, port: str = "plain", host: str = "127.0.0.1") -> str:
        """Return the URL of a path."""
        scheme = "http" if port == "plain" else "https"
        return f"{scheme}://{host}:{self.ports[port]}/{path}"


@pytest.fixture(scope="session")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    """Start nginx on free ports; it ends with the tests."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/opt/homebrew/bin")
    if program is None:
        absent(f"nginx isn't here: {INSTALL}")
    loads = _modules(program)
    home = tmp_path_factory.mktemp("nginx")
    (home / "root").mkdir()
    _write_certificates(home)
    (home / "users").write_text("me:{PLAIN}secret\n")
    process, ports = _started(program, loads, home)
    try:
        yield Nginx(home / "root", home, ports)
    finally:
        process.terminate()
        process.wait(200)


def _started(program: str, loads: str, home: Path) -> tuple[subprocess.Popen[bytes], dict[str, int]]:
    """Start it; again, if somebody else has taken one of the ports meanwhile."""
    for _ in range(5):
        ports = _free_ports("plain", "tls", "expired", "named", "mutual")
        (home / "nginx.conf").write_text(_config(loads, home, ports))
        log = home / "error.log"
        with log.open("wb") as errors:
            command = [program, "-e", str(log), "-p", str(home), "-c", str(home / "nginx.conf")]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)
        until = time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", ports["mutual"]), 1):
                return process, ports
            time.sleep(0.01)
        process.kill()
        process.wait()
        said = log.read_text(errors="replace")
        if "in use" not in said:
            break
    pytest.fail(f"nginx doesn't start; {INSTALL}. It says:\n{said}", pytrace=False)


def _free_ports(*names: str) -> dict[str, int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in names]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return {name: one.getsockname()[1] for name, one in zip(names, sockets, strict=True)}


def _config(loads: str, home: Path, ports: dict[str, int]) -> str:
    paths = "".join(
        f"  {kind}_temp_path {home}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    locations = LOCATIONS.replace("ROOT", f"{home}/root").replace("HOME", str(home))
    servers = ""
    for name, port in ports.items():
        certificate = home / f"{name if name in ('expired', 'named') else 'tls'}.pem"
        servers += f"  server {{\n    listen 127.0.0.1:{port}{'' if name == 'plain' else ' ssl'};\n"
        if name != "plain":
            servers += f"    ssl_certificate {certificate};\n    ssl_certificate_key {certificate};\n"
        if name == "mutual":
            servers += f"    ssl_client_certificate {home}/ca.pem;\n    ssl_verify_client on;\n"
        servers += f"{locations}  }}\n"
    return (
        f"{'user root root;' if os.geteuid() == 0 else ''}\n{loads}"
        f"daemon off;\nmaster_process off;\npid {home}/pid;\nerror_log {home}/error.log warn;\n"
        "events { worker_connections 1024; }\n"
        f"http {{\n  access_log off;\n  default_type application/octet-stream;\n{paths}{servers}}}\n"
    )


def _modules(program: str) -> str:
    """Return the line that loads the echo module, where it isn't compiled in; end the test where there is none."""
    told = subprocess.run([program, "-V"], capture_output=True, text=True, check=True, timeout=START_S).stderr
    if "echo-nginx-module" in told and "add-dynamic-module" not in told:
        return ""
    folder = next((word.partition("=")[2] for word in told.split() if word.startswith("--modules-path=")), "modules")
    module = Path(folder, "ngx_http_echo_module.so")
    if not module.exists():
        absent(f"nginx has no echo module: {INSTALL}")
    return f"load_module {module};\n"


def _write_certificates(home: Path) -> None:
    ca, other = trustme.CA(), trustme.CA()
    ca.cert_pem.write_to_path(home / "ca.pem")
    other.cert_pem.write_to_path(home / "other-ca.pem")
    yesterday = datetime.now(UTC) - timedelta(days=1)
    names = ("127.0.0.1", "localhost")
    made = {
        "tls": ca.issue_cert(*names),
        "expired": ca.issue_cert(*names, not_before=yesterday - timedelta(days=9), not_after=yesterday),
        "named": ca.issue_cert("files.example"),
        "client": ca.issue_cert("me@files.example"),
    }
    for name, certificate in made.items():
        certificate.private_key_and_cert_chain_pem.write_to_path(home / f"{name}.pem")
