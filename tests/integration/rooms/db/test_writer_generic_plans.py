"""Check the plans of hot statements if the planner has no statistics or wrong ones.

Plans are kept, and must be right when the tables have grown.
"""

import re
from collections.abc import Callable

import psycopg
import pytest

from rooms.db.jobs import waiting_retries
from rooms.db.leases import ack, acquire, acquire_copies, release
from rooms.db.operational import batches, completion
from rooms.db.queue import (
    broker_change,
    broker_claims,
    claims,
    holds,
    lookahead,
    ordering,
    orphans,
    outcomes,
    relay,
    resend,
    throttle,
    withdraw,
)
from rooms.db.sideline import entries, shovel
from rooms.domain.ids import RoomId, first_id
from tests.support.publisher import IDS, make_id
from tests.support.query_plans import kept_plans

STATEMENTS = {
    "take": acquire._ACQUIRE,
    "ack": ack._ACK,
    "nack": release._GIVE_BACK,
    "extend": release._EXTEND,
    "end": release._EXPIRE,
    "end of others": release._EXPIRE_OF_OTHERS,
    "look": release._INSPECT,
    "look up": release._SUBSCRIPTIONS,
    "due": release._DUE,
    "claim": claims._CLAIM,
    "claim of others": claims._CLAIM_OF_OTHERS,
    "claim by key": claims._CLAIM_OF_OTHERS_BY_KEY,
    "count skipped": claims._HAVE_MANY_SUBSCRIPTIONS,
    "messages": claims._LOAD_MESSAGES,
    "release": claims._RELEASE,
    "decide": outcomes._DECIDE,
    "deliver": outcomes._DELIVER,
    "decide in order": outcomes._DECIDE_ORDERED,
    "decide sidelined": outcomes._DECIDE_SIDELINED,
    "decide sidelined in order": outcomes._DECIDE_SIDELINED_ORDERED,
    "disable": throttle._DISABLE,
    "completed": completion._COMPLETE,
    "completed in turn": completion._COMPLETE_IN_TURN,
    "due for completion": completion._COUNT_DUE,
    "waiting events": batches._EVENTS,
    "take events": batches._TAKE,
    "ack in order": ack._ACK_ORDERED,
    "mend order": ordering._REPAIR,
    "advance": ordering._ADVANCE,
    "skip": ordering._SKIP,
    "release held": holds._RELEASE_HELD,
    "drain": holds._DRAIN,
    "probe": holds._PROBE,
    "open circuit": throttle._OPEN_CIRCUIT,
    "close circuit": throttle._CLOSE_CIRCUIT,
    "draw": throttle._TAKE_TOKENS,
    "take copies": broker_claims._CLAIM,
    "look at copies": broker_claims._INSPECT,
    "adopt": orphans._CREATE_ORPHAN_ROWS,
    "sideline": orphans._SIDELINE_WITHOUT_MESSAGE,
    "put apart": orphans._SIDELINE_VERSIONS,
    "relay": relay._CLAIM,
    "relay of others": relay._CLAIM_OF_OTHERS,
    "relay by key": relay._CLAIM_OF_OTHERS_BY_KEY,
    "mark": relay._MARK_SENT,
    "give back": relay._RELEASE,
    "end copies": relay._END_DELIVERIES,
    "come due": lookahead._STAGE_DUE,
    "withdraw": withdraw._CANCEL,
    "move": withdraw._RESCHEDULE,
    "retry": waiting_retries._RETRY,
    "count retries": waiting_retries._COUNT,
    "lease copies": acquire_copies._LEASE,
    "look at queues": acquire_copies._DUE_BY_QUEUE,
    "restore named": resend._RESEND_BY_VERSION,
    "restore": resend._RESEND_PAGE,
    "change over": broker_change._MIGRATE,
    "of here": broker_change._ANY_EMBEDDED,
    "of another": broker_change._ANY_RELAYED,
    "living": relay._EXISTING_SUBSCRIPTIONS,
    "unloaded": entries._LIST_UNLOADED,
    "unloaded sidelines": entries._LIST_UNLOADED_SIDELINES,
    "loaded": entries._RECORD_LOADED,
    "lost": entries._RECORD_LOST,
    "placed": entries._LIST_PLACED,
    "placed of": entries._LIST_PLACED_OF,
    "forget": entries._DELETE_STALE,
    "slots": entries._SLOTS,
    "moved": entries._RECORD_MOVED,
    "shovel": shovel._SHOVEL,
    "purge": shovel._PURGE,
}
OWN = {
    "take": {"outbox_pull"}, "due": {"outbox_pull"}, "end": {"leases_until"}, "end of others": {"leases_until", "subscriptions_of_organisation"}, "claim": {"outbox_push"},
    "claim of others": {"outbox_push", "subscriptions_of_organisation"}, "claim by key": {"outbox_push", "subscriptions_pkey"}, "count skipped": {"subscriptions_of_organisation"},
    "relay of others": {"outbox_to_send", "subscriptions_of_organisation"}, "relay by key": {"outbox_to_send", "subscriptions_pkey", "subscriptions_of_organisation"},
    "release held": {"held_subscription"}, "drain": {"held_subscription"}, "probe": {"held_subscription"}, "relay": {"outbox_to_send"}, "come due": {"outbox_later", "due_buckets_pkey"},
    "of here": {"outbox_push", "outbox_pull"}, "of another": {"outbox_to_send", "outbox_pull_away", "outbox_later", "upkeep_marks_pkey"},
    "lease copies": {"outbox_pull_away"}, "look at queues": {"outbox_pull_away"}, "unloaded": {"sidelined_unloaded"},
    "unloaded sidelines": {"sidelined_unloaded"}, "placed of": {"sidelined_subscription"},
    "adopt": {"upkeep_marks_pkey"}, "completed": {"operational_messages_check"},
    "completed in turn": {"operational_messages_room"}, "due for completion": {"operational_messages_check"},
    "withdraw": {"ordered_waiting_id"},
}  # fmt: skip
# These choose from a hundred thousand rows and more, which their index has in order.
SORTED = {"release held", "drain", "probe", "unloaded", "unloaded sidelines", "placed of"}
# What lets the next of an ordering key go finds the key by its head, in whatever statement.
HEAD = "ordered_keys_head"
# A step of a job looks up the job by its id among those that are open.
OPEN_JOBS = "jobs_open"
# Operational events are found by room, and so are their recipients.
EVENTS = re.compile(
    r"(?:operational_\w+_pkey|subscriptions_operational) on .*\n.*Index Cond: \(\(?room_id = "
)
# By the whole key, or on from one, page after page.
BY_KEY = re.compile(
    r"Index Cond: \(\((?:\w+\.)?room_id = .*\) AND \((?:\w+\.)?id = |Index Cond: \(id = |Index Cond: \(ROW\(room_id, id\) > ROW\("
    r"|Index Cond: \(\(room_id = .*\) AND \(id >=? .*\) AND \(id < "
    r"|Index Cond: \(\(room_id = .*\) AND \(subscription_id = .*\) AND \(key = |Index Cond: \(ROW\(room_id, subscription_id, key\) > ROW\("
)
SCAN = re.compile(r"(?:Index Scan|Index Only Scan|Bitmap Index Scan)(?: using| on) (\w+)")


