"""`.pack`: concatenates documents of tokens, and cuts them into blocks of one length.

State: the upstream's before the document that a block's end has cut (a mark, `Since`), and how many of its tokens were
delivered; after a block that ends with a document, the upstream's after that. A resume rereads the one document.

Documents are concatenated a list at a time; the segments and positions of its blocks are computed at once.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, cast

import msgspec

from streamline.core.blame import blame
from streamline.core.capacity import LIST_ITEMS
from streamline.core.flow import Chunk, Lists, StageRun
from streamline.core.lazy_numpy import has_more, loaded_np, np
from streamline.core.meters import HoldTimer
from streamline.core.options import check_flag, check_int, type_and_repr
from streamline.core.pace import Pace
from streamline.core.place import Lender, Place, lent
from streamline.core.replay import FailedCall
from streamline.core.state import MadeStates, Over, Reference, Since, State
from streamline.core.state_types import Count
from streamline.errors import PlanTypeError, ResumeError
from streamline.transforms.base import Stage

if TYPE_CHECKING:
    import numpy.typing as npt

Tokens: TypeAlias = "npt.NDArray[Any]"

Block: TypeAlias = "dict[str, Tokens]"
"""One block: "tokens", "segment_ids" and "positions", of one length."""

Dtype: TypeAlias = Literal["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]

ITEM_TOKENS = 512
"""Tokens in a block that counts as one item of a channel: channels hold at most 4 MiB of blocks."""

TOGETHER_TOKENS = 65536
"""Small blocks are cut some at a time, out of about so many tokens, which stay in the cache. Larger ones are written
where they will be read: with blocks of 16,384 tokens, lending memory for each takes longer than a copy (157 us in place
of 117, of 65,536 tokens 810 in place of 1,120)."""


class PackPart(msgspec.Struct, frozen=True):
    """The stage's part of a saved state: tokens of the next document that were delivered, and the dtype of all."""

    token: Count
    dtype: Dtype | None
    dropped: Count | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, kw_only=True)
