"""What may hold a part of an array: each takes one, and returns what reads the part that it holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np

__all__ = ["HOLDERS"]


def suspended(array: Any) -> Callable[[], bytes]:
    def frame() -> Iterator[bytes]:
        mine = array[3:]
        while True:
            yield mine.tobytes()

    generator = frame()
    return lambda: next(generator)


def in_thread(array: Any) -> Callable[[], bytes]:
    """A thread that outlives the stream; it ends when what reads it dies."""
    asked: SimpleQueue[bool] = SimpleQueue()
    answers: SimpleQueue[bytes] = SimpleQueue()

    def work(mine: Any) -> None:
        while asked.get():
            answers.put(mine.tobytes())

    threading.Thread(target=work, args=(array[5:],), daemon=True).start()

    class Reader:
        def __call__(self) -> bytes:
            asked.put(True)
            return answers.get(timeout=200)

        def __del__(self) -> None:
            asked.put(False)

    return Reader()


def cyclic(array: Any) -> Callable[[], bytes]:
    """Only the garbage collector frees it."""
    circle: list[Any] = [array[::-1]]
    circle.append(circle)
    return lambda: bytes(circle[0].tobytes())


def boxed(array: Any) -> Callable[[], bytes]:
    box = np.empty(2, object)
    box[0] = array[2:9]
    return lambda: bytes(box[0].tobytes())


def of_base(array: Any) -> Callable[[], bytes]:
    """What `.base` gives: an array, or a buffer."""
    base = array if array.base is None else np.frombuffer(array.base, np.uint8)
    start = array.ctypes.data - base.ctypes.data
    return base[start : start + len(array)].tobytes


HOLDERS: dict[str, Callable[[Any], Callable[[], bytes]]] = {
    "array": lambda array: array.tobytes,
    "slice": lambda array: array[1::3].tobytes,
    "row": lambda array: array[: len(array) // 4 * 4].reshape(4, -1)[2].tobytes,
    "other dtype": lambda array: array[: len(array) // 8 * 8].view(np.int64).tobytes,
    "memoryview": lambda array: memoryview(array)[7:].tobytes,
    "buffer of a buffer": lambda array: np.frombuffer(memoryview(array), np.uint8)[1:].tobytes,
    "dlpack": lambda array: np.from_dlpack(array)[4:].tobytes,
    "base": of_base,
    "object array": boxed,
    "generator": suspended,
    "thread": in_thread,
    "cycle": cyclic,
}
