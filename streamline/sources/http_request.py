"""The options of `stream_http`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from streamline.core.options import check_int, check_seconds, given
from streamline.errors import PlanError, PlanTypeError
from streamline.io.storage.options import HttpOptions
from streamline.io.storage.paths import check_host, is_url
from streamline.sources.framing import FRAMINGS, Framing

IDLE_TIMEOUT_S = 300.0
"""Seconds of silence after which a connection counts as dropped: servers that keep one open send something every 15 to
60 s (WHATWG HTML, 9.2.7, advises a comment every 15 s), and many proxies cut it after 60 s."""

GIVE_UP_S = 3600.0
"""Seconds of failures before a feed that has answered once fails: a server's update is over by then; for longer, a
waiting job costs more than one that is restarted and resumes."""

MAX_ITEM_BYTES = 16 * 2**20
"""The longest line or event by default: more is likely no such stream at all, and would be gathered in memory."""


@dataclass(frozen=True, kw_only=True)
class EndlessRequest:
    """The request, repeated for each connection.

    Attributes:
      idle_timeout_s: seconds of silence after which a connection counts as dropped; `math.inf`: none.
      give_up_s: seconds for which it may fail without an answer, once it has had one; `math.inf`: for ever.
      max_item_bytes: a longer line or event is an error.

    Raises:
      PlanTypeError: an option of the wrong type.
      PlanError: one out of range.
    """

    url: str = field(repr=False)  # it may hold a signature
    framing: Framing
    http: HttpOptions | None = None
    idle_timeout_s: float = IDLE_TIMEOUT_S
    give_up_s: float = GIVE_UP_S
    max_item_bytes: int = MAX_ITEM_BYTES

    def __post_init__(self) -> None:
        if not isinstance(self.url, str):
            raise PlanTypeError(f"stream_http(url) is one http(s) URL, got {given(self.url)}")
        if not is_url(self.url):
            raise PlanError(
                f"stream_http(url) is one http(s) URL, got {self.url!r}: for another kind of feed write "
                "from_stream(feed), for files read_lines and the like"
            )
        check_host(self.url)
        if self.framing not in FRAMINGS:
            raise PlanError(f"stream_http(framing=) is one of {', '.join(FRAMINGS)}, got {given(self.framing)}")
        if self.http is not None and not isinstance(self.http, HttpOptions):
            raise PlanTypeError(f"expected http as HttpOptions, got {given(self.http)}")
        for option in ("idle_timeout_s", "give_up_s"):
            if (value := getattr(self, option)) != math.inf:
                check_seconds(f"stream_http({option}=)", value)
        check_int("stream_http(max_item_bytes=)", self.max_item_bytes, 1)
