"""Who is asked, when again, and what a request says."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from streamline.errors import PlanError, PlanTypeError
from streamline.io.peers import peer as peers_module
from streamline.io.peers.peer import Peer, PeerRequest, can_be_asked_for, check_peers, chosen, look_up
from streamline.io.storage.base import FoundObject

NAMES = [f"{number:064x}" for number in range(2000)]


def peers(count: int) -> list[Peer]:
    return [Peer(f"node{number}:7078", f"10.0.0.{number}", 7078) for number in range(count)]


def owners(group: list[Peer]) -> list[str]:
    return [peer.name for name in NAMES if (peer := chosen(group, name)) is not None]


def test_all_machines_choose_alike_and_each_has_its_share() -> None:
    found = owners(peers(8))
    assert owners(peers(8)[::-1]) == found
    assert all(200 < found.count(peer.name) < 300 for peer in peers(8))


def test_only_the_objects_of_a_lost_peer_move() -> None:
    before, group = owners(peers(8)), peers(8)
    assert group[3].failed(0)
    after = owners(group)
    moved = [(one, other) for one, other in zip(before, after, strict=True) if one != other]
    assert {one for one, _ in moved} == {"node3:7078"}
    assert len({other for _, other in moved}) == 7


def test_a_peer_that_failed_is_tried_by_one_at_a_time_and_ever_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(peers_module, "monotonic", lambda: now[0])
    (peer,) = peers(1)
    assert [peer.may_be_asked() for _ in range(2)] == [True, True]
    assert peer.failed(0)
    assert not peer.failed(0)  # what else was in flight
    pauses = []
    for seen in range(1, 10):
        begun = now[0]
        while not peer.may_be_asked():
            now[0] += 0.5
        pauses.append(now[0] - begun)
        assert not peer.may_be_asked()
        assert not peer.failed(seen)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert not peer.failed(10, refused=True)  # it has been started again, but does not listen yet
    now[0] += 1
    assert peer.may_be_asked()
    peer.answered()
    assert [peer.may_be_asked() for _ in range(2)] == [True, True]
    assert peer.failed(11)
    now[0] += 1
    assert peer.may_be_asked()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("a:1", (("a", 1),)),
        ("node{0..2}:7078", (("node0", 7078), ("node1", 7078), ("node2", 7078))),
        (["a:1", "[::1]:2", "b{1,2}:3"], (("a", 1), ("::1", 2), ("b1", 3), ("b2", 3))),
    ],
)
def test_a_list_is_written_with_braces(given: Any, found: Any) -> None:
    assert check_peers(given) == found


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (5, PlanTypeError, "expected peers as"),
        ([5], PlanTypeError, "expected peers as"),
        ([], PlanError, "got none"),
        ("node", PlanError, "peers is an address"),
        ("node:0", PlanError, "port"),
        ("node:x", PlanError, "peers is an address"),
        (["a:1", "a:1"], PlanError, "once"),
    ],
)
def test_what_is_no_list_is_refused(given: Any, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        check_peers(given)


def test_a_name_with_several_addresses_stands_for_several_machines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = {"pods": ["10.0.0.2", "10.0.0.1", "fd00::1"], "one": ["10.0.0.3"], "six": ["fd00::2"]}

    def answers(host: str, port: int, type: int) -> Any:
        if host not in names:
            raise OSError("Name or service not known")
        return [(10 if ":" in one else 2, type, 6, "", (one, port)) for one in names[host]]

    monkeypatch.setattr("socket.getaddrinfo", answers)
    found = look_up([("pods", 1), ("one", 2), ("gone", 3), ("six", 4)])
    assert [(peer.name, peer.host) for peer in found] == [
        ("10.0.0.1:1", "10.0.0.1"),
        ("10.0.0.2:1", "10.0.0.2"),
        ("one:2", "10.0.0.3"),
        ("six:4", "fd00::2"),
    ]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def request(**changes: Any) -> PeerRequest:
    given: dict[str, Any] = {"path": "s3://b/ä b?c\udc80\n", "size": 10, "etag": '"e"', "start": 2, "stop": 7} | changes
    return PeerRequest(
        "0" * 64, FoundObject(given["path"], given["size"], given["etag"]), given["start"], given["stop"]
    )


@pytest.mark.parametrize("made", [request(), request(size=None), request(stop=10)])
def test_a_request_is_understood_as_it_was_made(made: PeerRequest) -> None:
    assert all(value.isascii() and value.isprintable() for value in made.headers().values())
    assert PeerRequest.of(made.target, made.headers()) == made


@pytest.mark.parametrize(
    "change",
    [
        {"target": "/objects/" + "0" * 63},
        {"target": "/objects/../../etc/passwd"},
        {"target": "/objects/" + "0" * 64 + "/.."},
        {"target": "/"},
        {"Range": "bytes=2-"},
        {"Range": "bytes=-2"},
        {"Range": "bytes=7-2"},
        {"Range": "bytes=2-10"},
        {"Range": "bytes=2-3,5-6"},
        {"Range": "bytes=2-" + "9" * 30},
        {"Range": ""},
        {"If-Match": ""},
        {"Streamline-Path": ""},
        {"Streamline-Size": "-1"},
        {"Streamline-Size": "x"},
    ],
)
def test_a_request_that_makes_no_sense_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="expected"):
        PeerRequest.of(change.pop("target", request().target), {**request().headers(), **change})


@pytest.mark.parametrize(
    ("path", "etag", "may"),
    [
        ("https://host/object", '"e"', True),
        ("s3://bucket/a@b?c", '"e"', True),
        ("https://user:password@host/object", '"e"', False),
        ("https://host/object?X-Amz-Signature=1", '"e"', False),
        ("https://host/object", '"\xe4"', False),
        ("https://host/object", '"\n"', False),
    ],
)
def test_secrets_of_a_url_are_told_to_no_peer(path: str, etag: str, may: bool) -> None:
    assert can_be_asked_for(FoundObject(path, 1, etag)) is may
