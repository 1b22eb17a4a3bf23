"""What an object store's refusal means, and what to do about it. Pure: decided by the text that obstore gives.

obstore names the HTTP status and what the server said, in all its errors alike; which class they are of differs between
the operations. Its texts hold whole URLs, which may be signed: so only parts of them are told on, and an error of ours
is not chained to one of its.
"""

from __future__ import annotations

import re

from streamline.errors import ReadError, printable
from streamline.storage.attempts import TransientError

__all__ = ["behind_end", "meaning", "other_version"]

STATUS = re.compile(r"status code: (\d{3})(?: ([\w ]+))?")
CODE = re.compile(r"<Code>\s*(.*?)\s*</Code>", re.DOTALL)
SAID = re.compile(r"<Message>\s*(.*?)\s*(?:\n|</Message>)", re.DOTALL)
QUERY = re.compile(r"\?\S*")

METADATA = re.compile(r"://169\.254\.|metadata\.google\.internal|/latest/api/token|/computeMetadata/|/identity/oauth2/")
"""Where a machine in a cloud asks who it is: tried when nothing else says with which credentials to read."""

CERTIFICATE = re.compile(r"certificate|UnknownIssuer|CertExpired|NotValidForName", re.IGNORECASE)

REGIONS = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
BUCKETS = ("NoSuchBucket", "ContainerNotFound")

WAYS = {
    "s3": (
        'AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or storage_options={"access_key_id": …, "secret_access_key": …} '
        "(the files in ~/.aws are not read)"
    ),
    "gs": 'GOOGLE_APPLICATION_CREDENTIALS, or storage_options={"service_account_path": …}',
    "az": (
        "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or "
        'storage_options={"account_name": …, "account_key": …}'
    ),
}
"""What says with which credentials to read, by the first two letters of a scheme."""


def behind_end(error: Exception) -> bool:
    """Whether bytes were asked for that the object doesn't have."""
    text = str(error)
    return _status(text) == 416 or "Wanted range starting at" in text  # obstore's own word, where the store sent less


def other_version(error: Exception) -> bool:
    """Whether the object is another version than the one that was asked for."""
    return _status(str(error)) == 412 or type(error).__name__ == "PreconditionError"


def meaning(path: str, error: Exception) -> ReadError | TransientError:
    """Return what an operation on `path`, a URL of a store as messages show it, has failed with.

    Returns:
      TransientError: another try may do better; ReadError: it would not.
    """
    text = str(error)
    status, said = _status(text), _said(text)
    if METADATA.search(text) and (status is None or status < 500):
        return ReadError(f"{path}: no credentials were found. {_give_credentials(path)}")
    if isinstance(error, TransientError):
        return error
    if isinstance(error, TimeoutError):
        return TransientError("no answer came in time")
    if type(error).__name__ == "InvalidPathError" or "Could not parse path" in text:
        return ReadError(f"{path}: a key with an empty part, '.' or '..' in it can't be read or listed: {_first(text)}")
    if CERTIFICATE.search(text):
        return ReadError(
            f"{path}: the server's certificate is not trusted: {_certificate(text)}; give the authority's own by "
            'storage_options={"client_options": {"root_certificate": PEM}}'
        )
    if "builder error" in text and "http://" in text:
        return ReadError(f'{path}: the endpoint is plain http: allow it, storage_options={{"allow_http": True}}')
    if "without LOCATION" in text or any(code in text for code in REGIONS):
        return ReadError(f"{path}: the bucket is in another region: {said}. {_give_region(text)}")
    if status is not None and not (status in (408, 429) or status >= 500):
        return ReadError(f"{path}: {said}: {_advice(path, text, status)}")
    if isinstance(error, FileNotFoundError):
        return ReadError(f"{path}: {said}: {_advice(path, text, 404)}")
    return TransientError(said)


def _advice(path: str, text: str, status: int) -> str:
    if any(code in text for code in BUCKETS):
        return "there is no such bucket (or container): check its name, and the endpoint"
    if status == 404:
        return "there is no such object: check its bucket and key; it may have been there when it was listed"
    if status in (401, 403):
        return f"check who this reads as, and what they may read. {_give_credentials(path)}"
    return "another try would get the same"


def _give_credentials(path: str) -> str:
    way = next((way for scheme, way in WAYS.items() if path.lower().startswith(scheme)), WAYS["az"])
    return f'Set {way}; or storage_options={{"skip_signature": True}} for what is public'


def _give_region(text: str) -> str:
    told = re.search(r"<Region>\s*(.*?)\s*</Region>|expecting '(.*?)'", text)
    region = printable(told[1] or told[2]) if told else "…"
    return f'Set AWS_REGION, or storage_options={{"region": "{region}"}}'


def _status(text: str) -> int | None:
    found = STATUS.search(text)
    return int(found[1]) if found else None


def _said(text: str) -> str:
    """Return what the server said, in short; without a query, which may be a signature."""
    status, code, message = STATUS.search(text), CODE.search(text), SAID.search(text)
    if status is not None:
        words = [f"{status[1]} {status[2] or ''}".strip(), *(found[1] for found in (code, message) if found)]
        return printable("the server answered " + ": ".join(words))
    if "dns error" in text:
        return "the name of the server can't be looked up"
    if "Connection refused" in text or "ConnectionRefused" in text:
        return "the server refuses connections"
    if "TimedOut" in text or "timed out" in text:
        return "the server stalled"
    return _first(text)


def _first(text: str) -> str:
    return printable(QUERY.sub("", text.strip().partition("\n")[0]))


def _certificate(text: str) -> str:
    found = re.search(r"InvalidCertificate\(\s*([\w ]+)", text)
    return found[1] if found else "see the server's own page"
