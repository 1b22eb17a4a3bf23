"""Ranks of one machine that share hosts: real processes, which are killed, stopped, late, and different."""

from __future__ import annotations

import os
import pickle
import random
import signal
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from socket import socketpair
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

import streamline as sl
from streamline.backends.hosts.job import JobDirectory
from streamline.backends.hosts.pool import spread
from streamline.backends.hosts.process_main import process_env
from streamline.backends.hosts.shared_hosts import HostOwner
from streamline.backends.network.connections import Listener
from streamline.backends.processes import ProcessHost
from streamline.errors import HostError, PlanError, PlanTypeError
from tests.backends.hosts.job_kit import StartJob, end, rest_of
from tests.backends.hosts.shared_rank import LENGTH, PIPES, SHARDS
from tests.laws.profile import FACTOR, long_but

ALL = list(range(LENGTH))
ONCE = Counter(ALL)


# What is shared -------------------------------------------------------------------------------------------------------
def test_what_several_ranks_need_is_read_once(job: StartJob, tmp_path: Path) -> None:
    with job(tmp_path) as made:
        ranks = made.opened(3)
        assert rest_of(*ranks) == [ALL] * 3
        assert made.reads == ONCE
        assert len({tuple(rank.hosts()) for rank in ranks}) == 1
        end(made, *ranks)


@pytest.mark.long
def test_what_one_rank_writes_into_its_arrays_no_other_sees(job: StartJob, tmp_path: Path) -> None:
    with job(tmp_path) as made:
        ranks = made.opened(3, "arrays")
        expected = [[number, number] for number in ALL]
        first, *others = ranks
        spoilt = first.take(8, spoil=True)
        kept = [rank.take(8) for rank in others]
        assert [spoilt, *kept] == [expected[SHARDS : SHARDS + 8]] * 3
        for rank in ranks:
            rank.first += spoilt
        assert rest_of(*ranks, spoil=True) == [expected] * 3
        assert made.reads == ONCE
        end(made, *ranks)


@pytest.mark.long
def test_ranks_with_other_shards_share_the_processes_only(job: StartJob, tmp_path: Path) -> None:
    with job(tmp_path) as made:
        ranks = made.start(4)
        for number, rank in enumerate(ranks):
            rank.open(rank=number, world_size=4, ends="allow")
        assert rest_of(*ranks) == [ALL[number::4] for number in range(4)]
        assert made.reads == ONCE
        assert len({pid for rank in ranks for pid in rank.hosts()}) == 2
        end(made, *ranks)


@pytest.mark.long
def test_other_plans_are_never_shared(job: StartJob, tmp_path: Path) -> None:
    with job(tmp_path) as made:
        one, two = made.opened(1) + made.opened(1, "others")
        assert rest_of(one, two) == [ALL, [-number for number in ALL]]
        assert made.reads == Counter(ALL * 2)
        assert one.hosts() == two.hosts()
        end(made, one, two)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["Inline", "node"])
def test_snapshots_resume_anywhere_and_are_shared_at_the_same_place(
    job: StartJob, tmp_path: Path, backend: str
) -> None:
    with job(tmp_path) as made:
        one, two, three = made.opened(3, "windows")
        whole = PIPES_OF_WINDOWS
        assert one.take(5) == two.take(5) == whole[SHARDS : SHARDS + 5]
        snapshots = [rank.do("snapshot", name="s") for rank in (one, two, three)]
        assert sl.Snapshot.from_json(snapshots[0]).flow_state == sl.Snapshot.from_json(snapshots[1]).flow_state
        for rank in (one, two, three):
            rank.do("close", name="s")
            rank.first = []
        read = sum(made.reads.values())
        for rank, snapshot in zip((one, two, three), snapshots, strict=True):
            rank.open(
                "windows", backend={"kind": "Inline"} if backend == "Inline" else {"shared": "node"}, resume=snapshot
            )
        if backend == "node":
            for rank in (one, two):
                rank.first = rank.take(SHARDS)
        later, earlier = whole[SHARDS + 5 :], whole[SHARDS:]
        assert rest_of(one, two, three) == [later, later, earlier]
        if backend == "node":
            alone = sum(len(batch) for batch in later + earlier)
            reread = 2 * 4 * 16  # at most two windows a shard, for each of two places
            assert sum(made.reads.values()) - read <= alone + reread
        end(made, one, two, three)


