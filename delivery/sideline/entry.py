"""What a subscription's sideline keeps of a delivery."""

import json
from datetime import datetime

from rooms.domain.magazine import Entry
from rooms.storage.sidelines import Unloaded


def entry_of(one: Unloaded) -> Entry:
    """The entry of a sidelined delivery; its id is the delivery's. The payload stays with the message."""
    body = {
        "delivery_id": one.step.delivery_id,
        "message_id": one.message_id,
        "subscription_id": one.step.subscription_id,
        "reason": one.reason,
        "last_status": one.last_status,
        "last_error": one.last_error,
        "attempts": one.attempts,
        "shovel_count": one.shovels,
        "correlation_id": one.correlation_id,
        "event_type": one.event_type,
        "event_version": one.event_version,
        "published_at": _text(one.published_at),
        "sidelined_at": _text(one.since),
    }
    return Entry(
        id=one.step.delivery_id,
        body=json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode(),
        generation=one.step.generation,
        shovels=one.shovels,
        reason=one.reason,
        detail=one.last_error,
        expires_at=one.expires_at,
    )


def _text(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()
