"""The handshake under attack: whatever a peer sends, or the network changes, it isn't believed and it isn't kept."""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from platform import python_version
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamline
from streamline.backends.network import connections, handshake
from streamline.backends.network.handshake import (
    FRAME_LENGTH,
    MAC_BYTES,
    MAGIC,
    MOST_BYTES,
    NONCE_BYTES,
    HandshakeError,
    PeerHello,
    Steps,
    dialer_steps,
    listener_steps,
    read_key,
    refuse_shared,
)
from streamline.errors import HostError

KEY, OTHER = b"key-of-this-job-" * 2, b"key-of-others---" * 2

HELLO = PeerHello(role="control", node="node7", pid=4711)

End = Steps[PeerHello] | Steps[None]


class Fed:
    """An end that is given bytes as its owner would: never more than it needs.

    Attributes:
      greeting: what it has sent before it was given anything.
      said: what it has sent since.
      needs: bytes that it wants next.
      done: whether it has succeeded.
      hello: of a listener that has: the dialer's.
      failed: why it has.
      left: bytes that it didn't take.
      asked: the most that it needed at once.
    """

    def __init__(self, end: End) -> None:
        self.said = self.left = self._data = b""
        self.done = False
        self.hello: PeerHello | None = None
        self.failed: HandshakeError | None = None
        self.needs = self.asked = 0
        self._end = end
        self._go_on(None)
        self.greeting, self.said = self.said, b""

    def give(self, data: bytes) -> bytes:
        """Return the answer; an end that has failed takes nothing."""
        said = len(self.said)
        while data and self.needs:
            piece, data = data[: self.needs - len(self._data)], data[self.needs - len(self._data) :]
            self._data += piece
            if len(self._data) == self.needs:
                whole, self._data = self._data, b""
                self._go_on(whole)
        self.left += data
        return self.said[said:]

    def _go_on(self, received: bytes | None) -> None:
        self.needs = 0
        try:
            step = next(self._end) if received is None else self._end.send(received)
            while isinstance(step, bytes):
                self.said += step
                step = next(self._end)
        except StopIteration as end:
            self.done, self.hello = True, end.value
        except HandshakeError as error:
            self.failed = error
        else:
            self.needs = step
            self.asked = max(self.asked, step)


def dialing(key: bytes = b"", hello: PeerHello = HELLO) -> Fed:
    return Fed(dialer_steps(key or KEY, hello))


def listening(key: bytes = KEY) -> Fed:
    return Fed(listener_steps(key))


