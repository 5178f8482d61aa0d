"""THE statement: everything that a group of publishes writes, in one go or not at all.

Every value travels in arrays of PostgreSQL's binary form. The rows of a message and of its deliveries are tuples of
packed elements, most of them packed once for a room's plan; a column is their concatenation.

A group is written only when every plan in it is current and no idempotency key in it is taken: a statement that found
otherwise writes nothing and says which. So the common case joins nothing, and the rare one costs a second round.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import psycopg
from msgspec import Raw

from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.place import Place
from rooms.domain.states import SubscriptionType
from rooms.storage import arrays
from rooms.storage.arrays import NULL, octets, uuid
from rooms.storage.writer import Writer

Row = tuple[bytes, ...]

KEYS_KEPT: Final = "24 hours"
"""How long an idempotency key answers; an older one is free again, whether or not upkeep has come by."""

_PLANS: Final = (("room_id", "int4"), ("version", "int8"))
_MESSAGES: Final = (
    ("n", "int4"), ("room_id", "int4"), ("id", "uuid"), ("event_type", "text"), ("event_version", "int4"),
    ("priority", "int2"), ("fanout", "int4"), ("life_ms", "int8"), ("publisher_id", "uuid"), ("correlation_id", "text"),
    ("ordering_key", "text"), ("headers", "bytea"), ("payload", "bytea"),
)  # fmt: skip
_DELIVERIES: Final = (
    ("n", "int4"), ("room_id", "int4"), ("id", "uuid"), ("message_id", "uuid"), ("subscription_id", "uuid"),
    ("kind", "int2"), ("policy_version", "int4"), ("priority", "int2"), ("life_ms", "int8"), ("event_type", "text"),
    ("event_version", "int4"), ("correlation_id", "text"),
)  # fmt: skip
_KEYS: Final = (
    ("room_id", "int4"), ("key", "text"), ("message_id", "uuid"), ("request_hash", "bytea"), ("answer", "bytea"),
)  # fmt: skip
_TABLES: Final = (_PLANS, _MESSAGES, _DELIVERIES, _KEYS)
_KINDS: Final = tuple(tuple(kind for _, kind in columns) for columns in _TABLES)

# A key taken between the look and the insert makes the insert fail for its null, and the group is tried again.
_TAKEN: Final = """, taken AS MATERIALIZED (
    SELECT t.room_id, t.key, t.request_hash, t.answer
    FROM ({keys}) k JOIN idempotency_keys t ON t.room_id = k.room_id AND t.key = k.key
    WHERE t.created_at > now() - interval '{kept}'
)"""
_TAKE: Final = """, taking AS (
    INSERT INTO idempotency_keys AS old (room_id, key, message_id, request_hash, answer)
    SELECT room_id, key, message_id, request_hash, answer FROM ({keys}) k WHERE (SELECT yes FROM clear)
    ON CONFLICT (room_id, key) DO UPDATE SET request_hash = excluded.request_hash, answer = excluded.answer,
        created_at = excluded.created_at, message_id = CASE
            WHEN old.created_at <= now() - interval '{kept}' THEN excluded.message_id END
)"""


def _statement(*, keyed: bool, place: str = "kind") -> str:
    numbers = itertools.count(1)
    plans, messages, deliveries, keys = (
        "SELECT " + ", ".join(f"unnest(${next(numbers)}::{kind}[]) AS {name}" for name, kind in columns)
        for columns in (_TABLES if keyed else (*_TABLES[:-1], ()))
    )
    rows, writer, seq = (next(numbers) for _ in range(3))
    taken, take, no_key_taken, found_taken = "", "", "", ""
    if keyed:
        taken, take = (text.format(keys=keys, kept=KEYS_KEPT) for text in (_TAKEN, _TAKE))
        no_key_taken = "AND NOT EXISTS (SELECT FROM taken)"
        found_taken = "UNION ALL SELECT room_id, NULL, key, request_hash, answer FROM taken"
    return f"""
