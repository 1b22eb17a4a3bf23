"""A loader's passes over its pipeline, and the hosts that stay between them: the next pass is opened ahead.

When the workers of a pass are done, the trainer still has what lies in the channels. At that moment the next epoch is
opened, in the same hosts, and its workers fill channels of their own: at the boundary neither they nor the trainer
wait. What was opened ahead is used if it is what the next `iter()` would open, and otherwise closed: it changes only
when things are read.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar, Unpack

from streamline.backends.hosts.pool import HostingBackend, HostPool
from streamline.core.cleanup import Cleanup
from streamline.core.cursor import PartIterator
from streamline.core.forks import disown_in_copies
from streamline.core.options import check_flag, check_int
from streamline.core.threads import CTRL_C_S, run_uninterrupted, start_thread
from streamline.errors import ClosedError, HostError, PlanError, PlanTypeError
from streamline.observe.exporters import keep
from streamline.observe.page import open_page, page_url
from streamline.runtime.loop_thread import EXIT_S
from streamline.runtime.run import OpenKeywords, OpenOptions, ResolvedRun, RunKeywords
from streamline.runtime.sync_stream import SyncStream
from streamline.runtime.tuning import StreamTuning
from streamline.sharding.ends import checked_ends
from streamline.snapshot.snapshot import Snapshot
from streamline.sources.base import Source
from streamline.training.epochs import Epochs

if TYPE_CHECKING:
    from streamline.runtime.open import Opened

T = TypeVar("T")


def passes_of(
    open_at: Callable[..., Opened[T]],
    options: RunKeywords,
    source: Source[Any],
    steps_per_epoch: int | None,
    *,
    stay: bool,
    settled: Callable[[], Callable[..., Opened[T]]],
) -> Passes[T]:
    """Return what opens the passes of a loader.

    Nothing is opened ahead where it would be noticed: workers that run here would take the trainer's time, a live feed
    is read once, an epoch of steps may end anywhere, a file of dead letters is one epoch's at a time, and ranks that
    agree over a store begin their streams in one order.

    Args:
      open_at: `Pipeline.open`; `settled` returns it with what depends on the calling thread, for passes opened ahead.
      stay: whether hosts stay between passes.
    """
    check_flag(".loader(persistent=)", stay)
    if steps_per_epoch is not None:
        if "ends" in options and checked_ends(options["ends"]).policy != "allow":
            raise PlanError(
                f".loader(ends=) with steps_per_epoch={steps_per_epoch}: every epoch has as many items on every rank "
                "anyway, so leave ends= out"
            )
        options = {"ends": "allow", **options}
    parsed = OpenOptions.of(**options)
    backend, tuning = parsed.work.backend, parsed.work.tuning
    options = {**options, "tune": tuning or False}  # passes go on with what those before them have found
    pool = None
    if stay and isinstance(backend, HostingBackend):
        pool = backend.pool(hints=True)
        options = {**options, "backend": pool}
    hosted = stay and isinstance(backend, HostingBackend | HostPool)
    again = steps_per_epoch is None and not source.is_live and parsed.errors.dead_letters is None
    passes = Passes(
        partial(open_at, **options),
        pool,
        lambda: partial(settled(), **options),
        ahead=hosted and again,
        metrics=parsed.watch.metrics,
        page=parsed.watch.page_place,
        tuning=tuning,
    )
    if isinstance(backend, HostPool):
        backend.at_close(passes.drop_next)
    return passes


class Passes(Generic[T]):
    """Opens the passes of one loader.

    Args:
      pool: the hosts that all passes run in, closed with this; None: they aren't this loader's.
      settled: returns what opens it elsewhere as it would be opened in the thread that calls this.
      metrics, page: where all passes are exported and shown, which stays open between two of them; None: nowhere.
      tuning: of all passes; None: they aren't tuned.
    """

    def __init__(
        self,
        open_at: OpenAt[T],
        pool: HostPool | None,
        settled: Callable[[], OpenAt[T]],
        *,
        ahead: bool = False,
        metrics: str | None = None,
        page: str | None = None,
        tuning: StreamTuning | None = None,
    ) -> None:
        self.open_at = open_at
        self.tuning = tuning
        self._open_next = open_at
        self._settled = settled
        self.ahead = ahead
        self._pool = pool
        self._page = page
        self._to_keep = [] if metrics is None else [partial(keep, metrics)]
        self._to_keep += [] if page is None else [partial(keep, page, open_page)]
        self._kept: list[Cleanup] = []
        self._lock = threading.RLock()  # Ctrl-C may come while it is held
        self._epoch = 0
        self._current: weakref.ref[SyncStream[T]] | None = None
        self._next: _Next[T] | None = None
        disown_in_copies(self)

    def disown(self) -> None:
        """Forget the lock, which another thread may have held."""
        self._lock = threading.RLock()

    def open(self, begin: Snapshot | None, epoch: int) -> LoaderRun[T]:
        """Open the pipeline at a snapshot, or at the beginning of an epoch; or return what was opened ahead."""
        opened = self.open_at(resume=begin, epoch=epoch if begin is None else None)
        self._keep_places()
        if self.ahead:
            self._open_next = self._settled()
        with self._lock:
            coming, self._next = self._next, None
        if coming is not None:
            ready = coming.wait()
            if ready is not None and begin is None and _same(coming.resolved, opened.resolved):
                self._current = weakref.ref(ready.stream)
                ready.stream.begin()
                return ready
            coming.drop()
        spent = Future[None]()
        stream = opened.sync_stream(on_exhausted=partial(_mark_spent, spent))
        self._current = weakref.ref(stream)
        return LoaderRun(stream, begin, opened.resolved.epoch, spent)

    @property
    def page(self) -> str | None:
        """The address of the page; it is opened, if there is to be one. Raises `HostError`."""
        self._keep_places()
        return page_url(self._page)

    def _keep_places(self) -> None:
        def keep_next() -> None:
            self._kept.append(Cleanup(self, self._to_keep[-1]()))
            self._to_keep.pop()

        while self._to_keep:
            run_uninterrupted(keep_next)

    def expect(self, epoch: int, current: LoaderRun[T] | None = None) -> None:
        """Open `epoch` ahead when its time comes.

        Args:
          current: the pass before it, which has just begun; None: another epoch follows than was expected.
        """
        self._epoch = epoch
        if self.ahead and current is not None:
            current.spent.add_done_callback(lambda _: self._begin_next())

    def close(self) -> None:
        """Close the present pass, and what was opened ahead; end hosts, page and export of metrics. Idempotent."""
        stream = None if self._current is None else self._current()
        if stream is not None:
            stream.close()
        self.drop_next()
        if self._pool is not None:
            self._pool.close()
        for kept in self._kept:
            kept()

    def drop_next(self) -> None:
        """Close what was opened ahead, and open nothing more so. From any thread."""
        with self._lock:
            self.ahead = False
        self.forget_next()

    def forget_next(self) -> None:
        """Close what was opened ahead. From any thread."""
        with self._lock:
            coming, self._next = self._next, None
        if coming is not None:
            coming.drop()

    def _begin_next(self) -> None:
        """Open the next epoch. In the event loop's thread of the present one, or in the trainer's."""
        with self._lock:
            if self._next is None and self.ahead:
                self._next = _Next(self._open_next, self._epoch)


class _Next(Generic[T]):
    """A pass that is being opened, in a thread: looking at files may take a while.

    Attributes:
      resolved: the run; None: it isn't open, or couldn't be opened.
    """

    def __init__(self, open_at: OpenAt[T], epoch: int) -> None:
        self.resolved: ResolvedRun | None = None
        self._open_at = open_at
        self._epoch = epoch
        self._dropped = False
        self._run: LoaderRun[T] | None = None
        thread = threading.Thread(target=self._open, name="streamline ahead", daemon=True)
        self._thread: threading.Thread | None = thread
        try:
            start_thread(thread)
        except HostError:  # the interpreter exits, or there may be no more threads: then nothing is opened ahead
            self._thread = None

    def wait(self) -> LoaderRun[T] | None:
        """Wait until it is open, and return it; None if it couldn't be opened: why, the trainer's own opening says."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(CTRL_C_S)
        return self._run

    def drop(self) -> None:
        """Close it; what takes longer to open closes by itself then, since the interpreter's exit must not wait."""
        self._dropped = True
        if self._thread is not None:
            self._thread.join(EXIT_S)
        run = self._run
        if run is not None:
            run.stream.close()

    def _open(self) -> None:
        spent = Future[None]()
        try:
            opened = self._open_at(resume=None, epoch=self._epoch)
            if opened.resolved.ending.store is not None:
                return  # ranks agree on streams in the order in which they begin, and none knows what others open ahead
            stream = opened.sync_stream(on_exhausted=partial(_mark_spent, spent), ahead=True)
        except Exception:
            return
        self.resolved = opened.resolved
        self._run = LoaderRun(stream, None, opened.resolved.epoch, spent)
        if self._dropped:
            stream.close()


