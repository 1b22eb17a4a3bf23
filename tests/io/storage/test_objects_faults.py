"""What goes wrong between obstore and a store: every record arrives, or an error that says what to do."""

import math
import traceback
from contextlib import aclosing
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from streamline.core.meters import Traffic
from streamline.errors import PlanError, PlanTypeError, ReadError
from streamline.io.storage import retry as attempts
from streamline.io.storage.object_store import ObjectStorage
from streamline.io.storage.options import Access, HttpOptions
from tests.servers.scripted_store import Handler, ScriptedStore, cut, refusal, serve

DATA = bytes(range(200))


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "BACKOFF_S", 0.0)


async def read(scripted: ScriptedStore, *, span: Any = (), traffic: Traffic | None = None, **http: Any) -> bytes:
    """Read s3://b/x; what came before a failure is in `args[1]` of it."""
    storage = ObjectStorage(scripted.options, HttpOptions(**http), traffic)
    got = b""
    try:
        async with aclosing(storage.blocks("s3://b/x", *span)) as blocks:
            async for block in blocks:
                got += block
    except ReadError as error:
        error.args = (*error.args, got)
        raise
    finally:
        await storage.aclose()
    return got


async def test_a_body_cut_at_any_byte_goes_on_there(scripted: ScriptedStore) -> None:
    scripted.objects["x"] = DATA
    for at in range(0, len(DATA), 9):
        scripted.script, traffic = [cut(at)], Traffic()
        scripted.requests.clear()
        assert await read(scripted, traffic=traffic) == DATA
        assert (traffic.requests, traffic.retries, traffic.bytes) == (2, 1, len(DATA))
        if at:
            assert scripted.requests[-1]["if-match"] == '"v1"'


async def test_a_body_of_another_length_than_told_is_no_end(scripted: ScriptedStore) -> None:
    scripted.objects["x"] = DATA
    scripted.script = [partial(serve, told=len(DATA) + 50)] * 2  # as one piece, then as it comes
    with pytest.raises(ReadError, match="has 200 bytes, expected more than 200"):
        await read(scripted, retries=2)


async def test_a_body_that_always_breaks_off_gets_on_all_the_same(scripted: ScriptedStore) -> None:
    scripted.objects["x"] = DATA
    scripted.script = [cut(15)] * 15
    assert await read(scripted, retries=1) == DATA


async def test_a_busy_store_is_asked_again(scripted: ScriptedStore) -> None:
    scripted.objects["x"] = DATA
    traffic = Traffic()
    scripted.script = [refusal(503, "SlowDown"), refusal(500), refusal(429), cut(50), refusal(502), refusal(503)]
    assert await read(scripted, retries=3, traffic=traffic) == DATA
    assert traffic.retries == 6


async def test_a_store_that_goes_on_failing_is_given_up(scripted: ScriptedStore) -> None:
    scripted.objects["x"] = DATA
    scripted.script = [cut(50)] + [refusal(503, "SlowDown", "Reduce your request rate.")] * 9
    with pytest.raises(ReadError, match=r"failed 3 times in a row at byte \d+: .*503.*SlowDown: Reduce your"):
        await read(scripted, retries=2)


async def test_a_store_that_stalls_is_asked_again(scripted: ScriptedStore) -> None:
    scripted.objects["x"] = DATA
    scripted.script = [partial(serve, cut=50, stall=True)]
    assert await read(scripted, timeout_s=0.2) == DATA


async def test_a_store_that_never_answers_is_given_up(scripted: ScriptedStore) -> None:
    scripted.objects["x"] = DATA
    scripted.script = [partial(serve, cut=0, stall=True)] * 9
    with pytest.raises(ReadError, match=r"deadline_s=0\.3"):
        await read(scripted, timeout_s=math.inf, deadline_s=0.3, retries=9)


async def test_an_object_that_is_replaced_on_the_way_names_both_etags(scripted: ScriptedStore) -> None:
    scripted.objects["x"] = DATA

    def replaced(handler: Handler) -> None:
        serve(handler, cut=50)
        scripted.etag = '"v2"'

    scripted.script = [replaced]
    with pytest.raises(ReadError, match=r's3://b/x has changed, at byte \d+: its ETag was "v1" and is "v2"'):
        await read(scripted)


