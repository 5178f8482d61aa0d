"""Serve `/v1/signing-keys`: the public keys by which an organisation signs its messages."""

import re
from datetime import datetime
from typing import Annotated, Any, Final

from litestar import Response, delete, get, post
from litestar.params import JSONBody, PathParameter
from msgspec import Meta, Struct

from rooms.api.auth import Caller, ServicesDep, require_scopes
from rooms.api.changes import ChangeDep
from rooms.api.codec import Body, validate_name
from rooms.api.errors import documented_responses
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.db.catalog import signing_keys as records
from rooms.db.connection import transaction
from rooms.domain.state_machine import Scope
from rooms.errors import FieldProblem, InvalidError, NotFoundError
from rooms.evidence.jose import KID_PATTERN, EvidenceError, PublicKey, end_of, public_key

_LIST: Final = "signing-keys"
_TAGS: Final = ["evidence"]
_ADMIN: Final = require_scopes(Scope.ADMIN)
_KID: Final = re.compile(KID_PATTERN)
_TIMES: Final = frozenset({"nbf", "exp", "iat"})
_MAX_MEMBERS: Final = 10
_MAX_TEXT: Final = 128

KidPath = Annotated[
    str,
    PathParameter(
        description="The key's thumbprint by RFC 7638, in base64url.",
        schema_extra={"pattern": f"^{KID_PATTERN}$"},
    ),
]


class CreateSigningKey(Struct, forbid_unknown_fields=True, kw_only=True):
    """Register a public key."""

    name: Annotated[str, Meta(min_length=1, max_length=_MAX_TEXT)]
    jwk: Annotated[
        dict[
            Annotated[str, Meta(max_length=_MAX_TEXT)],
            Annotated[str, Meta(max_length=_MAX_TEXT)]
            | Annotated[list[Annotated[str, Meta(max_length=16)]], Meta(max_length=_MAX_MEMBERS)],
        ],
        Meta(
            max_length=_MAX_MEMBERS,
            description="A public JWK: kty OKP with crv Ed25519, or kty EC with crv P-256.",
        ),
    ]


class SigningKeyResponse(Struct, kw_only=True):
    """Describe a public key. In `jwk`, `exp` says until when a revoked key proves anything."""

    kid: str
    name: str
    algorithm: str
    jwk: dict[str, Any]
    created_at: datetime
    revoked_at: datetime | None


class SigningKeyPage(Struct, kw_only=True):
    """List signing keys."""

    items: list[SigningKeyResponse]
    next_cursor: str | None


@post(
    "/signing-keys",
    dto=Body[CreateSigningKey],
    return_dto=None,
    opt=_ADMIN,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Register a signing key",
)
async def create_signing_key(
    data: JSONBody[CreateSigningKey], principal: Caller, change: ChangeDep
) -> Response[SigningKeyResponse]:
    """Register a public key by which your organisation signs messages; its `kid` is its thumbprint.

    409: it is registered or was revoked, or 20 keys are active, or 200 are kept.
    """
    validate_name(data.name)
    try:
        key = public_key({name: one for name, one in data.jwk.items() if name not in _TIMES})
    except EvidenceError as exc:
        raise InvalidError(FieldProblem("jwk", str(exc))) from exc
    async with change.transaction() as connection:
        change.after = {"name": data.name, "kid": key.kid, "jwk": dict(key.members)}
        made = await records.register_key(
            connection,
            principal.organisation_id,
            kid=key.kid,
            name=data.name,
            jwk=key.members,
        )
    return Response(_to_response(made), headers={"Location": f"/v1/signing-keys/{key.kid}"})


@get("/signing-keys", opt=_ADMIN, tags=_TAGS, summary="List signing keys")
async def list_signing_keys(
    services: ServicesDep, principal: Caller, limit: Limit = 50, cursor: Cursor = None
) -> SigningKeyPage:
    """List the organisation's public keys in the order of their `kid`, with revoked ones."""
    page = PageRequest(services.cipher, _LIST, limit, cursor)
    async with transaction(services.engine) as connection:
        found = await records.list_keys(
            connection, principal.organisation_id, after=page.after, limit=page.fetch_limit
        )
    return page.respond(SigningKeyPage, found, _to_response, position=lambda key: key.kid)


@get("/signing-keys/{kid:str}", opt=_ADMIN, tags=_TAGS, summary="Read a signing key")
async def read_signing_key(
    services: ServicesDep, principal: Caller, kid: KidPath
) -> SigningKeyResponse:
    """Return one public key, also a revoked one."""
    async with transaction(services.engine) as connection:
        found = await records.find_key(connection, principal.organisation_id, _parse(kid))
    return _to_response(found)


@delete("/signing-keys/{kid:str}", opt=_ADMIN, tags=_TAGS, summary="Revoke a signing key")
async def revoke_signing_key(principal: Caller, change: ChangeDep, kid: KidPath) -> None:
    """Revoke a key for good: within a second, no message is accepted with it.

    It stays in the list, because messages that it signed before are verified with it.
    """
    identity = _parse(kid)
    async with change.transaction() as connection:
        found = await records.revoke_key(connection, principal.organisation_id, identity)
        change.before = {"name": found.name, "kid": found.kid}


def _parse(kid: str) -> str:
    """Return a `kid`. NotFoundError: the text cannot be one."""
    if not _KID.fullmatch(kid):
        raise NotFoundError("there is no such signing key")
    return kid


def to_public_key(record: records.SigningKeyRecord) -> PublicKey:
    """Return a registered key with the time in which it is valid."""
    return public_key(
        record.jwk, valid_from=record.created_at, valid_until=end_of(record.revoked_at)
    )


def _to_response(record: records.SigningKeyRecord) -> SigningKeyResponse:
    key = to_public_key(record)
    return SigningKeyResponse(
        kid=record.kid,
        name=record.name,
        algorithm=key.algorithm,
        jwk=key.to_jwk(),
        created_at=record.created_at,
        revoked_at=record.revoked_at,
    )


ROUTES: Final = [create_signing_key, list_signing_keys, read_signing_key, revoke_signing_key]
