"""Test the client of OpenID Connect against providers that are right, wrong, slow and hostile."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

import pytest
from aiohttp import web
from joserfc import jwt

from rooms.console.oidc import (
    FAILURE_KEPT_S,
    KEPT_S,
    LEEWAY_S,
    MAX_AGE_S,
    MAX_ANSWER_BYTES,
    MAX_GROUPS,
    REFETCH_S,
    Attempt,
    Identity,
    OidcClient,
    OidcConfiguration,
    OidcError,
    ProviderAwayError,
)
from tests.integration.rooms.api.test_keys import Seconds
from tests.support.scripted_provider import (
    CLIENT_ID,
    CLIENT_SECRET,
    ScriptedProvider,
    never,
    new_key,
    scripted_provider,
    signed_with_public_key,
    unsigned,
)

CALLBACK: Final = "https://rooms.example.com/console/oidc/callback"
DISCOVERY: Final = "/.well-known/openid-configuration"


@pytest.fixture
async def provider() -> AsyncIterator[ScriptedProvider]:
    async with scripted_provider() as running:
        yield running


class Client(OidcClient):
    """Sign in at a scripted provider, with clocks that the test moves."""

    def __init__(
        self, provider: ScriptedProvider, *, timeout_s: float = 5.0, **changes: Any
    ) -> None:
        self.seconds = Seconds()
        self.ahead_s = 0
        configuration: dict[str, Any] = {
            "issuer": provider.issuer,
            "client_id": CLIENT_ID,
            "client_secret": CLIENT_SECRET,
            "scopes": "openid profile",
            "groups_claim": "groups",
            "redirect_uri": CALLBACK,
        }
        super().__init__(
            OidcConfiguration(**configuration | changes),
            monotonic=self.seconds,
            now_s=lambda: int(time.time()) + self.ahead_s,
            timeout_s=timeout_s,
        )
        self.provider = provider

    async def sign_in(self, **more: str) -> Identity:
        """Sign in; `more`: what the provider adds to its answer."""
        address, attempt = await self.start("/console", expires_s=600)
        return await self.finish(attempt, self.provider.authorize(address, **more))


async def test_a_person_signs_in(provider: ScriptedProvider) -> None:
    client = Client(provider)
    assert await client.sign_in() == Identity(
        subject="subject-1", name="ada@example.com", groups=frozenset({"ops"})
    )
    asked = provider.asked
    assert asked["redirect_uri"] == CALLBACK
    assert (asked["response_type"], asked["scope"]) == ("code", "openid profile")
    assert asked["code_challenge_method"] == "S256"
    await client.sign_in()
    assert provider.requests == [DISCOVERY, "/token", "/keys", "/token"]
    assert provider.asked["state"] != asked["state"]
    assert provider.asked["nonce"] != asked["nonce"]
    assert provider.asked["code_challenge"] != asked["code_challenge"]


async def test_no_two_people_have_one_name(provider: ScriptedProvider) -> None:
    """Check that no person gets the name of another one by what people may edit themselves."""
    named = {"email": None, "preferred_username": "ada"}
    names = []
    for claims in ({}, {"sub": "s-2"}, {"sub": "y" * 200}, {"sub": "y" * 201}):
        for more in (named, {"email": None}):
            provider.claims = {**claims, **more}
            names.append((await Client(provider).sign_in()).name)
    assert len(set(names)) == len(names)
    assert all(len(name) <= 128 for name in names)


EMAIL = "ada@example.com"
MARK = hashlib.sha256(b"subject-1").hexdigest()[:12]


@pytest.mark.parametrize(
    ("claims", "name"),
    [
        ({"email_verified": True, "preferred_username": "ada"}, "ada@example.com"),
        ({"email_verified": "true"}, "ada@example.com"),
        ({"email_verified": False, "preferred_username": "ada"}, f"ada ({MARK})"),
        ({"email_verified": None, "preferred_username": "ada"}, f"ada ({MARK})"),
        ({"email_verified": 1, "preferred_username": "ada"}, f"ada ({MARK})"),
        (
            {"email": "eve@example.com", "email_verified": None, "preferred_username": EMAIL},
            f"{EMAIL} ({MARK})",
        ),
        ({"email": None}, "subject-1"),
        ({"email": None, "preferred_username": " "}, "subject-1"),
        ({"email": ["x"], "preferred_username": "a\x1bb"}, f"a\\x1bb ({MARK})"),
        ({"email": None, "preferred_username": "x" * 500}, f"{'x' * 113} ({MARK})"),
        ({"email": "x" * 500}, f"{'x' * 113} ({MARK})"),
    ],
)
async def test_the_name_of_a_person(
    provider: ScriptedProvider, claims: dict[str, Any], name: str
) -> None:
    provider.claims = claims
    assert (await Client(provider).sign_in()).name == name


@pytest.mark.parametrize(
    ("claim", "claims", "groups"),
    [
        ("groups", {"groups": None}, set()),
        ("groups", {"groups": "ops"}, {"ops"}),
        ("groups", {"groups": ["a", 1, None, "b"]}, {"a", "b"}),
        ("groups", {"groups": {"a": 1}}, set()),
        ("realm_access.roles", {"realm_access": {"roles": ["a"]}}, {"a"}),
        ("realm_access.roles", {"realm_access": ["a"]}, set()),
        ("https://example.com/g", {"https://example.com/g": ["a"]}, {"a"}),
    ],
)
async def test_the_groups_of_a_person(
    provider: ScriptedProvider, claim: str, claims: dict[str, Any], groups: set[str]
) -> None:
    provider.claims = claims
    assert (await Client(provider, groups_claim=claim).sign_in()).groups == groups


async def test_too_many_groups_are_refused(provider: ScriptedProvider) -> None:
    provider.claims = {"groups": [str(number) for number in range(MAX_GROUPS + 1)]}
    with pytest.raises(OidcError, match="more than"):
        await Client(provider).sign_in()


def now(seconds: int) -> int:
    return int(time.time()) + seconds


WRONG: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "nonce": lambda: {"nonce": "another"},
    "no nonce": lambda: {"nonce": None},
    "audience": lambda: {"aud": "another"},
    "audiences": lambda: {"aud": ["another", "third"]},
    "no authorised party": lambda: {"aud": [CLIENT_ID, "another"]},
    "authorised party": lambda: {"azp": "another"},
    "party of several": lambda: {"aud": [CLIENT_ID, "another"], "azp": "another"},
    "no audience": lambda: {"aud": None},
    "number as audience": lambda: {"aud": 1},
    "issuer": lambda: {"iss": "https://another.example.com"},
    "no issuer": lambda: {"iss": None},
    "expired": lambda: {"exp": now(-LEEWAY_S - 5)},
    "no end": lambda: {"exp": None},
    "end that is no number": lambda: {"exp": "never"},
    "issued in the future": lambda: {"iat": now(LEEWAY_S + 30)},
    "issued long ago": lambda: {"iat": now(-MAX_AGE_S - LEEWAY_S - 5)},
    "not issued": lambda: {"iat": None},
    "not yet valid": lambda: {"nbf": now(LEEWAY_S + 30)},
    "no subject": lambda: {"sub": None},
    "subject that is no text": lambda: {"sub": 7},
    "empty subject": lambda: {"sub": "", "email": None},
    "hash of another access token": lambda: {"at_hash": "AAAAAAAAAAAAAAAAAAAAAA"},
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_wrong_claim_is_refused(provider: ScriptedProvider, wrong: str) -> None:
    provider.claims = WRONG[wrong]()
    with pytest.raises(OidcError, match="ID token"):
        await Client(provider).sign_in()


async def test_several_audiences_are_right_with_an_authorised_party(
    provider: ScriptedProvider,
) -> None:
    provider.claims = {"aud": [CLIENT_ID, "another"], "azp": CLIENT_ID}
    await Client(provider).sign_in()


async def test_clocks_may_differ_by_a_minute(provider: ScriptedProvider) -> None:
    provider.claims = {"exp": now(-LEEWAY_S + 10), "iat": now(-LEEWAY_S)}
    await Client(provider).sign_in()
    provider.claims = {"iat": now(LEEWAY_S - 10)}
    await Client(provider).sign_in()


def of_another_key(provider: ScriptedProvider, claims: dict[str, Any]) -> str:
    key = new_key("first", forged=True)
    return jwt.encode({"alg": "RS256", "kid": "first"}, claims, key)


def with_its_own_key(provider: ScriptedProvider, claims: dict[str, Any]) -> str:
    key = new_key("mine")
    header = {"alg": "RS256", "kid": "mine", "jwk": key.as_dict(private=False)}
    return jwt.encode(header, claims, key)


def cut_off(provider: ScriptedProvider, claims: dict[str, Any]) -> str:
    token = jwt.encode({"alg": "RS256", "kid": "first"}, claims, provider.key)
    return token.rpartition(".")[0] + "."


@pytest.mark.parametrize(
    "make",
    [
        unsigned,
        signed_with_public_key,
        of_another_key,
        with_its_own_key,
        cut_off,
        lambda *_: "a.b.c",
        lambda *_: "x" * 1000,
        lambda *_: "\x00",
        lambda *_: "e30.bnVsbA.",
    ],
)
async def test_a_token_without_a_right_signature_is_refused(
    provider: ScriptedProvider, make: Callable[[ScriptedProvider, dict[str, Any]], str]
) -> None:
    provider.make_token = make
    with pytest.raises(OidcError, match="ID token"):
        await Client(provider).sign_in()


async def test_keys_that_do_not_sign_are_no_keys(provider: ScriptedProvider) -> None:
    """Check short keys, keys for encryption, symmetric keys, and what is no key."""
    public = provider.key.as_dict(private=False)
    for published in (
        [],
        [{**public, "use": "enc"}],
        [{"kty": "oct", "k": "c2VjcmV0", "kid": "first"}],
        [{"kty": "RSA", "kid": "first"}],
        [{**public, "n": "AQAB"}],
        [{"kty": "XX", "kid": "first"}],
    ):
        provider.published = published
        with pytest.raises(OidcError):
            await Client(provider).sign_in()
    provider.published = [{"kty": "AKP", "alg": "ML-DSA-44", "kid": "new"}, {**public, "x5c": 7}]
    await Client(provider).sign_in()


async def test_a_new_key_is_looked_up_and_unknown_ones_not_each_time(
    provider: ScriptedProvider,
) -> None:
    client = Client(provider)
    await client.sign_in()
    provider.key = new_key("second")
    with pytest.raises(OidcError):
        await client.sign_in()
    assert provider.requests.count("/keys") == 1
    client.seconds.now += REFETCH_S
    await client.sign_in()
    assert provider.requests.count("/keys") == 2
    provider.make_token = with_its_own_key
    for _ in range(3):
        with pytest.raises(OidcError):
            await client.sign_in()
    assert provider.requests.count("/keys") == 2
    assert provider.requests.count(DISCOVERY) == 1
    provider.make_token = None
    client.seconds.now += KEPT_S
    await client.sign_in()
    assert (provider.requests.count("/keys"), provider.requests.count(DISCOVERY)) == (3, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"state": "another"},
        {"state": ""},
        {"state": "é"},
        {"code": ""},
        {"code": "another"},
        {"iss": "https://another.example.com"},
        {"error": "access_denied"},
    ],
)
async def test_a_wrong_answer_is_refused(provider: ScriptedProvider, wrong: dict[str, str]) -> None:
    with pytest.raises(OidcError) as refused:
        await Client(provider).sign_in(**wrong)
    assert "\x1b" not in str(refused.value)
    assert ("/token" in provider.requests) is (wrong.get("code") == "another")


async def test_an_attempt_ends(provider: ScriptedProvider) -> None:
    client = Client(provider)
    address, attempt = await client.start("/console", expires_s=60)
    answer = provider.authorize(address)
    client.ahead_s = 60
    with pytest.raises(OidcError, match="too long"):
        await client.finish(attempt, answer)
    assert "/token" not in provider.requests


async def test_the_verifier_of_another_attempt_is_refused(provider: ScriptedProvider) -> None:
    """Check that a stolen code is of no use in another browser, whatever it makes of the state."""
    client = Client(provider)
    _, mine = await client.start("/console", expires_s=60)
    address, theirs = await client.start("/console", expires_s=60)
    answer = provider.authorize(address)
    forged = Attempt(
        state=theirs.state,
        nonce=theirs.nonce,
        verifier=mine.verifier,
        target="/console",
        expires_at=mine.expires_at,
    )
    with pytest.raises(OidcError, match="invalid_grant"):
        await client.finish(forged, answer)


async def test_a_provider_that_promises_its_issuer_must_name_it(provider: ScriptedProvider) -> None:
    provider.metadata = {"authorization_response_iss_parameter_supported": True}
    client = Client(provider)
    await client.sign_in()
    address, attempt = await client.start("/console", expires_s=60)
    answer = provider.authorize(address)
    del answer["iss"]
    with pytest.raises(OidcError, match="issuer"):
        await client.finish(attempt, answer)


@pytest.mark.parametrize(
    "metadata",
    [
        {"issuer": "https://another.example.com"},
        {"issuer": 1},
        {"token_endpoint": None},
        {"token_endpoint": "http://192.0.2.1/token"},
        {"jwks_uri": "file:///etc/passwd"},
        {"authorization_endpoint": "javascript:alert(1)"},
        {"authorization_endpoint": "https://user:secret@example.com/"},
    ],
)
async def test_wrong_metadata_are_refused(
    provider: ScriptedProvider, metadata: dict[str, Any]
) -> None:
    provider.metadata = metadata
    with pytest.raises(ProviderAwayError):
        await Client(provider).start("/console", expires_s=60)
    assert set(provider.requests) == {DISCOVERY}


async def endless(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    while True:
        await answer.write(b" " * 65_536)


async def huge(_: web.Request) -> web.StreamResponse:
    return web.Response(body=b"[" * (MAX_ANSWER_BYTES + 1))


async def deep(_: web.Request) -> web.StreamResponse:
    return web.Response(body=b"[" * (MAX_ANSWER_BYTES - 1))


async def dripping(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    while True:
        await answer.write(b" ")
        await asyncio.sleep(0.01)


async def redirecting(request: web.Request) -> web.StreamResponse:
    raise web.HTTPTemporaryRedirect(f"{request.url}?again")


async def failing(_: web.Request) -> web.StreamResponse:
    return web.Response(status=500, text="\x1b[31m <script>")


async def compressed(_: web.Request) -> web.StreamResponse:
    return web.Response(body=b"x", headers={"Content-Encoding": "gzip"})


async def cut(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize("path", [DISCOVERY, "/keys", "/token"])
@pytest.mark.parametrize(
    "answer",
    [never, endless, huge, deep, dripping, redirecting, failing, compressed, cut],
    ids=lambda answer: answer.__name__,
)
async def test_a_provider_that_misbehaves_costs_little(
    provider: ScriptedProvider,
    path: str,
    answer: Callable[[web.Request], Any],
) -> None:
    provider.instead[path] = answer
    client = Client(provider, timeout_s=0.5)
    began = time.monotonic()
    with pytest.raises(ProviderAwayError) as away:
        await client.sign_in()
    assert time.monotonic() - began < 5
    assert "API key or a link" in str(away.value)
    assert "\x1b" not in str(away.value)
    assert provider.requests.count(path) == 1


async def test_a_provider_that_is_away_is_not_asked_each_time(provider: ScriptedProvider) -> None:
    provider.instead[DISCOVERY] = failing
    client = Client(provider)
    outcomes = await asyncio.gather(*(client.sign_in() for _ in range(20)), return_exceptions=True)
    assert {type(one) for one in outcomes} == {ProviderAwayError}
    assert provider.requests == [DISCOVERY]
    provider.instead.clear()
    with pytest.raises(ProviderAwayError):
        await client.sign_in()
    client.seconds.now += FAILURE_KEPT_S
    await client.sign_in()


async def test_many_sign_ins_at_once_look_the_provider_up_once(provider: ScriptedProvider) -> None:
    client = Client(provider)
    found = await asyncio.gather(*(client.start("/console", expires_s=60) for _ in range(20)))
    assert len({attempt.state for _, attempt in found}) == 20
    assert provider.requests == [DISCOVERY]


async def test_nothing_listens(provider: ScriptedProvider) -> None:
    client = Client(provider, issuer="http://127.0.0.1:1/realm")
    with pytest.raises(ProviderAwayError, match="cannot be reached"):
        await client.start("/console", expires_s=60)


async def test_a_public_client_and_one_with_its_secret_in_the_form(
    provider: ScriptedProvider,
) -> None:
    forms: list[dict[str, str]] = []

    async def token(request: web.Request) -> web.StreamResponse:
        assert "Authorization" not in request.headers
        forms.append(dict(parse_qsl(await request.text())))
        return web.json_response({"id_token": provider.id_token()})

    provider.instead["/token"] = token
    provider.claims = {"at_hash": None}
    await Client(provider, client_secret=None).sign_in()
    provider.metadata = {"token_endpoint_auth_methods_supported": ["client_secret_post"]}
    await Client(provider).sign_in()
    assert [form.get("client_secret") for form in forms] == [None, CLIENT_SECRET]
    assert {form["client_id"] for form in forms} == {CLIENT_ID}
    assert all(len(form["code_verifier"]) >= 43 for form in forms)


async def test_the_address_keeps_the_query_of_the_provider(provider: ScriptedProvider) -> None:
    provider.metadata = {"authorization_endpoint": "https://id.example.com/a?tenant=1"}
    address, _ = await Client(provider).start("/console", expires_s=60)
    parts = urlsplit(address)
    assert (parts.netloc, parts.path) == ("id.example.com", "/a")
    assert dict(parse_qsl(parts.query))["tenant"] == "1"
