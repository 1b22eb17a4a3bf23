"""Caches on disk are of what is before them: a digest of it, made when a plan is opened, is in their files' names.

In it are the stages before the cache, as a fingerprint has them, the code of their functions, and the source's data, as
a snapshot lists them. Not the epoch: a pass that was drawn is served in the next epochs, too.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

from streamline.core.state import Json
from streamline.core.text import Entry
from streamline.plan.fingerprint import fingerprint
from streamline.plan.plan import AnyStage, Plan
from streamline.transforms.cache import Cache

DIGEST_CHARS = 16


def bound(plan: Plan, listing: Json = None) -> Plan:
    """Return a plan whose caches on disk know what they are of.

    Args:
      plan: as it will run, its source resolved.
      listing: of the data that it reads; None: what its source says.
    """
    plan = replace(plan, source=plan.source.bound(bound))
    if all(cache.path is None for cache in _caches(plan)):
        return plan
    of = [plan.source.listing() if listing is None else listing, plan.source.drawn()]
    of += [[fingerprint(part), part.source.drawn()] for _, _, part in plan.source.made_of]
    entries, chosen = fingerprint(plan), False
    caches = {cache.name: cache for cache in _caches(plan)}
    sections: list[tuple[AnyStage, ...]] = []
    for section in (plan.worker, plan.after):
        found: list[AnyStage] = []
        for stage in section:
            cache = caches.get(stage.name)
            found.append(stage if cache is None else replace(cache, of=_digest(entries, stage.name, of), chosen=chosen))
            chosen = chosen or stage.chooses
        chosen = chosen or plan.merge.chooses
        sections.append(tuple(found))
    worker, after = sections
    return replace(plan, worker=worker, after=after)


def caches_of(plan: Plan) -> list[Cache[Any]]:
    """Return all caches of a plan, those of its source's components, too."""
    return [cache for part in (plan, *(part for _, _, part in plan.source.made_of)) for cache in _caches(part)]


def _caches(plan: Plan) -> list[Cache[Any]]:
    return [stage for stage in (*plan.worker, *plan.after) if isinstance(stage, Cache)]


def _digest(entries: list[Entry], name: str, of: Json) -> str:
    before = entries[: next(at for at, entry in enumerate(entries) if at and entry["name"] == name)]
    text = json.dumps([before, of], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_CHARS]