def _same(one: ResolvedRun | None, other: ResolvedRun) -> bool:
    """Whether two runs of one pipeline, with the same options, give the same items, in the same place."""
    if one is None:
        return False
    mine = one.epoch, one.rank, one.listing, one.plan.after
    return mine == (other.epoch, other.rank, other.listing, other.plan.after)


class OpenAt(Protocol[T]):
    """Opens the pipeline at a snapshot, or at the beginning of an epoch; `Pipeline.open` with its other options."""

    def __call__(self, **options: Unpack[OpenKeywords]) -> Opened[T]: ...


def _mark_spent(spent: Future[None]) -> None:
    """Mark a pass as spent. In its event loop's thread, perhaps again."""
    if not spent.done():
        spent.set_result(None)


@dataclass(frozen=True)
class LoaderRun(Generic[T]):
    """The stream that items come from, or came from.

    Attributes:
      begin: what it was opened at; None: at the beginning of `epoch`.
      epoch: the pipeline's; with `steps_per_epoch` it isn't the loader's.
      spent: done when its workers have given all that they have.
      offset: less the items that it had given when the present iteration began, plus those of that from before it.
      alive: it can still be asked for items.
    """

    stream: SyncStream[T]
    begin: Snapshot | None
    epoch: int
    spent: Future[None]
    offset: int = 0
    alive: bool = True

    @property
    def taken(self) -> int:
        """Items that the present iteration has given."""
        return self.offset + self.stream.count

    def stopped(self) -> LoaderRun[T]:
        """Close the stream; the snapshot stays."""
        self.stream.close()
        return replace(self, alive=False)

    @property
    def snapshot(self) -> Snapshot:
        return self.stream.snapshot() if self.begin is None or self.stream.count else self.begin

    @property
    def snapshot_before(self) -> Snapshot:
        """Where it stood right before the last item."""
        return self.stream.snapshot(1) if self.begin is None or self.stream.count > 1 else self.begin


