"""Serve `/v1/journal`: who changed what, and what was refused."""

from collections.abc import AsyncIterator
from datetime import datetime
from typing import Annotated, Any, Final, Literal

import msgspec
from litestar import Response, get
from litestar.params import QueryParameter
from litestar.response import Stream
from msgspec import Struct

from rooms.api.auth import Caller, ServicesDep, require_scopes
from rooms.api.deps import ApiServices
from rooms.api.exports import CSV_MEDIA_TYPE, csv_lines, while_key_lasts
from rooms.api.openapi import TableOperation
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.api.params import Since, Until, parse_id, parse_time
from rooms.api.stream_task import in_own_task
from rooms.db import journal as records
from rooms.db.connection import transaction
from rooms.domain.ids import OrganisationId
from rooms.domain.journal import ActorKind, ChainedEntry, Outcome, to_document
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.errors import FieldProblem, ForbiddenError, InvalidError

_LIST: Final = "journal"
_TAGS: Final = ["journal"]
_AUDIT: Final = require_scopes(Scope.AUDIT, Scope.PLATFORM)
_NDJSON: Final = "application/x-ndjson"
ALL: Final = "*"

OrganisationQuery = Annotated[
    str | None,
    QueryParameter(
        description="Another organisation's id, or * for all: with the scope `platform`."
    ),
]


class JournalEntryResponse(Struct, kw_only=True):
    """Describe an entry. `hash` covers its content and `previous_hash`."""

    seq: int
    id: str
    organisation_id: str
    at: datetime
    actor_kind: ActorKind
    actor_id: str | None
    actor_name: str
    actor_organisation_id: str | None
    application: str | None
    source: str | None
    request_id: str | None
    action: str
    object: str
    before: Any
    after: Any
    outcome: Outcome
    reason: str | None
    previous_hash: str
    hash: str


class JournalPage(Struct, kw_only=True):
    """List entries, newest first."""

    items: list[JournalEntryResponse]
    next_cursor: str | None


class JournalVerification(Struct, kw_only=True):
    """Say whether the chain is whole; `broken_at` and `problem` name its first wrong entry."""

    whole: bool
    entries: int
    first: int | None
    last: int | None
    head_hash: str | None
    broken_at: int | None
    problem: str | None


@get("/journal", opt=_AUDIT, tags=_TAGS, summary="List the journal")
async def list_journal(
    *,
    services: ServicesDep,
    principal: Caller,
    limit: Limit = 50,
    cursor: Cursor = None,
    since: Since = None,
    until: Until = None,
    actor: Annotated[str | None, QueryParameter(description="Only of keys of this name.")] = None,
    action: Annotated[str | None, QueryParameter(description="Only this action.")] = None,
    object_path: Annotated[
        str | None,
        QueryParameter(name="object", description="Only objects whose path begins so."),
    ] = None,
    outcome: Annotated[Outcome | None, QueryParameter(description="Only this outcome.")] = None,
    organisation_id: OrganisationQuery = None,
) -> JournalPage:
    """List changes of configuration and refused attempts at them, newest first.

    An organisation has a journal of its own; the scope `platform` reads those of others.
    """
    wanted = records.JournalFilter(
        organisation=_whose(principal, organisation_id),
        since=parse_time("since", since),
        until=parse_time("until", until),
        actor=actor,
        action=action,
        object=object_path,
        outcome=outcome,
    )
    page = PageRequest(services.cipher, _LIST, limit, cursor)
    async with transaction(services.engine) as connection:
        found = await records.list_entries(
            connection, wanted, before=_position(page.after), limit=page.fetch_limit
        )
    return page.respond(
        JournalPage,
        found,
        _to_response,
        position=lambda chained: f"{chained.entry.at.isoformat()} {chained.entry.id}",
    )