@pytest.mark.long
def test_a_snapshot_of_inline_is_resumed_by_ranks_that_share(job: StartJob, tmp_path: Path) -> None:
    with job(tmp_path) as made:
        one, two = made.start(2)
        one.open("windows", backend={"kind": "Inline"})
        assert one.take(7) == PIPES_OF_WINDOWS[:7]
        snapshot = one.do("snapshot", name="s")
        one.do("close", name="s")
        for rank in (one, two):
            rank.open("windows", resume=snapshot)
            rank.first = rank.take(1)
        assert rest_of(one, two) == [PIPES_OF_WINDOWS[7:]] * 2
        end(made, one, two)


@pytest.mark.long
def test_each_epoch_is_shared_and_ranks_may_be_in_two_of_them(job: StartJob, tmp_path: Path) -> None:
    with job(tmp_path) as made:
        one, two = made.start(2)
        for name, epoch in (("a", 0), ("b", 1)):
            for rank in (one, two):
                rank.open(name=name, epoch=epoch)
                assert rank.take(SHARDS, name) == ALL[:SHARDS]
        for name in ("b", "a"):
            for rank in (one, two):
                rank.ask("take", name=name)
            assert [rank.answer() for rank in (one, two)] == [ALL[SHARDS:]] * 2
        assert made.reads == Counter(ALL * 2)
        end(made, one, two)


@pytest.mark.long
def test_a_rank_that_comes_late_reads_by_itself(job: StartJob, tmp_path: Path) -> None:
    with job(tmp_path) as made:
        (one,) = made.opened(1, "long")
        one.first += one.take(40_000)
        before = made.reads[0]
        (two,) = made.opened(1, "long")
        assert made.reads[0] == before + 1
        assert two.take(1_000) == list(range(SHARDS, SHARDS + 1_000))
        assert one.take(1_000) == list(range(SHARDS + 40_000, SHARDS + 41_000))
        end(made, one, two)


@pytest.mark.long
def test_skipped_items_are_reported_to_each_rank(job: StartJob, tmp_path: Path) -> None:
    with job(tmp_path) as made:
        ranks = made.opened(2, "faulty", on_error="skip")
        good = [number for number in ALL if number % 10 != 3]
        assert [sorted(items) for items in rest_of(*ranks)] == [good] * 2
        assert made.reads == Counter(good)
        bad = LENGTH - len(good)
        assert [rank.do("skipped", name="s")[0] for rank in ranks] == [bad] * 2
        end(made, *ranks)


@pytest.mark.long
def test_a_handler_of_errors_is_asked_in_the_rank_whose_it_is(job: StartJob, tmp_path: Path) -> None:
    """What it decides is its own, so workers are not shared; the hosts are."""
    with job(tmp_path) as made:
        ranks = made.opened(2, "faulty", on_error="handler")
        good = [number for number in ALL if number % 10 != 3]
        assert [sorted(items) for items in rest_of(*ranks)] == [good] * 2
        assert made.reads == Counter(good * 2)
        asked = [sorted(rank.do("skipped", name="s")[1]) for rank in ranks]
        assert asked == [sorted(f"number {number}" for number in ALL if number % 10 == 3)] * 2
        end(made, *ranks)


@pytest.mark.long
def test_an_item_that_ends_its_host_is_found_by_each_rank(job: StartJob, tmp_path: Path) -> None:
    with job(tmp_path) as made:
        ranks = made.start(2)
        for rank in ranks:
            rank.open("poisonous", on_error="skip")
        for items in rest_of(*ranks):
            assert sorted(items) == [number for number in ALL if number != 5]
        assert [rank.do("skipped", name="s")[0] for rank in ranks] == [1, 1]
        end(made, *ranks)


@pytest.mark.long
def test_ranks_pause_alone_and_together(job: StartJob, tmp_path: Path) -> None:
    with job(tmp_path) as made:
        one, two = made.opened(2)
        assert one.do("pause", name="s")
        for rank in (one, two):
            rank.ask("pause", name="s")
        assert one.answer()
        assert two.answer()
        assert rest_of(one, two) == [ALL] * 2
        assert made.reads == ONCE
        end(made, one, two)


