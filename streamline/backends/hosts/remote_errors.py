"""Error policy in a host: the consumer decides, and the consumer counts.

An `on_error` handler is the user's function, which may append to a list; and a skipped item counts when it would have
been consumed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from streamline.backends.hosts.stdio_relay import asker
from streamline.backends.ipc.exceptions import encode_skipped, pickle_skipped
from streamline.backends.ipc.link import Link
from streamline.backends.ipc.messages import SkippedItem
from streamline.core.error_policy import Decision, Errors, Failure, Policy


def host_policy(policy: Policy) -> Policy:
    """Return the policy for a host, without the user's handler: the host asks the consumer."""
    return policy if isinstance(policy.on_error, str) else replace(policy, on_error=_never_called)


def _never_called(failure: Failure) -> Decision:
    raise AssertionError("the consumer decides")


class RemoteErrors(Errors):
    """Errors of a host's stages, decided and counted by the consumer.

    Args:
      answer: as in `streamline.backends.hosts.host_server.serve`.

    Attributes:
      ask: decides, where the link doesn't copy; None: a question to the consumer does.
    """

    def __init__(self, policy: Policy, link: Link, answer: Callable[[object], object] | None) -> None:
        super().__init__(policy)
        self.ask: Callable[[Failure], object] | None = None
        self._link = link
        self._answer = answer

    def decide(self, failure: Failure) -> object:
        if isinstance(self.policy.on_error, str):
            return super().decide(failure)
        if self.ask is not None:
            return self.ask(failure)
        answer = self._answer or asker()
        assert answer is not None, "the handler is in the consumer, and there is no connection to ask over"
        return answer(pickle_skipped(failure))

    def happened(self, key: tuple[int, str], failure: Failure, epoch: tuple[int, ...], number: int) -> None:
        self._link.send(SkippedItem(key, encode_skipped(self._link, failure), epoch, number))
