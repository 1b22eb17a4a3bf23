"""Save a snapshot in the middle of each of `tests.saved.plans` that has none yet: `python -m tests.saved.make`.

Beside it: the items delivered before it and after it, and the folders that it refers to (journal, cache, spill).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from streamline.pipeline import Pipeline
from tests.saved.plans import PLANS, shown

HERE = Path(__file__).parent
FOLDERS = {"from_stream with a journal": "journal", "cache on disk": "cache", "regenerate spilled": "spill"}


def count(pipe: Pipeline[Any]) -> int:
    with pipe.open(on_error="skip") as stream:
        return sum(1 for _ in stream)


def main() -> None:
    for name, plan in PLANS.items():
        target = HERE / "snapshots" / f"{name}.json"
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
                    shutil.copytree(FOLDERS[name], HERE / "folders" / FOLDERS[name])
                after = [shown(item) for item in stream]
            record = {"snapshot": Path("snapshot.json").read_text(), "before": before, "after": after}
        target.write_text(json.dumps(record, indent=1) + "\n")
        print(name, len(before), len(after), target.stat().st_size)


if __name__ == "__main__":
    main()