class Now(NamedTuple, Generic[T]):
    """Accounts and stream change together: Ctrl-C may come between any two lines."""

    epochs: Epochs
    run: LoaderRun[T] | None


class Iteration(PartIterator[T]):
    """One epoch of a loader, or what is left of it.

    Args:
      part: returns what gives the next items, as `SyncStream.part`; ClosedError where another iteration has begun.
      over: called at the end; perhaps again, if Ctrl-C comes in the middle of it.
      insist: raises a ClosedError if this isn't the loader's present iteration.
    """

    def __init__(
        self, part: Callable[[], Iterator[T] | None], over: Callable[[], None], insist: Callable[[], None]
    ) -> None:
        self._part = part
        self._over = over
        self._insist = insist

    def _fetch_part(self) -> NoReturn:
        try:
            part = self._part()
        except ClosedError:
            self._insist()
            raise
        if part is None:
            self._over()
        self._go_on(part)


def check_begin(
    epoch: int | None, steps_per_epoch: int | None, fixed_epoch: bool, resume: object
) -> tuple[int | None, int | None]:
    """Insist on options of `.loader()` that are of their types; return epoch and steps."""
    if epoch is not None:
        epoch = check_int(".loader(epoch=)", epoch, 0)
    if steps_per_epoch is not None:
        steps_per_epoch = check_int(".loader(steps_per_epoch=)", steps_per_epoch, 1)
    check_flag(".loader(fixed_epoch=)", fixed_epoch)
    if resume is not None and not isinstance(resume, Snapshot):
        raise PlanTypeError(
            f".loader(resume=) is a Snapshot, got {type(resume).__name__}; a state_dict goes to load_state_dict()"
        )
    return epoch, steps_per_epoch