# Who ends -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("pipe", long_but(["arrays"], ["items", "arrays", "windows"]))
def test_when_the_owner_is_killed_another_rank_takes_over(job: StartJob, tmp_path: Path, pipe: str) -> None:
    with job(tmp_path) as made:
        owner, one, two = made.opened(3, pipe)
        one.first += one.take(5)
        owner.send_signal(signal.SIGKILL)
        whole = EXPECTED[pipe]
        assert rest_of(one, two) == [whole] * 2
        assert one.hosts() == two.hosts()
        end(made, one, two)


@pytest.mark.long
def test_when_a_guest_is_killed_the_others_go_on_undisturbed(job: StartJob, tmp_path: Path) -> None:
    with job(tmp_path) as made:
        owner, one, two = made.opened(3)
        two.send_signal(signal.SIGKILL)
        assert rest_of(owner, one) == [ALL] * 2
        assert made.reads == ONCE
        end(made, owner, one)


@pytest.mark.long
def test_when_a_host_is_killed_all_ranks_go_on(job: StartJob, tmp_path: Path) -> None:
    with job(tmp_path) as made:
        ranks = made.opened(3, "windows")
        os.kill(ranks[0].hosts()[0], signal.SIGKILL)
        assert rest_of(*ranks) == [PIPES_OF_WINDOWS] * 3
        end(made, *ranks)


@pytest.mark.long
def test_an_owner_that_has_closed_its_stream_keeps_the_hosts_for_others(job: StartJob, tmp_path: Path) -> None:
    with job(tmp_path) as made:
        owner, one = made.opened(2)
        hosts = one.hosts()
        owner.do("close", name="s")
        assert rest_of(one) == [ALL]
        assert made.reads == ONCE
        assert one.hosts() == hosts
        end(made, one, owner)


@pytest.mark.long
def test_when_the_owner_has_exited_another_rank_takes_over(job: StartJob, tmp_path: Path) -> None:
    with job(tmp_path) as made:
        owner, one = made.opened(2, "long")
        assert owner.end() == 0
        assert one.take(3_000) == list(range(SHARDS, SHARDS + 3_000))
        end(made, one)


@pytest.mark.long
def test_a_stopped_rank_is_detached_and_goes_on_by_itself(job: StartJob, tmp_path: Path) -> None:
    with job(tmp_path, STALL_S="0.2") as made:
        one, two, three = made.opened(3, "long")
        two.send_signal(signal.SIGSTOP)
        assert one.take(20_000) == list(range(SHARDS, SHARDS + 20_000))
        assert three.take(20_000) == list(range(SHARDS, SHARDS + 20_000))
        two.send_signal(signal.SIGCONT)
        assert two.take(30_000) == list(range(SHARDS, SHARDS + 30_000))
        assert one.take(1_000) == list(range(SHARDS + 20_000, SHARDS + 21_000))
        end(made, one, two, three)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(max(1, int(FACTOR))))
