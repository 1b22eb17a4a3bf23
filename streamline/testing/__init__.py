"""The law kit: checks that a stage or a pipeline keeps streamline's promises. For the library's tests, and for yours.

    from streamline.testing import check_resume, check_stage

The laws, by the name that a broken one's message begins with:

- Order: an uninterrupted run delivers what the oracle says.
- Resume: what was delivered, and what a run opened at the state after it delivers, are together the whole. Where the
  order is fixed, exactly the rest; after a choosing flow, the same multiset, each worker's items in their order.
- State: it is JSON: a value that would come back as another one (a tuple, a key that is no string) is refused.
- Quiescence: a state doesn't change while no pull is in progress, nor once it was handed out.
- Close: `aclose` is idempotent, closes what was opened, and leaves no task.
- Failure: the items before it, then the very exception, on every further pull; a resume after a fix delivers the rest.
- Bound: when the consumer stops, the source has been asked for no more than `max_in_flight` further items.
- Liveness: something happens within seconds.

The oracle compares a stage or a source of your own with a plain generator that `@reference(MyStage)` registers.
`streamline.testing.compositions` makes random pipelines; it needs `streamline-data[testing]`.
"""

from __future__ import annotations

from streamline.testing.checks import LAWS, Jitter, check_failure, check_resume, check_stage
from streamline.testing.oracle import Oracle, UnknownStageError, Upstream, oracle, reference
from streamline.testing.scripted import PAUSE, YIELD, Abort, Script, scripted
from streamline.testing.subjects import LOOPS

__all__ = [
    "LAWS",
    "LOOPS",
    "PAUSE",
    "YIELD",
    "Abort",
    "Jitter",
    "Oracle",
    "Script",
    "UnknownStageError",
    "Upstream",
    "check_failure",
    "check_resume",
    "check_stage",
    "oracle",
    "reference",
    "scripted",
]
