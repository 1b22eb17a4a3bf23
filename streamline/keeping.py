"""A pipeline's stages that keep items for a while, as users write them."""

from __future__ import annotations

import os
from typing import Self, TypeVar

from streamline.caching.cache import Cache
from streamline.caching.regenerate import Regenerate
from streamline.errors import PlanError, PlanTypeError
from streamline.options import check_int, check_seed, given
from streamline.ordering import Ordering
from streamline.transforms.prefetch import Prefetch

__all__ = ["Keeping"]

T = TypeVar("T")


class Keeping(Ordering[T]):
    """The part of `Pipeline` that adds these stages. Each method raises a `PlanError` as `Pipeline`'s do."""

    def prefetch(self, items: int, *, bytes: int | None = None) -> Self:
        """Let what is before run ahead by up to `items` items, in a task of its own.

        Args:
          items: kept ready at the most.
          bytes: the same in bytes, as `streamline.sizes.nbytes` counts them; one item is always admitted.
        """
        items = check_int(".prefetch(items)", items, 1)
        if bytes is not None:
            bytes = check_int(".prefetch(bytes=)", bytes, 1)
        return self._same(Prefetch(name=self._name(None, "prefetch"), items=items, bytes=bytes))

    def cache(
        self,
        *,
        path: str | os.PathLike[str] | None = None,
        max_bytes: int | None = None,
        name: str | None = None,
    ) -> Self:
        """Keep one pass of what is before it, and serve it in the passes behind: `.cache().repeat(3)`.

        All passes have the same items in the same order, until `reset_cache()` of the stream or loader: shuffle behind
        it. In memory it lasts as long as the stream: one that is opened anew (an epoch of a loader, too) draws anew,
        and a resume draws again what was served of its pass. On disk it lasts: streams that are opened later, and
        resumes, read on in its files. See docs/regenerating.md.

        Args:
          path: a folder to keep it in, for this and other pipelines; it is made. Files are of what is before this, its
            functions' code and its data's listing: of anything else, they aren't served. None: it is kept in memory.
          max_bytes: in each worker, of the items, as `streamline.sizes.nbytes` counts them, or of the files: a pass
            that is larger fails with `CacheFull`, behind all items that there is room for. None: no bound.
        """
        if max_bytes is not None:
            max_bytes = check_int(".cache(max_bytes=)", max_bytes, 1)
        folder = _folder(".cache(path=)", path)
        return self._same(Cache(name=self._name(name, "cache"), max_bytes=max_bytes, path=folder))

    def regenerate(
        self,
        size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        reuse: int = 1,
        block: int | None = None,
        overlap: bool = False,
        spill: str | os.PathLike[str] | None = None,
        name: str | None = None,
    ) -> Self:
        """Draw `size` items, serve them shuffled, drop them, and draw the next: a cache that is made anew.

        Put an endless `.repeat()` before it to go round a shard for ever. At the end of what is before it, the last
        cycle has the rest.

        Args:
          size: items of a cycle; with `block`, rows. Behind `.shard`, in each worker.
          shuffle: whether they are; each serving by (seed, epoch, shard, cycle, serving) alone.
          reuse: how often each item is served before its cycle is dropped; each serving has an order of its own.
          block: the items are blocks, NumPy arrays or dicts and tuples of them, whose first axis are rows; they are
            kept as arrays, and blocks of `block` rows come out. `size` is a multiple of it.
          overlap: draw the next cycle while one is served: two are in memory then.
          spill: a folder that cycles are written to, for what can't be drawn again; a resume reads them there. The
            files go when snapshots are saved: what the last two need is there.

        Raises:
          PlanError: `size` is no multiple of `block`.
        """
        size = check_int(".regenerate(size)", size, 1)
        seed = check_seed(".regenerate(seed=)", seed)
        reuse = check_int(".regenerate(reuse=)", reuse, 1)
        for option, value in (("shuffle", shuffle), ("overlap", overlap)):
            if not isinstance(value, bool):
                raise PlanTypeError(f".regenerate({option}=) is True or False, got {given(value)}")
        if block is not None:
            block = check_int(".regenerate(block=)", block, 1)
            if size % block:
                raise PlanError(
                    f".regenerate({size}, block={block}) would end each cycle with a block of {size % block} rows: "
                    "make size a multiple of block"
                )
        stage = Regenerate[T](
            name=self._name(name, "regenerate"), size=size, shuffle=shuffle, seed=seed, reuse=reuse, block=block,
            overlap=overlap, spill=_folder(".regenerate(spill=)", spill),
        )  # fmt: skip
        return self._same(stage)


def _folder(option: str, path: str | os.PathLike[str] | None) -> str | None:
    """Return it as a string, if it is the path of a folder of this machine."""
    if path is None:
        return None
    if not isinstance(path, str | os.PathLike):
        raise PlanTypeError(f"{option} is the path of a folder, got {given(path)}")
    folder = os.fspath(path)
    if not folder or "://" in folder:
        raise PlanError(
            f"{option} is the path of a folder of this machine, or of a disk that it mounts, got {folder!r}"
        )
    return folder
