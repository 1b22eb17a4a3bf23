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
from streamline.backends.processes import Processes
from streamline.backends.threads import Threads
from streamline.custom_source import source
from streamline.debug import DebugStream
from streamline.failing.failures import ErrorReport, Failure
from streamline.failing.replay import replay
from streamline.loading.loader import Loader
from streamline.meters.stats import Stats
from streamline.meters.verdict import Verdict
from streamline.opened import Opened
from streamline.pictures.draw import Drawing
from streamline.pipeline import Pipeline
from streamline.resuming.explain import Explanation
from streamline.snapshot import Snapshot
from streamline.sources.http_options import HttpOptions
from streamline.start import from_items, from_iterable, from_stream, read_jsonl, read_lines
from streamline.stream import Stream
from streamline.sync import SyncStream
from streamline.transforms.custom import stage
from streamline.watching.trace import Trace

__all__ = [
    "DebugStream",
    "Drawing",
    "ErrorReport",
    "Explanation",
    "Failure",
    "HttpOptions",
    "Inline",
    "Loader",
    "Opened",
    "Pipeline",
    "Processes",
    "Snapshot",
    "Stats",
    "Stream",
    "SyncStream",
    "Threads",
    "Trace",
    "Verdict",
    "__version__",
    "errors",
    "from_items",
    "from_iterable",
    "from_stream",
    "read_jsonl",
    "read_lines",
    "replay",
    "source",
    "stage",
]

__version__ = "0.1.0"
