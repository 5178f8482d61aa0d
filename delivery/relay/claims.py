"""Choose what a relay claims, and which copies the broker hands out behind those of others.

A backlogged organisation takes turns with the other ones (`delivery.brokers.claim_order`). Its
claims run beside those for all others, in smaller batches, and what it has beyond the share of
others goes behind. While others have work, its claims are smaller still; while processors are
short, too, they rest after each.
"""

import math
from collections.abc import Callable
from typing import Final

from delivery.brokers.claim_order import COMMIT_SLACK_US, ClaimTurn, ClaimTurns, ClaimWatermarks
from delivery.brokers.skipped_organisations import SkippedOrganisations
from rooms.burst_pacing import BurstPacer
from rooms.db.queue.relay import RelayBatch, RelayOutbox
from rooms.domain.ids import OrganisationId, RoomId
from rooms.domain.state_machine import SubscriptionType
from rooms.ports import Clock

FULL_SCAN_INTERVAL_S: Final = 1.0
FULL_SCAN_SHARE: Final = 20
"""The least time between two full scans, as a multiple of how long the last one took."""
MAX_FULL_SCAN_INTERVAL_S: Final = 10.0
EARLY_SCAN_S: Final = 0.25
"""In a backlog a scan comes so early rather than with the next wake-up."""
BACKLOG_BATCH: Final = 200
"""A claim in turn takes at most so many rows: those of others wait for it."""
PACED_BACKLOG_BATCH: Final = 25
"""The same while others have work.

A larger claim would delay them before it is known that processors are short.
"""
BACKLOG_REST: Final = 4.0
"""The rest after a claim in turn then, as a multiple of the time that it took.

The broker and workers have several times the relay's work with it, on the same processors.
"""
KEEP_BACKLOG_US: Final = 1_000_000
"""An organisation counts as backlogged for so long after its last full claim.

A relay that is faster than a burst's publisher finds few rows for moments, and would claim them
together with those of others then.
"""

RelayTurn = ClaimTurn[RelayBatch]


def relay_watermarks() -> ClaimWatermarks[RelayBatch]:
    """Return low-water marks of the outbox, below what transactions under way may commit."""
    return ClaimWatermarks(lambda batch: batch.at_us, slack_us=COMMIT_SLACK_US)


