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
    from streamline.backends.ray import Ray
    from streamline.backends.remote.remote import Remote
    from streamline.backends.threads import Threads
    from streamline.constructors import (
        StreamReplicator,
        concat,
        from_huggingface,
        from_items,
        from_iterable,
        from_pandas,
        from_polars,
        from_stream,
        from_torch,
        mix,
        source,
        zip,
    )
    from streamline.core.error_policy import ErrorReport, Failure
    from streamline.core.limits import Limit
    from streamline.core.place import empty
    from streamline.core.replay import replay
    from streamline.io.storage.options import HttpOptions
    from streamline.observe import metrics
    from streamline.observe.stats import Stats
    from streamline.observe.trace import Trace
    from streamline.observe.verdict import Verdict
    from streamline.pipeline import Pipeline
    from streamline.plan.draw import Drawing
    from streamline.readers import (
        from_arrow,
        read_array_record,
        read_arrow,
        read_csv,
        read_files,
        read_hdf5,
        read_jsonl,
        read_lance,
        read_lines,
        read_mds,
        read_npy,
        read_parquet,
        read_tar,
        read_tfrecord,
        stream_http,
    )
    from streamline.runtime.check import Report
    from streamline.runtime.debug import DebugStream
    from streamline.runtime.open import Opened
    from streamline.runtime.stream import Stream
    from streamline.runtime.sync_stream import SyncStream
    from streamline.runtime.writing import Written, write_jsonl, write_npy, write_parquet, write_tar
    from streamline.sharding.ends import Ends, EndsReport
    from streamline.snapshot.explain import Explanation
    from streamline.snapshot.recorder import Recorder
    from streamline.snapshot.snapshot import Snapshot
    from streamline.sources.framing import ServerSentEvent
    from streamline.training.loader import Loader
    from streamline.training.stream_dataset import StreamDataset
    from streamline.transforms import decode
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
    "Limit",
    "Loader",
    "Opened",
    "Pipeline",
    "Processes",
    "Ray",
    "Recorder",
    "Remote",
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
    "Written",
    "__version__",
    "concat",
    "decode",
    "empty",
    "errors",
    "from_arrow",
    "from_huggingface",
    "from_items",
    "from_iterable",
    "from_pandas",
    "from_polars",
    "from_stream",
    "from_torch",
    "metrics",
    "mix",
    "read_array_record",
    "read_arrow",
    "read_csv",
    "read_files",
    "read_hdf5",
    "read_jsonl",
    "read_lance",
    "read_lines",
    "read_mds",
    "read_npy",
    "read_parquet",
    "read_tar",
    "read_tfrecord",
    "replay",
    "source",
    "stage",
    "stream_http",
    "write_jsonl",
    "write_npy",
    "write_parquet",
    "write_tar",
    "zip",
]

__version__ = "0.1.0"

_NAMES = {
    "streamline.backends.inline": "Inline",
    "streamline.backends.processes": "Processes",
    "streamline.backends.ray": "Ray",
    "streamline.backends.remote.remote": "Remote",
    "streamline.backends.threads": "Threads",
    "streamline.constructors": "StreamReplicator concat from_huggingface from_items from_iterable "
    "from_pandas from_polars from_stream from_torch mix source zip",
    "streamline.core.error_policy": "ErrorReport Failure",
    "streamline.core.limits": "Limit",
    "streamline.core.place": "empty",
    "streamline.core.replay": "replay",
    "streamline.io.storage.options": "HttpOptions",
    "streamline.observe.stats": "Stats",
    "streamline.observe.trace": "Trace",
    "streamline.observe.verdict": "Verdict",
    "streamline.pipeline": "Pipeline",
    "streamline.plan.draw": "Drawing",
    "streamline.readers": "from_arrow read_array_record read_arrow read_csv read_files "
    "read_hdf5 read_jsonl read_lance read_lines read_mds read_npy read_parquet read_tar read_tfrecord stream_http",
    "streamline.runtime.check": "Report",
    "streamline.runtime.debug": "DebugStream",
    "streamline.runtime.open": "Opened",
    "streamline.runtime.stream": "Stream",
    "streamline.runtime.sync_stream": "SyncStream",
    "streamline.runtime.writing": "Written write_jsonl write_npy write_parquet write_tar",
    "streamline.sharding.ends": "Ends EndsReport",
    "streamline.snapshot.explain": "Explanation",
    "streamline.snapshot.recorder": "Recorder",
    "streamline.snapshot.snapshot": "Snapshot",
    "streamline.sources.framing": "ServerSentEvent",
    "streamline.training.loader": "Loader",
    "streamline.training.stream_dataset": "StreamDataset",
    "streamline.transforms.custom": "stage",
}
"""What each module gives: it is imported when a name of it is first used, so that a process that runs workers, which
needs few of them, starts in a third of the time."""

_SUBMODULES = {
    "decode": "streamline.transforms.decode",
    "errors": "streamline.errors",
    "metrics": "streamline.observe.metrics",
}
"""What is itself a module."""

_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

_ELSEWHERE = {
    "DataLoader": "pipe.loader() is iterated like one, epoch after epoch",
    "Dataset": "sl.from_items(dataset) begins a pipeline with one, sl.read_jsonl and its kin with files",
    "load_dataset": "sl.from_huggingface(dataset) begins a pipeline with one",
}
"""Where users of other libraries find what they look for here."""

if not TYPE_CHECKING:  # a checker that saw this would take any name for granted

    def __getattr__(name: str) -> Any:
        if name not in _MODULES and name not in _SUBMODULES:
            way = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            raise AttributeError(f"module 'streamline' has no attribute {name!r}{way}", name=name)
        module = import_module(_SUBMODULES.get(name) or _MODULES[name])
        found = globals()[name] = module if name in _SUBMODULES else getattr(module, name)
        return found


def __dir__() -> list[str]:
    return sorted(__all__)
