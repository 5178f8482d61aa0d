"""Test which rows a relay claims, and which copies it sends behind others, on a model of the outbox."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import cast

import pytest

from delivery.relay.claims import (
    BACKLOG_BATCH,
    BACKLOG_REST,
    EARLY_SCAN_S,
    FULL_SCAN_INTERVAL_S,
    FULL_SCAN_SHARE,
    KEEP_BACKLOG_US,
    PACED_BACKLOG_BATCH,
    RelayClaims,
)
from rooms.burst_pacing import BurstPacer
from rooms.db.queue.relay import RelayOutbox
from rooms.domain.state_machine import SubscriptionType
from tests.support.manual_clock import ManualClock
from tests.support.relay_outbox import Outbox

LIMIT = 10


class Machine:
    """Hold the times of a thread, which waits for a processor all the time or never."""

    def __init__(self, clock: ManualClock, *, waits: bool) -> None:
        self._clock = clock
        self._waits = waits

    def times_s(self) -> tuple[float, float]:
        return 0.0, self._clock.now_s if self._waits else 0.0


def make_claims(
    outbox: Outbox, *, waits: bool = False, ended: list[str] | None = None
) -> RelayClaims:
    clock = outbox.clock
    return RelayClaims(
        cast("RelayOutbox", outbox),
        clock=clock,
        claim_s=30.0,
        poll_s=1.0,
        on_backlog_ended=lambda: (ended if ended is not None else []).append("ended"),
        pacer=BurstPacer(clock.monotonic, Machine(clock, waits=waits).times_s, factor=BACKLOG_REST),
    )


async def claim(claims: RelayClaims) -> list[tuple[str, bool]]:
    """Claim once; return the owners of what was taken, and whether it goes behind others."""
    turn = claims._turns.next()
    batch = await claims.claim(LIMIT, None if turn.organisation is None else turn)
    return [(task.subscription_id, task.behind) for task in batch.tasks]


async def claim_in_turn(claims: RelayClaims) -> list[str]:
    """Claim for the backlogged organisation, whose turn it is."""
    turn = claims.next_turn()
    assert turn is not None
    batch = await claims.claim(LIMIT, turn)
    return [task.subscription_id for task in batch.tasks]


def fronts(taken: Sequence[tuple[str, bool]]) -> Counter[str]:
    return Counter(owner for owner, behind in taken if not behind)


async def test_a_message_beside_a_backlog_waits_for_one_claim_and_goes_in_front() -> None:
    outbox = Outbox(ManualClock())
    claims = make_claims(outbox)
    outbox.add("large", 1000)
    await claim(claims)
    for _ in range(20):
        outbox.add("small", 1)
        assert ("small", False) in await claim(claims) + await claim(claims)


async def test_a_backlog_goes_behind_but_for_the_share_of_all_others() -> None:
    outbox = Outbox(ManualClock())
    claims = make_claims(outbox)
    outbox.add("large", 1000)
    await claim(claims)
    for count in (0, 3, 0, 1):
        outbox.add("small", count)
        taken = await claim(claims)
        assert fronts(taken) == Counter(small=count)
        while not (taken := [one for one in await claim(claims) if one[0] == "large"]):
            pass  # a turn of other subscriptions of its organisation
        assert len(taken) == LIMIT
        assert fronts(taken) == Counter(large=count)


async def test_no_organisation_starves_beside_others_that_never_pause() -> None:
    """Those that fill their claims are backlogged as well, and others leave it as many places as they take."""
    outbox = Outbox(ManualClock())
    claims = make_claims(outbox)
    outbox.add("large", 4000)
    front: Counter[str] = Counter()
    for _ in range(200):
        outbox.add("steady", LIMIT - 1)
        front.update(fronts(await claim(claims)))
    assert front["large"] >= 0.9 * front["steady"]


async def test_copies_of_pull_queues_never_go_behind() -> None:
    """Each has a queue of its own."""
    outbox = Outbox(ManualClock())
    claims = make_claims(outbox)
    outbox.add("large", 100, SubscriptionType.PULL)
    for _ in range(10):
        assert all(not behind for _, behind in await claim(claims))


async def test_without_a_backlog_nothing_goes_behind() -> None:
    outbox = Outbox(ManualClock())
    claims = make_claims(outbox)
    for _ in range(10):
        outbox.add("one", LIMIT - 1)
        assert await claim(claims) == [("one", False)] * (LIMIT - 1)


@pytest.mark.parametrize("have_many", [False, True])
async def test_claims_behind_a_backlog_of_many_subscriptions_look_up_the_owners_of_rows(
    *, have_many: bool
) -> None:
    """The first one that skips the organisation hashes, and so do full scans."""
    outbox = Outbox(ManualClock(), have_many=have_many)
    claims = make_claims(outbox)
    outbox.add("large", 1000)
    await claim(claims)
    for _ in range(3):
        outbox.add("small", 1)
        await claims.claim(LIMIT)
    outbox.clock.now_s += FULL_SCAN_INTERVAL_S
    for _ in range(2):
        await claims.claim(LIMIT)
    assert outbox.looked_up == [False, have_many, have_many, False, have_many]


async def test_the_whole_outbox_is_scanned_once_a_second_or_more_seldom_if_that_takes_long() -> (
    None
):
    clock = ManualClock()
    outbox = Outbox(clock)
    claims = make_claims(outbox)
    await claim(claims)
    await claim(claims)
    assert outbox.scans[0] == (0,) * 10 != outbox.scans[1]
    clock.now_s += FULL_SCAN_INTERVAL_S
    outbox.claim_takes_s = 0.1
    await claim(claims)
    assert outbox.scans[2] == (0,) * 10
    clock.now_s += FULL_SCAN_SHARE * 0.1 - 0.05
    await claim(claims)
    assert outbox.scans[3] != (0,) * 10
    await claim(claims)
    assert outbox.scans[4] == (0,) * 10


async def test_what_came_during_the_last_claim_of_a_backlog_is_announced_to_other_claims() -> None:
    """One of them that skipped it may have found nothing, and sleep until the next poll."""
    ended: list[str] = []
    outbox = Outbox(ManualClock())
    claims = make_claims(outbox, ended=ended)
    outbox.add("large", LIMIT)
    await claim(claims)
    assert await claim_in_turn(claims) == []
    assert claims.next_turn() is not None
    assert not ended
    outbox.at_us += KEEP_BACKLOG_US
    assert await claim_in_turn(claims) == []
    assert claims.next_turn() is None
    assert ended == ["ended"]


async def test_a_scan_that_is_wanted_during_a_scan_is_not_forgotten() -> None:
    """Otherwise tasks given back since would wait for the next one, up to ten seconds."""
    outbox = Outbox(ManualClock())
    claims = make_claims(outbox)
    outbox.may_end.clear()
    scanning = asyncio.create_task(claims.claim(LIMIT))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(outbox.scans) == 1
    claims.scan_all_next()
    outbox.may_end.set()
    await scanning
    await claims.claim(LIMIT)
    assert outbox.scans == [(0,) * 10, (0,) * 10]
    await claims.claim(LIMIT)
    assert outbox.scans[2] != (0,) * 10


async def test_a_claim_that_shows_a_backlog_sends_it_behind_what_others_have_in_it() -> None:
    outbox = Outbox(ManualClock())
    claims = make_claims(outbox)
    outbox.add("small", 2)
    outbox.add("large", 1000)
    taken = await claim(claims)
    assert fronts(taken) == Counter(small=2, large=2)
    assert len(taken) == LIMIT


async def test_a_burst_that_pauses_for_a_moment_is_claimed_beside_others_all_the_same() -> None:
    """The relay is faster than its publisher, so claims of the burst find few rows or none."""
    outbox = Outbox(ManualClock())
    claims = make_claims(outbox)
    outbox.add("large", LIMIT)
    await claim(claims)
    for count in (0, 3, 0, LIMIT, 1):
        outbox.at_us += KEEP_BACKLOG_US // 10
        outbox.add("large", count)
        outbox.add("small", 1)
        assert [task.subscription_id for task in (await claims.claim(LIMIT)).tasks] == ["small"]
        # A subscription with a backlog has turns of its own within its organisation.
        taken = await claim_in_turn(claims) or await claim_in_turn(claims)
        assert taken == ["large"] * count


async def test_a_backlog_ends_where_the_clock_of_the_database_was_set_back() -> None:
    outbox = Outbox(ManualClock())
    claims = make_claims(outbox)
    outbox.add("large", LIMIT)
    await claim(claims)
    outbox.at_us -= 3_600_000_000
    await claim_in_turn(claims)
    assert not claims.has_backlog


@pytest.mark.parametrize("in_backlog", [True, False])
async def test_a_wake_up_does_not_wait_for_a_scan_of_the_whole_outbox_in_a_backlog(
    *, in_backlog: bool
) -> None:
    """It takes long there. It comes with the next claim, early, and after an interval with any."""
    outbox = Outbox(ManualClock())
    claims = make_claims(outbox)
    outbox.add("large", LIMIT if in_backlog else 1)
    await claim(claims)
    scans_all = []
    for passed_s, is_woken in (
        (FULL_SCAN_INTERVAL_S, True),
        (0.0, False),
        (FULL_SCAN_INTERVAL_S, True),
        (FULL_SCAN_INTERVAL_S, True),
        (FULL_SCAN_INTERVAL_S - EARLY_SCAN_S - 0.01, False),
        (0.01, False),
    ):
        outbox.clock.now_s += passed_s
        await claims.claim(LIMIT, is_woken=is_woken)
        scans_all.append(outbox.scans[-1] == (0,) * 10)
    assert scans_all == (
        [False, True, False, True, False, True]
        if in_backlog
        else [True, False, True, True, False, False]
    )


@pytest.mark.parametrize(
    ("waits", "others", "batch", "rest"),
    [
        (True, 1, PACED_BACKLOG_BATCH, BACKLOG_REST),
        (False, 1, PACED_BACKLOG_BATCH, 0.0),
        (True, 0, BACKLOG_BATCH, 0.0),
    ],
)
async def test_claims_of_a_backlog_are_small_beside_others_and_rest_while_processors_are_short(
    *, waits: bool, others: int, batch: int, rest: float
) -> None:
    """An organisation does not count as others, in how many rooms its subscriptions may be."""
    outbox = Outbox(ManualClock())
    claims = make_claims(outbox, waits=waits)
    outbox.add("large/1", 1000)
    await claim(claims)
    for number in range(5):
        outbox.add(f"large/{number}", LIMIT)
        outbox.add("small", others)
        await claims.claim(LIMIT)
        await claim_in_turn(claims)
        outbox.clock.now_s += 0.1
    assert claims.backlog_batch == batch
    assert claims.rest_s(0.01) == pytest.approx(rest * 0.01)


async def test_a_backlog_rests_also_if_one_of_its_turns_took_what_others_have() -> None:
    """A turn skips only other backlogs, and the claims for others come at any time."""
    outbox = Outbox(ManualClock())
    claims = make_claims(outbox, waits=True)
    outbox.add("large", LIMIT)
    await claim(claims)
    outbox.add("small", 1)
    while (taken := await claim_in_turn(claims)) != ["small"]:
        assert not taken
    for _ in range(5):
        outbox.add("large", LIMIT)
        while await claim_in_turn(claims) != ["large"] * LIMIT:
            pass
        outbox.add("small", 1)
        await claims.claim(LIMIT)
        outbox.clock.now_s += 2.0
    assert claims.backlog_batch == PACED_BACKLOG_BATCH