def unknown(connection: "psycopg.Connection[tuple[object, ...]]") -> None:
    """No table was analysed."""


def emptied(connection: "psycopg.Connection[tuple[object, ...]]") -> None:
    """Work came and went, and vacuum came by when one row was left, and the first messages were there."""
    ids = [make_id(RoomId(1)) for _ in range(50)]
    connection.execute(
        "INSERT INTO messages (room_id, id, event_type, event_version, priority, fanout, correlation_id, payload)"
        " SELECT 1, id, 'made', 1, 4, 1, 'c', '' FROM unnest(%s::uuid[]) id",
        [ids],
    )
    connection.execute(
        "INSERT INTO deliveries (room_id, id, message_id, subscription_id, state)"
        " SELECT 1, id, id, id, 'delivered' FROM unnest(%s::uuid[]) id",
        [ids],
    )
    connection.execute(
        "INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, due_at)"
        " SELECT n, gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), 1, 4, 0, 0, now() FROM generate_series(1, 5000) n"
    )
    connection.execute(
        "INSERT INTO leases (room_id, id, subscription_id, generation, until)"
        " SELECT n, gen_random_uuid(), gen_random_uuid(), 0, now() FROM generate_series(1, 5000) n"
    )
    connection.execute(
        "INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason)"
        " SELECT n, gen_random_uuid(), gen_random_uuid(), 4, 0, 'paused' FROM generate_series(1, 5000) n"
    )
    connection.execute("DELETE FROM held WHERE room_id < 5000")
    connection.execute("DELETE FROM outbox WHERE room_id < 5000")
    connection.execute("DELETE FROM leases WHERE room_id < 5000")
    for table in ("outbox", "leases", "held", "deliveries", "messages"):
        ((partition,),) = connection.execute(
            f"SELECT DISTINCT tableoid::regclass::text FROM {table}".encode()
        )
        connection.execute(f"VACUUM ANALYZE {partition}".encode())


