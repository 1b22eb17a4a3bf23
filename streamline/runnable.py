"""What every pipeline can do once it is written: run, be looked at, be described."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection
from contextlib import closing
from html import escape
from itertools import islice
from os import PathLike
from typing import Any, Generic, Never, NoReturn, TypeVar, Unpack

from streamline.backends.base import Backend
from streamline.backends.inline import Inline
from streamline.debug import DebugStream
from streamline.ending.policy import Ends, EndsPolicy
from streamline.errors import PlanTypeError
from streamline.failing.failures import MAX_ERRORS, OnError, Policy
from streamline.loading.ahead import passes_of
from streamline.loading.loader import Loader
from streamline.opened import Begin, Opened, RunOptions, prepare, unsettled
from streamline.options import check_int, check_known
from streamline.pictures.describe import describe, max_in_flight
from streamline.pictures.draw import Drawing, draw
from streamline.plan import Plan
from streamline.preflight.report import DEADLINE_S, Report
from streamline.ranks import Mesh
from streamline.resuming.accept import NewFiles
from streamline.resuming.explain import Explanation, explain
from streamline.session import MEMORY_BYTES
from streamline.snapshot import Snapshot
from streamline.sync import SyncStream
from streamline.tracebacks import TrimmedTraceback
from streamline.watching.watchdog import STALL_S

__all__ = ["Runnable"]

T = TypeVar("T")

INLINE = Inline()

OPTIONS = {**RunOptions.__annotations__, "resume": Snapshot, "epoch": int}
LOADER_OPTIONS = ("steps_per_epoch", "fixed_epoch", "persistent")


class Runnable(ABC, Generic[T]):
    """A plan that can be run. `Pipeline` is one, and knows how to write it."""

    @property
    @abstractmethod
    def plan(self) -> Plan:
        """The plan in sections, as it is run."""

    @abstractmethod
    def settled(self) -> Runnable[T]:
        """Return this pipeline with what it finds out about the thread that opens it: which GPU is the current one.

        Raises:
          PlanError: it can't run here.
        """

    def open(
        self,
        *,
        backend: Backend = INLINE,
        resume: Snapshot | None = None,
        accept: Collection[str] = (),
        new_files: NewFiles = "refuse",
        rank: int | None = None,
        world_size: int | None = None,
        mesh: Mesh | None = None,
        epoch: int | None = None,
        ends: EndsPolicy | Ends = "drop",
        on_error: OnError = "raise",
        max_errors: int | float | None = MAX_ERRORS,
        dead_letters: str | PathLike[str] | None = None,
        progress: bool = False,
        stall_s: float | None = STALL_S,
        memory: int = MEMORY_BYTES,
        **unknown: Never,
    ) -> Opened[T]:
        """Return what `async with` or `with` runs: an async or a plain iterator with snapshots.

        Looks at files, unless servers or stores have to be asked in a running event loop of asyncio's: then `async
        with` does, or `with`, and what is wrong with the data comes out there.

        Args:
          backend: where the workers run.
          resume: go on right after what this snapshot had delivered; None: from the beginning. Of a whole job's
            snapshot, each rank takes its own part.
          accept: what may have changed since the snapshot, as "NAME.what": ["batch.size"]. A resume that is refused
            says what to write here, and what comes out then. An entry that isn't needed does no harm.
          new_files: what a resume does when files have come since: "refuse" to go on; or leave them to "next_epoch".
          rank: which data-parallel rank this is, of `world_size`; by default both are found out.
          mesh: in their place, the dimension of torch's `DeviceMesh` dividing the data: mesh["dp"]. See docs/ranks.md.
          epoch: seen by shuffles, random generators and custom sources; by default the snapshot's, or 0.
          ends: how ranks with unequal shards end together: "drop" what the others have no more of, "pad" with items
            given again, or "allow" each its own end; or an `sl.Ends`. One rank alone gives all. See docs/ranks.md.
          on_error: what happens when user code fails on an item, or a record is malformed: "raise" it; "skip" the item,
            and count it; or a sync function of a `Failure` that returns "skip" or "raise".
          max_errors: skipped items, counted when they would have been consumed, beyond which the stream fails with
            `TooManyErrors`: an int is a count, a float a rate of all items (ten are borne in any case), None no limit.
          dead_letters: a JSONL file with a line for each skipped item; each rank has its own.
          progress: show on stderr how it gets on: live lines on a terminal or in a notebook, else INFO each 30 s.
          stall_s: seconds of waiting at which the log says what for, and at twice, four times, … as many; None: never.
          memory: bytes that sources may hold read ahead in each process; one request is always admitted.

        Raises:
          PlanError: what several ranks, or processes of one, can't share, or ranks can't end together; options that
            contradict, or out of range or type (PlanTypeError).
          ResumeError: the snapshot is of another plan, of other data, or of other ranks.
          ReadError: a file of the source is missing.
          Later, by `with`: DeadLetterError; of a live source with another journal, what `docs/live.md` says.
        Warns: CodeChangedWarning, if functions' code has changed since the snapshot.
        """
        check_known(".open", unknown, OPTIONS)
        policy = Policy(on_error=on_error, max_errors=max_errors, dead_letters=dead_letters)
        begin = Begin(resume, accept, new_files, rank, world_size, mesh, epoch, ends)
        run: dict[str, Any] = {"backend": backend, "progress": progress, "stall_s": stall_s, "memory": memory}
        return Opened(unsettled(self.plan, begin, policy=policy, **run))

    def explain(
        self, snapshot: Snapshot, *, accept: Collection[str] = (), new_files: NewFiles = "refuse"
    ) -> Explanation:
        """Say what a resume of `snapshot` would do, to be printed, without doing it.

        Where each worker reads on, what is read and computed again, and by which stage; or why the snapshot doesn't fit
        this plan, and what to accept. Of a whole job's snapshot: all ranks.

        Args:
          accept: as for `open`.
          new_files: likewise.

        Raises:
          PlanError: `accept` names what isn't there.
          ReadError: a file of the source is missing.
        """
        return explain(self.plan, snapshot, accept, new_files)

    def debug(
        self,
        *,
        resume: Snapshot | None = None,
        accept: Collection[str] = (),
        new_files: NewFiles = "refuse",
        rank: int | None = None,
        world_size: int | None = None,
        mesh: Mesh | None = None,
        epoch: int | None = None,
        on_error: OnError = "raise",
        max_errors: int | float | None = MAX_ERRORS,
        dead_letters: str | PathLike[str] | None = None,
    ) -> DebugStream[T]:
        """Return a plain iterator that runs the whole plan in the calling thread, an item when it is asked for one.

        For pdb, prints in order, Ctrl-C. Same items, order and states as `open`; a snapshot of the one resumes the
        other. Slow: calls follow one another, and next to nothing is read ahead. Works where an event loop is running
        already, in a notebook, say. Only blocks of files are read in a thread. Of several ranks, each ends by itself.

        Args:
          resume: as in `open`, like the others.

        Raises:
          PlanError, ResumeError, ReadError: as in `open`.
        """
        begin = Begin(resume, accept, new_files, rank, world_size, mesh, epoch)
        policy = Policy(on_error=on_error, max_errors=max_errors, dead_letters=dead_letters)
        return DebugStream(prepare(self.plan, begin, backend=INLINE, policy=policy))

    def loader(
        self,
        *,
        steps_per_epoch: int | None = None,
        fixed_epoch: bool = False,
        epoch: int | None = None,
        resume: Snapshot | None = None,
        persistent: bool = True,
        **options: Unpack[RunOptions],
    ) -> Loader[T]:
        """Return what trainers hold: it can be iterated again and again, one epoch each time, saved and loaded.

        Args:
          steps_per_epoch: an epoch is so many items of a pipeline that goes on: the next epoch continues where the last
            one stopped; where the pipeline ends, it begins anew, in its next epoch. None: an epoch is one pass.
          fixed_epoch: each iteration is of the same epoch, with the same items in the same order: for validation.
          epoch: of the first iteration; by default the snapshot's, or 0.
          resume: go on behind this snapshot; if nothing follows in its epoch, with the next one. Its steps aren't
            known: with `steps_per_epoch`, an epoch begins there.
          persistent: threads and processes stay between epochs, and read ahead into the next one; `close`, or dropping
            the loader, ends them. False: each epoch has its own, and begins when it is asked for.
          options: those of `open`; each epoch is opened with them.

        Raises:
          PlanError: an epoch below 0, or fewer than 1 step.
          PlanTypeError: an option of the wrong type.
          As `open`, here and at each `iter()`.
        """
        check_known(".loader", options.keys() - OPTIONS.keys(), [*OPTIONS, *LOADER_OPTIONS])
        return Loader(
            passes_of(
                self.open,
                options,
                self.plan.source,
                steps_per_epoch,
                stay=persistent,
                settled=lambda: self.settled().open,
            ),
            epoch=epoch,
            steps_per_epoch=steps_per_epoch,
            fixed_epoch=fixed_epoch,
            resume=resume,
        )

    def first(self, count: int) -> list[T]:
        """Return the first items, at most `count`; nothing is opened for 0.

        No channel holds more than `count` items meanwhile: little more is read than what is returned takes. Also in a
        running event loop, which it holds up.

        Raises:
          PlanError: `count` is no integer of 0 or more.
          PlanError, ReadError: as in `open`.
        """
        count = check_int(".first(count)", count, 0)
        if not count:
            return []
        with TrimmedTraceback(), closing(self.open(ends="allow").sync_stream(most_ahead=count)) as stream:
            return list(islice(stream, count))

    def check(
        self,
        *,
        world_size: int | None = None,
        backend: Backend | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> Report:
        """Look before the run at what it would read, and at what it would fail on. Takes seconds; writes nothing.

        Lists the files, asks for sizes that the listing doesn't tell, reads the first record of a few files, compares
        these, and runs them through the stages: functions of the pipeline are called. A live source isn't read. Also in
        a running event loop, which it holds up.

        Args:
          world_size: of the job that is planned; by default it is found out, as in `open`.
          backend: where the workers will run: for `sl.Processes`, the plan must pickle.
          deadline_s: seconds for reading, and as many for the stages; what takes longer is named.

        Returns:
          What was found, to be printed; `report.ok`, `report.problems`, `report.raise_for_problems()`.

        Raises:
          PlanError: options out of range or type; what is wrong with the plan or the data is in the report.
        """
        from streamline.preflight.check import check  # a run needs none of it

        return check(self.plan, world_size=world_size, backend=backend, deadline_s=deadline_s)

    def __aiter__(self) -> AsyncIterator[T]:
        return self.open().stream()

    def __iter__(self) -> SyncStream[T]:
        return self.open().sync_stream()

    def __len__(self) -> NoReturn:
        """Refuse: torch's DataLoader asks a dataset this before anything else.

        Raises:
          PlanTypeError: always. `list(pipe)` and its like, for which a length is a hint, go on without.
        """
        raise PlanTypeError(
            "a pipeline has no length: len(pipe.loader()) has, where it is known. If a DataLoader of torch's asked, it "
            "can't index a pipeline: loop over pipe.loader(), or give it DataLoader(TorchDataset(pipe), "
            "batch_size=None), from streamline.integrations.torch_dataset"
        )

    def __bool__(self) -> bool:
        return True  # else Python would ask for the length

    def draw(self) -> Drawing:
        """Return a picture of the plan: Mermaid as text, SVG in a notebook, `.save("plan.svg")`. Nothing runs."""
        return draw(self.plan)

    @property
    def max_in_flight(self) -> int:
        """Items that are taken from the source and not yet consumed, at most, on one rank."""
        return max_in_flight(self.plan)

    def __repr__(self) -> str:
        return describe(self.plan)

    def _repr_html_(self) -> str:
        """Return the same for a notebook."""
        return f"<pre>{escape(repr(self))}</pre>"