WITH stale AS MATERIALIZED (
    SELECT p.room_id, p.version FROM ({plans}) p WHERE NOT EXISTS (
        SELECT FROM rooms r WHERE r.id = p.room_id AND r.plan_version = p.version AND NOT r.deleting)
){taken}, clear AS MATERIALIZED (
    SELECT NOT EXISTS (SELECT FROM stale) {no_key_taken} AS yes
), m AS MATERIALIZED (
    SELECT *, now() + life_ms * interval '1 ms' AS expires_at FROM ({messages}) m WHERE (SELECT yes FROM clear)
), d AS MATERIALIZED (
    SELECT *, now() + life_ms * interval '1 ms' AS expires_at FROM ({deliveries}) d WHERE (SELECT yes FROM clear)
){take}, message AS (
    INSERT INTO messages (room_id, id, event_type, event_version, priority, fanout, expires_at, publisher_id,
        correlation_id, ordering_key, headers, payload)
    SELECT room_id, id, event_type, event_version, priority, fanout, expires_at, publisher_id, correlation_id,
        ordering_key, headers, payload FROM m
), delivery AS (
    INSERT INTO deliveries (room_id, id, message_id, subscription_id, state, due_at, expires_at)
    SELECT room_id, id, message_id, subscription_id, 'queued', now(), expires_at FROM d
), work AS (
    INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, due_at, expires_at)
    SELECT room_id, id, message_id, subscription_id, {place}, priority, 0, 0, now(), expires_at FROM d
), log AS (
    INSERT INTO delivery_log (room_id, message_id, writer_id, writer_seq, kind, subscription_id, delivery_id,
        generation, attempt, event_version, fanout, payload_bytes, policy_version, correlation_id, event_type)
    SELECT room_id, id, ${writer}::int4, ${seq}::int8 + n, 'published', NULL, NULL, NULL, NULL, event_version, fanout,
        octet_length(payload), NULL, correlation_id, event_type FROM m
    UNION ALL
    SELECT room_id, message_id, ${writer}::int4, ${seq}::int8 + n, 'enqueued', subscription_id, id, 0, 0,
        event_version, NULL, NULL, policy_version, correlation_id, event_type FROM d
)
SELECT CASE WHEN c.yes THEN ${rows}::int8 ELSE 0 END, x.* FROM clear c LEFT JOIN (
    SELECT room_id, version, NULL::text AS key, NULL::bytea AS request_hash, NULL::bytea AS answer FROM stale
    {found_taken}
) x ON true
"""  # noqa: S608 - names of our own columns


PUBLISH: Final = _statement(keyed=False)
PUBLISH_KEYED: Final = _statement(keyed=True)
_TO_SEND: Final = f"kind + {Place.PUSH_TO_SEND - Place.PUSH_HERE}"
PUBLISH_RELAYED: Final = _statement(keyed=False, place=_TO_SEND)
PUBLISH_RELAYED_KEYED: Final = _statement(keyed=True, place=_TO_SEND)
_KIND_NUMBERS: Final = {
    SubscriptionType.PUSH: arrays.int2(Place.PUSH_HERE),
    SubscriptionType.PULL: arrays.int2(Place.PULL_HERE),
}
_PRIORITIES: Final = tuple(arrays.int2(priority) for priority in range(10))


class RouteRows:
    """The packed elements that every message of one event type and version in one room shares."""

    __slots__ = ("event_type", "event_version", "fanout", "recipients", "room")

    def __init__(
        self,
        room: RoomId,
        event_type: str,
        event_version: int,
        recipients: Sequence[tuple[SubscriptionId, SubscriptionType, int]],
    ) -> None:
        self.room = arrays.room(room)
        self.event_type = arrays.octets(event_type.encode())
        self.event_version = arrays.int4(event_version)
        self.fanout = arrays.int4(len(recipients))
        self.recipients = tuple(
            (arrays.uuid_of(identity), _KIND_NUMBERS[kind], arrays.int4(version))
            for identity, kind, version in recipients
        )


class Submission:
    """One request, ready to be written: whole or not at all. `begun_s`: when it came, on the monotonic clock."""

    __slots__ = (
        "answer", "begun_s", "deliveries", "key", "messages", "plan_version", "pulls", "pushes", "request_hash",
        "room_id", "rows", "size",
    )  # fmt: skip

    def __init__(self, room_id: RoomId, plan_version: int) -> None:
        self.room_id = room_id
        self.plan_version = plan_version
        self.answer = b""
        self.key: str | None = None
        self.request_hash = b""
        self.begun_s = 0.0
        self.messages: list[Row] = []
        self.deliveries: list[Row] = []
        self.rows = 0
        """Messages and deliveries."""
        self.size = 0
        """Bytes of payload."""
        self.pushes = False
        self.pulls: frozenset[SubscriptionId] = frozenset()

    def add(
        self,
        route: RouteRows,
        *,
        identity: bytes,
        publisher: bytes,
        correlation_id: bytes,
        priority: int,
        life_ms: int | None,
        ordering_key: str | None,
        headers: bytes | None,
        payload: bytes | Raw,
        delivery_numbers: Iterable[int],
    ) -> None:
        """Put in one message and a delivery for each recipient of its route.

        `identity` and `publisher` (the key that published) are packed elements. `life_ms` None: it never expires.
        """
        correlation = octets(correlation_id)
        urgency = _PRIORITIES[priority]
        life = NULL if life_ms is None else arrays.int8(life_ms)
        room, event_type, version = route.room, route.event_type, route.event_version
        self.messages.append((
            room, identity, event_type, version, urgency, route.fanout, life, publisher, correlation,
            NULL if ordering_key is None else octets(ordering_key.encode()),
            NULL if headers is None else octets(headers),
            octets(payload),
        ))  # fmt: skip
        self.deliveries += [
            (room, uuid(number), identity, subscription, kind, policy, urgency, life, event_type, version, correlation)
            for number, (subscription, kind, policy) in zip(delivery_numbers, route.recipients, strict=True)
        ]
        self.rows += 1 + len(route.recipients)
        self.size += len(payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What stood in the way of a group; with both empty it is written."""

    stale: frozenset[tuple[int, int]] = frozenset()
    """(room, plan version) that is no longer current."""
    taken: Mapping[tuple[int, str], tuple[bytes, bytes]] = field(default_factory=dict)
    """(room, idempotency key) → (hash of the request that took it, its answer)."""
    raced: bool = False
    """Somebody else took a key at the same moment: the same group again will find it taken."""

    @property
    def stands_in_the_way(self) -> bool:
        """Whether anything did, so that nothing is written."""
        return bool(self.stale or self.taken or self.raced)


