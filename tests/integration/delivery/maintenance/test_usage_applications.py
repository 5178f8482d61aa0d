"""Test that usage is counted by application, up to a bound for each organisation and hour."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.maintenance.usage import count_usage
from rooms.db.connection import open_engine
from rooms.domain.usage import MAX_APPLICATIONS, OTHER_APPLICATIONS
from tests.integration.delivery.maintenance.test_usage import always
from tests.support.installation import Installation
from tests.support.log_rows import Log, logging


@pytest.fixture
async def engine(installation: Installation) -> AsyncIterator[AsyncEngine]:
    engine = open_engine(installation.url, size=2)
    yield engine
    await engine.dispose()


async def publish(
    installation: Installation, log: Log, application: str | None, at: datetime
) -> None:
    """Write that one message of an application was published."""
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(subscription)
    await installation.rows(
        "UPDATE messages SET application = %s WHERE id = %s", application, copy.message_id
    )
    log.write(installation.room, "published", at=at, message=copy.message_id)
    log.commit()


async def counts(installation: Installation, at: datetime) -> dict[str, int]:
    """Return the messages of each application in the hour of a time."""
    rows = await installation.rows(
        "SELECT application, sum(messages)::int8 AS messages FROM usage_hours"
        " WHERE hour = date_trunc('hour', %s::timestamptz, 'UTC') GROUP BY 1",
        at,
    )
    return {row["application"]: row["messages"] for row in rows}


@pytest.mark.parametrize("per_statement", [1, 7, 2000])
async def test_an_hour_has_a_bounded_number_of_applications(
    installation: Installation, engine: AsyncEngine, per_statement: int
) -> None:
    """Check that nothing is uncounted, whichever statement meets the bound."""
    now = datetime.now(UTC)
    surplus = 5
    with logging(installation.url) as log:
        for number in range(MAX_APPLICATIONS + surplus):
            await publish(installation, log, f"app-{number:04}", now)
        await publish(installation, log, None, now)
        await count_usage(engine, always, max_transactions=per_statement)
        found = await counts(installation, now)
        assert found.pop(OTHER_APPLICATIONS) == surplus
        assert found.pop("") == 1
        assert found == {f"app-{number:04}": 1 for number in range(MAX_APPLICATIONS)}
        for name in ("app-0003", f"app-{MAX_APPLICATIONS:04}", "app-zz"):
            await publish(installation, log, name, now)
        await publish(installation, log, "app-zz", now - timedelta(hours=3))
        await count_usage(engine, always, max_transactions=per_statement)
    found = await counts(installation, now)
    assert (found["app-0003"], found[OTHER_APPLICATIONS]) == (2, surplus + 2)
    assert len(found) == MAX_APPLICATIONS + 2
    assert await counts(installation, now - timedelta(hours=3)) == {"app-zz": 1}


async def test_each_organisation_has_its_own_bound(
    installation: Installation, engine: AsyncEngine
) -> None:
    """Check that many applications of a publisher take nothing from those of a subscriber."""
    now = datetime.now(UTC)
    guest = await installation.value(
        "INSERT INTO organisations (id, name) VALUES (gen_random_uuid(), 'guest') RETURNING id::text"
    )
    queue = await installation.subscribe(organisation_id=guest, application="billing")
    with logging(installation.url) as log:
        for number in range(MAX_APPLICATIONS + 1):
            await publish(installation, log, f"app-{number:04}", now)
        log.write(installation.room, "delivered", at=now, subscription=queue)
        log.commit()
        await count_usage(engine, always)
    (row,) = await installation.rows(
        "SELECT application, delivered, organisation_id::text AS organisation FROM usage_hours"
        " WHERE delivered > 0"
    )
    assert row == {"application": "billing", "delivered": 1, "organisation": guest}
