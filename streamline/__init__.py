"""streamline: data into training loops, with exact resume at every item.

pipe = sl.read_jsonl("train/part-*.jsonl").shard(8).shuffle(window=4096).map(tokenize).merge().batch(32)
with pipe.open(resume=sl.Snapshot.load("ckpt/", missing_ok=True)) as stream:
    for batch in stream:
        ...
        stream.snapshot().save("ckpt/")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamline import errors
    from streamline.backends.inline import Inline
    from streamline.backends.processes import Processes
    from streamline.backends.threads import Threads
    from streamline.constructors import StreamReplicator, from_items, from_iterable, from_stream, mix, source, zip
    from streamline.core.error_policy import ErrorReport, Failure
    from streamline.core.replay import replay
    from streamline.io.storage.options import HttpOptions
    from streamline.observe.stats import Stats
    from streamline.observe.trace import Trace
    from streamline.observe.verdict import Verdict
    from streamline.pipeline import Pipeline
    from streamline.plan.draw import Drawing
    from streamline.readers import (
        read_arrow,
        read_csv,
        read_files,
        read_jsonl,
        read_lines,
        read_npy,
        read_parquet,
        read_tar,
        stream_http,
    )
    from streamline.runtime.check_report import Report
    from streamline.runtime.debug import DebugStream
    from streamline.runtime.open import Opened
    from streamline.runtime.stream import Stream
    from streamline.runtime.sync_stream import SyncStream
    from streamline.sharding.ends import Ends, EndsReport
    from streamline.snapshot.explain import Explanation
    from streamline.snapshot.snapshot import Snapshot
    from streamline.sources.framing import ServerSentEvent
    from streamline.training.loader import Loader
    from streamline.training.stream_dataset import StreamDataset
    from streamline.transforms.custom import stage

__all__ = [
    "DebugStream",
    "Drawing",
    "Ends",
    "EndsReport",
    "ErrorReport",
    "Explanation",
    "Failure",
    "HttpOptions",
    "Inline",
    "Loader",
    "Opened",
    "Pipeline",
    "Processes",
    "Report",
    "ServerSentEvent",
    "Snapshot",
    "Stats",
    "Stream",
    "StreamDataset",
    "StreamReplicator",
    "SyncStream",
    "Threads",
    "Trace",
    "Verdict",
    "__version__",
    "errors",
    "from_items",
    "from_iterable",
    "from_stream",
    "mix",
    "read_arrow",
    "read_csv",
    "read_files",
    "read_jsonl",
    "read_lines",
    "read_npy",
    "read_parquet",
    "read_tar",
    "replay",
    "source",
    "stage",
    "stream_http",
    "zip",
]

__version__ = "0.1.0"

_WHERE = {
    "DebugStream": "streamline.runtime.debug",
    "Drawing": "streamline.plan.draw",
    "Ends": "streamline.sharding.ends",
    "EndsReport": "streamline.sharding.ends",
    "ErrorReport": "streamline.core.error_policy",
    "Explanation": "streamline.snapshot.explain",
    "Failure": "streamline.core.error_policy",
    "HttpOptions": "streamline.io.storage.options",
    "Inline": "streamline.backends.inline",
    "Loader": "streamline.training.loader",
    "Opened": "streamline.runtime.open",
    "Pipeline": "streamline.pipeline",
    "Processes": "streamline.backends.processes",
    "Report": "streamline.runtime.check_report",
    "ServerSentEvent": "streamline.sources.framing",
    "Snapshot": "streamline.snapshot.snapshot",
    "Stats": "streamline.observe.stats",
    "Stream": "streamline.runtime.stream",
    "StreamDataset": "streamline.training.stream_dataset",
    "StreamReplicator": "streamline.constructors",
    "SyncStream": "streamline.runtime.sync_stream",
    "Threads": "streamline.backends.threads",
    "Trace": "streamline.observe.trace",
    "Verdict": "streamline.observe.verdict",
    "from_items": "streamline.constructors",
    "from_iterable": "streamline.constructors",
    "from_stream": "streamline.constructors",
    "mix": "streamline.constructors",
    "read_arrow": "streamline.readers",
    "read_csv": "streamline.readers",
    "read_files": "streamline.readers",
    "read_jsonl": "streamline.readers",
    "read_lines": "streamline.readers",
    "read_npy": "streamline.readers",
    "read_parquet": "streamline.readers",
    "read_tar": "streamline.readers",
    "replay": "streamline.core.replay",
    "source": "streamline.constructors",
    "stage": "streamline.transforms.custom",
    "stream_http": "streamline.readers",
    "zip": "streamline.constructors",
}
"""The module of each name: they are imported when they are first used, so that a process that runs workers, which needs
few of them, starts in a third of the time.
"""

if not TYPE_CHECKING:  # a checker that saw this would take any name for granted

    def __getattr__(name: str) -> Any:
        if name == "errors":
            return import_module("streamline.errors")
        if name not in _WHERE:
            raise AttributeError(f"module 'streamline' has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(_WHERE[name]), name)
        return found


def __dir__() -> list[str]:
    return sorted(__all__)