def retained(connection: "psycopg.Connection[tuple[object, ...]]") -> None:
    """One row of a past day had to stay; retention leaves the day without an analysis."""
    low, high = first_id(1_583_798_400_000), first_id(1_583_884_800_000)
    identity = IDS.generate(RoomId(1), 1_583_800_000_000)
    for table in ("messages", "deliveries", "log_entries"):
        name = f"{table}_20200310_kept1"
        connection.execute(
            f"CREATE TABLE {name} (LIKE {table} INCLUDING DEFAULTS INCLUDING INDEXES)".encode()
        )
        connection.execute(
            f"ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES FROM ('{low}') TO ('{high}')".encode()
        )
    connection.execute(
        "INSERT INTO messages (room_id, id, event_type, event_version, priority, fanout, correlation_id, payload)"
        " VALUES (1, %s, 'made', 1, 4, 1, 'c', '')",
        [identity],
    )
    connection.execute(
        "INSERT INTO deliveries (room_id, id, message_id, subscription_id, state) VALUES (1, %s, %s, %s, 'sidelined')",
        [identity] * 3,
    )


@pytest.mark.parametrize("state", [unknown, emptied, retained])
def test_rows_are_found_by_primary_key_and_queues_by_their_index(
    database: str, state: "Callable[[psycopg.Connection[tuple[object, ...]]], None]"
) -> None:
    wrong = []
    with psycopg.connect(database, autocommit=True) as connection:
        state(connection)
        for name, plan in kept_plans(connection, STATEMENTS):
            wrong += [
                (name, line.strip())
                for line in plan
                if "Seq Scan" in line or "Bitmap" in line or (name in SORTED and "Sort" in line)
            ]
            used = {found[1]: at for at, line in enumerate(plan) if (found := SCAN.search(line))}
            wrong += [
                (name, f"{index} is not used") for index in OWN.get(name, set()) - used.keys()
            ]
            wrong += [
                (name, line.strip() + " / " + plan[at + 1].strip())
                for at, line in enumerate(plan)
                if (found := SCAN.search(line))
                and found[1] not in OWN.get(name, set())
                and found[1] != HEAD
                and not EVENTS.search(f"{line}\n{plan[at + 1]}")
                and not found[1].startswith("pg_")
                if not (found[1].endswith("_pkey") or found[1] == OPEN_JOBS)
                or not BY_KEY.search(plan[at + 1])
            ]
    assert wrong == [], "\n".join(map(str, wrong))
