"""Let people sign in at an OpenID Connect provider: authorization code with PKCE.

    browser  ── start ──►  attempt: state, nonce, verifier, sealed in a cookie of this browser
             ◄─ redirect ─ the provider's authorization address, with the verifier's hash
             ── callback ► code and state; code and verifier ──► the provider's token address
                           ID token: signature, issuer, audience, time, nonce, access token's hash

Authlib builds and checks what the protocol prescribes, joserfc checks signatures. Requests are made
here, because a provider that is slow, away or hostile must not stop anything: each has a limit in
time and bytes, redirects are not followed, and what is found is kept for a while.
"""

import asyncio
import hashlib
import secrets
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final
from urllib.parse import quote

import httpx
import msgspec
from authlib.oauth2.rfc6749.parameters import prepare_grant_uri
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import ECKey, Key, KeySet, RSAKey

from rooms.console.sign_in_limit import SignInLimit
from rooms.domain.role import GroupRoles
from rooms.domain.web_address import is_protected
from rooms.safe_text import terminal_safe

ALGORITHMS: Final = (
    *("RS256", "RS384", "RS512"),
    *("PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512"),
)
"""Only these with a public key: one that a client knows must not be able to sign."""
REQUEST_TIMEOUT_S: Final = 10.0
"""Seconds for one answer of the provider, to its last byte."""
MAX_ANSWER_BYTES: Final = 256 * 1024
KEPT_S: Final = 3600.0
"""Seconds for which addresses and keys of the provider are kept."""
REFETCH_S: Final = 30.0
"""Seconds between two look-ups of keys because of an unknown one."""
FAILURE_KEPT_S: Final = 5.0
"""Seconds in which a provider that failed is not asked again."""
LEEWAY_S: Final = 60
"""The most by which the provider's clock may differ."""
MAX_AGE_S: Final = 600
"""The age at which an ID token is no longer one of this sign-in."""
MAX_GROUPS: Final = 2000
MIN_RSA_BITS: Final = 2048
_MAX_KEYS: Final = 100
_MAX_NAME: Final = 128
_MARK: Final = 12
"""Hexadecimal characters of a subject's hash in names that are not unique: 48 bits."""
_HTTP_OK: Final = 200
_HTTP_CLIENT_ERROR: Final = range(400, 500)


class OidcError(Exception):
    """Report that a person cannot sign in by the provider; the text is for this person."""


class ProviderAwayError(OidcError):
    """Report that the provider does not answer, or not as a provider does: try again later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OidcConfiguration:
    """Hold what the operator configured."""

    issuer: str
    client_id: str
    client_secret: str | None
    scopes: str
    groups_claim: str
    redirect_uri: str


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what a browser keeps, sealed, while a person is at the provider."""

    state: str
    nonce: str
    verifier: str
    target: str
    """The page of the console to go on to."""
    expires_at: int
    """In seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Describe the person that the provider vouches for."""

    subject: str
    name: str
    groups: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OidcSignIn:
    """Hold the sign-in at a provider: its client, and which roles its groups have."""

    client: "OidcClient"
    group_roles: Sequence[GroupRoles]
    sign_in_limit: SignInLimit
    """Answers of the provider that one address may bring in a second: each causes a request."""


class _Metadata(msgspec.Struct, kw_only=True):
    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    token_endpoint_auth_methods_supported: list[str] = []
    authorization_response_iss_parameter_supported: bool = False


class _Tokens(msgspec.Struct, kw_only=True):
    id_token: Annotated[str, msgspec.Meta(min_length=1)]
    access_token: str | None = None


class _TokenProblem(msgspec.Struct, kw_only=True):
    error: str
    error_description: str = ""


class _Keys(msgspec.Struct, kw_only=True):
    keys: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=_MAX_KEYS)]