def known_nonces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every handshake have the same nonces, so that one can be recorded, changed and played again."""
    monkeypatch.setattr(handshake, "token_bytes", bytes)  # zeros


def recorded(hello: PeerHello = HELLO) -> tuple[bytes, bytes]:
    """Return what the dialer and the listener say in a handshake that succeeds."""
    dialer, there = dialing(KEY, hello), listening()
    greeting = to_listener = dialer.greeting
    while to_listener:
        to_listener = dialer.give(there.give(to_listener))
    assert dialer.done
    assert there.done
    return greeting + dialer.said, there.said


def each_end() -> list[tuple[Callable[[], Fed], bytes]]:
    """Return what makes each end, and what it hears when all goes well. Nonces must be known."""
    says_dialer, says_listener = recorded()
    return [(listening, says_dialer), (dialing, says_listener)]


# What comes in other pieces, or not at all


def test_a_handshake_split_at_every_byte_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    known_nonces(monkeypatch)
    for make, data in each_end():
        for cut in range(len(data) + 1):
            end = make()
            end.give(data[:cut])
            end.give(data[cut:])
            assert end.done
            assert end.failed is None


def test_a_handshake_cut_off_at_any_byte_is_not_done_and_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    known_nonces(monkeypatch)
    for make, data in each_end():
        for cut in range(len(data)):
            end = make()
            end.give(data[:cut])
            assert not end.done
            assert 0 < end.needs - len(end._data) <= len(data) - cut, "it asks for bytes that never come"
            assert end.failed is None


def test_no_byte_of_a_handshake_can_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    known_nonces(monkeypatch)
    for make, data in each_end():
        for at, bit in itertools.product(range(len(data)), (0x01, 0x80)):
            end = make()
            end.give(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
            assert not end.done
            assert end.hello is None


def test_garbage_after_any_byte_is_refused_or_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    known_nonces(monkeypatch)
    for make, data in each_end():
        for cut in range(len(data)):
            end = make()
            end.give(data[:cut] + b"\xff" * (2 * MOST_BYTES))
            assert not end.done
            assert end.failed is not None


def test_what_follows_the_handshake_is_left_to_the_sockets_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    known_nonces(monkeypatch)
    for make, data in each_end():
        end = make()
        end.give(data + b"the first frame")
        assert end.done
        assert end.left == b"the first frame"


# Who doesn't know the key


@pytest.mark.parametrize(("dialers", "listeners"), [(KEY, OTHER), (OTHER, KEY), (KEY, KEY[:-1]), (KEY, b"")])
def test_a_dialer_tells_a_wrong_key_before_it_has_said_who_it_is(dialers: bytes, listeners: bytes) -> None:
    dialer, there = dialing(dialers, HELLO), listening(listeners)
    dialer.give(there.give(dialer.greeting))
    assert "--key-file" in str(dialer.failed)
    assert "STREAMLINE_KEY" in str(dialer.failed)
    assert dialer.said == b""


def test_a_listener_tells_a_wrong_key_and_does_not_parse_the_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    known_nonces(monkeypatch)
    monkeypatch.setattr(msgspec.json, "decode", lambda *_, **__: pytest.fail("it was parsed"))
    forged = handshake._Proof(OTHER, bytes(2 * NONCE_BYTES), b"")
    end = listening()
    end.give(MAGIC + bytes(NONCE_BYTES) + forged.sealed(b"dialer", HELLO))
    assert "another key" in str(end.failed)
    assert (end.done, end.hello) == (False, None)


def test_a_recorded_handshake_proves_nothing_to_either_end() -> None:
    says_dialer, says_listener = recorded()
    there, dialer = listening(), dialing()
    there.give(says_dialer)
    dialer.give(says_listener)
    for end in (there, dialer):
        assert "another key" in str(end.failed)
        assert not end.done


def test_a_listeners_own_bytes_sent_back_prove_nothing() -> None:
    there, body = listening(), msgspec.json.encode(HELLO)
    challenge = there.give(MAGIC + b"d" * NONCE_BYTES)
    there.give(challenge[-MAC_BYTES:] + FRAME_LENGTH.pack(len(body)) + body)
    assert "another key" in str(there.failed)


def test_a_listener_that_answers_itself_through_an_attacker_lets_no_one_in() -> None:
    """The second connection is asked to sign the nonce of the first."""
    first, second = listening(), listening()
    challenge = first.give(MAGIC + b"d" * NONCE_BYTES)
    answer = second.give(challenge[: len(MAGIC) + NONCE_BYTES])
    first.give(answer[-MAC_BYTES:] + FRAME_LENGTH.pack(2) + b"{}")
    assert "another key" in str(first.failed)


def test_a_dialer_that_is_sent_its_own_bytes_says_nothing_more() -> None:
    dialer = dialing()
    dialer.give(dialer.greeting + bytes(MAC_BYTES))
    assert "another key" in str(dialer.failed)
    assert dialer.said == b""


def test_a_dialers_own_proof_sent_back_is_no_verdict() -> None:
    dialer = dialing()
    proof = dialer.give(listening().give(dialer.greeting))
    dialer.give(proof)
    assert "another key" in str(dialer.failed)


def test_two_dialers_at_once_can_not_take_each_others_place() -> None:
    ends = [(dialing(), listening()) for _ in range(2)]
    proofs = [dialer.give(there.give(dialer.greeting)) for dialer, there in ends]
    for (_, there), proof in zip(ends, reversed(proofs), strict=True):
        there.give(proof)
        assert "another key" in str(there.failed)


def test_a_role_or_a_ticket_that_is_changed_on_the_way_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    known_nonces(monkeypatch)
    link = msgspec.structs.replace(HELLO, role="link", ticket="a" * 32)
    says_dialer, _ = recorded(link)
    for old, new in [(b'"link"', b'"control"'), (b'"a', b'"b'), (b"4711", b"4712")]:
        changed = says_dialer.replace(old, new, 1)
        grown = len(changed) - len(says_dialer)
        at = len(MAGIC) + NONCE_BYTES + MAC_BYTES
        size = FRAME_LENGTH.unpack(says_dialer[at : at + FRAME_LENGTH.size])[0]
        changed = changed[:at] + FRAME_LENGTH.pack(size + grown) + changed[at + FRAME_LENGTH.size :]
        there = listening()
        there.give(changed)
        assert "another key" in str(there.failed)


def test_a_verdict_that_is_changed_on_the_way_is_noticed() -> None:
    """A refused agent can't be let go on, nor be told what to print."""
    old = msgspec.structs.replace(HELLO, version="0.0.9")
    there, dialer = listening(), dialing(KEY, old)
    challenge = there.give(dialer.greeting)
    verdict = there.give(dialer.give(challenge))
    welcome = b'{"why":""}'
    dialer.give(verdict[:MAC_BYTES] + FRAME_LENGTH.pack(len(welcome)) + welcome)
    assert "another key" in str(dialer.failed)
    assert not dialer.done