class RelayClaims:
    """Claim rows to send, for backlogged organisations in turn and for all others.

    A claim for others and one in turn may be under way at the same time.
    """

    def __init__(
        self,
        outgoing: RelayOutbox,
        *,
        clock: Clock,
        claim_s: float,
        poll_s: float,
        on_backlog_ended: Callable[[], None],
        on_rest: Callable[[float], object] | None = None,
        pacer: BurstPacer | None = None,
    ) -> None:
        """Keep claims for `claim_s`, and look for dead relays every `poll_s`.

        `on_rest` gets each rest of the default `pacer`, in seconds. `on_backlog_ended`: what came
        for an organisation since its last turn is for the claims for others now, which may have
        skipped it.
        """
        self._outgoing = outgoing
        self._skipped = SkippedOrganisations(outgoing.have_many_subscriptions)
        self._clock = clock
        self._claim_s = claim_s
        self._poll_s = poll_s
        self._on_backlog_ended = on_backlog_ended
        self._pacer = pacer or BurstPacer(clock.monotonic, factor=BACKLOG_REST, on_rest=on_rest)
        self._turns = ClaimTurns(relay_watermarks(), keep_us=KEEP_BACKLOG_US)
        self._backlog_rooms: dict[OrganisationId, RoomId] = {}
        """A room of each backlogged organisation."""
        self._next_full_scan_s = 0.0
        self._dead_relays: list[int] = []
        self._next_dead_check_s = 0.0

    @property
    def has_backlog(self) -> bool:
        """Return whether an organisation takes turns."""
        return self._turns.has_backlog

    def next_turn(self) -> RelayTurn | None:
        """Return the next claim for a backlogged organisation; None: there is none."""
        return self._turns.next_backlogged()

    @property
    def backlog_batch(self) -> int:
        """Return how many rows a claim in turn takes."""
        return PACED_BACKLOG_BATCH if self._pacer.has_several_organisations else BACKLOG_BATCH

    def rest_s(self, took_s: float) -> float:
        """Return how long claims in turn rest, after one that took so long with handing it on."""
        return self._pacer.rest_s(took_s)

    def scan_all_next(self) -> None:
        """Let the next claim for others scan the whole outbox."""
        self._next_full_scan_s = 0.0

    async def claim(
        self, limit: int, turn: RelayTurn | None = None, *, is_woken: bool = False
    ) -> RelayBatch:
        """Claim up to `limit` rows: in a turn, or for all others.

        `is_woken`: a notification announced something for others, which the claim should find soon.
        Errors: those of the outbox.
        """
        begun_s = self._clock.monotonic()
        if begun_s >= self._next_dead_check_s:
            known, self._dead_relays = self._dead_relays, await self._outgoing.dead_relays()
            self._next_dead_check_s = begun_s + self._poll_s
            if not set(self._dead_relays) <= set(known):
                self.scan_all_next()
        full_scan = turn is None and self._scans_all_now(begun_s, is_woken=is_woken)
        if turn is None:
            turn = self._turns.scan_all() if full_scan else self._turns.next_of_others()
        looks_up_owners = await self._skipped.are_looked_up(
            turn.excluded, begun_s, is_full_scan=turn.watermarks.is_at_start
        )
        if full_scan:
            self._next_full_scan_s = math.inf  # until another one is wanted, or this one has ended
        batch = await self._outgoing.claim(
            limit=limit,
            claim_s=self._claim_s,
            deadline=begun_s + self._claim_s,
            watermarks_us=turn.watermarks.marks.bounds,
            dead_relays=self._dead_relays,
            excluded_organisations=turn.excluded,
            excluded_subscriptions=turn.excluded_subscriptions,
            ended=turn.ended,
            looks_up_owners=looks_up_owners,
            with_owners=turn.organisation is not None,
        )
        self._record(turn, batch, exhausted=batch.left_nothing_due(limit))
        if full_scan and self._next_full_scan_s == math.inf:
            ended_s = self._clock.monotonic()
            rest_s = max(FULL_SCAN_INTERVAL_S, FULL_SCAN_SHARE * (ended_s - begun_s))
            self._next_full_scan_s = ended_s + min(MAX_FULL_SCAN_INTERVAL_S, rest_s)
        return batch

    def _scans_all_now(self, now_s: float, *, is_woken: bool) -> bool:
        """Return whether the next claim for others scans the whole outbox.

        In a backlog that takes long. So a claim that was woken leaves it to the next one, but not
        for more than an interval, and that one makes it a little early.
        """
        due_s = self._next_full_scan_s
        if self._turns.has_backlog:
            due_s += FULL_SCAN_INTERVAL_S if is_woken else -EARLY_SCAN_S
        return now_s >= due_s

    def _record(self, turn: RelayTurn, batch: RelayBatch, *, exhausted: bool) -> None:
        added = self._turns.record(turn, batch, exhausted=exhausted)
        self._note_work(turn.organisation, batch)
        if added is not None:
            _put_behind(batch, added, share=len(batch.tasks) - batch.count_by_organisation()[added])
        if turn.organisation is not None:
            _put_behind(batch, turn.organisation, share=turn.share)
            if not self._turns.is_backlogged(turn.organisation):
                self._backlog_rooms.pop(turn.organisation, None)
                self._on_backlog_ended()

    def _note_work(self, organisation: OrganisationId | None, batch: RelayBatch) -> None:
        """Record whose work a claim took: rooms stand for organisations, which most claims omit.

        One room stands for all of a backlogged organisation. A turn may also take what others have.
        """
        own = {
            task.room_id
            for task in batch.tasks
            if organisation is not None
            and batch.organisations.get(task.subscription_id) == organisation
        }
        for room in {task.room_id for task in batch.tasks} - own:
            self._pacer.note(room)
        if organisation is not None and own:
            room = self._backlog_rooms.setdefault(organisation, min(own))
            self._pacer.note(room, has_backlog=True)


def _put_behind(batch: RelayBatch, organisation: OrganisationId, *, share: int) -> None:
    """Let the broker hand out a backlogged organisation's PUSH tasks after those of others.

    The first `share` tasks keep their place: as many as all others had in their last turn. So
    others that never pause do not keep this organisation from its share of the workers.
    """
    for task in batch.tasks:
        if (
            task.kind is SubscriptionType.PUSH
            and batch.organisations.get(task.subscription_id) == organisation
        ):
            task.behind = share <= 0
            share -= 1
