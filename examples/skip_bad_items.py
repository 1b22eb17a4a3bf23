"""Some records are broken. The run goes on without them, survives a crash, and says exactly what it left out."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import streamline as sl

RECORDS = 1000


def write(folder: Path) -> str:
    for part in range(4):
        lines = [json.dumps({"id": n, "words": n % 7 or None}) for n in range(part, RECORDS, 4)]
        lines[100] = '{"id": '  # cut off by a copy that failed
        (folder / f"part-{part}.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder / "part-*.jsonl")


def mean(record: dict[str, Any]) -> float:
    return float(100 / record["words"])


def main() -> None:
    logging.basicConfig(stream=sys.stdout, format="log: %(message)s")  # each run says at its end what it skipped
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pipe = sl.read_jsonl(write(folder)).shard(4).map(mean).shuffle(window=32).merge()
        options: Any = {"on_error": "skip", "max_errors": 0.2, "dead_letters": folder / "bad.jsonl"}

        with pipe.open(**options) as stream:  # one in seven fails: less than the 0.2 that it may be
            taken = [next(stream) for _ in range(300)]
            snapshot = stream.snapshot()
            lost = [next(stream) for _ in range(50)]  # and then the machine went down
            print(f"crashed after {len(taken)} saved and {len(lost)} lost; {stream.errors.total} skipped by then")

        with pipe.open(resume=snapshot, **options) as stream:
            taken += stream
            print("every record delivered or skipped:", len(taken) + stream.errors.total == RECORDS)
            last = stream.errors.last[-1]

        letters = [json.loads(line) for line in (folder / "bad.jsonl").read_text().splitlines()]
        print("a dead letter for each, none twice:", len({letter["position"] for letter in letters}) == len(letters))
        print(f"replay of the last: {type(last.error).__name__}; mended: {sl.replay(last.error, fn=len)}")


if __name__ == "__main__":
    main()
