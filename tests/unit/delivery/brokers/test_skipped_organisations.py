"""Test when a claim looks up the owners of rows, and how often subscriptions are counted."""

from collections.abc import Collection
from dataclasses import dataclass, field

import pytest

from delivery.brokers.skipped_organisations import COUNT_EVERY_S, SkippedOrganisations
from rooms.domain.ids import OrganisationId
from rooms.errors import StorageRefusedError

LARGE, OTHER, SMALL = OrganisationId("large"), OrganisationId("other"), OrganisationId("small")


@dataclass
class Counts:
    """Count what the organisations of `many` have, and record which were counted."""

    many: set[OrganisationId] = field(default_factory=lambda: {LARGE, OTHER})
    counted: list[set[OrganisationId]] = field(default_factory=list)
    is_refused: bool = False

    async def have_many(self, organisations: Collection[OrganisationId]) -> bool:
        if self.is_refused:
            raise StorageRefusedError("not now")
        self.counted.append(set(organisations))
        return not self.many.isdisjoint(organisations)


async def claim(
    skipped: SkippedOrganisations,
    now_s: float,
    *organisations: OrganisationId,
    is_full_scan: bool = False,
) -> bool:
    return await skipped.are_looked_up(organisations, now_s, is_full_scan=is_full_scan)


async def test_nothing_is_counted_while_nothing_is_skipped() -> None:
    counts = Counts()
    skipped = SkippedOrganisations(counts.have_many)
    for now_s in range(10):
        assert not await claim(skipped, float(now_s))
    assert counts.counted == []


async def test_subscriptions_are_counted_once_a_second_however_many_claims_skip_them() -> None:
    counts = Counts()
    skipped = SkippedOrganisations(counts.have_many)
    for tenth in range(20):
        await claim(skipped, tenth * COUNT_EVERY_S / 10, SMALL)
    assert counts.counted == [{SMALL}] * 2


async def test_owners_are_looked_up_from_the_second_claim_that_skips_an_organisation_on() -> None:
    """The first one passes over what the organisation has, as no mark is beyond it."""
    skipped = SkippedOrganisations(Counts().have_many)
    assert [await claim(skipped, 0.0, LARGE) for _ in range(3)] == [False, True, True]


async def test_few_subscriptions_are_hashed() -> None:
    skipped = SkippedOrganisations(Counts().have_many)
    assert not any([await claim(skipped, now_s / 2, SMALL) for now_s in range(10)])


async def test_a_full_scan_hashes() -> None:
    skipped = SkippedOrganisations(Counts().have_many)
    await claim(skipped, 0.0, LARGE)
    assert not await claim(skipped, 0.1, LARGE, is_full_scan=True)
    assert await claim(skipped, 0.2, LARGE)


async def test_an_organisation_that_is_new_is_hashed_until_the_next_count() -> None:
    skipped = SkippedOrganisations(Counts().have_many)
    await claim(skipped, 0.0, LARGE)
    assert [await claim(skipped, 0.1, LARGE, OTHER) for _ in range(2)] == [False, False]
    assert await claim(skipped, 0.2, LARGE)
    assert not await claim(skipped, COUNT_EVERY_S, LARGE, OTHER)
    assert await claim(skipped, COUNT_EVERY_S, LARGE, OTHER)


async def test_organisations_that_are_skipped_by_turns_are_counted_together() -> None:
    """A claim skips all backlogged ones but that whose turn it is."""
    counts = Counts()
    skipped = SkippedOrganisations(counts.have_many)
    found = [await claim(skipped, tenth / 10, LARGE if tenth % 2 else OTHER) for tenth in range(30)]
    assert counts.counted == [{OTHER}, {LARGE, OTHER}, {LARGE, OTHER}]
    assert all(found[11:])


async def test_owners_are_not_looked_up_once_the_subscriptions_are_few() -> None:
    counts = Counts()
    skipped = SkippedOrganisations(counts.have_many)
    await claim(skipped, 0.0, LARGE)
    counts.many.clear()
    assert await claim(skipped, 0.5, LARGE)
    assert not await claim(skipped, COUNT_EVERY_S, LARGE)


async def test_a_count_that_is_refused_is_repeated_a_second_later() -> None:
    counts = Counts(is_refused=True)
    skipped = SkippedOrganisations(counts.have_many)
    with pytest.raises(StorageRefusedError):
        await claim(skipped, 0.0, LARGE)
    assert not await claim(skipped, 0.5, LARGE)
    counts.is_refused = False
    assert not await claim(skipped, COUNT_EVERY_S, LARGE)
    assert await claim(skipped, COUNT_EVERY_S, LARGE)
