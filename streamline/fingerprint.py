"""What a plan is, for comparing it with the plan that a snapshot was taken of.

Counted: kinds of stages and their order, names, options that change items, functions' qualified names. Not counted:
functions' code (so that a run can be resumed behind a fix), buffers, concurrency, backend, kind of merge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

from streamline.blame import function_name
from streamline.errors import ResumeError
from streamline.plan import Plan
from streamline.states import Json
from streamline.transforms.prefetch import Prefetch

__all__ = ["Entry", "compare", "fingerprint"]

Entry = dict[str, Json]


def fingerprint(plan: Plan) -> list[Entry]:
    """Return one entry per step of the plan, in order: kind, name, options."""
    shard = {"num_shards": plan.shard.num_shards, "mode": plan.mode, "drop_remainder": plan.shard.drop_remainder}
    entries = [_entry(plan.source.kind, plan.source.name, plan.source.options())]
    entries += [_entry(stage.kind, stage.name, stage.options) for stage in plan.before]
    entries.append(_entry("shard", "shard", shard))
    entries += [_entry(s.kind, s.name, s.options) for s in plan.worker if not isinstance(s, Prefetch)]
    entries.append(_entry("merge", plan.merge.name, {}))
    entries += [_entry(s.kind, s.name, s.options) for s in plan.after if not isinstance(s, Prefetch)]
    return entries


def compare(ours: Sequence[Entry], theirs: Sequence[Entry]) -> None:
    """Insist that a snapshot was taken of this plan.

    Raises:
      ResumeError: it was not; the message is a diff of the two.
    """
    if list(ours) == list(theirs):
        return
    lines = []
    for mine, its in zip_longest(ours, theirs):
        if mine == its:
            lines.append(f"    {_line(mine)}")
        else:
            lines += [f"  - {_line(its)}"] if its else []
            lines += [f"  + {_line(mine)}"] if mine else []
    raise ResumeError("the snapshot was taken of another plan (- the snapshot's, + this one's):\n" + "\n".join(lines))


def _entry(kind: str, name: str, options: Mapping[str, Any]) -> Entry:
    return {"kind": kind, "name": name, "options": {key: _json(value) for key, value in options.items()}}


def _json(value: Any) -> Json:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    if isinstance(value, partial):
        return {"partial": _json(value.func), "args": _json(value.args), "keywords": _json(value.keywords)}
    return function_name(value)


def _line(entry: Entry) -> str:
    options = ", ".join(f"{key}={value!r}" for key, value in entry["options"].items())
    return f"{entry['kind']} {entry['name']!r} ({options})"
