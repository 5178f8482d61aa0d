"""Load sidelined deliveries into the magazines of their subscriptions."""

import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from delivery.maintenance.task import ShouldContinue
from delivery.sideline.magazines import SidelineMagazineCache
from delivery.sideline.turns import OrganisationTurns
from rooms.db.sideline.entries import SidelineEntries, UnloadedEntry
from rooms.domain.ids import SubscriptionId
from rooms.domain.magazine import MAX_BATCH, Entry
from rooms.errors import MagazineMissingError

_log = logging.getLogger(__name__)

LOAD_BATCH: Final = MAX_BATCH
MAX_SUBSCRIPTIONS: Final = 50
"""Subscriptions of a turn: each costs a few statements, though it may have one entry only."""
MIN_TURNS: Final = 16
"""Turns before those that wait are listed again, at least: the list may be long."""
_PAGE: Final = 1000


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
    """Load entries and record their slots, in turns of organisations.

    A turn is one batch, of a bounded number of subscriptions. So an organisation waits for one turn
    of each other one, however much of theirs is sidelined. Interrupted, it leaves rows without a
    slot to the next run, and orphan entries to the audit.
    """

    name = "loading of sidelines"

    def __init__(
        self,
        sidelines: SidelineEntries,
        magazine_cache: SidelineMagazineCache,
        *,
        batch: int = LOAD_BATCH,
        max_subscriptions: int = MAX_SUBSCRIPTIONS,
    ) -> None:
        """Create it; a turn has `batch` entries of `max_subscriptions` at most."""
        self._sidelines = sidelines
        self._magazine_cache = magazine_cache
        self._batch = batch
        self._max_subscriptions = max_subscriptions
        self._turns = OrganisationTurns()

    async def run(self, should_continue: ShouldContinue) -> None:
        """Load every sidelined delivery without a slot."""
        more = True
        while more and should_continue():
            more = await self._run_round(should_continue)

    async def _run_round(self, should_continue: ShouldContinue) -> bool:
        """Give turns to those that wait now; return whether there may be more to load."""
        self._turns.clear()
        after: SubscriptionId | None = None
        while should_continue() and (
            page := await self._sidelines.list_unloaded_sidelines(after, limit=_PAGE)
        ):
            for one in page:
                self._turns.add(one.subscription, one.organisation)
            after = page[-1].subscription
            if len(page) < _PAGE:
                break
        left = max(self._turns.start(), MIN_TURNS)
        more = self._turns.is_cut
        while left and not self._turns.is_empty and should_continue():
            left -= 1
            more = await self._take_turn(should_continue) or more
        return more or not self._turns.is_empty

    async def _take_turn(self, should_continue: ShouldContinue) -> bool:
        """Load the next organisation's batch; return whether its subscriptions may have more."""
        organisation, subscriptions = self._turns.next_turn(self._max_subscriptions)
        page = await self._sidelines.list_unloaded(subscriptions, limit=self._batch)
        by_subscription: defaultdict[SubscriptionId, list[UnloadedEntry]] = defaultdict(list)
        for row in page.entries:
            by_subscription[row.ref.subscription_id].append(row)
        for subscription in subscriptions[: page.reached]:
            if rows := by_subscription[subscription]:
                if not should_continue():
                    return True
                self._turns.serve(organisation, subscription)
                await self._load(subscription, rows)
        self._turns.end_turn(organisation, subscriptions[: page.reached])
        return page.is_full

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