# Who knows the key, and misbehaves


def answered(hello: bytes) -> Fed:
    """Return a listener that was sent a hello under the right key."""
    there, nonce = listening(), bytes(NONCE_BYTES)
    challenge = there.give(MAGIC + nonce)
    proof = handshake._Proof(KEY, nonce + challenge[len(MAGIC) :][:NONCE_BYTES], b"")
    there.give(proof.mac(b"dialer", hello) + FRAME_LENGTH.pack(len(hello)) + hello)
    return there


@pytest.mark.parametrize(
    "hello",
    [
        b"{}",
        b"[]",
        b"null",
        b"\xff" * 40,
        b'{"role":"control","node":"\xff","pid":1}',
        b'{"role":"root","node":"a","pid":1}',
        b'{"role":"link","node":7,"pid":1}',
        b'{"role":"link","node":"a","pid":"1"}',
        b'{"role":"link","node":"a","pid":-1}',
        b'{"role":"link","node":"a","pid":' + b"9" * 4000 + b"}",
        b'{"role":"link","pid":1,"node":"' + b"a" * 254 + b'"}',
        b'{"role":"link","node":"a","pid":1,"version":"' + b"1" * 3000 + b'"}',
        b'{"more":' + b"[" * 4000,
        pickle.dumps(print),
    ],
    ids=range(14),
)
def test_a_hello_of_another_shape_is_refused_with_the_key_too(hello: bytes) -> None:
    there = answered(hello)
    assert str(there.failed).startswith("a hello that isn't one: ")
    assert (there.done, there.hello) == (False, None)


@pytest.mark.parametrize("size", [0, MOST_BYTES + 1, 0xFFFF])
def test_a_hello_that_is_too_long_is_refused_before_any_of_it_is_read(size: int) -> None:
    there = listening()
    there.give(MAGIC + bytes(NONCE_BYTES))
    there.give(bytes(MAC_BYTES) + FRAME_LENGTH.pack(size))
    assert "speaks of too many bytes, or none" in str(there.failed)
    assert there.asked < 100


def test_a_dialer_does_not_send_a_hello_that_is_too_long() -> None:
    dialer = dialing(KEY, msgspec.structs.replace(HELLO, node="n" * MOST_BYTES))
    dialer.give(listening().give(dialer.greeting))
    assert "may say 4,096 bytes" in str(dialer.failed)


def test_a_hello_that_comes_too_early_is_refused() -> None:
    body = msgspec.json.encode(HELLO)
    there = listening()
    there.give(MAGIC + bytes(NONCE_BYTES) + bytes(MAC_BYTES) + FRAME_LENGTH.pack(len(body)) + body)
    assert "another key" in str(there.failed)
    there = listening()
    there.give(FRAME_LENGTH.pack(len(body)) + body)
    assert "no streamline" in str(there.failed)


@pytest.mark.parametrize(
    "change",
    [
        {"version": "streamline-data 0.0.9"},
        {"version": streamline.__version__},
        {"python": "3.99.0"},
        {"python": ""},
        {"python": "3.1.1"},
    ],
)
def test_another_version_is_refused_by_name_and_is_not_done(change: dict[str, str]) -> None:
    hello = msgspec.structs.replace(HELLO, **change)
    dialer, there = dialing(KEY, hello), listening()
    dialer.give(there.give(dialer.give(there.give(dialer.greeting))))
    for part in (
        f"streamline-data {streamline.__version__} on Python {python_version()}",
        f"{hello.version} on Python {hello.python}",
        "install the same streamline-data",
        "node7",
    ):
        assert part in str(dialer.failed)
    assert str(there.failed) == str(dialer.failed)
    assert [dialer.done, there.done, there.hello] == [False, False, None]


def test_the_longest_hello_is_refused_in_words_that_fit_a_verdict() -> None:
    hello = msgspec.structs.replace(HELLO, node="\x00" * 253, version="\x00" * 64, python="\x00" * 64)
    dialer, there = dialing(KEY, hello), listening()
    dialer.give(there.give(dialer.give(there.give(dialer.greeting))))
    assert "the trainer runs streamline-data" in str(dialer.failed)
    assert "\x00" not in str(dialer.failed)


# Whatever comes

pieces = st.lists(
    st.binary(max_size=300)
    | st.sampled_from([MAGIC, bytes(NONCE_BYTES), FRAME_LENGTH.pack(MOST_BYTES), b"\xff" * MOST_BYTES])
)


