"""An OpenID Connect provider on this machine that does what a test says, wrong things included."""

import asyncio
import base64
import functools
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qs, parse_qsl, urlsplit

from aiohttp import web
from joserfc import jwt
from joserfc.jwk import RSAKey

CLIENT_ID: Final = "rooms"
CLIENT_SECRET: Final = "s/e:c ret"
CODE: Final = "the-code"
Handler = Callable[[web.Request], Any]


@functools.cache
def new_key(kid: str, *, forged: bool = False) -> RSAKey:
    """Return the private key of this name; `forged`: another one of the same name."""
    return RSAKey.generate_key(2048, parameters={"kid": kid, "use": "sig"}, private=True)


@dataclass
class ScriptedProvider:
    """Sign every person in as `claims` says. `instead` answers in place of it, by path."""

    url: str = ""
    key: RSAKey = field(default_factory=lambda: new_key("first"))
    published: list[dict[str, Any]] | None = None
    claims: dict[str, Any] = field(default_factory=dict)
    """Over those that are right; None removes one."""
    metadata: dict[str, Any] = field(default_factory=dict)
    make_token: Callable[["ScriptedProvider", dict[str, Any]], str] | None = None
    instead: dict[str, Handler] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    access_token: str = "an-access-token"
    asked: dict[str, str] = field(default_factory=dict)
    """The query of the last authorization request."""

    @property
    def issuer(self) -> str:
        """Return the issuer."""
        return f"{self.url}/realm"

    def authorize(self, address: str, **more: str) -> dict[str, str]:
        """Return what the browser brings back from the address to which it was sent."""
        self.asked = dict(parse_qsl(urlsplit(address).query))
        return {"code": CODE, "state": self.asked["state"], "iss": self.issuer, **more}

    def id_token(self) -> str:
        """Return the ID token of the sign-in that was asked for."""
        now = int(time.time())
        digest = hashlib.sha256(self.access_token.encode()).digest()[:16]
        claims: dict[str, Any] = {
            "iss": self.issuer,
            "sub": "subject-1",
            "aud": CLIENT_ID,
            "exp": now + 300,
            "iat": now,
            "nonce": self.asked.get("nonce"),
            "at_hash": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
            "email": "ada@example.com",
            "email_verified": True,
            "groups": ["ops"],
            **self.claims,
        }
        claims = {name: value for name, value in claims.items() if value is not None}
        if self.make_token is not None:
            return self.make_token(self, claims)
        return jwt.encode({"alg": "RS256", "kid": self.key.kid}, claims, self.key)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request."""
        path = request.path.removeprefix("/realm")
        self.requests.append(path)
        if path in self.instead:
            found: web.StreamResponse = await self.instead[path](request)
            return found
        match path:
            case "/.well-known/openid-configuration":
                return web.json_response(self._metadata())
            case "/keys":
                keys = [self.key.as_dict(private=False)]
                return web.json_response(
                    {"keys": keys if self.published is None else self.published}
                )
            case "/token":
                return self._token(parse_qs(await request.text()), request)
        return web.Response(status=404)

    def _metadata(self) -> dict[str, Any]:
        return {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "jwks_uri": f"{self.issuer}/keys",
            **self.metadata,
        }

    def _token(self, form: dict[str, list[str]], request: web.Request) -> web.Response:
        credentials = base64.b64encode(b"rooms:s%2Fe%3Ac%20ret").decode()
        challenge = hashlib.sha256(form.get("code_verifier", [""])[0].encode()).digest()
        right = (
            request.headers.get("Authorization") == f"Basic {credentials}"
            and form.get("grant_type") == ["authorization_code"]
            and form.get("code") == [CODE]
            and form.get("redirect_uri") == [self.asked.get("redirect_uri")]
            and base64.urlsafe_b64encode(challenge).rstrip(b"=").decode()
            == self.asked.get("code_challenge")
            and self.asked.get("code_challenge_method") == "S256"
        )
        if not right:
            problem = {"error": "invalid_grant", "error_description": "wrong\x1b[31m code"}
            return web.json_response(problem, status=400)
        tokens = {"id_token": self.id_token(), "access_token": self.access_token}
        return web.json_response({**tokens, "token_type": "Bearer", "expires_in": 300})


def unsigned(_: ScriptedProvider, claims: dict[str, Any]) -> str:
    """Return an ID token without a signature."""
    parts = [json.dumps({"alg": "none", "typ": "JWT"}), json.dumps(claims)]
    return ".".join(_encoded(part.encode()) for part in parts) + "."


def signed_with_public_key(provider: ScriptedProvider, claims: dict[str, Any]) -> str:
    """Return an ID token that is signed symmetrically, with a public value as the secret."""
    import hmac

    header = json.dumps({"alg": "HS256", "typ": "JWT", "kid": provider.key.kid})
    body = ".".join(_encoded(part.encode()) for part in (header, json.dumps(claims)))
    secret = provider.key.as_pem(private=False)
    return f"{body}.{_encoded(hmac.new(secret, body.encode(), hashlib.sha256).digest())}"


def _encoded(part: bytes) -> str:
    return base64.urlsafe_b64encode(part).rstrip(b"=").decode()


async def never(_: web.Request) -> web.StreamResponse:
    """Take a request, and never answer it."""
    await asyncio.Event().wait()
    raise AssertionError


@asynccontextmanager
async def scripted_provider() -> AsyncIterator[ScriptedProvider]:
    """Run a provider on a port of loopback."""
    provider = ScriptedProvider()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", provider.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        provider.url = f"http://127.0.0.1:{port}"
        yield provider
    finally:
        await runner.cleanup()