WRITTEN: Final = Verdict()
_RACED: Final = Verdict(raced=True)


async def write_group(writer: Writer, group: Sequence[Submission]) -> Verdict:
    """Write all submissions in one transaction, or none. No two of them may carry the same key of the same room.

    StorageUnavailableError: in doubt. StorageRefusedError: nothing was written.
    """
    plans = sorted({(submission.room_id, submission.plan_version) for submission in group})
    keyed = [submission for submission in group if submission.key is not None]
    # Two processes that take the same keys in the same order cannot wait for each other in a circle.
    keyed.sort(key=lambda submission: (submission.room_id, submission.key))
    messages = [row for submission in group for row in submission.messages]
    deliveries = [row for submission in group for row in submission.deliveries]
    numbers = [arrays.int4(n) for n in range(len(messages) + len(deliveries))]
    values = [
        *_packed(_KINDS[0], [(arrays.room(room), arrays.int8(version)) for room, version in plans]),
        arrays.array("int4", numbers[: len(messages)]),
        *_packed(_KINDS[1][1:], messages),
        arrays.array("int4", numbers[len(messages) :]),
        *_packed(_KINDS[2][1:], deliveries),
    ]
    if keyed:
        values += _packed(_KINDS[3], [_key_row(submission) for submission in keyed])
    values.append(len(numbers).to_bytes(8, "big"))
    try:
        plain, with_keys = (
            (PUBLISH_RELAYED, PUBLISH_RELAYED_KEYED) if writer.shape.relayed else (PUBLISH, PUBLISH_KEYED)
        )
        found = await writer.run_packed(with_keys if keyed else plain, values)
    except psycopg.errors.NotNullViolation as exc:
        if keyed and exc.diag.table_name == "idempotency_keys":
            return _RACED
        raise
    return _verdict(found) if found else WRITTEN


def _packed(kinds: Sequence[str], rows: Sequence[Row]) -> list[bytes]:
    """The rows as one array a column."""
    columns: Iterable[Sequence[bytes]] = zip(*rows, strict=True) if rows else itertools.repeat(())
    return [arrays.array(kind, column) for kind, column in zip(kinds, columns, strict=False)]


def _key_row(submission: Submission) -> Row:
    return (
        arrays.room(submission.room_id),
        arrays.octets((submission.key or "").encode()),
        submission.messages[0][1],
        arrays.octets(submission.request_hash),
        arrays.octets(submission.answer),
    )


def _verdict(found: Sequence[tuple[bytes | None, ...]]) -> Verdict:
    stale: set[tuple[int, int]] = set()
    taken: dict[tuple[int, str], tuple[bytes, bytes]] = {}
    for room, version, key, request_hash, answer in found:
        identity = int.from_bytes(room or b"", "big")
        if key is None:
            stale.add((identity, int.from_bytes(version or b"", "big")))
        else:
            taken[identity, key.decode()] = (request_hash or b"", answer or b"")
    return Verdict(stale=frozenset(stale), taken=taken)
