"""Tar archives for tests."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

MEMBERS: Sequence[tuple[str, bytes]] = [
    ("train/0.JPG", b"j0" * 300),
    ("train/0.cls", b""),
    ("train/1.cls", b"one"),
    ("train/1.seg.png", b"p" * 512),
    ("2.txt", b"x" * 511),
    ("3.a", b"3"),
]
SAMPLES: list[dict[str, Any]] = [
    {"__key__": "train/0", "jpg": b"j0" * 300, "cls": b""},
    {"__key__": "train/1", "cls": b"one", "seg.png": b"p" * 512},
    {"__key__": "2", "txt": b"x" * 511},
    {"__key__": "3", "a": b"3"},
]


def archive(
    members: Iterable[tuple[str, bytes] | tarfile.TarInfo] = MEMBERS,
    format: int = tarfile.USTAR_FORMAT,
    pax_headers: dict[str, str] | None = None,
) -> bytes:
    """Return an archive of files by name, and of whatever else."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format, pax_headers=pax_headers) as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member, io.BytesIO(bytes(member.size)))
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
    return buffer.getvalue()


def special(name: str, kind: bytes, link: str = "", **attributes: Any) -> tarfile.TarInfo:
    """Return a member that is no plain file."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    for key, value in attributes.items():
        setattr(info, key, value)
    return info


def ends(data: bytes) -> list[int]:
    """Return where each member's data end, with their padding, and where the end mark begins."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [info.offset_data + -(-info.size // 512) * 512 for info in tar.getmembers()]


def edited(data: bytes, edit: Callable[[bytearray], None], at: int = 0) -> bytes:
    """Return an archive with the header at byte `at` changed, and its checksum right again."""
    made = bytearray(data)
    head = made[at : at + 512]
    edit(head)
    head[148:156] = b"%06o\0 " % (sum(head[:148]) + sum(head[156:]) + 8 * 32)
    made[at : at + 512] = head
    return bytes(made)
