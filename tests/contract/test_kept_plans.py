"""Plans of the hot statements where the planner knows nothing of the tables, or the wrong thing: they are kept, and must
be right when the tables have grown.
"""

import re
from collections.abc import Callable

import psycopg
import pytest

from rooms.domain.ids import RoomId, first_id
from rooms.storage import (
    acks,
    changeover,
    claims,
    copy_leases,
    holds,
    horizon,
    lanes,
    lease_ends,
    order,
    orphans,
    outbox,
    outcomes,
    recovery,
    relay,
    shovels,
    sidelines,
    takes,
    withdrawals,
)
from tests.plans import kept_plans
from tests.publishing import IDS, make_id

STATEMENTS = {
    "take": takes._TAKE,
    "ack": acks._ACK,
    "nack": lease_ends._NACK,
    "extend": lease_ends._EXTEND,
    "end": lease_ends._END,
    "look": lease_ends._LOOK,
    "due": lease_ends._DUE,
    "claim": outbox._CLAIM,
    "messages": outbox._MESSAGES,
    "release": outbox._RELEASE,
    "decide": outcomes._DECIDE,
    "deliver": outcomes._DELIVER,
    "decide in order": outcomes._DECIDE_ORDERED,
    "ack in order": acks._ACK_ORDERED,
    "mend order": order._MEND,
    "advance": order._ADVANCE,
    "skip": order._SKIP,
    "release held": holds._RELEASE_HELD,
    "drain": holds._DRAIN,
    "probe": holds._PROBE,
    "open circuit": lanes._OPEN,
    "close circuit": lanes._CLOSE,
    "draw": lanes._DRAW,
    "take copies": claims._TAKE,
    "look at copies": claims._LOOK,
    "adopt": orphans._ADOPT,
    "sideline": orphans._SIDELINE,
    "put apart": orphans._APART,
    "relay": relay._CLAIM,
    "mark": relay._MARK,
    "give back": relay._RELEASE,
    "end copies": relay._END,
    "come due": horizon._COME_DUE,
    "withdraw": withdrawals._WITHDRAW,
    "move": withdrawals._MOVE,
    "lease copies": copy_leases._LEASE,
    "look at queues": copy_leases._LOOK,
    "restore named": recovery._RESTORE_NAMED,
    "restore": recovery._RESTORE_PAGE,
    "change over": changeover._MOVE,
    "of here": changeover._OF_HERE,
    "of another": changeover._OF_ANOTHER,
    "living": relay._LIVING,
    "unloaded": sidelines._UNLOADED,
    "loaded": sidelines._LOADED,
    "lost": sidelines._LOST,
    "placed": sidelines._PLACED,
    "forget": sidelines._FORGET,
    "slots": sidelines._SLOTS,
    "moved": sidelines._MOVED,
    "shovel": shovels._SHOVEL,
    "purge": shovels._PURGE,
}
OWN = {
    "take": {"outbox_pull"}, "due": {"outbox_pull"}, "end": {"leases_until"}, "claim": {"outbox_push"},
    "release held": {"held_subscription"}, "drain": {"held_subscription"}, "probe": {"held_subscription"}, "relay": {"outbox_to_send"}, "come due": {"outbox_later", "due_buckets_pkey"},
    "of here": {"outbox_push", "outbox_pull"}, "of another": {"outbox_to_send", "outbox_pull_away", "outbox_later", "upkeep_marks_pkey"},
    "lease copies": {"outbox_pull_away"}, "look at queues": {"outbox_pull_away"}, "unloaded": {"sidelined_unloaded"},
    "adopt": {"upkeep_marks_pkey"},
}  # fmt: skip
# What lets the next of an ordering key go finds the key by its head, in whatever statement.
HEAD = "ordered_keys_head"
# By the whole key, or on from one, page after page.
BY_KEY = re.compile(
    r"Index Cond: \(\((?:\w+\.)?room_id = .*\) AND \((?:\w+\.)?id = |Index Cond: \(id = |Index Cond: \(ROW\(room_id, id\) > ROW\("
    r"|Index Cond: \(\(room_id = .*\) AND \(id >= .*\) AND \(id < "
    r"|Index Cond: \(\(room_id = .*\) AND \(subscription_id = .*\) AND \(key = |Index Cond: \(ROW\(room_id, subscription_id, key\) > ROW\("
)
SCAN = re.compile(r"(?:Index Scan|Index Only Scan|Bitmap Index Scan)(?: using| on) (\w+)")


def unknown(connection: "psycopg.Connection[tuple[object, ...]]") -> None:
    """Nobody has analysed anything."""


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
        ((partition,),) = connection.execute(f"SELECT DISTINCT tableoid::regclass::text FROM {table}".encode())
        connection.execute(f"VACUUM ANALYZE {partition}".encode())


def retained(connection: "psycopg.Connection[tuple[object, ...]]") -> None:
    """Of a day that is over a single row had to stay; as retention leaves it, nobody analyses it."""
    low, high = first_id(1_583_798_400_000), first_id(1_583_884_800_000)
    identity = IDS.make(RoomId(1), 1_583_800_000_000)
    for table in ("messages", "deliveries", "log_entries"):
        name = f"{table}_20200310_kept1"
        connection.execute(f"CREATE TABLE {name} (LIKE {table} INCLUDING DEFAULTS INCLUDING INDEXES)".encode())
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
            wrong += [(name, line.strip()) for line in plan if "Seq Scan" in line or "Bitmap" in line]
            used = {found[1]: at for at, line in enumerate(plan) if (found := SCAN.search(line))}
            wrong += [(name, f"{index} is not used") for index in OWN.get(name, set()) - used.keys()]
            wrong += [
                (name, line.strip() + " / " + plan[at + 1].strip())
                for at, line in enumerate(plan)
                if (found := SCAN.search(line))
                and found[1] not in OWN.get(name, set())
                and found[1] != HEAD
                and not found[1].startswith("pg_")
                if not found[1].endswith("_pkey") or not BY_KEY.search(plan[at + 1])
            ]
    assert wrong == [], "\n".join(map(str, wrong))
