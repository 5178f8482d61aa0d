"""Test which rows a relay claims, and which copies it sends behind others, on a model of the outbox."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from delivery.relay.relay import BATCH, FULL_SCAN_INTERVAL_S, FULL_SCAN_SHARE, Relay
from rooms.db.queue.relay import RelayBatch, RelayOutbox
from rooms.domain.ids import OrganisationId, SubscriptionId
from rooms.domain.state_machine import SubscriptionType
from rooms.metrics import Metrics
from rooms.ports import Broker
from tests.support.manual_clock import ManualClock
from tests.support.tasks import make_task

LIMIT = 10
T0 = 1_750_000_000_000_000


@dataclass
class Outbox:
    """Claim rows of (due time, owner) by due time, as the statement does."""

    clock: ManualClock
    rows: list[tuple[int, str, SubscriptionType]] = field(default_factory=list)
    at_us: int = T0
    claim_takes_s: float = 0.0
    scans: list[tuple[int, ...]] = field(default_factory=list)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    """A claim that is under way ends once this is set."""

    def __post_init__(self) -> None:
        self.may_end.set()

    async def dead_relays(self) -> list[int]:
        return []

    async def claim(
        self,
        *,
        limit: int,
        watermarks_us: Sequence[int],
        excluded_organisations: Sequence[OrganisationId],
        excluded_subscriptions: Sequence[SubscriptionId],
        **_: Any,
    ) -> RelayBatch:
        self.scans.append(tuple(watermarks_us))
        due = [
            row
            for row in sorted(self.rows)
            if row[1] not in {*excluded_organisations, *excluded_subscriptions}
            and row[0] >= watermarks_us[5]
        ]
        taken = due[:limit]
        for row in taken:
            self.rows.remove(row)
        self.at_us += 1_000
        self.clock.now_s += self.claim_takes_s
        await self.may_end.wait()
        return RelayBatch(
            tasks=[make_task(owner, kind) for _, owner, kind in taken],
            not_before=[],
            without_message=[],
            row_count=len(taken),
            at_us=self.at_us,
            highest_due_us={4: taken[-1][0]} if taken else {},
            has_future=False,
            deadline=0.0,
            organisations={SubscriptionId(owner): OrganisationId(owner) for _, owner, _ in taken},
        )

    def add(self, owner: str, count: int, kind: SubscriptionType = SubscriptionType.PUSH) -> None:
        self.at_us += 1_000
        self.rows += [(self.at_us, owner, kind)] * count


def make_relay(outbox: Outbox, *, batch: int = BATCH) -> Relay:
    return Relay(
        outgoing=cast("RelayOutbox", outbox),
        broker=cast("Broker", None),
        clock=outbox.clock,
        metrics=Metrics(),
        on_pull_queued=lambda _: None,
        batch=batch,
    )


async def claim(relay: Relay) -> list[tuple[str, bool]]:
    """Claim once; return the owners of what was taken, and whether it goes behind others."""
    turn = relay._turns.next()
    batch = await relay._claim(
        None if turn.organisation is None else turn, LIMIT, relay._clock.monotonic()
    )
    return [(task.subscription_id, task.behind) for task in batch.tasks]


def fronts(taken: Sequence[tuple[str, bool]]) -> Counter[str]:
    return Counter(owner for owner, behind in taken if not behind)


async def test_a_message_beside_a_backlog_waits_for_one_claim_and_goes_in_front() -> None:
    outbox = Outbox(ManualClock())
    relay = make_relay(outbox)
    outbox.add("large", 1000)
    assert await claim(relay) == [("large", False)] * LIMIT, "before the backlog is known"
    for _ in range(20):
        outbox.add("small", 1)
        assert ("small", False) in await claim(relay) + await claim(relay)


async def test_a_backlog_goes_behind_but_for_the_share_of_all_others() -> None:
    outbox = Outbox(ManualClock())
    relay = make_relay(outbox)
    outbox.add("large", 1000)
    await claim(relay)
    for count in (0, 3, 0, 1):
        outbox.add("small", count)
        taken = await claim(relay)
        assert fronts(taken) == Counter(small=count)
        while not (taken := [one for one in await claim(relay) if one[0] == "large"]):
            pass  # a turn of other subscriptions of its organisation
        assert len(taken) == LIMIT
        assert fronts(taken) == Counter(large=count)


async def test_no_organisation_starves_beside_others_that_never_pause() -> None:
    """Those that fill their claims are backlogged as well, and others leave it as many places as they take."""
    outbox = Outbox(ManualClock())
    relay = make_relay(outbox)
    outbox.add("large", 4000)
    front: Counter[str] = Counter()
    for _ in range(200):
        outbox.add("steady", LIMIT - 1)
        front.update(fronts(await claim(relay)))
    assert front["large"] >= 0.9 * front["steady"]


async def test_copies_of_pull_queues_never_go_behind() -> None:
    """Each has a queue of its own."""
    outbox = Outbox(ManualClock())
    relay = make_relay(outbox)
    outbox.add("large", 100, SubscriptionType.PULL)
    for _ in range(10):
        assert all(not behind for _, behind in await claim(relay))


async def test_without_a_backlog_nothing_goes_behind() -> None:
    outbox = Outbox(ManualClock())
    relay = make_relay(outbox)
    for _ in range(10):
        outbox.add("one", LIMIT - 1)
        assert await claim(relay) == [("one", False)] * (LIMIT - 1)


async def test_the_whole_outbox_is_scanned_once_a_second_or_more_seldom_if_that_takes_long() -> (
    None
):
    clock = ManualClock()
    outbox = Outbox(clock)
    relay = make_relay(outbox)
    await claim(relay)
    await claim(relay)
    assert outbox.scans[0] == (0,) * 10 != outbox.scans[1]
    clock.now_s += FULL_SCAN_INTERVAL_S
    outbox.claim_takes_s = 0.1
    await claim(relay)
    assert outbox.scans[2] == (0,) * 10
    clock.now_s += FULL_SCAN_SHARE * 0.1 - 0.05
    await claim(relay)
    assert outbox.scans[3] != (0,) * 10
    await claim(relay)
    assert outbox.scans[4] == (0,) * 10


async def test_a_batch_of_a_backlog_that_is_not_sent_yet_holds_up_no_claim_of_others() -> None:
    """The queues of both are as short as in the relay, and nothing is taken from that of the backlog."""
    outbox = Outbox(ManualClock())
    relay = make_relay(outbox, batch=LIMIT)
    outbox.add("large", 60)
    others, backlog = (asyncio.Queue[RelayBatch | None](1) for _ in range(2))
    running = [
        asyncio.create_task(relay._claim_until_stopped(others)),
        asyncio.create_task(relay._claim_backlog_until_stopped(backlog)),
    ]
    first = await asyncio.wait_for(others.get(), 60)
    assert first is not None
    assert len(first.tasks) == LIMIT, "before the backlog is known"
    for _ in range(3):
        outbox.add("small", 1)
        relay.wake()
        batch = await asyncio.wait_for(others.get(), 60)
        assert batch is not None
        assert [task.subscription_id for task in batch.tasks] == ["small"]
    taken = 0
    while taken < 60 - LIMIT:
        batch = await asyncio.wait_for(backlog.get(), 60)
        assert batch is not None
        assert {task.subscription_id for task in batch.tasks} == {"large"}
        taken += len(batch.tasks)
    relay._stopping = True
    relay.wake()
    relay._has_backlog.set()
    for ended in (others, backlog):
        assert await asyncio.wait_for(ended.get(), 60) is None
    await asyncio.wait_for(asyncio.gather(*running), 60)


async def test_a_pause_of_the_claims_of_a_backlog_takes_no_wake_up_of_the_others() -> None:
    """The relay would sleep until its next poll although something was queued."""
    outbox = Outbox(ManualClock())
    relay = make_relay(outbox, batch=LIMIT)
    outbox.add("large", 1000)
    await claim(relay)
    relay._retry_at_s = outbox.clock.now_s + 60.0
    pausing = asyncio.create_task(relay._claim_backlog_until_stopped(asyncio.Queue(1)))
    await asyncio.sleep(0)
    relay.wake()
    for _ in range(10):
        await asyncio.sleep(0)
    assert relay._wake.is_set()
    pausing.cancel()


async def test_what_came_during_the_last_claim_of_a_backlog_is_claimed_at_once() -> None:
    """A claim of all others that skipped it may have found nothing, and sleep until the next poll."""
    outbox = Outbox(ManualClock())
    relay = make_relay(outbox)
    outbox.add("large", LIMIT)
    await claim(relay)
    turn = relay._turns.next_backlogged()
    assert turn is not None
    assert turn.organisation is not None
    relay._wake.clear()
    await relay._claim(turn, LIMIT, outbox.clock.now_s)
    assert not relay._turns.is_backlogged(turn.organisation)
    assert relay._wake.is_set()


async def test_a_scan_that_is_wanted_during_a_scan_is_not_forgotten() -> None:
    """Otherwise tasks given back since would wait for the next one, up to ten seconds."""
    outbox = Outbox(ManualClock())
    relay = make_relay(outbox)
    outbox.may_end.clear()
    scanning = asyncio.create_task(relay._claim(None, LIMIT, outbox.clock.now_s))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(outbox.scans) == 1
    relay._scan_all_next()
    outbox.may_end.set()
    await scanning
    await relay._claim(None, LIMIT, outbox.clock.now_s)
    assert outbox.scans == [(0,) * 10, (0,) * 10]
    await relay._claim(None, LIMIT, outbox.clock.now_s)
    assert outbox.scans[2] != (0,) * 10