@given(pieces, st.booleans(), st.booleans())
def test_whatever_bytes_come_there_is_an_error_or_a_need(data: list[bytes], polite: bool, dials: bool) -> None:
    fed = dialing() if dials else listening()
    for piece in [MAGIC + bytes(NONCE_BYTES)] * polite + data:
        fed.give(piece)
        assert fed.needs <= MOST_BYTES
    assert not fed.done
    assert (fed.failed is not None) != (fed.needs > 0)
    assert len(fed.said) <= len(MAGIC) + NONCE_BYTES + MAC_BYTES


names = st.sampled_from(["role", "node", "pid", "ticket", "version"])
leaves = st.none() | st.text(max_size=9) | st.integers() | st.floats() | st.just("link")
shapes = st.recursive(leaves, lambda some: st.lists(some, max_size=3) | st.dictionaries(names, some))


@given(shapes)
def test_whatever_the_hello_holds_there_is_an_error_or_a_refusal(hello: Any) -> None:
    body = msgspec.json.encode(hello)[:MOST_BYTES]
    there = answered(body or b"0")
    assert there.failed is not None or there.hello is not None
    assert isinstance(there.hello, PeerHello | None)


def test_nothing_that_unpickles_or_evaluates_is_imported() -> None:
    for module in (handshake, connections):
        names = {node.id for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Name)}
        assert not names & {"pickle", "marshal", "shelve", "dill", "cloudpickle", "eval", "exec", "loads", "Unpickler"}
        assert not {"pickle", "marshal", "dill", "cloudpickle", "by_value"} & set(vars(module))


# The key


def shows(key: bytes, text: str) -> bool:
    return any(form in text for form in (key.decode(), key.hex(), repr(key)[2:-1]))


def test_no_error_and_no_repr_shows_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    known_nonces(monkeypatch)
    texts = []
    for make, data in each_end():
        for at in range(len(data)):
            end = make()
            end.give(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            texts += [
                repr(end._end),
                repr(end.failed),
                str(end.failed),
                repr(end.failed and end.failed.args),
            ]
    assert texts
    assert not any(shows(KEY, text) for text in texts)


def test_a_key_is_read_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = "0123456789abcdef" * 4
    path = tmp_path / "key"
    path.write_text(f"  {made}\n")
    path.chmod(0o600)
    monkeypatch.setenv("STREAMLINE_KEY", f"{OTHER.decode()}\n")
    assert read_key(str(path)) == made.encode()
    assert read_key(None) == OTHER
    monkeypatch.setenv("STREAMLINE_KEY", os.fsdecode(b"\xff" * 16))
    assert read_key(None) == b"\xff" * 16


def test_without_a_key_the_error_names_both_places(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "", " \n"):
        monkeypatch.delenv("STREAMLINE_KEY", raising=False)
        if value is not None:
            monkeypatch.setenv("STREAMLINE_KEY", value)
        with pytest.raises(HostError, match=r"key_file=, --key-file.*STREAMLINE_KEY"):
            read_key(None)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o602])
def test_a_key_that_others_may_read_is_refused_with_the_way_out(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    path.write_bytes(KEY)
    path.chmod(mode)
    with pytest.raises(HostError, match=r"may be read by others: `chmod 600 .*STREAMLINE_KEY"):
        read_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize(
    ("content", "words"), [(b"short-key \n", "has 9 bytes"), (b"", "0 bytes"), (b"x" * 9999, "no key")]
)
def test_a_key_of_another_length_is_refused_and_not_shown(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(HostError, match=words) as error:
        read_key(path)
    assert "short-key" not in str(error.value)


def test_a_key_of_root_may_be_read_by_a_group_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    path.touch(mode=0o640)

    def seen_by(user: int, mode: int, owner: int = 0) -> None:
        path.chmod(mode)
        monkeypatch.setattr("os.geteuid", lambda: user)
        refuse_shared(os.stat_result([*path.stat()[:4], owner, *path.stat()[5:10]]), path)

    seen_by(1000, 0o440)
    seen_by(1000, 0o640)
    for user, mode, owner in ((1000, 0o444, 0), (1000, 0o660, 0), (1000, 0o440, 1000), (0, 0o440, 0), (1000, 0o604, 0)):
        with pytest.raises(HostError, match="may be read by others"):
            seen_by(user, mode, owner)


def test_a_key_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"the key can't be read: No such file or directory: .*/none"):
        read_key(tmp_path / "none")
    with pytest.raises(HostError, match="the key can't be read: Is a directory"):
        read_key(tmp_path)
