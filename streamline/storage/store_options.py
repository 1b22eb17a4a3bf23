"""`storage_options=`: how an object store is reached, as users say it, and as obstore wants it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from streamline.errors import PlanError, PlanTypeError
from streamline.storage.http_options import HttpOptions

__all__ = ["check_storage_options", "open_store"]

NESTED = ("client_options", "credential_provider")
"""What obstore takes beside its configuration."""

CLIENT = frozenset(
    (
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "default_content_type",
        "default_headers",
        "http1_only",
        "http2_only",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_url",
        "proxy_ca_certificate",
        "proxy_excludes",
        "root_certificate",
        "randomize_addresses",
        "read_timeout",
        "timeout",
        "user_agent",
    )
)
"""What belongs to `client_options`, and may be written beside the rest. Source: obstore 0.12, `ClientConfig`; in the
configuration itself, obstore panics at them."""

LONG = "30 days"
"""obstore's own limit for a request with all of its body is 30 s: a consumer that trains meanwhile takes longer. What
stalls is noticed by `read_timeout`."""


def check_storage_options(options: object) -> None:
    """Insist on a mapping by name; a value may be a secret, and is in no message.

    Raises:
      PlanTypeError: it is something else.
    """
    wanted = 'storage_options= is a mapping by name, {"region": "eu-central-1"}'
    if not isinstance(options, Mapping):
        raise PlanTypeError(f"{wanted}, got {type(options).__name__}")
    for name in options:
        if not isinstance(name, str):
            raise PlanTypeError(f"{wanted}, got the name {name!r}, which is of type {type(name).__name__}")
    if not isinstance(options.get("client_options", {}), Mapping):
        raise PlanTypeError('storage_options={"client_options": …} is a mapping by name')


def open_store(base: str, options: Mapping[str, Any], http: HttpOptions) -> Any:
    """Return obstore's store of a bucket. It connects when it is first asked, and tries nothing twice.

    Args:
      base: the bucket's URL, "s3://bucket".
      options: as the user gave them.
      http: whose time limits count here too.

    Raises:
      PlanError: options that this kind of store doesn't have, or not all that it needs; obstore isn't installed.
    """
    try:
        obstore = import_module("obstore.store")
        base_error = import_module("obstore.exceptions").BaseError
    except ImportError as error:
        raise PlanError(f"{base}: object stores need obstore: pip install 'streamline[stores]'") from error
    client: dict[str, Any] = {"timeout": LONG, "read_timeout": _span(http.timeout_s)}
    client["connect_timeout"] = _span(http.connect_timeout_s)
    client |= {name: value for name, value in options.items() if name in CLIENT}
    client |= options.get("client_options", {})
    config = {name: value for name, value in options.items() if name not in CLIENT and name not in NESTED}
    provider = options.get("credential_provider")
    try:
        return obstore.from_url(
            base,
            config=config,
            client_options=client,
            retry_config={"max_retries": 0},  # we count them, and resume at the byte
            **({} if provider is None else {"credential_provider": provider}),
        )
    except (base_error, TypeError, ValueError) as error:
        said = str(error).strip().partition("\n")[0]
        if "Account must be specified" in said:
            way = 'set AZURE_STORAGE_ACCOUNT_NAME, or storage_options={"account_name": …}'
            raise PlanError(f"{base} can't be opened without the name of its account: {way}") from None
        raise PlanError(f"{base} can't be opened with storage_options of {sorted(options)}: {said}") from None


def _span(seconds: float) -> str:
    return LONG if seconds == math.inf else f"{max(1, round(seconds * 1000))} ms"