class OidcClient:
    """Sign people in at one provider."""

    def __init__(
        self,
        configuration: OidcConfiguration,
        *,
        monotonic: Callable[[], float],
        now_s: Callable[[], int],
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        self._configuration = configuration
        self._monotonic = monotonic
        self._now_s = now_s
        self._timeout_s = timeout_s
        self._metadata: tuple[_Metadata, float] | None = None
        self._keys: tuple[KeySet, float] | None = None
        self._failure: tuple[str, float] | None = None
        self._tls: ssl.SSLContext | None = None
        self._lock = asyncio.Lock()

    async def start(self, target: str, *, expires_s: int) -> tuple[str, Attempt]:
        """Return the provider's address to send a browser to, and the attempt. OidcError."""
        configuration, metadata = self._configuration, await self._find_metadata()
        attempt = Attempt(
            state=secrets.token_urlsafe(32),
            nonce=secrets.token_urlsafe(32),
            verifier=secrets.token_urlsafe(48),
            target=target,
            expires_at=self._now_s() + expires_s,
        )
        address: str = prepare_grant_uri(
            metadata.authorization_endpoint,
            configuration.client_id,
            "code",
            redirect_uri=configuration.redirect_uri,
            scope=configuration.scopes,
            state=attempt.state,
            nonce=attempt.nonce,
            code_challenge=create_s256_code_challenge(attempt.verifier),
            code_challenge_method="S256",
        )
        return address, attempt

    async def finish(self, attempt: Attempt, answer: Mapping[str, str]) -> Identity:
        """Return the person of the provider's answer, the query of the callback. OidcError."""
        if attempt.expires_at <= self._now_s():
            raise OidcError("the sign-in took too long; begin again")
        if not secrets.compare_digest(attempt.state.encode(), answer.get("state", "").encode()):
            raise OidcError("this answer is not to the sign-in that this browser began; try again")
        metadata = await self._find_metadata()
        self._check_issuer(metadata, answer)
        if "error" in answer:
            said = _shown(answer.get("error_description") or answer["error"])
            raise OidcError(f"the provider did not sign you in: {said}")
        if not answer.get("code"):
            raise OidcError("the provider's answer has no code; begin again")
        tokens = await self._exchange(metadata, answer["code"], attempt.verifier)
        claims = await self._verify(tokens, attempt.nonce)
        return self._identity(claims)

    def _check_issuer(self, metadata: _Metadata, answer: Mapping[str, str]) -> None:
        """Check that the answer comes from this provider and from no other (RFC 9207)."""
        given = answer.get("iss")
        if given is None and metadata.authorization_response_iss_parameter_supported:
            raise OidcError("the provider's answer does not name its issuer")
        if given is not None and given != metadata.issuer:
            raise OidcError("this answer is of another provider")

    async def _find_metadata(self) -> _Metadata:
        async with self._lock:
            known = self._metadata
            if known is not None and self._monotonic() < known[1]:
                return known[0]
            issuer = self._configuration.issuer
            address = f"{issuer.rstrip('/')}/.well-known/openid-configuration"
            found: _Metadata = await self._get(address, _Metadata)
            endpoints = (found.authorization_endpoint, found.token_endpoint, found.jwks_uri)
            if found.issuer != issuer:
                raise self._failed(
                    f"it calls itself {_shown(found.issuer)}, and ROOMS_OIDC_ISSUER is {issuer}"
                )
            if not all(map(is_protected, endpoints)):
                raise self._failed("one of its addresses is without HTTPS")
            self._metadata = (found, self._monotonic() + KEPT_S)
            return found

    async def _find_keys(self, address: str, *, again: bool = False) -> KeySet:
        async with self._lock:
            known, now = self._keys, self._monotonic()
            age_s = REFETCH_S if again else KEPT_S
            if known is not None and now < known[1] + age_s:
                return known[0]
            found = await self._get(address, _Keys)
            keys = _signing_keys(found.keys)
            if not keys:
                raise self._failed("it publishes no key that signs")
            self._keys = (KeySet(keys), now)
            return self._keys[0]

    async def _get(self, address: str, kind: type[Any]) -> Any:
        if self._failure is not None and self._monotonic() < self._failure[1]:
            raise ProviderAwayError(self._failure[0])
        status, body = await self._send(httpx.Request("GET", address, headers=_HEADERS))
        if status != _HTTP_OK:
            raise self._failed(f"it answers {status} to a request for its configuration")
        return self._decode(body, kind)

    def _decode(self, body: bytes, kind: type[Any]) -> Any:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, RecursionError) as exc:
            raise self._failed(f"its answer is not as OpenID Connect prescribes: {exc}") from exc

    def _failed(self, reason: str) -> ProviderAwayError:
        """Return the error, and ask the provider nothing for a while."""
        text = (
            f"the sign-in provider cannot be used: {reason}. "
            "Try again soon, or sign in with an API key or a link"
        )
        self._failure = (text, self._monotonic() + FAILURE_KEPT_S)
        return ProviderAwayError(text)

    async def _exchange(self, metadata: _Metadata, code: str, verifier: str) -> _Tokens:
        """Return the tokens of a code. OidcError."""
        configuration = self._configuration
        fields = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": configuration.redirect_uri,
            "code_verifier": verifier,
        }
        auth: httpx.BasicAuth | None = None
        secret = configuration.client_secret
        methods = metadata.token_endpoint_auth_methods_supported or ["client_secret_basic"]
        if secret is not None and "client_secret_basic" in methods:
            # Both parts are encoded as in a form before (RFC 6749, 2.3.1).
            auth = httpx.BasicAuth(quote(configuration.client_id, safe=""), quote(secret, safe=""))
        else:
            fields["client_id"] = configuration.client_id
            if secret is not None:
                fields["client_secret"] = secret
        request = httpx.Request("POST", metadata.token_endpoint, data=fields, headers=_HEADERS)
        if auth is not None:
            request = next(auth.auth_flow(request))
        status, body = await self._send(request)
        if status in _HTTP_CLIENT_ERROR:
            raise OidcError(f"the provider refused the sign-in: {_problem_of(body, status)}")
        if status != _HTTP_OK:
            raise self._failed(f"it answers {status} to a sign-in")
        tokens: _Tokens = self._decode(body, _Tokens)
        return tokens

    async def _verify(self, tokens: _Tokens, nonce: str) -> Mapping[str, Any]:
        """Return the claims of an ID token that is valid for this sign-in. OidcError."""
        metadata = await self._find_metadata()
        try:
            keys = await self._find_keys(metadata.jwks_uri)
            try:
                token = jwt.decode(tokens.id_token, keys, algorithms=list(ALGORITHMS))
            except InvalidKeyIdError:
                # The provider may have a new key since its keys were looked up.
                keys = await self._find_keys(metadata.jwks_uri, again=True)
                token = jwt.decode(tokens.id_token, keys, algorithms=list(ALGORITHMS))
            claims = CodeIDToken(
                token.claims,
                token.header,
                options={
                    "iss": {"essential": True, "value": self._configuration.issuer},
                    "aud": {"essential": True, "value": self._configuration.client_id},
                },
                params={
                    "nonce": nonce,
                    "client_id": self._configuration.client_id,
                    "access_token": tokens.access_token,
                },
            )
            claims.validate(now=self._now_s(), leeway=LEEWAY_S)
        except (JoseError, ValueError, TypeError, KeyError, RecursionError) as exc:
            raise OidcError(f"the provider's ID token is not valid: {_shown(str(exc))}") from exc
        if claims["iat"] < self._now_s() - MAX_AGE_S - LEEWAY_S:
            raise OidcError("the provider's ID token is not of this sign-in: it is too old")
        found: Mapping[str, Any] = claims
        return found

    def _identity(self, claims: Mapping[str, Any]) -> Identity:
        subject = str(claims["sub"])
        if not subject.strip():
            raise OidcError("the provider's ID token names no person")
        groups = _find_claim(claims, self._configuration.groups_claim)
        listed = [groups] if isinstance(groups, str) else groups
        if not isinstance(listed, list):
            listed = []
        if len(listed) > MAX_GROUPS:
            raise OidcError(f"the provider names more than {MAX_GROUPS} groups of yours")
        found = frozenset(one for one in listed if isinstance(one, str))
        return Identity(subject=_shown(subject), name=_name_of(claims, subject), groups=found)

    async def _send(self, request: httpx.Request) -> tuple[int, bytes]:
        """Return status and body of an answer. ProviderAwayError."""
        try:
            async with asyncio.timeout(self._timeout_s), await self._transport() as transport:
                answer = await transport.handle_async_request(request)
                body = bytearray()
                # A compressed answer could be far larger than what was received.
                if answer.headers.get("content-encoding", "identity") != "identity":
                    raise self._failed("its answer is compressed")
                assert isinstance(answer.stream, httpx.AsyncByteStream)
                async for chunk in answer.stream:
                    body += chunk
                    if len(body) > MAX_ANSWER_BYTES:
                        raise self._failed(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
                await answer.aclose()
        except TimeoutError as exc:
            raise self._failed(f"it did not answer within {self._timeout_s:g} s") from exc
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as exc:
            raise self._failed(f"it cannot be reached: {_shown(str(exc))}") from exc
        return answer.status_code, bytes(body)

    async def _transport(self) -> httpx.AsyncHTTPTransport:
        if self._tls is None:
            # Reading the trusted authorities takes 50 ms.
            self._tls = await asyncio.to_thread(httpx.create_ssl_context)
        return httpx.AsyncHTTPTransport(verify=self._tls)


_HEADERS: Final = {"Accept": "application/json", "Accept-Encoding": "identity"}


def _signing_keys(found: list[dict[str, Any]]) -> list[Key]:
    """Return the public keys that may sign; a key that cannot be read counts as none."""
    keys: list[Key] = []
    for one in found:
        if one.get("use", "sig") != "sig":
            continue
        public = {name: value for name, value in one.items() if name in _PUBLIC_MEMBERS}
        try:
            match one.get("kty"):
                case "RSA":
                    key = RSAKey.import_key(public)
                    if key.raw_value.key_size >= MIN_RSA_BITS:
                        keys.append(key)
                case "EC":
                    keys.append(ECKey.import_key(public))
                case _:
                    pass
        except (JoseError, ValueError, TypeError):
            continue
    return keys


_PUBLIC_MEMBERS: Final = frozenset({"kty", "kid", "alg", "use", "n", "e", "crv", "x", "y"})


def _name_of(claims: Mapping[str, Any], subject: str) -> str:
    """Return the name of a person in journal and lists, which no other person has.

    People may edit their user name, and an e-mail address that the provider has not verified: so
    only a verified address stands for itself. A user name gets a part of the subject's hash, and so
    does what is too long.
    """
    email, user_name = claims.get("email"), claims.get("preferred_username")
    verified = claims.get("email_verified")
    if (verified is True or verified == "true") and isinstance(email, str) and email.strip():
        text, is_unique = email, True
    elif isinstance(user_name, str) and user_name.strip():
        text, is_unique = user_name, False
    else:
        text, is_unique = subject, True
    shown = terminal_safe(text.strip())
    if is_unique and len(shown) <= _MAX_NAME:
        return shown
    mark = f" ({hashlib.sha256(subject.encode()).hexdigest()[:_MARK]})"
    return shown[: _MAX_NAME - len(mark)] + mark


def _find_claim(claims: Mapping[str, Any], name: str) -> Any:
    """Return a claim of this name, or of the path in it; None: there is none."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found


def _problem_of(body: bytes, status: int) -> str:
    try:
        problem = msgspec.json.decode(body, type=_TokenProblem)
    except (msgspec.DecodeError, RecursionError):
        return f"status {status}"
    return _shown(f"{problem.error} {problem.error_description}")


def _shown(text: str) -> str:
    return terminal_safe(text.strip())[:_MAX_NAME]
