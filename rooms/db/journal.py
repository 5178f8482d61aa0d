"""Store the journal: every change of configuration, and every refused attempt at one.

An entry is written by the transaction of its change. The head of the organisation's chain is locked
by the last statements before the commit, so that changes wait for each other only that long.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import RowMapping, Select, delete, select, text, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.sql import func

from rooms.db.connection import transaction, wait_for_share
from rooms.db.statement_parts import rows_as_json
from rooms.db.tables.organisations import journal, journal_heads, organisations
from rooms.domain.ids import OrganisationId
from rooms.domain.journal import (
    FIRST_HASH,
    ActorKind,
    ChainBreak,
    ChainCheck,
    ChainedEntry,
    JournalEntry,
    Outcome,
    chain_entries,
)

MAX_SIDE_BYTES: Final = 8192
"""The most bytes of JSON that `before` or `after` keeps."""
_READ_BATCH: Final = 100
"""Entries read at a time. Their JSON, up to 1.6 MB, is decoded at once on the event loop."""
_VERIFY_RETRIES: Final = 5
_ALLOW_RETENTION: Final = text("SELECT set_config('rooms.journal_retention', 'on', true)")
_LOCK_HEAD: Final = text(
    "SELECT seq, hash FROM journal_heads WHERE organisation_id = CAST(:organisation_id AS uuid) FOR UPDATE"
)
_CREATE_HEAD: Final = text("""
INSERT INTO journal_heads AS h (organisation_id, seq, previous_hash, hash)
VALUES (CAST(:organisation_id AS uuid), 0, :first_hash, :first_hash)
ON CONFLICT (organisation_id) DO UPDATE SET seq = h.seq
RETURNING seq, hash
""")
_APPEND: Final = text("""
WITH head AS (
    UPDATE journal_heads SET seq = :last_seq, previous_hash = :last_previous_hash, hash = :last_hash
    WHERE organisation_id = CAST(:organisation_id AS uuid)
)
INSERT INTO journal (organisation_id, seq, id, at, actor_kind, actor_id, actor_name, actor_organisation_id, application, source,
    request_id, action, object, before, after, outcome, reason, previous_hash, hash)
SELECT CAST(:organisation_id AS uuid), e.seq, e.id, e.at, e.actor_kind, e.actor_id, e.actor_name, e.actor_organisation_id,
    e.application, e.source, e.request_id, e.action, e.object, CAST(e.before AS json), CAST(e.after AS json), e.outcome, e.reason, e.previous_hash, e.hash
FROM json_to_recordset(CAST(:rows AS json)) AS e (seq int8, id uuid, at timestamptz, actor_kind text, actor_id uuid,
    actor_name text, actor_organisation_id uuid, application text, source text, request_id text, action text, object text,
    before text, after text, outcome text, reason text, previous_hash bytea, hash bytea)
""")


def bounded(value: Any) -> Any:
    """Return a value whose JSON has at most `MAX_SIDE_BYTES`: a larger one is cut, and says so."""
    plain = msgspec.to_builtins(value)
    size = len(msgspec.json.encode(plain))
    if size <= MAX_SIDE_BYTES:
        return plain
    return {"cut": f"{size} bytes are more than the {MAX_SIDE_BYTES} that the journal keeps"}


async def append(connection: AsyncConnection, *entries: JournalEntry) -> None:
    """Add entries to the chain of their organisation, in this order, at the end of a transaction.

    The chain is locked until the commit, so nothing should follow. ValueError: the entries are of
    several organisations.
    """
    if not entries:
        return
    owner = entries[0].organisation_id
    if any(entry.organisation_id != owner for entry in entries):
        raise ValueError("a chain holds the entries of one organisation")
    head = (await connection.execute(_LOCK_HEAD, {"organisation_id": owner})).one_or_none()
    if head is None:
        created = {"organisation_id": owner, "first_hash": FIRST_HASH}
        head = (await connection.execute(_CREATE_HEAD, created)).one()
    chain = chain_entries(entries, head.seq, bytes(head.hash))
    last = chain[-1]
    parameters = {
        "organisation_id": owner,
        "last_seq": last.seq,
        "last_previous_hash": last.previous_hash,
        "last_hash": last.hash,
        "rows": rows_as_json(list(map(_row, chain))),
    }
    await connection.execute(_APPEND, parameters)


async def has_entry(connection: AsyncConnection, entry: JournalEntry) -> bool:
    """Wait for entries that are being written; return whether its organisation's chain has it."""
    await connection.execute(_LOCK_HEAD, {"organisation_id": entry.organisation_id})
    # Its time selects partitions and few rows; it is that of this process, before the first
    # attempt.
    found = select(journal.c.id).where(
        journal.c.organisation_id == entry.organisation_id,
        journal.c.at == entry.at,
        journal.c.id == entry.id,
    )
    return await connection.scalar(found) is not None


