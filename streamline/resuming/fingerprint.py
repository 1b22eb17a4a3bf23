"""What a plan is, for comparing it with the plan that a snapshot was taken of.

Counted: kinds of stages and their order, names, options that change items, functions' qualified names. Not counted:
buffers, devices, concurrency, backend, kind of merge. Of functions' code there is a hash in each entry, which is never
a reason to refuse a snapshot (so that a run can be resumed behind a fix): a changed one is worth a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from streamline.core.blame import function_name
from streamline.core.state import Json
from streamline.core.text import Entry
from streamline.plan import Plan
from streamline.resuming.codehash import code_hash

__all__ = ["fingerprint"]


def fingerprint(plan: Plan) -> list[Entry]:
    """Return one entry per step of the plan, in order: kind, name, options; and code, if it has functions."""
    shard: dict[str, Json] = {
        "num_shards": plan.shard.num_shards,
        "mode": plan.mode,
        "drop_remainder": plan.shard.drop_remainder,
    }
    if plan.shard.interleave > 1:  # without it, there is nothing to compare
        shard["interleave"] = plan.shard.interleave
    source = plan.source
    entries = [_entry(source.kind, source.name, source.options(), source.functions())]
    entries += [_entry(stage.kind, stage.name, stage.options) for stage in plan.before]
    entries.append(_entry("shard", "shard", shard))
    entries += [_entry(s.kind, s.name, s.options) for s in plan.worker if s.counted]
    entries.append(_entry("merge", plan.merge.name, {}))
    entries += [_entry(s.kind, s.name, s.options) for s in plan.after if s.counted]
    return entries


def _entry(kind: str, name: str, options: Mapping[str, Any], functions: Mapping[str, Any] | None = None) -> Entry:
    entry: Entry = {"kind": kind, "name": name, "options": {key: _json(value) for key, value in options.items()}}
    hashes = ((key, _hash_of(fn)) for key, fn in _functions({**options, **(functions or {})}))
    if code := {key: found for key, found in hashes if found is not None}:
        entry["code"] = code
    return entry


def _functions(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the functions among some options, and one level down: parameters of a custom stage."""
    for key, value in values.items():
        if callable(value):
            yield key, value
        elif isinstance(value, tuple):
            yield from ((f"{key}.{name}", fn) for name, fn in filter(_is_pair, value) if callable(fn))


def _hash_of(fn: Any) -> str | None:
    """Return the hash of a function's code; None of streamline's own: another version of it is no change of a user's.

    What streamline has put around a user's function (a declaration, a random generator) doesn't count either.
    """
    if type(fn).__module__.startswith("streamline."):
        fn = getattr(fn, "__wrapped__", None)
    ours = fn is None or str(getattr(fn, "__module__", "")).startswith("streamline.")
    return None if ours else code_hash(fn)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)


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
