"""streamline: data into training loops, with exact resume at every item.

pipe = sl.read_jsonl("train/part-*.jsonl").shard(8).shuffle(window=4096).map(tokenize).merge().batch(32)
with pipe.open(resume=sl.Snapshot.load("ckpt/", missing_ok=True)) as stream:
    for batch in stream:
        ...
        stream.snapshot().save("ckpt/")
"""

from __future__ import annotations

from streamline import errors
from streamline.backends.inline import Inline
from streamline.opened import Opened
from streamline.pipeline import Pipeline
from streamline.snapshot import Snapshot
from streamline.sources.http_options import HttpOptions
from streamline.start import from_items, from_iterable, read_jsonl, read_lines
from streamline.stream import Stream
from streamline.sync import SyncStream
from streamline.transforms.custom import stage

__all__ = [
    "HttpOptions",
    "Inline",
    "Opened",
    "Pipeline",
    "Snapshot",
    "Stream",
    "SyncStream",
    "__version__",
    "errors",
    "from_items",
    "from_iterable",
    "read_jsonl",
    "read_lines",
    "stage",
]

__version__ = "0.1.0"