def _row(chained: ChainedEntry) -> dict[str, Any]:
    row = {name: getattr(chained.entry, name) for name in JournalEntry.__slots__}
    for side in ("before", "after"):
        # text in the JSON of the row, so that PostgreSQL does not decode what is in it
        row[side] = None if row[side] is None else msgspec.json.encode(row[side]).decode()
    return row | {
        "seq": chained.seq,
        "previous_hash": chained.previous_hash,
        "hash": chained.hash,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalFilter:
    """Select entries; None: any. `organisation` None: of every organisation."""

    organisation: OrganisationId | None
    since: datetime | None = None
    until: datetime | None = None
    actor: str | None = None
    action: str | None = None
    object: str | None = None
    outcome: Outcome | None = None


async def list_entries(
    connection: AsyncConnection,
    wanted: JournalFilter,
    *,
    before: tuple[datetime, str] | None,
    limit: int,
) -> Sequence[ChainedEntry]:
    """Return entries, newest first."""
    statement = entries_before(wanted, before).limit(limit)
    return [_chained(row) for row in (await connection.execute(statement)).mappings()]


def entries_before(wanted: JournalFilter, before: tuple[datetime, str] | None) -> Select[Any]:
    """Return the query for entries before a position (None: the end), newest first."""
    statement = select(journal).order_by(journal.c.at.desc(), journal.c.id.desc())
    if wanted.organisation is not None:
        statement = statement.where(journal.c.organisation_id == wanted.organisation)
    if wanted.since is not None:
        statement = statement.where(journal.c.at >= wanted.since)
    if wanted.until is not None:
        statement = statement.where(journal.c.at < wanted.until)
    if wanted.actor is not None:
        statement = statement.where(journal.c.actor_name == wanted.actor)
    if wanted.action is not None:
        statement = statement.where(journal.c.action == wanted.action)
    if wanted.object is not None:
        statement = statement.where(journal.c.object.startswith(wanted.object, autoescape=True))
    if wanted.outcome is not None:
        statement = statement.where(journal.c.outcome == wanted.outcome.value)
    if before is not None:
        statement = statement.where(tuple_(journal.c.at, journal.c.id) < before)
    return statement


async def read_chain(
    connection: AsyncConnection, organisation: OrganisationId, *, after: int, limit: int
) -> Sequence[ChainedEntry]:
    """Return the next entries of a chain, in the order of their numbers."""
    statement = (
        select(journal)
        .where(journal.c.organisation_id == organisation, journal.c.seq > after)
        .order_by(journal.c.seq)
        .limit(limit)
    )
    return [_chained(row) for row in (await connection.execute(statement)).mappings()]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainReport:
    """Say whether an organisation's chain is whole, from the first entry that is kept to the last.

    `broken` None: it is.
    """

    entries: int
    first: int | None
    last: int | None
    head_hash: bytes | None
    broken: ChainBreak | None


async def verify_chain(engine: AsyncEngine, organisation: OrganisationId) -> ChainReport:
    """Check every entry that is kept, a batch at a time, and the head.

    Retention may delete the oldest entries meanwhile. Then the check begins again, a few times.

    StorageUnavailableError, StorageRefusedError.
    """
    head = await _read_head(engine, organisation)
    report = await _verify(engine, organisation, head)
    for _ in range(_VERIFY_RETRIES):
        former, head = head, await _read_head(engine, organisation)
        if report.broken is None or head["kept_from"] == former["kept_from"]:
            break
        report = await _verify(engine, organisation, head)
    return report


async def _read_head(engine: AsyncEngine, organisation: OrganisationId) -> RowMapping:
    async with transaction(engine) as connection:
        found: RowMapping = (await connection.execute(_head_of(organisation))).mappings().one()
        return found


async def read_batches(
    engine: AsyncEngine, organisation: OrganisationId
) -> AsyncIterator[Sequence[ChainedEntry]]:
    """Yield a chain in the order of its numbers, some entries a transaction.

    StorageUnavailableError, StorageRefusedError, RateLimitedError.
    """
    after = 0

    async def read() -> Sequence[ChainedEntry]:
        async with transaction(engine) as connection:
            return await read_chain(connection, organisation, after=after, limit=_READ_BATCH)

    while True:
        found = await wait_for_share(read)
        if found:
            yield found
            after = found[-1].seq
        if len(found) < _READ_BATCH:
            return


async def _verify(
    engine: AsyncEngine, organisation: OrganisationId, head: RowMapping
) -> ChainReport:
    check, count, first, broken = ChainCheck(), 0, None, _check_bounds(head)
    last_seq = 0 if head["seq"] is None else head["seq"]
    async for batch in read_batches(engine, organisation):
        for chained in batch:
            if broken is not None or chained.seq > last_seq:
                break
            first = chained.seq if first is None else first
            broken = check.add(chained)
            count += broken is None
        if broken is not None or batch[-1].seq >= last_seq:
            break
    if broken is None:
        broken = _check_head(head, check, first)
    return ChainReport(
        entries=count,
        first=first,
        last=check.seq,
        head_hash=None if head["hash"] is None else bytes(head["hash"]),
        broken=broken,
    )


def _head_of(organisation: OrganisationId) -> Select[Any]:
    """Return the head with the least and the greatest number of an entry, as of one moment.

    Its columns are null where there is no head.
    """
    entries = (
        select(func.min(journal.c.seq).label("least"), func.max(journal.c.seq).label("greatest"))
        .where(journal.c.organisation_id == organisation)
        .subquery()
    )
    return select(entries, journal_heads).select_from(
        entries.outerjoin(journal_heads, journal_heads.c.organisation_id == organisation)
    )


def _check_bounds(head: RowMapping) -> ChainBreak | None:
    """Find entries that no change has written: they are not between the first and the head."""
    if head["least"] is None:
        return None
    if head["seq"] is None:
        return ChainBreak(head["least"], "follows no known head")
    if head["least"] < head["kept_from"]:
        return ChainBreak(head["least"], f"is added: the first entry is {head['kept_from']}")
    if head["greatest"] > head["seq"]:
        return ChainBreak(head["seq"] + 1, f"is added: the last entry is {head['seq']}")
    return None


def _check_head(head: RowMapping, check: ChainCheck, first: int | None) -> ChainBreak | None:
    if head["seq"] is None:
        return None
    if (first or head["seq"] + 1) != head["kept_from"]:
        return ChainBreak(head["kept_from"], "is missing: the chain begins later")
    if (check.seq or head["kept_from"] - 1) != head["seq"]:
        return ChainBreak((check.seq or 0) + 1, f"is missing: the last entry is {head['seq']}")
    if check.seq is not None and check.hash != bytes(head["hash"]):
        return ChainBreak(check.seq, "is not the last entry that was written")
    return None


async def list_chains(
    connection: AsyncConnection, *, after: str, limit: int
) -> list[OrganisationId]:
    """Return the next organisations that have a journal, by id, also those that were deleted."""
    statement = (
        select(journal_heads.c.organisation_id)
        .where(journal_heads.c.organisation_id > after)
        .order_by(journal_heads.c.organisation_id)
        .limit(limit)
    )
    return [OrganisationId(row) for row in (await connection.execute(statement)).scalars()]


async def delete_before(
    connection: AsyncConnection, organisation: OrganisationId, until: datetime, *, limit: int
) -> int:
    """Delete the oldest entries, written before a time; return how many.

    The head keeps the number from which the chain is whole; the entry there has the hash of the
    last deleted one. The newest entry stays, unless the organisation was deleted: then the head
    goes with it.
    """
    await connection.execute(_ALLOW_RETENTION)
    head = select(journal_heads.c.seq).where(journal_heads.c.organisation_id == organisation)
    newest = await connection.scalar(head.with_for_update())
    exists = await connection.scalar(
        select(organisations.c.id).where(organisations.c.id == organisation)
    )
    oldest = (
        select(journal.c.seq, journal.c.at)
        .where(journal.c.organisation_id == organisation)
        .order_by(journal.c.seq)
        .limit(limit)
    )
    gone = []
    for seq, at in (await connection.execute(oldest)).all():
        if at >= until or (seq == newest and exists is not None):
            break
        gone.append(seq)
    if not gone:
        return 0
    await connection.execute(
        delete(journal).where(journal.c.organisation_id == organisation, journal.c.seq <= gone[-1])
    )
    kept_head = journal_heads.c.organisation_id == organisation
    if gone[-1] == newest:
        await connection.execute(delete(journal_heads).where(kept_head))
    else:
        await connection.execute(
            update(journal_heads).where(kept_head).values(kept_from=gone[-1] + 1)
        )
    return len(gone)


def _chained(row: RowMapping) -> ChainedEntry:
    fields = {name: row[name] for name in JournalEntry.__slots__}
    fields["actor_kind"] = ActorKind(row["actor_kind"])
    fields["outcome"] = Outcome(row["outcome"])
    return ChainedEntry(
        seq=row["seq"],
        previous_hash=bytes(row["previous_hash"]),
        hash=bytes(row["hash"]),
        entry=JournalEntry(**fields),
    )
