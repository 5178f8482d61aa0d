"""Replays of a room that has sent messages about operational events, and messages without publisher.

Oracle: the subscription gets what was published, and nothing that Rooms wrote to another one.
"""

from typing import Any

import pytest

from delivery.maintenance import replay as replay_module
from delivery.maintenance.jobs import JobRunner
from delivery.maintenance.restore import RestoreJob
from rooms.db.jobs.jobs import JobQueue
from rooms.db.jobs.restore import RestoreQueries
from rooms.db.queue.throttle import SharedLaneState
from rooms.db.writer import LogWriter
from rooms.domain.ids import OrganisationId, SubscriptionId
from rooms.domain.state_machine import State
from tests.integration.delivery.maintenance.test_operational_events import (
    operational,
    organisation,
    task,
)
from tests.integration.delivery.maintenance.test_replay import (
    given,
    jobs_of,
    replay,
    result,
)
from tests.integration.delivery.maintenance.test_service import always, ask, job
from tests.support.installation import Installation

EVER = [{"event_types": None, "from_us": 0, "until_us": None}]
OF_OTHERS = [{"event_types": ["rooms.*", "order.*"], "from_us": 0, "until_us": None}]


async def disabled_endpoint(installation: Installation, writer: LogWriter) -> OrganisationId:
    """An endpoint of another organisation was disabled, which both operational subscriptions learn."""
    theirs = await organisation(installation, "theirs")
    await operational(installation)
    await operational(installation, organisation_id=theirs)
    foreign = await installation.subscribe(
        organisation_id=theirs, push_url="https://hooks.example.com/secret?token=1"
    )
    assert await SharedLaneState(writer).disable(
        await installation.endpoint_record(foreign),
        reason="HTTP 410: their answer",
    )
    await task(writer).run(always)
    assert (
        await installation.value(
            "SELECT count(*) FROM messages WHERE event_type = 'rooms.endpoint.disabled'"
        )
        == 2
    )
    return theirs


async def reader(installation: Installation, whose: str, **columns: Any) -> SubscriptionId:
    if whose == "another":
        columns["organisation_id"] = await organisation(installation, "reading")
    return await installation.subscribe(**columns)


@pytest.mark.parametrize("event_types", [None, '[{"name": "*"}]', '[{"name": "rooms.*"}]'])
@pytest.mark.parametrize(
    ("whose", "wanted"),
    [
        ("owner", {}),
        ("owner", {"event_types": ["rooms.endpoint.disabled", "order.created"]}),
        ("another", {"entitled": EVER}),
        ("another", {"entitled": OF_OTHERS}),
        ("another", {"entitled": EVER, "missing": True}),
    ],
)
async def test_no_replay_gives_a_message_about_operational_events(
    *,
    installation: Installation,
    writer: LogWriter,
    monkeypatch: pytest.MonkeyPatch,
    whose: str,
    wanted: dict[str, Any],
    event_types: str | None,
) -> None:
    monkeypatch.setattr(replay_module, "BACKFILL_AFTER_S", 0.0)
    await disabled_endpoint(installation, writer)
    (copy,) = await installation.publish(await installation.subscribe(), state=State.DELIVERED)
    reading = await reader(installation, whose, event_types=event_types)
    identity = await replay(installation, reading, **wanted)
    await jobs_of(writer, batch=1).run(always)
    expected = set() if event_types and "rooms" in event_types else {copy.message_id}
    assert set(await given(installation, reading)) == expected
    done = await job(installation, identity)
    assert (done["state"], done["done"]) == ("done", 1 if whose == "owner" else len(expected))
    if whose == "owner":
        assert done["total"] == 1, "what it passes over is not counted"


async def test_a_business_key_finds_none_either(
    installation: Installation, writer: LogWriter
) -> None:
    await disabled_endpoint(installation, writer)
    await installation.publish(await installation.subscribe(), state=State.DELIVERED)
    await installation.rows("UPDATE messages SET business_key = 'k' RETURNING 1")
    reading = await installation.subscribe()
    identity = await replay(installation, reading, business_keys=["k"])
    await jobs_of(writer, batch=1).run(always)
    assert await result(installation, identity) == {"replayed": 1}


async def test_a_restore_sends_them_to_no_other_subscription(
    installation: Installation, writer: LogWriter
) -> None:
    await disabled_endpoint(installation, writer)
    reading = await reader(installation, "another")
    before = await installation.value("SELECT count(*) FROM deliveries")
    identity = await ask(
        installation,
        "restore",
        room_id=installation.room,
        since="2020-01-01T00:00:00+00:00",
        states=[str(state) for state in State],
    )
    worklist = JobQueue(writer)
    duty = RestoreJob(worklist, RestoreQueries(writer), on_queued=lambda _: None)
    await JobRunner(worklist, duty.handlers()).run(always)
    assert await given(installation, reading) == {}
    assert (await job(installation, identity))["state"] == "done"
    assert await installation.value("SELECT count(*) FROM deliveries") == before


async def test_what_was_made_again_without_its_publisher_is_only_for_those_that_had_it(
    installation: Installation, writer: LogWriter
) -> None:
    had = await reader(installation, "another")
    (copy,) = await installation.publish(had, state=State.SIDELINED)
    await installation.rows("UPDATE messages SET publisher_id = NULL RETURNING 1")
    stranger = await installation.subscribe(
        organisation_id=await organisation(installation, "strangers")
    )
    own = await installation.subscribe()
    await installation.rows("DELETE FROM sidelined")
    for subscription in (had, stranger):
        await replay(installation, subscription, entitled=EVER)
    await replay(installation, own)
    await jobs_of(writer).run(always)
    assert set(await given(installation, own)) == {copy.message_id}
    assert await given(installation, stranger) == {}
    assert (
        await installation.value("SELECT count(*) FROM deliveries WHERE subscription_id = %s", had)
        == 2
    )