@get(
    "/journal/export",
    opt=_AUDIT,
    tags=_TAGS,
    summary="Export the journal",
    operation_class=TableOperation,
    media_type=_NDJSON,
)
async def export_journal(
    services: ServicesDep,
    principal: Caller,
    file_format: Annotated[
        Literal["ndjson", "csv"], QueryParameter(name="format", description="ndjson or csv.")
    ] = "ndjson",
    organisation_id: OrganisationQuery = None,
) -> Stream:
    """Stream one organisation's whole journal, oldest entry first.

    NDJSON has the hashes: `rooms journal verify FILE` checks it without the service.
    """
    organisation = _whose(principal, organisation_id)
    if organisation is None:
        raise InvalidError(
            FieldProblem("organisation_id", "an export is of one organisation; name its id")
        )
    rows = _csv_rows if file_format == "csv" else _ndjson_rows
    media_type = CSV_MEDIA_TYPE if file_format == "csv" else _NDJSON
    return Stream(
        in_own_task(while_key_lasts(services, principal, rows(services, organisation))),
        headers={
            # The route's media type, which documents NDJSON, would replace that of the stream.
            "Content-Type": media_type,
            "Content-Disposition": f'attachment; filename="journal.{file_format}"',
        },
    )


@get("/journal/verify", opt=_AUDIT, tags=_TAGS, summary="Verify the journal")
async def verify_journal(
    services: ServicesDep, principal: Caller, organisation_id: OrganisationQuery = None
) -> Response[JournalVerification]:
    """Check the chain of one organisation's journal: every hash, every number, and its head.

    A caller's organisation has one checked at a time. 429: too many wait.
    """
    organisation = _whose(principal, organisation_id)
    if organisation is None:
        raise InvalidError(FieldProblem("organisation_id", "name one organisation's id"))
    # It goes on after its client is gone, so there must not be any number of them.
    async with services.journal_turns.slot(principal.organisation_id):
        report = await records.verify_chain(services.engine, organisation)
    broken = report.broken
    return Response(
        JournalVerification(
            whole=broken is None,
            entries=report.entries,
            first=report.first,
            last=report.last,
            head_hash=None if report.head_hash is None else report.head_hash.hex(),
            broken_at=None if broken is None else broken.seq,
            problem=None if broken is None else broken.problem,
        )
    )


def _whose(principal: Principal, organisation_id: str | None) -> OrganisationId | None:
    """Return whose journal is meant; None: every organisation's. ForbiddenError."""
    if organisation_id is None or organisation_id == principal.organisation_id:
        if not principal.has_scope(Scope.AUDIT):
            raise ForbiddenError(
                "the own journal needs a key with the scope audit or admin; "
                "platform reads those of others by organisation_id"
            )
        return principal.organisation_id
    if not principal.has_scope(Scope.PLATFORM):
        raise ForbiddenError("another organisation's journal needs the scope platform")
    if organisation_id == ALL:
        return None
    return OrganisationId(parse_id(organisation_id, "organisation"))


def _position(text: str | None) -> tuple[datetime, str] | None:
    if text is None:
        return None
    at, _, identity = text.partition(" ")
    return datetime.fromisoformat(at), identity


def _to_response(chained: ChainedEntry) -> JournalEntryResponse:
    return msgspec.convert(to_document(chained), JournalEntryResponse)


async def _ndjson_rows(services: ApiServices, organisation: OrganisationId) -> AsyncIterator[bytes]:
    async for batch in records.read_batches(services.engine, organisation):
        yield b"".join(msgspec.json.encode(to_document(one)) + b"\n" for one in batch)


async def _csv_rows(services: ApiServices, organisation: OrganisationId) -> AsyncIterator[bytes]:
    columns = list(JournalEntryResponse.__struct_fields__)
    yield csv_lines([columns])
    async for batch in records.read_batches(services.engine, organisation):
        documents = map(to_document, batch)
        yield csv_lines([document[name] for name in columns] for document in documents)


ROUTES: Final = [list_journal, export_journal, verify_journal]
