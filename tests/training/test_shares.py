"""Who gets which item: arithmetic, compared with a list that is cut."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamline.errors import SnapshotError
from streamline.snapshot.file_format import seal
from streamline.training.replica_shares import ReplicaShares
from streamline.training.replicator import ReplicatorState
from tests.laws.profile import examples


@examples(60)
@given(st.integers(1, 5), st.lists(st.integers(0, 9), max_size=8), st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_item_i_is_dealt_to_i_mod_n_behind_what_was_taken(of: int, lists: list[int], taken: list[int]) -> None:
    shares = ReplicaShares(taken[:of], 1000)
    items = list(range(sum(lists)))
    at = 0
    for count in lists:
        part, at = items[at : at + count], at + count
        if count % 2:
            shares.give_all(part)
        else:
            for item in part:
                shares.give(item)
    for share in shares.all:
        assert list(share.items) == items[share.replica :: of][taken[share.replica] :]
    assert shares.at == len(items)


@examples(60)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 9), st.lists(st.integers(0, 3), max_size=12))
def test_there_is_room_until_one_would_have_too_much(of: int, capacity: int, begin: int, reads: list[int]) -> None:
    shares = ReplicaShares([0] * of, capacity)
    for item in range(begin):
        if shares.room:
            shares.give(item)
    for replica in reads:
        if shares.all[replica % of].items:
            next(shares.all[replica % of].pops)
    room = shares.room
    for item in range(int(room)):
        shares.give(item)
        assert max(len(share.items) for share in shares.all) <= capacity
    assert shares.room == 0
    assert len(shares.next.items) == capacity


def test_a_closed_share_is_dropped_and_counted() -> None:
    shares = ReplicaShares([0, 0], 4)
    shares.give_all(range(6))
    assert next(shares.all[1].pops) == 1
    shares.all[1].leave("closed")
    shares.give_all(range(6, 11))
    assert [(one.standing, one.taken, one.waiting, one.dropped) for one in shares.stats()] == [
        ("unasked", 0, 6, 0),
        ("closed", 1, 0, 4),
    ]
    assert shares.oldest(shares.taken) == 0
    shares.all[0].leave("closed")
    assert shares.room == math.inf
    assert not shares.open
    assert shares.oldest(shares.taken) == 11


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"taken": []}, "length"),
        ({"taken": [1, -1]}, "not a replicator's state: "),
        ({"behind": 7}, "contradict"),
        ({"closed": [2]}, "contradict"),
        ({"snapshot": ""}, "has no snapshot"),
        ({"version": 3}, "upgrade"),
        ({"snapshot": 5}, "snapshot"),
    ],
)
def test_a_state_that_was_edited_is_refused(change: dict[str, object], message: str) -> None:
    sound = ReplicatorState(taken=[3, 3], closed=[], behind=6, snapshot="{}").to_dict()
    assert ReplicatorState.from_dict(sound).to_dict() == sound
    edited = {**sound, "snapshot": "{}", **change}
    if edited["snapshot"] == "{}":  # by somebody who knows the checksum's rule
        edited["snapshot"] = seal("{}", [edited[key] for key in edited if key not in ("snapshot", "version")])
    with pytest.raises(SnapshotError, match=message):
        ReplicatorState.from_dict(edited)
    with pytest.raises(SnapshotError):
        ReplicatorState.from_dict({**sound, **change})
    with pytest.raises(SnapshotError, match="damaged"):
        ReplicatorState.from_dict({**sound, "taken": [3, 4]})
    with pytest.raises(SnapshotError, match=r"is the dict of state_dict\(\), got list"):
        ReplicatorState.from_dict([])
