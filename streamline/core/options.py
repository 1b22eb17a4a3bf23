"""Options are checked where they are written: a wrong type is a PlanTypeError, a wrong value a PlanError."""

from __future__ import annotations

import inspect
import math
import operator
import socket
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from importlib.util import find_spec
from types import FunctionType
from typing import Any

from streamline.errors import HostError, PlanError, PlanTypeError, install


def check_int(option: str, value: object, least: int | None, most: int | None = None) -> int:
    """Return an integer from `least` to `most`; None: no bound. NumPy's integers count."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise PlanTypeError(f"{option} is an integer, got {type(value).__name__} {value!r}") from None
    if least is not None and number < least:
        raise PlanError(f"{option} is at least {least}, got {number}")
    if most is not None and number > most:
        raise PlanError(f"{option} is at most {most:,}, got {number:,}")
    return number


def check_flag(option: str, value: object) -> None:
    """Raise unless it is True or False: "False", say, which a configuration may hold, would count as true."""
    if not isinstance(value, bool):
        raise PlanTypeError(f"{option} is True or False, got {type_and_repr(value)}")


def check_ago(option: str, value: object) -> None:
    check_int(option, value, 0)
    if value not in (0, 1):
        raise PlanError(f"{option} is 0 or 1, got {value}: states further back are not kept")


def check_seed(option: str, value: object) -> int:
    return check_int(option, value, 0)


def check_seconds(option: str, value: object) -> None:
    """Raise unless it is a finite number of seconds, more than 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PlanTypeError(f"{option} is a number of seconds, got {type(value).__name__} {value!r}")
    if not (value > 0 and math.isfinite(value)):
        raise PlanError(f"{option} is a finite number of seconds, more than 0, got {value}")


