"""Turn operational events into messages, and find completed messages.

Each run makes at most one message for a room, kind and recipient. It lists up to `MAX_LISTED`
events and says how many there were in all. Disabled endpoints wait until a message lists them.

The rooms' owners take turns, and of one owner those rooms and kinds come first that had no message
for longest. After `MAX_BATCHES` the next run goes on, which also sees what came meanwhile.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from delivery.maintenance.task import ShouldContinue
from rooms.db.operational.batches import (
    MAX_GROUPS,
    BatchQueries,
    EventGroup,
    Notice,
    Recipient,
    WaitingBatch,
    WaitingEvent,
)
from rooms.db.operational.completion import CompletionQueries
from rooms.db.writer import LogWriter
from rooms.domain.ids import (
    DeliveryId,
    IdGenerator,
    MessageId,
    OrganisationId,
    SubscriptionId,
)
from rooms.domain.operational_event import OperationalEvent
from rooms.domain.state_machine import SubscriptionType
from rooms.errors import StorageRefusedError
from rooms.ports import Clock

MAX_LISTED: Final = 100
MAX_LIST_BYTES: Final = 240 * 1024
"""With what the message repeats of its first event, it has 256 KiB at most.

By default, a publisher's message may have as many.
"""
MAX_BATCHES: Final = 1000
"""Batches that one run makes, or one for each owner of rooms if there are more owners."""
_MAX_SCANS: Final = 20
"""Batches of messages that one run looks at for completion."""
_START: Final = (-1, "")

NotifyQueued = Callable[[SubscriptionId | None], None]


class OperationalEvents:
    """Publish what waits in the tables of operational events."""

    name = "batching of operational events"

    def __init__(
        self, writer: LogWriter, clock: Clock, ids: IdGenerator, *, notify_queued: NotifyQueued
    ) -> None:
        self._queries = BatchQueries(writer)
        self._completion = CompletionQueries(writer)
        self._clock = clock
        self._ids = ids
        self._notify_queued = notify_queued

    async def run(self, should_continue: ShouldContinue) -> None:
        """Look at messages whose completion is awaited, and make a batch of each group.

        StorageRefusedError: something was refused, and the rest was done.
        """
        refusals: list[StorageRefusedError] = []
        try:
            await self._find_completed(should_continue)
        except StorageRefusedError as exc:
            refusals.append(exc)
        groups = await self._due_groups(should_continue)
        for count, (turn, group) in enumerate(in_turns(groups)):
            if (count >= MAX_BATCHES and turn > 0) or not should_continue():
                break
            try:
                await self._make_batch(group)
            except StorageRefusedError as exc:  # the other rooms do not wait for this one
                refusals.append(exc)
        if refusals:
            raise refusals[0]

    async def _due_groups(self, should_continue: ShouldContinue) -> list[EventGroup]:
        due: list[EventGroup] = []
        after: tuple[int, str] = _START
        while should_continue():
            groups = await self._queries.groups(after)
            due += [group for group in groups if group.due]
            if len(groups) < MAX_GROUPS:
                break
            after = groups[-1].room, groups[-1].event.value
        return due

    async def _find_completed(self, should_continue: ShouldContinue) -> None:
        for _ in range(_MAX_SCANS):
            if not should_continue() or not await self._completion.find():
                return

    async def _make_batch(self, group: EventGroup) -> None:
        batch = await self._queries.read(group)
        if group.event is OperationalEvent.ENDPOINT_DISABLED:
            batch = _listed_only(batch)
        now_ms = self._clock.now_ms()
        payloads = [
            (one, payload)
            for one in batch.recipients
            if (payload := message_for(one, batch)) is not None
        ]
        notices = [
            Notice(
                recipient=one.id,
                message=MessageId(self._ids.generate(group.room, now_ms)),
                delivery=DeliveryId(self._ids.generate(group.room, now_ms)),
                payload=msgspec.json.encode(payload),
            )
            for one, payload in payloads
        ]
        if await self._queries.take(batch, notices):
            for one, _ in payloads:
                self._notify_queued(one.id if one.type is SubscriptionType.PULL else None)


def in_turns(groups: Iterable[EventGroup]) -> list[tuple[int, EventGroup]]:
    """Return the first group of each owner with 0, then the second of each with 1, and so on.

    Those that had no batch for longest come first.
    """
    turns: Counter[OrganisationId | None] = Counter()
    ranked = []
    for group in sorted(groups, key=lambda group: group.spent_until_s):
        ranked.append((turns[group.owner], group))
        turns[group.owner] += 1
    ranked.sort(key=lambda each: each[0])
    return ranked


def message_for(recipient: Recipient, batch: WaitingBatch) -> dict[str, Any] | None:
    """Return the payload of a recipient's message; None: nothing of the batch is for it.

    The owner of the room receives everything, another organisation what is about its own
    subscriptions.
    """
    group = batch.group
    if group.event is OperationalEvent.MESSAGE_COMPLETED and not recipient.owns:
        return None
    events = [one for one in batch.events if _is_for(recipient, one.organisation_id)]
    total = len(events) + sum(
        one.total for one in batch.counted if _is_for(recipient, one.organisation_id)
    )
    if total == 0:
        return None
    listed = [_entry(recipient, one) for one in _listed(recipient, batch)]
    message = {"type": group.event.value, "room_id": group.room, "total": total, "events": listed}
    if group.event is OperationalEvent.ENDPOINT_DISABLED and listed:
        message |= _first_disabled(listed[0])
    return message


def _first_disabled(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a message had when each disabled endpoint had one of its own."""
    fields = {name: entry[name] for name in ("subscription_id", "name", "disabled_at")}
    if "push_url" in entry:
        return fields | {"push_url": entry["push_url"], "reason": entry["reason"]}
    return fields | {"push_url": entry["target"], "organisation_id": entry["organisation_id"]}


