"""Write operational messages: each with its delivery, work row and log, in one statement."""

# ruff: noqa: E501 - SQL statements keep their lines

from typing import Final

from rooms.domain.state_machine import LogKind, State, SubscriptionType

PRIORITY: Final = 4
EXPIRES_AT: Final = (
    "now() + least(nullif(r.message_expiration_ms, 0), o.message_expiration_ms) * interval '1 ms'"
)
"""The end of the lifetime of a message that is published now into the room `r` for the subscription
`o`; null: it has none.
"""

IS_OPERATIONAL: Final = "m.publisher_id IS NULL AND starts_with(m.event_type, 'rooms.')"
"""`IS_OPERATIONAL_MESSAGE` of the message `m`."""

MESSAGE_CTES: Final = f""", message AS (
    INSERT INTO messages (room_id, id, event_type, event_version, priority, fanout, expires_at, correlation_id, payload)
    SELECT room_id, message_id, event, 1, {PRIORITY}, 1, expires_at, message_id::text, payload FROM notice
), delivery AS (
    INSERT INTO deliveries (room_id, id, message_id, subscription_id, state, due_at, expires_at)
    SELECT room_id, id, message_id, subscription_id, '{State.QUEUED}', now(), expires_at FROM notice
), work AS (
    INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, due_at, expires_at)
    SELECT room_id, id, message_id, subscription_id, CASE type WHEN '{SubscriptionType.PULL}' THEN %(pull)s::int2 ELSE %(push)s::int2 END,
        {PRIORITY}, 0, 0, now(), expires_at FROM notice
), log AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_version, fanout, payload_bytes, policy_version, correlation_id, event_type)
    SELECT %(writer)s::int4, %(seq)s::int8 - 1 + row_number() OVER (), x.* FROM (
        SELECT room_id, message_id, '{LogKind.PUBLISHED}', NULL::uuid, NULL::uuid, NULL::int4, NULL::int4, 1, 1,
            octet_length(payload), NULL::int4, message_id::text, event FROM notice
        UNION ALL
        SELECT room_id, message_id, '{LogKind.ENQUEUED}', subscription_id, id, 0, 0, 1, NULL, NULL, policy, message_id::text,
            event FROM notice
    ) x RETURNING 1
)"""  # noqa: S608 - constants of this package
"""Publish the rows of `notice` to one subscription each, in a statement of `LogWriter.run`.

They are (room_id, message_id, id, subscription_id, type, policy, expires_at, event, payload). The
statement returns the number of rows of `log` first.
"""
