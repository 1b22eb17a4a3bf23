"""The handshake of two machines: only those that know the key, each end in its role, whatever else is sent."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamline.backends.remote.handshake import (
    MAC,
    MAGIC,
    MOST,
    NONCE,
    SIZE,
    DialerHandshake,
    HandshakeError,
    ListenerHandshake,
    PeerHello,
)

KEY, OTHER = b"k" * 32, b"o" * 32

HELLO = PeerHello(role="link", node="node7", pid=4711, ticket="abc")


def fed(end: DialerHandshake | ListenerHandshake, data: bytes) -> tuple[bytes, bytes]:
    """Give an end as much of `data` as it needs, piece by piece; return its answers and what is left."""
    answers = b""
    while data and end.needs:
        needs = end.needs
        answers += end.receive(data[:needs])
        data = data[needs:]
    return answers, data


def talk(dialer: DialerHandshake, listener: ListenerHandshake, change: Callable[[bytes], bytes] = bytes) -> None:
    """Let two ends talk until neither has anything to say; `change` is what the network does to the dialer's bytes."""
    to_listener = dialer.greeting
    while to_listener:
        to_dialer, _ = fed(listener, change(to_listener))
        to_listener, _ = fed(dialer, to_dialer)


def recorded() -> tuple[list[bytes], list[bytes]]:
    """Return what each end of a handshake sent, the dialer's first."""
    dialer, listener = DialerHandshake(KEY, HELLO), ListenerHandshake(KEY)
    challenge, _ = fed(listener, dialer.greeting)
    proof, _ = fed(dialer, challenge)
    verdict, _ = fed(listener, proof)
    fed(dialer, verdict)
    assert dialer.done
    assert listener.done
    return [dialer.greeting, proof], [challenge, verdict]


def test_two_ends_with_the_same_key_agree_and_the_hello_arrives() -> None:
    dialer, listener = DialerHandshake(KEY, HELLO), ListenerHandshake(KEY)
    talk(dialer, listener)
    assert (dialer.done, listener.done, listener.refused) == (True, True, "")
    assert listener.hello == HELLO


@pytest.mark.parametrize("keys", [(KEY, OTHER), (OTHER, KEY), (KEY, b""), (KEY, KEY[:-1])])
def test_another_key_is_noticed_by_the_dialer_before_it_says_anything(keys: tuple[bytes, bytes]) -> None:
    dialer, listener = DialerHandshake(keys[0], HELLO), ListenerHandshake(keys[1])
    challenge, _ = fed(listener, dialer.greeting)
    with pytest.raises(HandshakeError, match=r"another key: give both the same --key-file or STREAMLINE_KEY"):
        fed(dialer, challenge)
    assert not dialer.done
    assert not listener.done


def test_a_dialer_without_the_key_is_noticed_by_the_listener() -> None:
    listener = ListenerHandshake(KEY)
    forger = DialerHandshake(OTHER, HELLO)
    forger._nonces = forger.greeting[len(MAGIC) :] + fed(listener, forger.greeting)[0][len(MAGIC) : -MAC]
    with pytest.raises(HandshakeError, match="another key"):
        fed(listener, forger._sealed(b"dialer", msgspec.json.encode(HELLO)))
    assert listener.hello is None


def test_a_recorded_dialer_is_of_no_use() -> None:
    (greeting, proof), _ = recorded()
    listener = ListenerHandshake(KEY)
    fed(listener, greeting)
    with pytest.raises(HandshakeError, match="another key"):
        fed(listener, proof)
    assert listener.hello is None


def test_a_recorded_listener_is_of_no_use() -> None:
    _, (challenge, _) = recorded()
    with pytest.raises(HandshakeError, match="another key"):
        fed(DialerHandshake(KEY, HELLO), challenge)


def test_a_listeners_own_words_sent_back_prove_nothing() -> None:
    listener = ListenerHandshake(KEY)
    challenge, _ = fed(listener, MAGIC + bytes(NONCE))
    body = msgspec.json.encode(HELLO)
    with pytest.raises(HandshakeError, match="another key"):
        fed(listener, challenge[-MAC:] + SIZE.pack(len(body)) + body)


def test_a_dialer_is_not_answered_by_another_dialer() -> None:
    one, other = DialerHandshake(KEY, HELLO), DialerHandshake(KEY, HELLO)
    with pytest.raises(HandshakeError, match="another key"):
        fed(one, other.greeting + bytes(MAC))