def parse_address(option: str, text: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT"; `PlanError` names the option."""
    host, colon, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if not (colon and host and port.isdecimal() and int(port) < 1 << 16):
        raise PlanError(f'{option} is an address such as "0.0.0.0:7077", got {text!r}')
    return host.strip("[]"), int(port)


def listening_socket(address: tuple[str, int] | str) -> socket.socket:
    """Return a non-blocking socket that listens at an address, or at a path. Raises `HostError`."""
    where = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
    with ExitStack() as undo:
        try:
            if isinstance(address, str):
                server = undo.enter_context(socket.socket(socket.AF_UNIX))
                server.bind(address)
                server.listen(1024)
            else:
                family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
                server = undo.enter_context(socket.create_server(address, family=family, backlog=1024))
        except (OSError, UnicodeError) as error:  # the latter: no name of a host
            raise HostError(f"can't listen at {where}: {getattr(error, 'strerror', None) or error}") from error
        undo.pop_all()
    server.setblocking(False)
    return server


def check_installed(function: str, module: str, package: str, extra: str) -> None:
    """Raise unless an optional package is installed; it isn't imported."""
    if find_spec(module) is None:
        raise PlanError(f"{function} needs {package}, which is not installed: {install(extra)}")


def check_function(option: str, value: object) -> None:
    if not callable(value):
        raise PlanTypeError(f"{option} is a function, got {type(value).__name__} {value!r}")


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether `fn`, a function or a callable object, is written with `async def`, or says so by `is_async`."""
    if getattr(fn, "is_async", False) is True:
        return True
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


OPTIONS_ELSEWHERE = {
    "num_workers": ".shard(4) says how many workers share the reading, backend=sl.Processes(4) where they run",
    "batch_size": ".batch(32) at the end of the pipeline",
    "shuffle": ".shuffle(seed=0) right after the source, or .shuffle(window=4096) after .shard",
    "sampler": ".shuffle, .take, .skip, .repeat, or an object whose __getitem__(i) looks item i up in that order",
    "batch_sampler": "sl.from_items(batches_of_indices).map(read)",
    "collate_fn": ".batch(32, collate=fn)",
    "drop_last": ".batch(32, drop_remainder=True)",
    "pin_memory": '.transfer("cuda") at the end of the pipeline',
    "prefetch_factor": ".prefetch(items); sources, workers and the loop read ahead anyway",
    "persistent_workers": "they stay anyway; loader(persistent=False) ends them with each epoch",
    "worker_init_fn": ".map(fn, seed=0) gives fn a random generator of its own for each item, rng=",
    "generator": ".shuffle(seed=0), .map(fn, seed=0)",
    "timeout": "stall_s= says in the log what the loop waits for",
    "in_order": '.map(fn, ordered=False), .merge("best_effort")',
    "seed": ".shuffle(seed=0), .map(fn, seed=0)",
    "multiprocessing_context": "backend=sl.Processes(4) starts new interpreters",
    "workers": "backend=sl.Threads(4), or sl.Processes(4)",
    "concurrency": ".map(fn, concurrency=4)",
    "num_parallel_calls": ".map(fn, concurrency=4), of an async function or with executor='thread'",
    "deterministic": ".map(fn, ordered=False)",
    "buffer_size": ".shuffle(window=4096)",
    "skip_steps": "leave them out in .open(resume=, skip_steps=), and go on from a snapshot after them",
    "drop_partial": ".batch(32, drop_remainder=True)",
    "index": "a stream has all shards that are this rank's: open(rank=, world_size=), or what the launcher says",
    "rank": "open(rank=, world_size=)",
    "reshuffle_each_iteration": "each epoch has an order of its own",
}
"""Options of other loaders, and what to write in their place."""


def check_takes_item(option: str, fn: Callable[..., Any], *named: str) -> None:
    """Raise unless a function can be called with one item, and these keywords, if its signature tells."""
    if not isinstance(fn, FunctionType) or hasattr(fn, "__wrapped__"):
        return
    signature = inspect.signature(fn)
    try:
        signature.bind(None, **dict.fromkeys(named))
    except TypeError as error:
        call = ", ".join(["item", *(f"{name}=" for name in named)])
        raise PlanTypeError(
            f"{option} is called as fn({call}), and {fn.__name__}{signature} can't be: {error}. Of items that are "
            "tuples, as sl.zip makes them, fn is given the tuple; what else it needs, functools.partial gives it"
        ) from None


def check_known(function: str, unknown: Iterable[str], known: Iterable[str]) -> None:
    from difflib import get_close_matches  # not at the top: hosts start sooner

    for name in unknown:
        near = get_close_matches(name, list(known), 1)
        way = OPTIONS_ELSEWHERE.get(name) or (f"did you mean {near[0]}=?" if near else f"it has {', '.join(known)}")
        raise PlanTypeError(f"{function} has no {name}=: {way}")


METHODS_ELSEWHERE = {
    **dict.fromkeys(("snapshot", "stats", "paused", "errors", "close"), "of a stream, `with pipe.open() as stream`"),
    **dict.fromkeys(("state_dict", "load_state_dict", "set_epoch", "epoch"), "of a loader, `loader = pipe.loader()`"),
    "to": '.transfer("cuda")',
    "cuda": '.transfer("cuda")',
    "padded_batch": ".bucket_by_length(boundaries, batch_size, collate=fn)",
    "concatenate": "sl.concat(a, b)",
    "with_format": '.batch(32, collate="torch")',
    "flatten": ".flat_map(list), or .unbatch()",
    "interleave": ".shard(8, interleave=4)",
}
"""Methods of other libraries, or of a running pipeline, and what to write in their place."""


def no_attribute(owner: object, name: str) -> AttributeError:
    """Return the error for an attribute that a pipeline or a stream doesn't have."""
    way = f": {METHODS_ELSEWHERE[name]}" if name in METHODS_ELSEWHERE else ""
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{way}", name=name, obj=owner)


def type_and_repr(value: object) -> str:
    """Return the type and the start of the repr of what was given."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else f'{text[:59]}…'}"
