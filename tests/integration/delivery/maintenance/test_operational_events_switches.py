"""Test that each kind of operational event can be switched, and that many make few messages."""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from delivery.maintenance.operational_events import MAX_LISTED
from rooms.db.operational.batches import BURST
from rooms.db.operational.completion import CompletionQueries
from rooms.db.queue.throttle import SharedLaneState
from rooms.db.writer import LogWriter
from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.operational_event import OperationalEvent
from rooms.domain.state_machine import State
from tests.integration.delivery.maintenance.test_operational_events import (
    always,
    no_rate,
    operational,
    received,
    sidelined,
    switch,
    task,
    track,
    waiting,
)
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import Member, act, approve, member, shared_room, subscribe
from tests.support.installation import Installation


class World:
    """Cause each event in a room of an organisation, with a subscription of another one."""

    def __init__(
        self,
        installation: Installation,
        writer: LogWriter,
        *,
        api: Api,
        owner: Member,
        guest: Member,
        room: int,
    ) -> None:
        self.api, self.owner, self.guest, self.room = api, owner, guest, room
        self.installation = dataclasses.replace(installation, room=RoomId(room))
        self.writer, self.lanes = writer, SharedLaneState(writer)
        self.made = 0

    async def pending(self) -> str:
        self.made += 1
        url = "https://hooks.example.com/in"
        made = await subscribe(
            self.api,
            self.guest,
            self.room,
            f"sub-{self.made}",
            push_url=url,
            circuit_failures=3,
        )
        return str(made["id"])

    async def active(self) -> str:
        identity = await self.pending()
        await approve(self.api, self.owner, identity)
        return identity

    async def decide(self, *actions: str) -> None:
        identity = await (self.pending() if actions == ("reject",) else self.active())
        for action in actions:
            answer = await act(self.api, self.owner, identity, action)
            assert answer.status_code == 200, answer.text

    async def close_circuit(self, *, closes: bool = True) -> None:
        identity = SubscriptionId(await self.active())
        record = await self.installation.endpoint_record(identity)
        assert await self.lanes.open_circuit(record, open_ms=1000)
        if closes:
            record = await self.installation.endpoint_record(identity)
            assert await self.lanes.close_circuit(record)

    async def recover(self) -> None:
        identity = SubscriptionId(await self.active())
        assert await self.lanes.mark_failing(await self.installation.endpoint_record(identity))
        assert await self.lanes.clear_failing(await self.installation.endpoint_record(identity))

    async def disable(self) -> None:
        identity = SubscriptionId(await self.active())
        record = await self.installation.endpoint_record(identity)
        assert await self.lanes.disable(record, reason="gone")

    async def complete(self) -> None:
        identity = SubscriptionId(await self.active())
        (copy,) = await self.installation.publish(identity, state=State.DELIVERED)
        await track(self.installation, copy)
        assert await CompletionQueries(self.writer).find() == 1

    async def sideline(self) -> None:
        await sidelined(self.installation, self.writer, SubscriptionId(await self.active()))

    def cause(self, event: OperationalEvent) -> Awaitable[Any]:
        """Let the event happen once, after those that come before it."""
        causes: dict[OperationalEvent, Callable[[], Awaitable[Any]]] = {
            OperationalEvent.SUBSCRIPTION_PENDING: self.pending,
            OperationalEvent.SUBSCRIPTION_APPROVED: self.active,
            OperationalEvent.SUBSCRIPTION_REJECTED: lambda: self.decide("reject"),
            OperationalEvent.SUBSCRIPTION_SUSPENDED: lambda: self.decide("suspend"),
            OperationalEvent.SUBSCRIPTION_REINSTATED: lambda: self.decide("suspend", "reinstate"),
            OperationalEvent.SUBSCRIPTION_TERMINATED: lambda: self.decide("terminate"),
            OperationalEvent.ENDPOINT_DISABLED: self.disable,
            OperationalEvent.ENDPOINT_RECOVERED: self.recover,
            OperationalEvent.CIRCUIT_OPENED: lambda: self.close_circuit(closes=False),
            OperationalEvent.CIRCUIT_CLOSED: self.close_circuit,
            OperationalEvent.DELIVERY_SIDELINED: self.sideline,
            OperationalEvent.MESSAGE_COMPLETED: self.complete,
        }
        return causes[event]()

    async def switch(self, *events: OperationalEvent) -> None:
        body = {"operational_events": list(events)}
        answer = await self.api.call("PATCH", f"/rooms/{self.room}", self.owner.key, json=body)
        assert answer.status_code == 200, answer.text

    async def written(self) -> dict[str, int]:
        """Count the events that wait or are sent, by kind."""
        rows = await self.api.sql(
            "SELECT event, count(*) FROM (SELECT event FROM operational_outbox"
            " UNION ALL SELECT event_type FROM messages WHERE event_type LIKE 'rooms.%%') e"
            " GROUP BY event"
        )
        return dict(rows)


@pytest.fixture
async def world(api: Api, installation: Installation, writer: LogWriter) -> World:
    owner, guest = await member(api), await member(api)
    room = await shared_room(
        api,
        owner,
        visibility="listed",
        subscription_policy="approval",
        operational_url="https://ops.example.com/a",
    )
    return World(installation, writer, api=api, owner=owner, guest=guest, room=room)


async def test_each_event_is_sent_only_where_it_is_switched_on(world: World) -> None:
    for event in OperationalEvent:
        before = await world.written()
        await world.switch(*(set(OperationalEvent) - {event}))
        await world.cause(event)
        after = await world.written()
        assert after.get(event, 0) == before.get(event, 0), f"{event} is switched off"
        await world.switch(event)
        await world.cause(event)
        after[event] = after.get(event, 0) + 1
        assert await world.written() == after, f"only {event} is switched on"


async def test_many_events_of_each_kind_make_few_messages(
    installation: Installation, writer: LogWriter
) -> None:
    await switch(installation, *OperationalEvent)
    reported = await operational(installation)
    subscription = await installation.subscribe()
    sent = 0
    for _ in range(BURST + 2):
        await installation.rows(
            "INSERT INTO operational_outbox (room_id, event, organisation_id, subscription_id, data)"
            " SELECT %s, e, %s, %s, jsonb_build_object('n', n, 'disabled_at', now())"
            " FROM unnest(%s::text[]) e, generate_series(1, %s) n",
            *(installation.room, installation.organisation, subscription),
            *(sorted(OperationalEvent), MAX_LISTED + 50),
        )
        sent += MAX_LISTED + 50
        await task(writer).run(always)
    messages = await received(installation, reported)
    for event in OperationalEvent:
        of_event = [one for one in messages if one["type"] == event]
        assert 1 <= len(of_event) <= BURST, event
    while any(await waiting(installation)):
        await no_rate(installation)
        await task(writer).run(always)
    messages = await received(installation, reported)
    for event in OperationalEvent:
        of_event = [one for one in messages if one["type"] == event]
        # A disabled endpoint waits until a message lists it.
        disabled = event is OperationalEvent.ENDPOINT_DISABLED
        assert len(of_event) <= (-(-sent // MAX_LISTED) if disabled else BURST + 1), event
        assert sum(one["total"] for one in of_event) == sent, event
        assert all(len(one["events"]) <= MAX_LISTED for one in of_event), event