async def test_without_an_etag_a_replaced_object_is_known_by_its_size(scripted: ScriptedStore) -> None:
    scripted.objects["x"], scripted.etag = DATA, None

    def replaced(handler: Handler) -> None:
        serve(handler, cut=50)
        scripted.objects["x"] = DATA + b"more"

    scripted.script = [replaced]
    with pytest.raises(ReadError, match=r"s3://b/x changed while it was read"):
        await read(scripted)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (refusal(403, "InvalidAccessKeyId", "No such key id."), r"403.*InvalidAccessKeyId.*Set AWS_ACCESS_KEY_ID"),
        (refusal(403, "AccessDenied"), r"AccessDenied.*check who this reads as"),
        (refusal(401, "Unauthorized"), r"401.*storage_options="),
        (
            refusal(400, "AuthorizationHeaderMalformed", "wrong", "<Region>eu-west-1</Region>"),
            r'another region.*"region": "eu-west-1"',
        ),
        (refusal(301, "PermanentRedirect", "elsewhere"), r"another region.*Set AWS_REGION"),
        (refusal(404, "NoSuchBucket"), r"there is no such bucket"),
        (refusal(410, "Gone"), r"410.*another try would get the same"),
    ],
)
async def test_what_another_try_would_not_change_fails_at_once(
    scripted: ScriptedStore, answer: Any, message: str
) -> None:
    scripted.script = [answer] * 9
    with pytest.raises(ReadError, match=message):
        await read(scripted)
    assert len(scripted.requests) == 1


@pytest.mark.parametrize("scheme", ["s3", "az", "gs"])
async def test_missing_credentials_fail_at_once_and_say_what_to_set(
    scripted: ScriptedStore, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "GOOGLE_APPLICATION_CREDENTIALS", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.delenv(name, raising=False)
    scripted.script = [refusal(404)] * 20
    options = {
        "s3": {"region": "r", "metadata_endpoint": scripted.endpoint},
        "az": {"account_name": "a", "msi_endpoint": f"{scripted.endpoint}/metadata/identity/oauth2/token"},
        "gs": {"service_account_key": '{"private_key": "x", "private_key_id": "y", "client_email": "z"}'},
    }[scheme]
    storage = ObjectStorage({**options, "allow_http": True})
    with pytest.raises((ReadError, PlanError), match="storage_options") as caught:
        await storage.stat(f"{scheme}://bucket/x")
    assert len(scripted.requests) <= 2
    if scheme != "gs":
        assert "no credentials were found" in str(caught.value)


async def test_google_is_read_too(scripted: ScriptedStore) -> None:
    """Only through a scripted server: there is no emulator of its storage here."""
    scripted.objects["x"] = DATA
    storage = ObjectStorage({"base_url": scripted.endpoint, "skip_signature": True, "allow_http": True})
    found = await storage.stat("gs://b/x")
    assert (found.size, found.etag) == (len(DATA), '"v1"')
    scripted.script = [cut(99)]
    async with aclosing(storage.blocks("gs://b/x", 10, None, '"v1"')) as blocks:
        assert b"".join([block async for block in blocks]) == DATA[10:]
    await storage.aclose()


def listing(keys: list[str]) -> Any:
    """Return an answer that lists objects in XML as Google does, two a page; of deeper directories the names alone."""

    def answer(handler: Handler) -> None:
        asked = {name: values[0] for name, values in parse_qs(urlsplit(handler.path).query).items()}
        prefix, start = asked.get("prefix", ""), int(asked.get("continuation-token", 0))
        below = [key for key in keys if key.startswith(prefix) and key > asked.get("start-after", "")]
        deeper = {key for key in below if "/" in key.removeprefix(prefix)} if asked.get("delimiter") else set()
        found = [key for key in below if key not in deeper]
        page = "".join(
            f"<Contents><Key>{key}</Key><Size>{len(handler.store.objects[key])}</Size><ETag>{handler.store.etag}</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key in found[start : start + 2]
        )
        more = f"<NextContinuationToken>{start + 2}</NextContinuationToken>" if found[start + 2 :] else ""
        names = sorted({prefix + key.removeprefix(prefix).partition("/")[0] + "/" for key in deeper})
        prefixes = "".join(f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in names)
        body = f"<?xml version='1.0'?><ListBucketResult>{page}{prefixes}{more}</ListBucketResult>".encode()
        handler.send_response(200)
        handler.send_header("Content-Type", "application/xml")
        handler.send_header("Connection", "close")  # which this server does: else the next page is asked for on it
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("d/*.txt", ["d/a.txt", "d/b.txt", "d/c d.txt"]),
        ("d/**", ["d/a.txt", "d/b.txt", "d/c d.txt", "d/deep/e.txt", "d/f"]),
        ("d/*/e.*", ["d/deep/e.txt"]),
        ("*", ["top"]),
    ],
)
async def test_globs_of_google_are_listed_page_by_page(
    scripted: ScriptedStore, pattern: str, expected: list[str]
) -> None:
    scripted.objects = dict.fromkeys(["d/a.txt", "d/b.txt", "d/c d.txt", "d/deep/e.txt", "d/f", "top"], b"x")
    scripted.script = [refusal(503, "SlowDown"), *[listing(sorted(scripted.objects))] * 9]
    storage = ObjectStorage({"base_url": scripted.endpoint, "skip_signature": True, "allow_http": True})
    found = await storage.list(f"gs://b/{pattern}")
    assert [(one.path, one.size, one.etag) for one in found] == [(f"gs://b/{key}", 1, '"v1"') for key in expected]
    assert len(scripted.requests) > 2 or len(expected) == 1
    await storage.aclose()


