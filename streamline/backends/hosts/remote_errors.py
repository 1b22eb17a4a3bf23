"""Items that are left out in a host: who decides, and who counts.

Both happen at the running's end: an `on_error` handler is the user's function, which may append to a list; and what is
left out counts when it would have been consumed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from streamline.backends.hosts.stdio_relay import asker
from streamline.backends.ipc.codec import left_out_in, left_out_out
from streamline.backends.ipc.link import Link
from streamline.backends.ipc.messages import SkippedItem
from streamline.backends.ipc.skipped_items import carry_left_out
from streamline.core.error_policy import Decision, Errors, Failure, Policy

__all__ = ["Ask", "RemoteErrors", "answers", "far_policy"]


Ask: TypeAlias = Callable[[Failure], object]


def far_policy(policy: Policy) -> Policy:
    """Return the policy that a host is given: a handler stays where it is, and is asked."""
    return policy if isinstance(policy.on_error, str) else replace(policy, on_error=_elsewhere)


def _elsewhere(failure: Failure) -> Decision:
    raise AssertionError("the running decides")


def answers(errors: Errors) -> Callable[[object], object]:
    """Return what answers the questions of a host that is another process."""
    return lambda question: errors.decide(left_out_in(question))


class RemoteErrors(Errors):
    """What is left out in a host.

    Args:
      answer: as of `streamline.backends.hosts.host_server.serve`.

    Attributes:
      ask: decides, where objects are handed over; None: the answer to a question does.
    """

    def __init__(self, policy: Policy, link: Link, answer: Callable[[object], object] | None) -> None:
        super().__init__(policy)
        self.ask: Ask | None = None
        self._link = link
        self._answer = answer

    def decide(self, failure: Failure) -> object:
        if isinstance(self.policy.on_error, str):
            return super().decide(failure)
        if self.ask is not None:
            return self.ask(failure)
        answer = self._answer or asker()
        assert answer is not None, "a handler is the running's, and nobody here can ask it"
        return answer(carry_left_out(failure))

    def happened(self, key: tuple[int, str], failure: Failure, epoch: tuple[int, ...], number: int) -> None:
        self._link.send(SkippedItem(key, left_out_out(self._link, failure), epoch, number))