def _is_for(recipient: Recipient, organisation: str) -> bool:
    return recipient.owns or organisation == recipient.organisation_id


def _listed_only(batch: WaitingBatch) -> WaitingBatch:
    """Return the batch with those events that each message about them lists; others wait."""
    left_out: set[int] = set()
    for recipient in batch.recipients:
        listed = {one.id for one in _listed(recipient, batch)}
        left_out |= {
            one.id
            for one in batch.events
            if _is_for(recipient, one.organisation_id) and one.id not in listed
        }
    kept = [one for one in batch.events if one.id not in left_out]
    return dataclasses.replace(batch, events=kept)


def _listed(recipient: Recipient, batch: WaitingBatch) -> list[WaitingEvent]:
    """Return the events that a message lists, oldest first."""
    events = (one for one in batch.events if _is_for(recipient, one.organisation_id))
    listed: list[WaitingEvent] = []
    size = 0
    for one in _by_turns(events)[:MAX_LISTED]:
        size += len(msgspec.json.encode(_entry(recipient, one))) + 1
        if listed and size > MAX_LIST_BYTES:
            break
        listed.append(one)
    return sorted(listed, key=lambda one: one.id)


def _by_turns(events: Iterable[WaitingEvent]) -> list[WaitingEvent]:
    """Return the oldest event of each organisation, then the second of each, and so on.

    So the many events of one organisation do not displace the few of another.
    """
    turns: Counter[str] = Counter()
    ordered = []
    for one in sorted(events, key=lambda one: one.id):
        ordered.append((turns[one.organisation_id], one.id, one))
        turns[one.organisation_id] += 1
    return [one for _, _, one in sorted(ordered, key=lambda each: each[:2])]


def _entry(recipient: Recipient, one: WaitingEvent) -> dict[str, Any]:
    shown: dict[str, Any] = {"at": one.at}
    if one.subscription_id is not None:
        shown |= {
            "subscription_id": one.subscription_id,
            "name": one.name,
            "subscription_type": one.type,
            "target": one.target,
            "organisation_id": one.organisation_id,
            "organisation": one.organisation,
            "member_id": one.member_id,
        }
    if one.push_url is not None and one.organisation_id == recipient.organisation_id:
        shown |= {"push_url": one.push_url, "reason": one.reason}
    return shown | msgspec.json.decode(one.data, type=dict[str, Any])
