"""Test that every growing table has its room in its key, and every statement names the room."""

import asyncio
import importlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Final

import rooms.db
from tests.support.installation import installed

OF_NO_ROOM = {
    "organisations", "api_keys", "rooms", "jobs", "writers", "processes", "write_probes", "upkeep_marks", "alembic_version",
    "election_members", "election_partitions", "election_terms", "handler_queues", "queues",
    "log_exports", "log_export_writers", "analysis_runs", "analysis_rows", "due_buckets", "journal", "journal_heads",
    "signing_keys", "receipt_keys", "usage_mark", "activity_minutes", "quota_days", "quota_stored", "sign_in_links",
}  # fmt: skip
"""Small tables, of which every shard of a cluster would hold a copy."""

BY_MAGAZINE: Final = {
    "magazines": "id",
    "magazine_pointers": "magazine_id",
    "magazine_entries": "magazine_id",
}
"""Tables keyed by magazine, which may be stored elsewhere as a whole (as in Aerospike)."""

ACROSS_ROOMS: Final = {
    "queue.claims._CLAIM": "a worker takes what is due in any room; a cluster has another broker",
    "queue.claims._CLAIM_TEMPLATE": "the same",
    "queue.claims._CLAIM_OF_OTHERS": "the same, without those of organisations whose turn it is not",
    "queue.claims._CLAIM_OF_OTHERS_BY_KEY": "the same",
    "queue.claims.OF_OTHER_ORGANISATIONS": "the subscriptions of an organisation are in any room",
    "queue.claims._OF_ORGANISATIONS": "the same",
    "queue.claims._HAVE_MANY_SUBSCRIPTIONS": "the same",
    "queue.claims.OF_OTHERS_AND_NOT_ENDED": "the same",
    "queue.relay.OF_OTHERS_AND_NOT_ENDED": "the same",
    "queue.claims._NEXT_DUE": "the same worker asks when to look again",
    "queue.orphans._FIND_CRASH_LOOPS": "the doctor looks through the queue of all rooms for what workers die with",
    "queue.orphans._COUNT_ORPHANS": "the doctor counts the orphans of all rooms",
    "queue.claims._DEPTH": "the one PUSH queue is counted whole",
    "queue.resend._COUNT_SENT": "a recovery sends again what the broker had of any room",
    "queue.holds._LIST_HELD": "a worker scans held deliveries of all rooms once a second",
    "leases.release._EXPIRE": "upkeep ends leases of any room",
    "leases.release._LAPSED": "the same",
    "leases.release._EXPIRE_OF_OTHERS": "the same, without those of organisations whose turn it is not",
    "leases.release.OF_OTHER_ORGANISATIONS": "the subscriptions of an organisation are in any room",
    "leases.release._ANY_EXPIRED": "the same, to see whether there are any",
    "queue.expire._BY_TIME": "upkeep ends what expired in any room",
    "queue.expire._EXPIRE_BY_TIME": "upkeep ends what expired in any room",
    "queue.expire._BY_TIME_TEMPLATE": "the same",
    "queue.expire._BY_TIME_OF_OTHERS": "the same, without those of organisations whose turn it is not",
    "queue.expire._EXPIRE_BY_TIME_OF_OTHERS": "the same",
    "queue.expire.OF_OTHER_ORGANISATIONS": "the subscriptions of an organisation are in any room",
    "queue.expire._ANY_BY_TIME": "the same, to see whether there is any",
    "queue.relay._NOTHING_SENT": "a relay asks once whether the broker is new to the whole installation",
    "queue.relay._CLAIM": "the relay sends for all rooms, as a worker takes from all",
    "queue.relay._CLAIM_TEMPLATE": "the same",
    "queue.relay._CLAIM_OF_OTHERS": "the same, without those whose turn it is not",
    "queue.relay._CLAIM_OF_OTHERS_BY_KEY": "the same",
    "queue.lookahead._STAGE_DUE": "upkeep has what comes due in any room sent",
    "queue.broker_change._ANY_EMBEDDED": "upkeep asks whether anything of any room stands where the other shape had it",
    "queue.broker_change._ANY_RELAYED": "upkeep asks whether anything of any room stands where the other shape had it",
    "queue.broker_change._MIGRATE": "upkeep moves what another shape has left, in any room",
    "queue.resend._PAGE": "what a broker has lost is of any room",
    "queue.resend._RESEND_PAGE": "what a broker has lost is of any room",
    "queue.resend._SENT_COUNTS": "the broker's queues are counted, the one of PUSH whole",
    "catalog.native_subscriptions._PASSWORDS": "upkeep holds the broker's users against the native subscriptions of all rooms",
    "catalog.native_subscriptions._STATE": "the same, to see that nothing has changed",
    "sideline.entries._LIST_UNLOADED_SIDELINES": "one member looks for what came to rest in any room",
    "sideline.entries._LIST_UNLOADED": "one member loads what came to rest in any room",
    "sideline.entries._LIST_PLACED_OF": "the audit goes on with several subscriptions, in any room",
    "sideline.entries._SIDELINES": "the audit asks who has a sideline, in any room",
    "sideline.entries._LIST_PLACED": "the doctor goes through every room, in the order of the key",
    "sideline.entries._SUBSCRIPTIONS": "the audit asks who has a sideline, in any room",
    "queue.integrity._SCAN": "the doctor goes through every room, in the order of the key",
    "queries.log_export._HAS_ROWS": "the log leaves by transactions, of whatever room",
    "queries.log_export.FIRST_RESTORED": "the same, of a log that was restored into another server",
    "queries.restored_log.FIRST_RESTORED": "the same",
    "queries.log_export._COPY": "the log leaves by transactions, of whatever room",
    "queries.failures._SYMPTOMS": "an organisation with many subscriptions has them in any room",
    "queries.failures._WAITING": "the same",
    "queries.failures._FAILING_LANES": "the same",
    "sideline.overview._ANY": "the same",
    "sideline.overview.OVERVIEW_OF_MANY": "the same",
    "quotas._SUBSCRIPTIONS_IN_USE": "an organisation subscribes to any room",
    "queries.search.BUSINESS_KEYS": "a search goes through the rooms that the organisation may read",
    "queries.search.CALLER_IDS": "the same",
    "queries.search.ROOM_NAMES": "the same",
    "queries.search.SUBSCRIPTION_NAMES": "the same",
    "queries.search._SHARED": "the same",
    "usage.count._ANY_NAMED": "the count asks once whether any message at all names who published it",
    "usage.read._NEXT_HOUR": "a report goes through the hours of an organisation, in any room",
    "usage.read._NEXT_HOUR_OF_ALL": "the platform's report goes through the hours of all rooms",
    "queue.ordering._REPAIR": "upkeep walks over the keys of any room, in the order of their own key",
    "queue.ordering._ANY_KEY": "the same, to see whether there are any",
    "operational.batches._DUE_GROUPS": "upkeep sends the events of all rooms, in the order of the key",
    "operational.completion._COMPLETE": "upkeep looks at awaited messages of any room, by time",
    "operational.completion._COMPLETE_IN_TURN": "the same, in turns of the rooms' owners",
    "operational.completion._COUNT_DUE": "the same, to see how many are due",
    "secret_rotation._PLAIN": "a process that starts seals what is in clear text in any room",
    "secret_rotation._SEALED_BY_OTHERS": "a rotation of the key goes through every room, in the order of the table's key",
    "secret_rotation._COUNT": "a process that starts needs the keys of the whole installation",
    "secret_rotation._UNNAMED": "a process that starts needs the keys of the whole installation",
    "retention.cleanup._DELETE_SEQUENCES": "retention walks over the keys of any room, in the order of their own key",
    "retention.cleanup._DELETE_EXPIRED_KEYS": "upkeep forgets the old keys of any room",
    "retention.cleanup._DELETE_DEAD_WRITERS": "upkeep forgets writers, which belong to no room",
}
"""Statements that may span rooms, and why."""

