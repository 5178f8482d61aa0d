"""Loads sidelined deliveries into the magazines of their subscriptions."""

import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from delivery.maintenance.task import ShouldContinue
from delivery.sideline.magazines import SidelineMagazineCache
from rooms.db.sideline.entries import SidelineEntries, UnloadedEntry
from rooms.domain.ids import SubscriptionId
from rooms.domain.magazine import MAX_BATCH, Entry
from rooms.errors import MagazineMissingError

_log = logging.getLogger(__name__)

LOAD_BATCH: Final = MAX_BATCH


def to_entry(row: UnloadedEntry) -> Entry:
    """Return a sidelined delivery's entry, under its id. The payload stays with the message."""
    body = {
        "delivery_id": row.ref.delivery_id,
        "message_id": row.message_id,
        "subscription_id": row.ref.subscription_id,
        "reason": row.reason,
        "last_status": row.last_status,
        "last_error": row.last_error,
        "attempts": row.attempts,
        "shovel_count": row.shovels,
        "correlation_id": row.correlation_id,
        "event_type": row.event_type,
        "event_version": row.event_version,
        "published_at": _timestamp_text(row.published_at),
        "sidelined_at": _timestamp_text(row.since),
    }
    return Entry(
        id=row.ref.delivery_id,
        body=json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode(),
        generation=row.ref.generation,
        shovels=row.shovels,
        reason=row.reason,
        detail=row.last_error,
        expires_at=row.expires_at,
    )


def _timestamp_text(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()


class SidelineLoader:
    """Loads entries and records their slots.

    Interrupted, it leaves rows without a slot to the next run, and orphan entries to the audit.
    """

    name = "loading of sidelines"

    def __init__(
        self,
        sidelines: SidelineEntries,
        magazine_cache: SidelineMagazineCache,
        *,
        batch: int = LOAD_BATCH,
    ) -> None:
        self._sidelines = sidelines
        self._magazine_cache = magazine_cache
        self._batch = batch

    async def run(self, should_continue: ShouldContinue) -> None:
        """Load every sidelined delivery without a slot."""
        more = True
        while more and should_continue():
            found, more = await self._sidelines.list_unloaded(limit=self._batch)
            by_subscription: defaultdict[SubscriptionId, list[UnloadedEntry]] = defaultdict(list)
            for row in found:
                by_subscription[row.ref.subscription_id].append(row)
            for subscription, rows in by_subscription.items():
                if not should_continue():
                    return
                await self._load(subscription, rows)

    async def _load(self, subscription: SubscriptionId, rows: Sequence[UnloadedEntry]) -> None:
        entries = [to_entry(row) for row in rows]
        magazine = await self._magazine_cache.get_or_create(subscription)
        try:
            slots = await magazine.load(entries)
        except MagazineMissingError:
            _log.warning(
                "the sideline magazine of subscription %s is lost: creating it again", subscription
            )
            magazine = await self._magazine_cache.recreate(subscription)
            slots = await magazine.load(entries)
        placed = [replace(row.ref, slot=slot) for row, slot in zip(rows, slots, strict=True)]
        late = await self._sidelines.record_loaded(placed)
        if late:
            await magazine.delete([ref.slot for ref in late if ref.slot is not None])
