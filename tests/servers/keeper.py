"""Keeps a server running while anybody uses it: a program that `tests.servers.shared` starts, of the standard library.

    python keeper.py SOCKET PORT PROGRAM...

A user is a connection, the first one standard input; it is told the port. When all have been closed, or their processes
are dead, the server ends; the last one is closed behind that.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys


def keep(path: str, port: bytes, program: list[str]) -> None:
    """Run a program while there are users."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        users = {socket.socket(fileno=os.dup(0))}
        nothing = subprocess.DEVNULL
        server = subprocess.Popen(program, stdin=nothing, stdout=nothing, stderr=nothing)
        for user in users:
            user.sendall(port)
        while users:
            for ready in select.select([listener, *users], [], [])[0]:
                if ready is listener:
                    user = listener.accept()[0]
                    user.sendall(port)
                    users.add(user)
                elif len(users) > 1:
                    users.remove(ready)
                    ready.close()
                else:
                    listener.close()
                    os.unlink(path)  # noqa: PTH108 - pathlib would be half of this program's start
                    server.terminate()
                    server.wait()
                    return


if __name__ == "__main__":
    if os.fork():
        os._exit(0)  # a child of nobody's: those that started it may end before it
    os.setsid()  # Ctrl-C is for those that use it
    keep(sys.argv[1], sys.argv[2].encode(), sys.argv[3:])