_SQL = re.compile(r"\b(?:SELECT|INSERT INTO|UPDATE|DELETE FROM)\b")


async def growing_tables(database: str) -> dict[str, list[str]]:
    """Return the primary keys of tables that grow with published messages, from the catalog."""
    async with installed(database) as installation:
        found = await installation.rows(
            """
            SELECT c.relname AS name, array_agg(a.attname::text ORDER BY k.n) AS key
            FROM pg_class c JOIN pg_namespace s ON s.oid = c.relnamespace AND s.nspname = 'public'
                LEFT JOIN pg_index i ON i.indrelid = c.oid AND i.indisprimary
                LEFT JOIN LATERAL unnest(i.indkey) WITH ORDINALITY AS k (attnum, n) ON true
                LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.attnum
            WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition GROUP BY c.relname
            """
        )
    tables = {row["name"]: row["key"] for row in found if row["name"] not in OF_NO_ROOM}
    assert {name: tables.pop(name)[0] for name in BY_MAGAZINE} == BY_MAGAZINE
    return tables


def statements() -> Iterator[tuple[str, str]]:
    """Yield every SQL text that a module of `rooms.db` has, by `module.NAME`."""
    for module in pkgutil.walk_packages(rooms.db.__path__, "rooms.db."):
        loaded = importlib.import_module(module.name)
        for name, value in vars(loaded).items():
            if isinstance(value, str) and name != "__doc__" and _SQL.search(value):
                yield f"{module.name.removeprefix('rooms.db.')}.{name}", value