class Pack(Stage[Any, Block]):
    """Cuts documents, each followed by `eos`, into blocks of `length` tokens; see `Pipeline.pack`."""

    kind: ClassVar[str] = "pack"
    accepted_changes: ClassVar[Mapping[str, str]] = {
        "length": "the blocks from here on have the new length, from the first token that was in no block delivered",
        "drop_remainder": "the rest at the end is treated as it says now",
        "added": "the documents from here on are packed",
        "removed": "the documents from here on come one by one",
    }
    refuses: ClassVar[Mapping[str, str]] = {
        "key": "the document that was cut would go on with other tokens: finish the epoch with it, or begin anew",
        "eos": "the document that was cut would have another length: finish the epoch with it, or begin anew",
    }
    order_preserving: ClassVar[frozenset[str]] = frozenset({"drop_remainder"})
    state_type: ClassVar[Any] = PackPart
    initial_state = PackPart(0, None)
    rewinds = True

    length: int
    key: str | None = None
    eos: int | None = None
    drop_remainder: bool = False

    @classmethod
    def replay_cost(cls, own: PackPart) -> str | None:
        if not own.token:
            return None
        return f"reads one document again, and passes over the {own.token:,} tokens of it that were delivered"

    @property
    def in_flight(self) -> int:
        return self.length  # documents of a token each

    @property
    def inputs_per_output(self) -> int:
        return self.length

    @property
    def output_weight(self) -> int:
        return max(1, self.length // ITEM_TOKENS)

    async def lists(self, run: StageRun[Any]) -> Lists[Block]:
        held = _OpenDocuments(self, run.own, run.site.tasks.session.services.get(Lender).place)
        mark = Reference.to(run.upstream.state)
        pace = Pace()
        while (chunk := await run.upstream.pull(held.documents_wanted(run.max_items))) is not None:
            start = 0
            while start < len(chunk.items):
                with HoldTimer(run.meter):
                    taken, error = held.take(chunk, start, mark)
                while held.blocks:
                    yield held.cut(min(held.blocks, held.together, run.max_items))
                    await pace.maybe_yield()
                start += taken
                mark = Reference(chunk.states, start - 1) if start else mark
                if error is not None:
                    item, now = chunk.items[start], chunk.states[start]
                    run.skip_or_raise(blame(error, str(self), run.site, now, FailedCall(self.tokens, item)), item, now)
                    held.pass_over()
                    start, mark = start + 1, Reference(chunk.states, start)
            mark = mark if chunk.progress is None else Reference.to(chunk.progress)
            if not held.tokens:
                yield Chunk((), (), held.state(mark.get()))
            del chunk  # release the documents while the next are made
        if held.tokens and not self.drop_remainder:
            yield held.rest(run.upstream.state)
        elif held.tokens:
            yield Chunk((), (), held.dropped(run.upstream.state))

    def tokens(self, item: Any) -> Tokens | None:
        """Return the tokens of an item; None: it is empty, and no array that has a dtype."""
        found = item
        if self.key is not None:
            if not isinstance(item, Mapping) or self.key not in item:
                has = f"one of {', '.join(map(repr, item))}" if isinstance(item, Mapping) else _description(item)
                raise PlanTypeError(f"expected a dict with {self.key!r}, as .pack(key=) says, got {has}")
            found = item[self.key]
        if isinstance(found, list | tuple) and not found:
            return None
        try:
            plain = not (isinstance(found, Mapping | str | bytes) or has_more(type(found)))
            array = np.asarray(found) if plain else None
        except ValueError:  # lists of several lengths
            array = None
        if array is None or array.ndim != 1 or array.dtype.kind not in "iu":
            hint = ": say which field with .pack(key=)" if isinstance(found, Mapping) else ""
            raise PlanTypeError(f"expected tokens, a list or an array of ints, got {_description(found)}{hint}")
        return array


def pack_of(length: int, key: str | None, eos: int | None, drop_remainder: bool, *, name: str) -> Pack:
    length = check_int(".pack(length)", length, 1)
    if eos is not None:
        eos = check_int(".pack(eos=)", eos, 0)
    if key is not None and not isinstance(key, str):
        raise PlanTypeError(f".pack(key) is the name of a field, got {type_and_repr(key)}")
    check_flag(".pack(drop_remainder=)", drop_remainder)
    return Pack(name=name, length=length, key=key, eos=eos, drop_remainder=drop_remainder)


def _description(value: object) -> str:
    if isinstance(value, list | tuple | loaded_np.ndarray):
        try:
            array = np.asarray(value)
        except ValueError:  # a list of lists of several lengths
            return f"a ragged {type(value).__name__}"
        return f"{'an array' if value is array else f'a {type(value).__name__}'} of {array.dtype}, shape {array.shape}"
    return f"a {type(value).__name__}"


_Span: TypeAlias = tuple[int, Reference, Reference]
"""The number of a document's tokens, with `eos`; the upstream's states before and after it."""

_Document: TypeAlias = tuple[Tokens, int, Reference, Reference]
"""Likewise after its tokens: a document of which some are not delivered yet."""


_Room: TypeAlias = "tuple[Tokens | None, Tokens | None, Tokens | None]"
"""Where to write the tokens, segments and positions of one block; None: in ordinary memory."""


class _OpenDocuments:
    """The documents with tokens not delivered yet.

    Attributes:
      tokens: of them that were not delivered.
      together: the most blocks that are cut at once.
    """

    def __init__(self, stage: Pack, own: PackPart, place: Place | None) -> None:
        self._stage = stage
        self._place = place
        self._documents: list[_Document] = []
        self._start = own.token  # tokens of the first document that were delivered
        self._dtype = own.dtype
        self._seen: np.dtype[Any] | None = None
        self._end = np.array([])
        self._size, self._count = 0, 0  # of all documents so far
        self._resumed = self._start > 0
        self.tokens = 0
        self.together = min(LIST_ITEMS, max(1, TOGETHER_TOKENS // stage.length))

    @property
    def blocks(self) -> int:
        """Whole ones that can be cut."""
        return self.tokens // self._stage.length

    def documents_wanted(self, blocks: int) -> int:
        """Return how many documents give about so many blocks, by their mean length so far."""
        wanted = min(blocks, self.together) * self._stage.length - self.tokens
        likely = 1 + wanted * self._count // max(1, self._size) if self._count else 1
        return max(1, min(LIST_ITEMS, likely, self._stage.length - self.tokens))

    def take(self, chunk: Chunk[Any], start: int, before: Reference) -> tuple[int, BaseException | None]:
        """Take the items of a list from `start` on; return how many, and the error of the next one."""
        items, states, key = chunk.items, chunk.states, self._stage.key
        for at in range(start, len(items)):
            item, after = items[at], Reference(states, at)
            try:
                if key is None and type(item) is np.ndarray and item.dtype is self._seen and item.ndim == 1:
                    self._add(item, before, after)
                else:
                    self._add(self._tokens_of(item), before, after)
            except BaseException as error:
                return at - start, error
            before = after
        return len(items) - start, None

    def _add(self, tokens: Tokens | None, before: Reference, after: Reference) -> None:
        self._count += 1
        size = 0 if tokens is None else len(tokens)
        if size:
            size += len(self._end)
        if self._resumed:
            if size < self._start:
                raise ResumeError(
                    f"{self._stage} had delivered {self._start:,} tokens of a document, and the one that is there now "
                    f"has {size:,}: what is before it gives another one than it did"
                )
            self._resumed = False
            if size == self._start:
                self._start, size = 0, 0
        self._size += size
        if size and tokens is not None:
            self.tokens += size - (0 if self._documents else self._start)
            self._documents.append((tokens, size, before, after))

    def _tokens_of(self, item: Any) -> Tokens | None:
        """Return the tokens of an item; checks that they have the dtype of those before."""
        tokens, key = self._stage.tokens(item), self._stage.key
        if key is not None and not self._count and (others := [repr(name) for name in item if name != key]):
            way = f"if this is right, .map(lambda item: item[{key!r}]) before it, and no key="
            text = f".pack(key={key!r}) leaves out {', '.join(others)} of each item, which no block has: {way}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        if tokens is None or tokens.dtype == self._seen:
            return tokens
        dtype = tokens.dtype
        if self._dtype not in (None, dtype.name):
            raise PlanTypeError(
                f"expected tokens of {self._dtype}, as in the documents before, got {dtype.name}: a block has one "
                "dtype, make them the same in a .map"
            )
        eos, span = self._stage.eos, np.iinfo(dtype)
        if eos is not None and not span.min <= eos <= span.max:
            raise PlanTypeError(f"expected tokens of a dtype that holds .pack(eos={eos}), got {dtype.name}")
        self._dtype, self._seen = cast(Dtype, dtype.name), dtype
        self._end = np.array([] if eos is None else [eos], dtype)
        return tokens

    def pass_over(self) -> None:
        """Skip the next document; if it was the one that had been cut, the next block begins with a new one."""
        if not self._documents:
            self._start, self._resumed = 0, False

    def cut(self, count: int) -> Chunk[Block]:
        """Return the first blocks."""
        return self._cut(count, count * self._stage.length, None)

    def rest(self, end: State) -> Chunk[Block]:
        """Return the last block, padded; `end` is the upstream's state at the end."""
        return self._cut(1, self.tokens, end)

    def state(self, upstream: State, token: int = 0) -> State:
        """Return the state after so many tokens of the next document."""
        own = PackPart(self._start if self._resumed else token, self._dtype)
        return Over(self._stage.name, own, upstream)

    def dropped(self, upstream: State) -> State:
        """Return the state at the end, with the number of tokens dropped."""
        return Over(self._stage.name, PackPart(0, self._dtype, self.tokens), upstream)

    def _room(self) -> _Room:
        """Return the place's memory for one block, as far as it lends some."""
        if self._place is None or self.together > 1:
            return None, None, None
        kinds = np.dtype(self._dtype), np.dtype(np.int32), np.dtype(np.int32)
        tokens, segments, positions = (lent(self._place, (self._stage.length,), kind) for kind in kinds)
        return tokens, segments, positions

    def _cut(self, count: int, size: int, end: State | None) -> Chunk[Block]:
        length, pieces, sizes, used = self._stage.length, list[Tokens](), list[int](), list[_Document]()
        start = first = self._start
        while size:
            used.append(document := self._documents[len(used)])
            tokens, whole = document[0], document[1]
            taken = min(whole - start, size)
            pieces.append(tokens[start : start + taken] if start or taken < whole else tokens)
            sizes.append(taken)
            size, start = size - taken, start + taken
            if start == whole:
                start = 0
                if len(self._end):
                    pieces.append(self._end)
        del self._documents[: len(used) - bool(start)]
        self._start = start
        self.tokens -= sum(sizes)
        items = _blocks(pieces, sizes, count, length, self._room())
        if end is not None:
            return Chunk(items, [self.state(end)])
        shared = self._dtype, length, [document[1:] for document in used], np.cumsum(sizes).tolist(), first
        return Chunk(items, MadeStates(_state_after, self._stage.name, *shared, first=1))


def _blocks(pieces: list[Tokens], sizes: list[int], count: int, length: int, room: _Room) -> list[Block]:
    """Return blocks of concatenated pieces; the last one is padded with 0.

    Args:
      sizes: of the segments, which may have two pieces each.
      room: for one block; where there is any, `count` is 1.
    """
    missing = count * length - sum(sizes)
    if missing:
        pieces = [*pieces, np.zeros(missing, pieces[0].dtype)]
        sizes = [*sizes, missing]
    tokens = np.concatenate(pieces, out=room[0])
    lengths = np.array(sizes)
    starts = np.repeat((np.cumsum(lengths) - lengths).astype(np.int32), lengths).reshape(-1, length)
    ids = np.repeat(np.arange(len(sizes), dtype=np.int32), lengths).reshape(-1, length)
    positions = np.arange(count * length, dtype=np.int32).reshape(-1, length)
    np.subtract(positions, starts, out=positions)
    positions = np.minimum(positions, np.arange(length, dtype=np.int32), out=_row(room[2]))
    ids = np.subtract(ids, ids[:, :1] - np.int32(1), out=_row(room[1]))
    if missing:
        ids[-1, -missing:] = positions[-1, -missing:] = 0
    rows = tokens.reshape(-1, length)
    return [
        {"tokens": row, "segment_ids": segment, "positions": position}
        for row, segment, position in zip(rows, ids, positions, strict=True)
    ]


def _row(array: Tokens | None) -> Tokens | None:
    """Return an array as the only row of a larger one."""
    return None if array is None else array[None]


def _state_after(
    name: str, dtype: Dtype | None, length: int, documents: list[_Span], ends: list[int], first: int, block: int
) -> State:
    """Return the state after block number `block`, from 1.

    Args:
      documents: that were cut.
      ends: where their parts end, in tokens of these blocks.
      first: tokens of the first document that were delivered before.
    """
    end = block * length
    at = bisect_left(ends, end)
    size, before, after = documents[at]
    token = end - ends[at - 1] if at else end + first
    if token == size:
        return Over(name, PackPart(0, dtype), after.get())
    return Over(name, PackPart(token, dtype), Since(before.get(), after.get()))
