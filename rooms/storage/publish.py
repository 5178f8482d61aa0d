"""THE statement: everything that a group of publishes writes, in one go or not at all.

Every value travels in arrays of PostgreSQL's binary form. The row of a message is a tuple of
packed elements, most of them packed once for a room's plan, and so are its deliveries, all of them in one tuple; a column is their concatenation.

A group is written only when every plan in it is current and no idempotency key and no id of a publisher's own in it is
taken: a statement that found otherwise writes nothing and says which. So the common case joins nothing, and the rare one
costs a second round.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import psycopg

from rooms.domain.ids import RoomId
from rooms.storage import arrays
from rooms.storage.arrays import octets, uuid
from rooms.storage.publish_statement import (
    DELIVERIES,
    HOLD,
    KEYS,
    LOGGED,
    MESSAGES,
    MORE_OF_DELIVERIES,
    MORE_OF_MESSAGES,
    NAMES,
    ORDER,
    PLANS,
    Columns,
    publish_statement,
)
from rooms.storage.submission import Name, Row, Submission
from rooms.storage.writer import Writer

_NO_MESSAGE: Final = uuid(bytes(16))
"""In the row of a key whose request published nothing: all its messages had been, under ids of their publisher's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What stood in the way of a group; where nothing did it is written."""

    stale: frozenset[tuple[int, int]] = frozenset()
    """(room, plan version) that is no longer current."""
    taken: Mapping[tuple[int, str], tuple[bytes, bytes]] = field(default_factory=dict)
    """(room, idempotency key) → (hash of the request that took it, its answer)."""
    named: Mapping[tuple[int, str], tuple[bytes, bytes]] = field(default_factory=dict)
    """(room, id of a publisher's own) → (hash of the content that has it, its answer)."""
    raced: bool = False
    """Somebody else took a key or an id at the same moment: the same group again will find it taken."""

    @property
    def stands_in_the_way(self) -> bool:
        """Whether anything did, so that nothing is written."""
        return bool(self.stale or self.taken or self.named or self.raced)


WRITTEN: Final = Verdict()
_RACED: Final = Verdict(raced=True)


async def write_group(writer: Writer, group: Sequence[Submission]) -> Verdict:
    """Write all submissions in one transaction, or none. No two of them may have a claim in common.

    StorageUnavailableError: in doubt. StorageRefusedError: nothing was written.
    """
    plans = sorted({(submission.room_id, submission.plan_version) for submission in group})
    # Two processes that take the same keys in the same order cannot wait for each other in a circle.
    keyed = sorted(
        (submission for submission in group if submission.key is not None), key=lambda one: (one.room_id, one.key)
    )
    extended = any(submission.more_of_messages for submission in group)
    ordered = any(submission.order_of_deliveries for submission in group)
    # Where there is more to be said of the group, nothing is held: a worker holds it when it meets it.
    holding = not (extended or ordered) and any(submission.hold_of_deliveries for submission in group)
    messages = [row for submission in group for row in submission.messages]
    deliveries = [row for submission in group for row in submission.deliveries]
    # A message's deliveries are numbered behind it in the log.
    *numbers, count = itertools.accumulate((1 + each for submission in group for each in submission.fanouts), initial=0)
    fanout = count - len(messages)
    values = [
        *_packed(PLANS, [(arrays.room(room), arrays.int8(version)) for room, version in plans]),
        arrays.array("int4", [arrays.int4(n) for n in numbers]),
        *_packed(MESSAGES[1:], messages),
    ]
    more = [submission.all_more() for submission in group] if extended else []
    if extended:
        values += _packed(MORE_OF_MESSAGES, [row for rows, _ in more for row in rows])
    values += _packed((*DELIVERIES, *LOGGED) if ordered or holding else DELIVERIES, deliveries, fanout)
    if extended:
        values += _packed(MORE_OF_DELIVERIES, [row for _, rows in more for row in rows], fanout)
    if ordered:
        values += _packed(ORDER, [row for submission in group for row in submission.all_order()], fanout)
        values.append(arrays.array("int4", [arrays.int4(n) for n in range(fanout)]))
    if holding:
        values += _packed(HOLD, [row for submission in group for row in submission.all_holds()], fanout)
    if extended:
        values += _packed(NAMES, _name_rows(group))
    if keyed:
        values += _packed(KEYS, [_key_row(submission) for submission in keyed])
    if extended and writer.shape.relayed:
        values.append(writer.shape.horizon_ms.to_bytes(8, "big"))
    values.append(count.to_bytes(8, "big"))
    statement = publish_statement(
        keyed=bool(keyed), extended=extended, relayed=writer.shape.relayed, ordered=ordered, holding=holding
    )
    try:
        found = await writer.run_packed(statement, values)
    except psycopg.errors.NotNullViolation as exc:
        if exc.diag.table_name in {"idempotency_keys", "message_ids"}:
            return _RACED
        raise
    return _verdict(found) if found else WRITTEN


def _packed(columns: Columns, rows: Sequence[Row], count: int | None = None) -> list[bytes]:
    """The rows as one array a column, of `count` elements where several stand in one."""
    values: Iterable[Sequence[bytes]] = zip(*rows, strict=True) if rows else itertools.repeat(())
    return [arrays.array(kind, column, count) for (_, kind), column in zip(columns, values, strict=False)]


def _name_rows(group: Sequence[Submission]) -> list[Row]:
    named: list[tuple[RoomId, str, Name]] = [
        (submission.room_id, name.caller_id, name) for submission in group for name in submission.names
    ]
    named.sort(key=lambda row: row[:2])
    return [
        (
            arrays.room(room),
            octets(caller_id.encode()),
            name.message,
            octets(name.content_hash),
            octets(name.answer),
        )
        for room, caller_id, name in named
    ]


def _key_row(submission: Submission) -> Row:
    return (
        arrays.room(submission.room_id),
        arrays.octets((submission.key or "").encode()),
        submission.messages[0][1] if submission.messages else _NO_MESSAGE,
        arrays.octets(submission.request_hash),
        arrays.octets(submission.answer),
    )


def _verdict(found: Sequence[tuple[bytes | None, ...]]) -> Verdict:
    stale: set[tuple[int, int]] = set()
    taken: dict[tuple[int, str], tuple[bytes, bytes]] = {}
    named: dict[tuple[int, str], tuple[bytes, bytes]] = {}
    for room, version, key, request_hash, answer in found:
        identity = int.from_bytes(room or b"", "big")
        if key is None:
            stale.add((identity, int.from_bytes(version or b"", "big")))
        else:
            (taken if version is None else named)[identity, key.decode()] = (request_hash or b"", answer or b"")
    return Verdict(stale=frozenset(stale), taken=taken, named=named)