@pytest.mark.parametrize("at", range(len(b"".join(recorded()[0]))))
def test_any_bit_that_changes_on_the_way_to_the_listener_is_noticed(at: int) -> None:
    seen = 0

    def flipped(data: bytes) -> bytes:
        nonlocal seen
        begin, seen = seen, seen + len(data)
        if not begin <= at < seen:
            return data
        return data[: at - begin] + bytes([data[at - begin] ^ 1]) + data[at - begin + 1 :]

    dialer, listener = DialerHandshake(KEY, HELLO), ListenerHandshake(KEY)
    try:
        talk(dialer, listener, flipped)
    except HandshakeError:
        assert not (listener.done and dialer.done)
    else:
        assert not listener.done, "it needs bytes that will not come"
    assert listener.hello in (None, HELLO)


def test_bytes_may_come_one_by_one_and_none_after_the_end_is_taken() -> None:
    (greeting, proof), _ = recorded()
    dialer, listener = DialerHandshake(KEY, HELLO), ListenerHandshake(KEY)
    challenge = b"".join(listener.receive(dialer.greeting[at : at + 1]) for at in range(len(greeting)))
    mine = b"".join(dialer.receive(challenge[at : at + 1]) for at in range(len(challenge)))
    assert len(mine) == len(proof)
    _, left = fed(listener, mine + b"the first frame of a link")
    assert left == b"the first frame of a link"
    assert listener.needs == 0


@pytest.mark.parametrize(
    "hello",
    [
        b"{}",
        b"[]",
        b"\x80\x04N.",
        b'{"role": "root", "node": "a", "pid": 1}',
        b'{"role": "link", "node": 7, "pid": 1}',
        b'{"role": "link", "node": "a", "pid": "1"}',
    ],
)
def test_a_hello_of_another_shape_is_refused_even_with_the_key(hello: bytes) -> None:
    dialer, listener = DialerHandshake(KEY, HELLO), ListenerHandshake(KEY)
    dialer._hello = hello
    with pytest.raises(HandshakeError, match="a hello that isn't one"):
        talk(dialer, listener)
    assert listener.hello is None


@pytest.mark.parametrize("size", [0, MOST + 1, 65535])
def test_a_hello_of_no_size_or_too_much_is_refused_before_it_is_read(size: int) -> None:
    listener = ListenerHandshake(KEY)
    fed(listener, MAGIC + bytes(NONCE))
    with pytest.raises(HandshakeError, match=f"speaks of {size} bytes"):
        fed(listener, bytes(MAC) + SIZE.pack(size))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": "0.0.9"}, r"streamline 0\.0\.9 on Python"),
        ({"python": "3.99.1"}, r"on Python 3\.99\.1: install the same streamline and the same minor version"),
    ],
)
def test_another_version_is_refused_by_name_at_both_ends(change: dict[str, Any], words: str) -> None:
    dialer = DialerHandshake(KEY, msgspec.structs.replace(HELLO, **change))
    listener = ListenerHandshake(KEY)
    with pytest.raises(HandshakeError, match=words):
        talk(dialer, listener)
    assert "on node7" in listener.refused


def test_another_patch_of_python_is_the_same_version() -> None:
    minor = ".".join(map(str, sys.version_info[:2]))
    dialer = DialerHandshake(KEY, msgspec.structs.replace(HELLO, python=f"{minor}.99"))
    talk(dialer, ListenerHandshake(KEY))
    assert dialer.done


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + bytes(20), bytes(NONCE + len(MAGIC))])
def test_what_speaks_another_protocol_is_refused(data: bytes) -> None:
    with pytest.raises(HandshakeError, match="no streamline"):
        fed(ListenerHandshake(KEY), data)


def test_another_version_of_the_protocol_is_named() -> None:
    with pytest.raises(HandshakeError, match="speaks version 9 of the protocol, this one 1"):
        fed(ListenerHandshake(KEY), MAGIC[:-1] + b"\x09" + bytes(NONCE))


@given(st.lists(st.binary(max_size=300), max_size=8), st.booleans())
def test_whatever_comes_nothing_is_believed(pieces: list[bytes], polite: bool) -> None:
    listener = ListenerHandshake(KEY)
    data = (MAGIC + bytes(NONCE) if polite else b"") + b"".join(pieces)
    try:
        fed(listener, data)
    except HandshakeError:
        assert not listener.done
    assert listener.hello is None
    assert len(listener._data) <= MOST