def test_whatever_dies_each_rank_gets_every_item_once_and_in_order(job: StartJob, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with job(tmp_path) as made:
        ranks = made.opened(4, "windows")
        for _ in range(4):
            victim = rng.choice(["rank", "host"])
            if victim == "rank" and len(ranks) > 2:
                ranks.pop(rng.randrange(len(ranks))).send_signal(signal.SIGKILL)
            else:
                with suppress(ProcessLookupError):  # it has died with its owner, and no other is there yet
                    os.kill(rng.choice(ranks[0].hosts()), signal.SIGKILL)
            for rank in ranks:
                rank.first += rank.take(rng.randrange(1, 4))
        assert rest_of(*ranks) == [PIPES_OF_WINDOWS] * len(ranks)
        end(made, *ranks)


# Where they meet ------------------------------------------------------------------------------------------------------
@pytest.mark.long
def test_the_wrong_key_is_refused(job: StartJob, tmp_path: Path) -> None:
    with job(tmp_path) as made:
        (owner,) = made.opened(1)
        (key,) = made.directory.glob("*.key")
        key.write_text("0" * 64)
        (one,) = made.start()
        one.open()
        with pytest.raises(AssertionError, match="HandshakeError: the other end has another key"):
            one.take(1)
        end(made, one, owner)


@pytest.mark.long
def test_what_a_dead_job_has_left_is_taken_over(job: StartJob, tmp_path: Path) -> None:
    with job(tmp_path) as made:
        (killed,) = made.opened(1)
        killed.send_signal(signal.SIGKILL)
        assert {path.suffix for path in made.directory.iterdir()} == {".sock", ".key", ".lock"}
        ranks = made.opened(2)
        assert rest_of(*ranks) == [ALL] * 2
        end(made, *ranks)


@pytest.mark.long
def test_what_ranks_that_were_killed_at_once_have_left_the_next_job_removes(job: StartJob, tmp_path: Path) -> None:
    with TemporaryDirectory() as folder, job(tmp_path, STREAMLINE_JOB="one", TMPDIR=folder) as made:
        killed = made.opened(2)
        for rank in killed:
            rank.send_signal(signal.SIGKILL)
        (left,) = Path(folder).iterdir()
        with job(tmp_path, STREAMLINE_JOB="another", TMPDIR=folder) as following:
            (rank,) = following.opened(1)
            assert not left.exists()
            end(following, rank)
        made.check_nothing_left()
        assert not list(Path(folder).iterdir())


async def test_a_pid_that_comes_after_the_link_is_known_then() -> None:
    process = SimpleNamespace(pid=0)
    here, there = socketpair()
    with here, there:
        reached = AsyncMock(return_value=(here, process))
        owner = Mock(host=lambda _: SimpleNamespace(reach=reached, node="node7"))
        _, place = await HostOwner.reach(owner, 0, None, None, process_env())
        process.pid = 7
        assert (place.pid(), place.node) == (7, "node7")


# In one process -------------------------------------------------------------------------------------------------------
@pytest.mark.long
def test_alone_it_behaves_as_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMLINE_JOB", os.fspath(tmp_path / "job"))
    pipe = sl.from_items(range(40)).shard(4).shuffle(window=4).map(abs).merge().batch(3, collate=None)
    whole = list(pipe)
    with pipe.open(backend=sl.Processes(2, shared="node")) as stream:
        assert [next(stream) for _ in range(4)] == whole[:4]
        snapshot = stream.snapshot()
        assert [host.name.partition(",")[0] for host in stream.stats().hosts] == [
            "shared process 0",
            "shared process 1",
        ]
    assert not list((tmp_path / "job").iterdir())
    with pipe.open(backend=sl.Processes(2, shared="node"), resume=snapshot) as stream:
        assert list(stream) == whole[4:]
    assert not list((tmp_path / "job").iterdir())


@pytest.mark.long
def test_a_pool_and_a_loader_keep_shared_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMLINE_JOB", os.fspath(tmp_path / "job"))
    pipe = sl.from_items(range(40)).shard(4).map(abs).merge()
    with sl.Processes(2, shared="node") as pool:
        pids = []
        for _ in range(2):
            with pipe.open(backend=pool) as stream:
                assert list(stream) == list(range(40))
                pids.append([host.pid for host in stream.stats().hosts])
        assert pids[0] == pids[1]
    with pipe.loader(backend=sl.Processes(2, shared="node")) as loader:
        assert [list(loader) for _ in range(3)] == [list(range(40))] * 3
    assert not list((tmp_path / "job").iterdir())


@pytest.mark.parametrize("at", long_but(["host"], ["listener", "directory", "host", "node"]))
def test_a_close_that_is_cut_off_is_done_by_the_next_one(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMLINE_JOB", os.fspath(tmp_path / "job"))
    cut: tuple[Any, str] = {
        "listener": (Listener, "close"),
        "directory": (JobDirectory, "remove"),
        "host": (ProcessHost, "close"),
        "node": (HostOwner, "close_if_unused"),
    }[at]
    pool = sl.Processes(1, shared="node").pool()
    with sl.from_items(range(4)).open(backend=pool) as stream:
        assert list(stream) == list(range(4))
        (host,) = stream.stats().hosts
    with monkeypatch.context() as patch:
        patch.setattr(cut[0], cut[1], Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pool.close()
    pool.close()
    assert not list((tmp_path / "job").iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(host.pid or 0, 0)


@pytest.mark.long
def test_an_ordinary_process_knows_nothing_of_shared_hosts() -> None:
    name = "streamline.backends.hosts.shared_runs"
    with sl.from_items([name]).map(lambda name: name in sys.modules).open(backend=sl.Processes(1)) as stream:
        assert list(stream) == [False]


@pytest.mark.long
def test_without_a_job_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREAMLINE_JOB", raising=False)
    pipe, backend = sl.from_items(range(8)).shard(2).merge(), sl.Processes(2, shared="node")
    with pipe.open(backend=backend) as one, pipe.open(backend=backend) as two:
        assert list(one) == list(two) == list(range(8))
        assert not {host.pid for host in one.stats().hosts} & {host.pid for host in two.stats().hosts}


@pytest.mark.long
def test_two_streams_of_one_process_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMLINE_JOB", os.fspath(tmp_path / "job"))
    pipe = sl.from_items(range(8)).shard(2).map(lambda number: (number, os.getpid())).merge()
    backend = sl.Processes(2, shared="node")
    with pipe.open(backend=backend) as one, pipe.open(backend=backend) as two:
        assert list(one) == list(two)
        assert [host.pid for host in one.stats().hosts] == [host.pid for host in two.stats().hosts]
    assert not list((tmp_path / "job").iterdir())


@pytest.mark.long
def test_a_failure_comes_out_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMLINE_JOB", os.fspath(tmp_path / "job"))
    pipe = sl.from_items([1, 2, 0]).map(lambda number: 1 // number)
    with pipe.open(backend=sl.Processes(1, shared="node")) as stream, pytest.raises(ZeroDivisionError):
        list(stream)
    assert not list((tmp_path / "job").iterdir())


def test_an_unsafe_directory_is_refused_where_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job").symlink_to(tmp_path)
    monkeypatch.setenv("STREAMLINE_JOB", os.fspath(tmp_path / "job"))
    pipe = sl.from_items(range(4))
    with (
        pipe.open(backend=sl.Processes(1, shared="node")) as stream,
        pytest.raises(HostError, match="job is a symbolic link: the processes of a job meet in a directory of their"),
    ):
        list(stream)


@pytest.mark.parametrize(("value", "error"), [("machine", PlanError), (True, PlanTypeError), (8, PlanTypeError)])
def test_what_else_shared_says_is_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match='shared=\\) is "node"'):
        sl.Processes(2, shared=value)


def test_hosts_that_come_and_go_are_not_shared() -> None:
    with pytest.raises(PlanError, match=r"write Remote\(8\), or leave shared= out"):
        sl.Remote((2, 8), shared="node")


def test_it_is_pickled_with_its_backend() -> None:
    again = pickle.loads(pickle.dumps(sl.Processes(2, shared="node")))
    assert again == sl.Processes(2, shared="node") != sl.Processes(2)


@pytest.mark.parametrize("ranks", long_but([8, 64], [8, 64, 512]))
@pytest.mark.parametrize("consecutive", [True, False])
def test_hosts_of_a_machine_get_equally_many_shards(ranks: int, consecutive: bool) -> None:
    machines, shards = ranks // 8, range(2 * ranks)
    for machine in range(machines):
        here = range(8 * machine, 8 * machine + 8) if consecutive else range(machine, ranks, machines)
        loads = Counter(spread(shard, 8) for shard in shards if shard % ranks in here)
        assert loads == Counter(dict.fromkeys(range(8), 2))


PIPES_OF_WINDOWS: list[Any] = []
EXPECTED: dict[str, list[Any]] = {}


@pytest.fixture(scope="module", autouse=True)
def _expected(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What these pipelines give without hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("READS", os.fspath(tmp_path_factory.mktemp("inline") / "reads"))
        PIPES_OF_WINDOWS[:] = list(PIPES["windows"]())
    EXPECTED.update(items=ALL, arrays=[[number, number] for number in ALL], windows=PIPES_OF_WINDOWS)
