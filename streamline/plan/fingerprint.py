"""A plan's fingerprint, which is compared with that of a snapshot's plan; with hashes of its functions' code.

Compared: kinds of stages and their order, names, options that change items, functions' qualified names; not buffers,
devices, concurrency, the backend, the kind of merge. A changed hash of code only warns, so that a run can be resumed
after a fix.

A hash covers bytecode, constants, names, defaults, nested functions, and functions that it has closed over or wraps;
not addresses, file names, line numbers, docstrings, names of local variables, what it calls by a global name, and the
data that it has closed over. Bytecode differs between versions of Python, so a hash names its version.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from streamline.core.blame import function_name
from streamline.core.state import Json, Tree
from streamline.core.state_types import Count, Counts, check_type
from streamline.core.text import Entry
from streamline.plan.plan import Plan
from streamline.transforms.base import stage_class

PYTHON = f"{sys.implementation.cache_tag or sys.implementation.name}-O{sys.flags.optimize}"
"""What bytecode depends on besides the code: with -O, it has no assertions."""

DIGEST_CHARS = 16


def code_hash(fn: object) -> str:
    """Return "PYTHON:HASH" of a function, a partial, a method, a class or a callable object."""
    words = "\n".join(_parts(fn, {}))
    return f"{PYTHON}:{hashlib.sha256(words.encode('utf-8', 'surrogatepass')).hexdigest()[:DIGEST_CHARS]}"


def is_changed(ours: object, theirs: object) -> bool:
    """Whether two hashes are of different code; False if they are of different Pythons, and can't be compared."""
    if not isinstance(ours, str) or not isinstance(theirs, str):
        return False
    python, _, digest = ours.partition(":")
    their_python, _, their_digest = theirs.partition(":")
    return python == their_python and digest != their_digest


def _parts(value: Any, seen: dict[int, object]) -> Iterator[str]:
    """Yield what identifies a value: functions by their code, plain values by their repr, others by their type."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield f"{type(value).__name__} {value!r}"
        return
    if id(value) in seen:  # a function that has closed over itself
        return
    seen[id(value)] = value  # kept alive, so that its id stays unique
    if isinstance(value, FunctionType):
        yield from _function(value, seen)
    elif isinstance(value, MethodType):
        yield from _parts(value.__func__, seen)
    elif isinstance(value, partial):
        yield from _parts((value.func, value.args, value.keywords), seen)
    elif isinstance(value, tuple | list):
        yield f"{type(value).__name__} {len(value)}"
        for item in value:
            yield from _parts(item, seen)
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)}"
        for key, item in value.items():
            yield str(key)
            yield from _parts(item, seen)
    elif isinstance(value, type):
        yield value.__qualname__
        yield from _methods(value, ("__new__", "__init__"), seen)
    else:
        yield getattr(value, "__qualname__", type(value).__qualname__)
        yield from _methods(type(value), ("__call__",), seen)
    if (wrapped := getattr(value, "__wrapped__", None)) is not None:
        yield from _parts(wrapped, seen)


def _methods(kind: type, names: tuple[str, ...], seen: dict[int, object]) -> Iterator[str]:
    for name in names:
        if isinstance(method := getattr(kind, name, None), FunctionType):
            yield from _function(method, seen)


def _function(fn: FunctionType, seen: dict[int, object]) -> Iterator[str]:
    yield from _code(fn.__code__)
    yield from _parts((fn.__defaults__, fn.__kwdefaults__), seen)
    for cell in fn.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # empty: it is assigned later
            continue
        if isinstance(held, FunctionType | MethodType | partial):
            yield from _parts(held, seen)


def _code(code: CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    arguments = code.co_argcount + code.co_kwonlyargcount
    yield f"{code.co_argcount} {code.co_kwonlyargcount} {code.co_posonlyargcount} {code.co_varnames[:arguments]}"
    yield " ".join(code.co_names)
    consts = code.co_consts
    if consts and isinstance(consts[0], str) and not code.co_name.startswith("<"):
        consts = (None, *consts[1:])  # the docstring
    for const in consts:
        yield from _const(const)


def _const(const: Any) -> Iterator[str]:
    if isinstance(const, CodeType):
        yield from _code(const)
    elif isinstance(const, tuple):
        yield f"tuple {len(const)}"
        for item in const:
            yield from _const(item)
    elif isinstance(const, frozenset):
        yield f"frozenset {sorted(map(repr, const))}"
    else:
        yield repr(const)


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


def sections(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Return the entries up to the shard, up to the merge, and after it; without the source's."""
    found: list[list[Entry]] = [[], [], []]
    at = 0
    for entry in entries[1:]:
        found[at].append(entry)
        at += (at, entry.get("name")) in ((0, "shard"), (1, "merge"))
    return found


def check_trees(entries: list[Entry], tree: Tree, where: str) -> None:
    """Check the types of a state's parts, by these entries of a fingerprint. The part of an added stage is missing."""
    check_type(tree.get("errors"), dict[str, Counts] | None, f"the counts of skipped items{where}")
    check_type(tree.get("shard"), Count | None, f"the state of 'shard'{where}")
    for entry in entries:
        name, options = entry["name"], entry.get("options") or {}
        if name in tree:
            stage_class(entry["kind"], options).check_state(tree[name], options, f"the state of {name!r}{where}")


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
    """Return the hash of a function's code, without what streamline wraps around it; None of streamline's own."""
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
