"""Samples of a tar archive: consecutive members that share a key, as WebDataset groups them. No I/O."""

from __future__ import annotations

from typing import Any, NamedTuple

from streamline.errors import DataError
from streamline.formats.tar_headers import Header
from streamline.formats.tar_scanner import NoEndMarkError, Scanner

__all__ = ["Gathered", "Member", "Samples", "Wrong", "part_of"]

SLICE_MEMBERS = 128
"""Members dealt with between two returns: some 0.3 ms, or 1.5 ms where their headers are not plain."""


class Member(NamedTuple):
    """A file in an archive; its name is never used as one here."""

    name: str
    data: bytes


class Wrong(NamedTuple):
    """What is wrong with a sample, what to call it, and where the next one begins; None: behind the archive."""

    error: DataError
    item: Any
    end: int | None


class Gathered(NamedTuple):
    """What a slice of an archive has.

    Attributes:
      items: samples, in order.
      ends: for each, where in the archive the next one begins.
      wrong: what is wrong with the sample behind them, which can be left out; None: nothing.
      failure: what is wrong with the archive behind them; None: nothing.
      more: whether there may be more in what was fed.
    """

    items: list[Any]
    ends: list[int]
    wrong: Wrong | None = None
    failure: DataError | None = None
    more: bool = False


def part_of(header: Header, group: bool) -> tuple[str | None, str] | None:
    """Return the sample that a member belongs to, its key, and the member's field in it; None: it belongs to none.

    A key is cut from a name at the first dot of its last part, as WebDataset's `base_plus_ext` does. What has nothing
    in front of the dot, no dot at all, or is called __so__ at the top is no sample's. Without `group`, each file is a
    sample, without a key.
    """
    name = header.name
    if not header.regular and not header.link:
        return None
    if not group:
        return None, name
    slash = name.rfind("/") + 1
    dot = name.find(".", slash)
    if dot <= slash or (name.startswith("__") and _is_meta(name.partition("/")[0])):
        return None
    return name[:dot], name[dot + 1 :].lower()


def _is_meta(top: str) -> bool:
    return len(top) >= 4 and top.endswith("__")


class Samples:
    """Makes samples of what a scanner cuts.

    A sample is whole when the next one begins, or when the archive has been found to be whole: until then it is kept.

    Args:
      path: for messages.
      scanner: at the beginning of a sample.
      stop: samples that begin at this byte or behind it are another's; None: there is no other.
      group: whether there are samples; otherwise each member is one.
      max_bytes: of the data of a sample; more is wrong with it.
      patient: whether a sample that something is wrong with is read to its end before that is said.

    Attributes:
      over: whether the next sample is another's.
    """

    def __init__(
        self, path: str, scanner: Scanner, stop: int | None, *, group: bool, max_bytes: int, patient: bool
    ) -> None:
        self._path = path
        self._scanner = scanner
        self._stop = stop
        self._group = group
        self._max_bytes = max_bytes
        self._patient = patient
        self._header: Header | None = None  # of the next sample's first member
        self._item: Any = None  # what there is of the sample that is being read; None: none is
        self._key: str | None = None
        self._begin = self._bytes = 0
        self._field: str | None = None  # of the member whose data come next
        self._error: DataError | None = None  # what is wrong with the sample
        self.over = False

    def next(self) -> Gathered:
        """Return what the next members give."""
        items: list[Any] = []
        ends: list[int] = []
        for _ in range(SLICE_MEMBERS):
            try:
                done = not self._step(items, ends)
            except DataError as error:
                self._keep(items, ends)
                return Gathered(items, ends, failure=error)
            if self._error is not None and (self._header is not None or not self._patient):
                return Gathered(items, ends, wrong=self._left_out(self._error, self._scanner.start), more=True)
            if done:
                return Gathered(items, ends)
        return Gathered(items, ends, more=True)

    def finish(self) -> Gathered:
        """Return what is left at the end of the archive; all of it has been fed."""
        items: list[Any] = []
        ends: list[int] = []
        try:
            self._scanner.finish()
        except NoEndMarkError as error:
            if not self._group:
                self._keep(items, ends)
            return Gathered(items, ends, wrong=self._left_out(error, None))
        except DataError as error:
            self._keep(items, ends)
            return Gathered(items, ends, failure=error)
        if self._error is not None:
            return Gathered(items, ends, wrong=self._left_out(self._error, None))
        self._keep(items, ends)
        return Gathered(items, ends)

    def rest(self) -> Gathered:
        """Return what is left where the archive can't be read any further."""
        items: list[Any] = []
        ends: list[int] = []
        self._keep(items, ends)
        return Gathered(items, ends)

    def _step(self, items: list[Any], ends: list[int]) -> bool:
        """Deal with one member; return whether that could be done with what was fed, and was needed."""
        if self._field is not None:
            return self._take(self._field)
        scanner = self._scanner
        header, self._header = self._header or scanner.header(), None
        if header is None:
            return False
        part = part_of(header, self._group)
        if part is None:
            scanner.skip()
            return True
        key, field = part
        if self._item is None or not self._group or key != self._key:
            if self._error is not None:
                self._header = header
                return True
            if self._item is not None:
                items.append(self._item)
                ends.append(scanner.start)
                self._item = None
            if self._stop is not None and scanner.start >= self._stop:
                self.over = True
                return False
            self._key, self._begin, self._bytes = key, scanner.start, 0
            self._item = {"__key__": key} if self._group else header.name
        self._bytes += header.size
        if self._error is None:
            self._error = self._fault(header, field)
        if self._error is not None:
            scanner.skip()
            return True
        return self._take(field)

    def _take(self, field: str) -> bool:
        data = self._scanner.data()
        if data is None:
            self._field = field
            return False
        self._field = None
        if self._group:
            self._item[field] = data
        else:
            self._item = Member(field, data)
        return True

    def _fault(self, header: Header, field: str) -> DataError | None:
        """Return what is wrong with a sample because of its next member."""
        start = self._scanner.start
        what = f"{self._path}, member {header.name!r} (byte {start:,})"
        if header.link:
            return DataError(
                f"{what} is a hard link to {header.link!r}, whose data are elsewhere in the archive: write it with "
                "tar --hard-dereference"
            )
        if self._group and field in self._item:
            return DataError(
                f"{what} is the second one for {field!r} of the sample {self._key!r} (byte {self._begin:,}): give each "
                "sample a name of its own, or read members with group=False"
            )
        if self._bytes > self._max_bytes:
            of = f"makes its sample {self._bytes:,} bytes long" if self._group else f"has {self._bytes:,} bytes"
            return DataError(
                f"{what} {of}, expected {self._max_bytes:,} at most: raise max_sample_bytes, if that is no damage"
            )
        return None

    def _left_out(self, error: DataError, end: int | None) -> Wrong:
        """Return what is wrong with the sample that is being read, and forget it."""
        item = {"__key__": self._key} if self._group and self._item is not None else self._item
        self._item = self._error = None
        return Wrong(error, item, end)

    def _keep(self, items: list[Any], ends: list[int]) -> None:
        """Add the sample that is being read, if it is known to be whole."""
        whole = self._scanner.ended or not self._group
        if self._item is not None and self._error is None and self._field is None and whole:
            items.append(self._item)
            ends.append(self._scanner.mark if self._scanner.ended else self._scanner.at)
            self._item = None
