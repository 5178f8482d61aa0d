"""Test the retention of the journal: what is kept can still be verified."""

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from delivery.maintenance import age_limits
from delivery.maintenance.age_limits import delete_old_entries, journal_retention_specs
from rooms.db import journal as records
from rooms.db.connection import transaction
from rooms.db.journal import JournalFilter, append, list_entries, read_chain, verify_chain
from rooms.domain.ids import OrganisationId
from rooms.domain.journal import (
    ActorKind,
    ChainedEntry,
    JournalEntry,
    Outcome,
    from_document,
    to_document,
)
from tests.integration.rooms.api.conftest import Api
from tests.support.journal_chain import check_chain

DAYS = 10


def entry(api: Api, organisation: OrganisationId, age: timedelta) -> JournalEntry:
    return JournalEntry(
        id=api.services.ids.generate_global(api.services.clock.now_ms()),
        organisation_id=organisation,
        at=datetime.now(UTC) - age,
        actor_kind=ActorKind.KEY,
        actor_id=None,
        actor_name="test",
        actor_organisation_id=organisation,
        application=None,
        source=None,
        request_id="r",
        action="change_room",
        object="/v1/rooms/1",
        before=None,
        after={"name": "ünï"},
        outcome=Outcome.SUCCEEDED,
        reason=None,
    )


@dataclasses.dataclass
class Journal:
    api: Api
    organisation: OrganisationId

    async def write(self, *ages: float) -> None:
        """Append an entry for each age in days."""
        for age in ages:
            async with transaction(self.api.services.engine) as connection:
                await append(connection, entry(self.api, self.organisation, timedelta(days=age)))

    async def retain(self, days: int = DAYS) -> None:
        await delete_old_entries(self.api.services.engine, datetime.now(UTC), days, lambda: True)

    async def numbers(self) -> list[int]:
        rows = await self.api.sql(
            "SELECT seq FROM journal WHERE organisation_id = %s ORDER BY seq", self.organisation
        )
        return [seq for (seq,) in rows]


@pytest.fixture
async def journal(api: Api) -> Journal:
    made = await api.made("/organisations", {"name": "agency"}, "platform")
    return Journal(api, OrganisationId(made["id"]))


async def test_the_rest_of_a_chain_is_still_proven(journal: Journal) -> None:
    await journal.write(30, 20, 11, 9, 1, 0)
    await journal.retain()
    assert await journal.numbers() == [4, 5, 6]
    report = await verify_chain(journal.api.services.engine, journal.organisation)
    assert (report.broken, report.entries, report.first, report.last) == (None, 3, 4, 6)
    await journal.write(0)
    report = await verify_chain(journal.api.services.engine, journal.organisation)
    assert (report.broken, report.entries) == (None, 4)


async def test_an_export_of_before_and_one_of_after_fit_together(journal: Journal) -> None:
    await journal.write(30, 20, 11, 9)
    before = await _export(journal)
    await journal.retain()
    await journal.write(0)
    after = await _export(journal)
    assert check_chain(after) is None
    joined = [*before, *(one for one in after if one.seq > before[-1].seq)]
    assert check_chain(joined) is None
    assert [one.seq for one in joined] == [1, 2, 3, 4, 5]


async def test_more_entries_than_a_batch_are_deleted(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(age_limits, "JOURNAL_BATCH", 2)
    await journal.write(*[20.0] * 5, 0)
    await journal.retain()
    assert await journal.numbers() == [6]


async def test_an_entry_that_was_removed_is_still_noticed(journal: Journal) -> None:
    await journal.write(30, 20, 5, 1)
    await journal.retain()
    async with transaction(journal.api.services.engine) as connection:
        await connection.exec_driver_sql("SET LOCAL rooms.journal_retention = 'on'")
        await connection.exec_driver_sql("DELETE FROM journal WHERE seq = 3")
    report = await verify_chain(journal.api.services.engine, journal.organisation)
    assert report.broken is not None
    assert report.broken.seq == 3


async def test_the_newest_entry_is_kept(journal: Journal) -> None:
    await journal.write(30, 20)
    await journal.retain()
    await journal.retain()
    assert await journal.numbers() == [2]
    report = await verify_chain(journal.api.services.engine, journal.organisation)
    assert (report.broken, report.entries) == (None, 1)


async def test_the_journal_of_a_deleted_organisation_ends_whole(journal: Journal) -> None:
    await journal.write(30, 20, 5)
    await journal.api.sql("DELETE FROM organisations WHERE id = %s", journal.organisation)
    await journal.retain()
    assert await journal.numbers() == [3]
    await journal.retain(days=4)
    assert await journal.numbers() == []
    assert (
        await journal.api.sql(
            "SELECT FROM journal_heads WHERE organisation_id = %s", journal.organisation
        )
        == []
    )
    report = await verify_chain(journal.api.services.engine, journal.organisation)
    assert (report.broken, report.entries) == (None, 0)


async def test_a_clock_that_is_ahead_deletes_nothing_young(journal: Journal) -> None:
    await journal.write(9, 1)
    ahead = datetime.now(UTC) + timedelta(days=100)
    await delete_old_entries(journal.api.services.engine, ahead, DAYS, lambda: True)
    assert await journal.numbers() == [1, 2]


async def test_a_verification_beside_retention_finds_no_break(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_READ_BATCH", 2)
    await journal.write(*[20.0] * 6, 0, 0)
    batches = 0

    async def beside(*arguments: Any, **more: Any) -> Sequence[ChainedEntry]:
        nonlocal batches
        batches += 1
        if batches == 2:
            await journal.retain()
        return await read_chain(*arguments, **more)

    monkeypatch.setattr(records, "read_chain", beside)
    report = await verify_chain(journal.api.services.engine, journal.organisation)
    assert (report.broken, report.entries, report.first) == (None, 2, 7)


async def test_a_stopped_run_is_continued(journal: Journal) -> None:
    await journal.write(20, 0)
    await delete_old_entries(journal.api.services.engine, datetime.now(UTC), DAYS, lambda: False)
    assert await journal.numbers() == [1, 2]
    await journal.retain()
    assert await journal.numbers() == [2]


def test_everything_is_kept_with_0_days() -> None:
    assert journal_retention_specs(0) == ()
    (spec,) = journal_retention_specs(3650)
    assert (spec.partition, spec.every_s) == ("upkeep/journal", 3600.0)


async def test_the_filter_reads_what_is_kept(journal: Journal) -> None:
    await journal.write(20, 1)
    await journal.retain()
    async with transaction(journal.api.services.engine) as connection:
        found = await list_entries(
            connection, JournalFilter(organisation=journal.organisation), before=None, limit=10
        )
    assert [one.seq for one in found] == [2]


async def _export(journal: Journal) -> list[ChainedEntry]:
    async with transaction(journal.api.services.engine) as connection:
        found = await read_chain(connection, journal.organisation, after=0, limit=100)
    return [from_document(_plain(to_document(one))) for one in found]


def _plain(document: dict[str, Any]) -> dict[str, Any]:
    return {**document, "id": str(document["id"])}