async def test_plain_http_has_to_be_allowed(scripted: ScriptedStore) -> None:
    storage = ObjectStorage({**scripted.options, "allow_http": False})
    with pytest.raises(
        ReadError, match=r'the endpoint is plain http: allow it, storage_options=\{"allow_http": True\}'
    ):
        await storage.stat("s3://b/x")


@pytest.mark.parametrize("options", [{"regoin": "x"}, {"endpoint": 3}, {"allow_http": object()}])
async def test_options_that_mean_nothing_are_refused_by_name(options: Any) -> None:
    with pytest.raises(PlanError, match=f"s3://b can't be opened with storage_options of .*{next(iter(options))}"):
        await ObjectStorage(options).stat("s3://b/x")


@pytest.mark.parametrize("options", ["region", 3, {3: "x"}, {"client_options": "allow_http"}])
def test_options_of_another_type_are_refused_where_they_are_written(options: Any) -> None:
    with pytest.raises(PlanTypeError, match="storage_options="):
        Access(storage_options=options)


async def test_secrets_are_in_no_message_and_no_repr(scripted: ScriptedStore) -> None:
    secret = "sv=2020&sig=s3cret"
    options = {"account_name": "a", "sas_key": secret, "endpoint": scripted.endpoint, "allow_http": True}
    scripted.script = [refusal(403, "AuthenticationFailed")] * 3
    storage = ObjectStorage(options)
    assert "s3cret" not in repr(Access(storage_options=options))
    with pytest.raises(ReadError) as caught:
        await storage.stat("az://b/x")
    with pytest.raises(ReadError) as listed:
        await storage.list("az://b/*")
    for error in (caught.value, listed.value):
        assert "s3cret" not in "".join(traceback.format_exception(error))


async def test_what_a_store_lists_is_shown_printable_and_never_sent_as_a_header(scripted: ScriptedStore) -> None:
    def listing(handler: Handler) -> None:
        tags = {"Key": "x&#x9b;&#x202e;", "LastModified": "2024-01-01T00:00:00Z", "ETag": '"&#27;"', "Size": "3"}
        entry = "".join(f"<{tag}>{text}</{tag}>" for tag, text in tags.items())
        body = f"<ListBucketResult><Name>b</Name><Contents>{entry}</Contents></ListBucketResult>".encode()
        handler.send_response(200)
        handler.send_header("Connection", "close")  # it does, and the next request would meet that
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    scripted.script = [listing, refusal(403, "No\x1b[31m", "\u202eMessage")]
    storage = ObjectStorage(scripted.options, HttpOptions(retries=0))
    (found,) = await storage.list("s3://b/*")
    with pytest.raises(
        ReadError, match=r"s3://b/x\\x9b\\u202e: the server answered 403 .*No\\x1b.*: \\u202eMess"
    ) as caught:
        [block async for block in storage.blocks(found.path, etag=found.etag)]
    assert str(caught.value).isprintable()
    assert "if-match" not in scripted.requests[1]
    await storage.aclose()
