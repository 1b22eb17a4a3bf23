"""What the formats of columns have in common: groups of rows, fetched one after the other. Place: `arrow_groups`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any, ClassVar

from streamline.core.counters import Working
from streamline.core.flow import Chunk, Demand, Lists
from streamline.core.state import At
from streamline.core.threads import in_thread
from streamline.errors import DataError, PlanError, ReadError
from streamline.fetching.file import File
from streamline.formats.arrow_groups import Table, Where
from streamline.formats.arrow_items import Items
from streamline.formats.arrow_library import Predicate
from streamline.formats.arrow_unchanged import Unchanged
from streamline.formats.base import AHEAD_BYTES, Format, Place

__all__ = ["Columnar", "check_schema", "watched"]


@dataclass(frozen=True, kw_only=True)
class Columnar(Format[Any]):
    """Reads rows as dicts, or record batches.

    Attributes:
      columns: dotted names of those that are wanted; None: all.
      predicate: rows for which it isn't true are left out; None: none are.
      batch_rows: rows in a record batch at the most; None: items are rows.
    """

    sequential: ClassVar[bool] = False
    unit: ClassVar[str]
    """What a group is called in messages: "row group"."""

    columns: tuple[str, ...] | None = None
    predicate: Predicate | None = None
    batch_rows: int | None = None

    @property
    def ahead_bytes(self) -> int | None:
        return None if self.batch_rows is None else AHEAD_BYTES  # counting rows takes longer than making them

    def begin(self, path: str | None) -> Place:
        return {"file": path, "group": 0, "row": 0}

    def not_splittable(self, path: str, num_shards: int) -> PlanError | None:
        return None

    def options(self) -> dict[str, Any]:
        return {
            "columns": None if self.columns is None else list(self.columns),
            "filter": None if self.predicate is None else self.predicate.text,
            "batch_rows": self.batch_rows,
        }

    async def read(
        self,
        file: File,
        table: Table,
        unchanged: Unchanged | None,
        begin: Place,
        after: Place,
        name: str,
        demand: Demand,
    ) -> Lists[Any]:
        """Yield the items of a file that has been opened, as `chunks`; `table` is closed then."""
        with closing(table):
            groups = table.groups
            if groups:  # a writer that had no rows may not have known their types
                with Working(demand.meter):
                    await in_thread(demand.site.tasks.threads, lambda: check_schema(file.path, table.schema, demand))
            spans = [span for group in groups for span in group.spans]
            async with aclosing(file.ranges(spans)) as ranges:
                for number, group in enumerate(groups):
                    with Working(demand.meter):
                        data = [await anext(ranges) for _ in group.spans]
                    start = begin["row"] if group.index == begin["group"] else 0
                    if group.rows is not None and start > group.rows:
                        raise ReadError(
                            f"{file.path} has {group.rows:,} rows in {self.unit} {group.index}, expected more than "
                            f"{start:,}: has it been replaced?"
                        )
                    following = groups[number + 1] if number + 1 < len(groups) else None
                    behind = after if following is None else self._at(file.path, following.index)
                    where = Where(file.path, self.unit, group, behind, start, unchanged)
                    async with aclosing(self.items(table, data, where, name, demand)) as chunks:
                        async for chunk in chunks:
                            yield chunk
            if not groups:
                yield Chunk((), (), At(name, after))

    def items(
        self, table: Table, data: Sequence[bytes], where: Where, name: str, demand: Demand
    ) -> AsyncGenerator[Chunk[Any], None]:
        """Yield the items of a group from its row `where.row` on, each with the state behind it."""
        return Items(self.batch_rows, name, demand).of_group(table, data, where)

    @staticmethod
    def _at(path: str, group: int, row: int = 0) -> Place:
        return {"file": path, "group": group, "row": row}


async def watched(file: File, demand: Demand) -> Unchanged | None:
    """Return what sees whether a local file changes; of others, their ETag tells."""
    if not file.local:
        return None
    size = file.part.found.size
    return await in_thread(demand.site.tasks.threads, lambda: Unchanged(file.path, size))


def check_schema(path: str, schema: Any, demand: Demand) -> None:
    """Check that a file has the columns of the first file that this flow has read."""
    from streamline.formats.arrow_selection import schema_difference  # imports pyarrow

    first_path, first = demand.kept.setdefault("schema", (path, schema))
    difference = schema_difference(first, schema)
    if difference is not None:
        raise DataError(
            f"{path} differs from {first_path}: {difference}; write files of one schema, read them apart, or give "
            "columns= that they have in common"
        )