def blocks(statement: str) -> list[str]:
    """Return the text of each query in parentheses, without its inner queries; and the outermost."""
    done, stack = [], [""]
    for char in re.sub(r"'[^']*'|--[^\n]*", "''", statement):
        if char == "(":
            stack.append("")
        elif char == ")":
            inner = stack.pop()
            if _SQL.search(inner):
                done.append(inner)
            else:
                stack[-1] += f"({inner})"
        else:
            stack[-1] += char
    return [*done, *stack]


def touched(block: str, tables: set[str]) -> set[str]:
    """Return the tables that the block names."""
    return set(re.findall(r"\b(?:FROM|JOIN|INTO|UPDATE|USING|,)\s+(\w+)", block)) & tables


def bound(block: str) -> bool:
    """Return True if the block compares the room or writes it."""
    return bool(
        re.search(
            r"room_id\s*=|=\s*(?:\w+\.)?room_id|INTO \w+(?: AS \w+)?\s*\([^)]*\broom_id", block
        )
    )


async def test_every_growing_table_has_its_room_in_its_key(database: str) -> None:
    tables = await growing_tables(database)
    assert {
        "messages",
        "deliveries",
        "log_entries",
        "outbox",
        "held",
        "leases",
        "idempotency_keys",
    } <= set(tables)
    assert {name: key for name, key in tables.items() if key[0] != "room_id"} == {}


async def test_every_statement_names_the_room(database: str) -> None:
    tables = {*await growing_tables(database), "delivery_log", "published_messages"}
    nameless = {
        name: sorted(touched(block, tables))
        # In a thread: it imports every module of queries.
        for name, statement in await asyncio.to_thread(lambda: list(statements()))
        for block in blocks(statement)
        if touched(block, tables) and not bound(block)
    }
    assert {name: found for name, found in nameless.items() if name not in ACROSS_ROOMS} == {}
    assert set(ACROSS_ROOMS) - set(nameless) == set(), "unneeded exceptions"


def test_the_checker_finds_statements_without_room() -> None:
    tables = {"deliveries", "outbox"}
    good = "WITH d AS (UPDATE deliveries SET a = (b + 1) WHERE room_id = 1) SELECT * FROM d"
    bad = "WITH d AS (UPDATE deliveries SET a = '(x)' WHERE id = 1) SELECT room_id FROM d, outbox"
    assert [touched(block, tables) for block in blocks(good) if not bound(block)] == [set()]
    assert [touched(block, tables) for block in blocks(bad)] == [{"deliveries"}, {"outbox"}]
    assert len(list(statements())) > 10
