"""Save a snapshot in the middle of each of `tests.saved.plans` that has none yet: `python -m tests.saved.make`.

With it: the items delivered before it and after it, and the folders that it refers to (journal, cache, spill). Each
format of snapshots has a folder of its own: `format_1`, `format_2`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from streamline.pipeline import Pipeline
from streamline.snapshot.file_format import FORMAT_VERSION
from tests.saved.plans import PLANS, shown

HERE = Path(__file__).parent
TARGET = HERE / f"format_{FORMAT_VERSION}"
LONGEST_S = 200.0
FOLDERS = {"from_stream with a journal": "journal", "cache on disk": "cache", "regenerate spilled": "spill"}


def count(pipe: Pipeline[Any]) -> int:
    with pipe.open(on_error="skip") as stream:
        return sum(1 for _ in stream)


def copy_complete(folder: Path, target: Path) -> None:
    """Copy a folder as soon as no file of it is half written."""
    deadline = time.monotonic() + LONGEST_S
    while any(folder.glob(".streamline-*.tmp")):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{folder} still has a file that is half written after {LONGEST_S:.0f} s")
        time.sleep(0.01)
    shutil.copytree(folder, target)


def main() -> None:
    (TARGET / "snapshots").mkdir(parents=True, exist_ok=True)
    for name, plan in PLANS.items():
        target = TARGET / "snapshots" / f"{name}.json"
        if target.exists():
            continue
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(HERE / "files", folder, dirs_exist_ok=True)
            os.chdir(folder)
            middle = 7 if name in FOLDERS else count(plan()) // 2
            with plan().open(on_error="skip") as stream:
                before = [shown(item) for item in islice(stream, middle)]
                stream.snapshot().save("snapshot.json")
                if name in FOLDERS:  # as it is when the run is killed here
                    copy_complete(Path(FOLDERS[name]), TARGET / "folders" / FOLDERS[name])
                after = [shown(item) for item in stream]
            record = {"snapshot": Path("snapshot.json").read_text(), "before": before, "after": after}
        target.write_text(json.dumps(record, indent=1) + "\n")
        print(name, len(before), len(after), target.stat().st_size)


if __name__ == "__main__":
    main()
