"""Frames are found again however the bytes between them were cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamline.backends.ipc.frames import BUFFER, LARGE, Frames, head, lay_out, offsets
from streamline.backends.ipc.shared_memory import ALIGN

Sent = tuple[bytes, int, list[bytes]]

messages = st.one_of(st.binary(max_size=99), st.builds(bytes, st.sampled_from([LARGE - 60, LARGE, BUFFER, 2 * BUFFER])))
sent = st.lists(
    st.tuples(
        messages, st.integers(0, 9), st.lists(st.one_of(st.binary(max_size=99), st.just(bytes(LARGE))), max_size=4)
    ),
    max_size=5,
)


def written(frames: list[Sent]) -> bytes:
    data = b""
    for message, count, parts in frames:
        sizes = list(map(len, parts))
        memory = bytearray(offsets(sizes)[-1])
        lay_out(parts[:1], [memoryview(part) for part in parts[1:]], memoryview(memory))
        data += head(message, count, sizes) + memory
    return data


def read(data: bytes, cuts: list[int]) -> list[Sent]:
    frames, found = Frames(), []
    while data:
        cut = cuts[len(data) % len(cuts)]
        got = 0
        for space in frames.spaces():
            piece = data[got : min(cut, got + len(space))]
            space[: len(piece)] = piece
            got += len(piece)
        assert got > 0
        data = data[got:]
        for frame in frames.take(got):
            starts = offsets(frame.sizes)
            parts = [bytes(frame.parts[at : at + size]) for at, size in zip(starts, frame.sizes, strict=False)]
            found.append((bytes(frame.message), frame.items, parts))
    return found


@settings(max_examples=60, deadline=None)
@given(sent, st.lists(st.one_of(st.integers(7_000, 2 * BUFFER), st.integers(1000, 9000)), min_size=1, max_size=5))
def test_frames_are_found_again(frames: list[Sent], cuts: list[int]) -> None:
    assert read(written(frames), cuts) == frames


@pytest.mark.parametrize("cut", [1, 2, 39, 41])
def test_also_byte_by_byte(cut: int) -> None:
    frames: list[Sent] = [(b"one", 0, []), (b"", 2, [b"a", b"", b"b" * ALIGN]), (b"three", 1, [b"c"])]
    assert read(written(frames), [cut]) == frames


def test_what_a_frame_holds_is_writable_and_its_own() -> None:
    frames = Frames()
    data: Any = written([(b"m", 1, [b"abc"])]) * 2
    frames.spaces()[0][: len(data)] = data
    first, second = frames.take(len(data))
    first.parts[:3] = b"xyz"
    assert bytes(second.parts[:3]) == b"abc"


@given(st.lists(st.integers(0, 1000)))
def test_parts_are_aligned_and_do_not_overlap(sizes: list[int]) -> None:
    starts = offsets(sizes)
    assert all(start % ALIGN == 0 for start in starts)
    assert all(start + size <= following for start, size, following in zip(starts, sizes, starts[1:], strict=False))
