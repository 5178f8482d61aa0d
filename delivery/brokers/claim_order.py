"""Choose what each claim of the outbox takes: with a backlog, organisations take turns.

Workers claim so where PostgreSQL is the broker, and relays where another one is.

A claim takes what is due by priority, then by due time. That is also the order of arrival, so a
burst of one organisation would delay everything behind it. A claim that fills its batch leaves a
backlog. The organisation with the most rows of such a claim is **backlogged**: every other claim
skips it from then on, and it gets claims in turn with the other backlogged ones. These skip only
the others that are backlogged. Its turns end when such a claim does not fill its batch, for a relay
a while later.

So a message of an organisation without a backlog waits for one claim of another organisation, and
backlogged organisations get the same number of rows a round. Without a backlog every claim is for
all, as if there were no turns.

Deleted subscriptions of a backlogged organisation are skipped once a claim has taken rows of them.
An organisation that has too many unsettled tasks gets no turn (`delivery.brokers.credit_shares`).

Within a backlogged organisation a subscription to which half of a full claim goes is backlogged in
the same way: its turns alternate with those of all others of its organisation. So a burst to one
webhook does not delay the other webhooks of its organisation. A burst to many at once does.
"""

import copy
from collections import Counter, deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from rooms.db.queue.claims import ClaimedBatch
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import OrganisationId, SubscriptionId
from rooms.domain.watermarks import NO_WATERMARKS, DueWatermarks, Watermarks

START_SLACK_US: Final = 50_000
"""The time for which a transaction may run, its due times fixed, before it gets its number."""
COMMIT_SLACK_US: Final = 500_000
"""The next scan of the whole queue finds what takes longer than this to commit."""
MAX_BACKLOGGED: Final = 64
"""Organisations that take turns; further ones wait in order of arrival with all others."""
_ORGANISATION_SHARE: Final = 16
"""An organisation with fewer than one row in so many of a full claim is not backlogged."""
_SUBSCRIPTION_SHARE: Final = 2
"""The same for a subscription among those of its organisation. If several of them took turns, each
claim would read the rows of all others that are due in between.
"""
MAX_ENDED: Final = 2_000
"""Subscriptions that have ended and are skipped by name, with every claim that skips their owners.

What further ones have goes in order of arrival with all others.
"""
_IDLE_TURNS: Final = 4
"""Turns of backlogged subscriptions between claims that find nothing of their organisation."""

PartyT = TypeVar("PartyT")
ClaimT = TypeVar("ClaimT", bound="Claim")


class Claim(Protocol):
    """Declare what is read of a claim."""

    @property
    def tasks(self) -> Sequence[DeliveryTask]: ...

    @property
    def organisations(self) -> Mapping[SubscriptionId, OrganisationId]: ...

    @property
    def highest_due_us(self) -> Mapping[int, int]: ...

    @property
    def at_us(self) -> int: ...

    def count_by_organisation(self) -> Mapping[OrganisationId, int]: ...


class CommittedUntil:
    """Find the time until which claims saw all commits, by the transactions under way."""

    def __init__(self) -> None:
        self._claims: deque[tuple[int, int]] = deque()

    def __call__(self, claim: ClaimedBatch) -> int:
        """Return it for the latest claim: at most `COMMIT_SLACK_US` before that."""
        # Whatever is committed from now on began after the latest claim before the oldest
        # transaction which was under way in this one.
        claims, earliest = self._claims, claim.at_us - COMMIT_SLACK_US
        claims.append((claim.at_us, claim.xmax))
        while len(claims) > 1 and claims[1][1] <= claim.xmin:
            claims.popleft()
        at_us, newest = claims[0]
        while claims[0][0] < earliest:
            claims.popleft()
        return max(at_us, earliest) if newest <= claim.xmin else earliest


class ClaimWatermarks(Generic[ClaimT]):
    """Keep the low-water marks of claims that skip the same parties.

    They may exclude subscriptions and organisations for a while.
    """

    def __init__(self, complete_until: Callable[[ClaimT], int], *, slack_us: int) -> None:
        """Set the time of a claim, in microseconds, until which it saw all that is due.

        Marks stay `slack_us` below it, and below what was taken.
        """
        self.marks = Watermarks()
        self.excluded_bounds: dict[str, DueWatermarks] = {}
        self._complete_until = complete_until
        self._slack_us = slack_us

    def reset(self) -> None:
        """Scan the whole queue next."""
        self.marks.reset()
        self.excluded_bounds.clear()

    @property
    def is_at_start(self) -> bool:
        """Return whether the next claim passes over the whole queue."""
        return self.marks.bounds == NO_WATERMARKS

    def lower_bounds(self, excluded: frozenset[str]) -> DueWatermarks:
        """Return the due times at which the next claim starts, which skips `excluded`."""
        for identity in self.excluded_bounds.keys() - excluded:
            self.marks.lower_to(self.excluded_bounds.pop(identity))
        for identity in excluded - self.excluded_bounds.keys():
            self.excluded_bounds[identity] = self.marks.bounds
        return self.marks.bounds

    def advance(self, claim: ClaimT, *, exhausted: bool) -> None:
        """Raise the marks by what the claim left nothing of; `exhausted`: nothing is left."""
        complete_us = self._complete_until(claim) - self._slack_us
        if exhausted:
            self.marks.advance(complete_us)
        elif taken := claim.highest_due_us:
            lowest = min(taken)
            reached_us = min(taken[lowest] - self._slack_us, complete_us)
            self.marks.advance(complete_us, reached=lowest, reached_us=reached_us)

    def copy(self) -> "ClaimWatermarks[ClaimT]":
        """Return marks of their own, at the same positions."""
        return copy.deepcopy(self)

    def absorb(self, other: "ClaimWatermarks[ClaimT]") -> None:
        """Scan also what claims with these other marks left."""
        for identity, bounds in other.excluded_bounds.items():
            own = self.excluded_bounds.get(identity, bounds)
            self.excluded_bounds[identity] = tuple(map(min, own, bounds))
        self.marks.lower_to(other.marks.bounds)


@dataclass(frozen=True, slots=True)
class _PartyTurn(Generic[PartyT, ClaimT]):
    """Describe a turn of a backlogged party (None: of all others), which skips `excluded`."""

    party: PartyT | None
    excluded: Sequence[PartyT]
    watermarks: ClaimWatermarks[ClaimT]


@dataclass(slots=True)
class _Backlog(Generic[ClaimT]):
    """Hold the marks of a backlogged party, and the rows of all others before its last claim."""

    watermarks: ClaimWatermarks[ClaimT]
    others_before: int


class _PartyTurns(Generic[PartyT, ClaimT]):
    """Hold which parties are backlogged, and whose turn it is.

    A party is backlogged if a claim of all others was full and one row in `share` was its own.
    After a claim for all others that took nothing, their next one comes after `idle_turns`.
    """

    def __init__(self, watermarks: ClaimWatermarks[ClaimT], *, share: int, idle_turns: int) -> None:
        self.others = watermarks
        self.backlogged: dict[PartyT, _Backlog[ClaimT]] = {}
        """In the order of their turns."""
        self.others_rows = 0
        """The rows that claims for all others took."""
        self._share = share
        self._idle_turns = idle_turns
        self._turns_left = 0
        """Turns of backlogged parties before that of all others."""

    def next(self, resting: Container[PartyT] = ()) -> _PartyTurn[PartyT, ClaimT]:
        """Return the next turn: that of a backlogged party, then that of all others.

        `resting`: parties that get no turn now.
        """
        turn = self.next_backlogged(resting) if self._turns_left else None
        return self.next_of_others() if turn is None else turn

    def next_backlogged(self, resting: Container[PartyT] = ()) -> _PartyTurn[PartyT, ClaimT] | None:
        for party, backlog in self.backlogged.items():
            if party in resting:
                continue
            others = [known for known in self.backlogged if known != party]
            return _PartyTurn(party, others, backlog.watermarks)
        return None

    def next_of_others(self) -> _PartyTurn[PartyT, ClaimT]:
        return _PartyTurn(None, list(self.backlogged), self.others)

    def end_turn(self, party: PartyT, *, taken: int, finished: bool) -> None:
        """Let a backlogged party wait for its next turn, or count it among all others again."""
        self._turns_left = max(0, self._turns_left - 1)
        backlog = self.backlogged.pop(party)
        if finished:
            self.others.absorb(backlog.watermarks)
        else:
            before = self.others_rows if taken else backlog.others_before
            self.backlogged[party] = _Backlog(backlog.watermarks, before)

    def end_turn_of_others(
        self, taken: int, counts: Callable[[], Mapping[PartyT, int]], *, exhausted: bool
    ) -> PartyT | None:
        """Record a claim for all others; return the party that is backlogged from now on."""
        self._turns_left = 1 if taken else self._idle_turns
        self.others_rows += taken
        if exhausted or len(self.backlogged) >= MAX_BACKLOGGED:
            return None
        # A claim skips no deleted subscription that none has met, and its owner may be backlogged.
        found = {party: rows for party, rows in counts().items() if party not in self.backlogged}
        party = max(found, key=found.__getitem__, default=None)
        if party is None or found[party] * self._share < sum(found.values()):
            return None
        self.backlogged[party] = _Backlog(self.others.copy(), self.others_rows)
        self._turns_left = 0
        return party

    def repeat_turn_of_others(self) -> None:
        self._turns_left = 0

    def reset(self) -> None:
        self.others.reset()
        for backlog in self.backlogged.values():
            backlog.watermarks.reset()


@dataclass(frozen=True, slots=True)
class ClaimTurn(Generic[ClaimT]):
    """Describe one claim, which begins at `watermarks`.

    `organisation`: the backlogged one whose turn it is; None: all others. `subscription`: the
    backlogged one of it; None: all its others. The claim skips the organisations of `excluded` and
    the subscriptions of `excluded_subscriptions`. `ended`: deleted ones of the organisations.
    `share`: as many rows as all other organisations had since its last turn.
    """

    organisation: OrganisationId | None
    subscription: SubscriptionId | None
    excluded: Sequence[OrganisationId]
    excluded_subscriptions: Sequence[SubscriptionId]
    watermarks: ClaimWatermarks[ClaimT]
    marks_version: int
    ended: Sequence[SubscriptionId] = ()
    share: int = 0


class ClaimTurns(Generic[ClaimT]):
    """Hold which organisations and subscriptions are backlogged, and whose turn it is."""

    def __init__(self, watermarks: ClaimWatermarks[ClaimT], *, keep_us: int = 0) -> None:
        """`keep_us`: an organisation takes turns for so long after its last full claim."""
        self._keep_us = keep_us
        self._full_at_us: dict[OrganisationId, int] = {}
        """PostgreSQL's time of the last full claim of each backlogged organisation."""
        self._organisations = _PartyTurns[OrganisationId, ClaimT](
            watermarks, share=_ORGANISATION_SHARE, idle_turns=1
        )
        self._subscriptions: dict[OrganisationId, _PartyTurns[SubscriptionId, ClaimT]] = {}
        """Of each backlogged organisation; its marks are those of the others among them."""
        self._ended: dict[OrganisationId, dict[SubscriptionId, None]] = {}
        """Subscriptions of backlogged organisations that were deleted, or ended otherwise."""
        self.has_several_organisations = True
        """Without a second organisation no claim in turn is for others."""
        self.resting: frozenset[OrganisationId] = frozenset()
        """Organisations that get no turn now."""
        self._marks_version = 0
        """Changes when marks are lowered: a claim under way then began too high."""

    @property
    def has_backlog(self) -> bool:
        """Return whether a claim is due at once, whatever the last one took."""
        backlogged = self._organisations.backlogged
        return bool(backlogged.keys() - self.resting if self.resting else backlogged)

    def next(self) -> ClaimTurn[ClaimT]:
        """Return the next claim: one for a backlogged organisation, then one for all others."""
        if not self.has_several_organisations and (alone := self.next_backlogged()) is not None:
            return alone
        turn = self._organisations.next(self.resting)
        return self.next_of_others() if turn.party is None else self._within(turn.party, turn)

    def next_backlogged(self) -> ClaimTurn[ClaimT] | None:
        """Return the next claim for a backlogged organisation; None: there is none."""
        turn = self._organisations.next_backlogged(self.resting)
        return None if turn is None or turn.party is None else self._within(turn.party, turn)

    def next_of_others(self) -> ClaimTurn[ClaimT]:
        """Return the next claim for all that are not backlogged."""
        turn = self._organisations.next_of_others()
        return ClaimTurn(
            None,
            None,
            turn.excluded,
            (),
            turn.watermarks,
            self._marks_version,
            self._ended_of(turn.excluded),
        )

    def _ended_of(self, organisations: Sequence[OrganisationId]) -> Sequence[SubscriptionId]:
        if not self._ended:
            return ()
        return [ended for known in organisations for ended in self._ended.get(known, ())]

    def _within(
        self, organisation: OrganisationId, turn: _PartyTurn[OrganisationId, ClaimT]
    ) -> ClaimTurn[ClaimT]:
        inner = self._subscriptions[organisation].next()
        organisations = self._organisations
        share = organisations.others_rows - organisations.backlogged[organisation].others_before
        return ClaimTurn(
            organisation,
            inner.party,
            turn.excluded,
            inner.excluded,
            inner.watermarks,
            self._marks_version,
            self._ended_of(turn.excluded),
            share,
        )

    def scan_all(self) -> ClaimTurn[ClaimT]:
        """Return a claim for the others that begins at the start; so do the next of all."""
        self.reset()
        return self.next_of_others()

    def record(
        self, turn: ClaimTurn[ClaimT], claim: ClaimT, *, exhausted: bool
    ) -> OrganisationId | None:
        """Record what a claim took; `exhausted`: it left nothing that is due.

        Return the organisation that is backlogged from now on.
        """
        if turn.marks_version == self._marks_version:
            turn.watermarks.advance(claim, exhausted=exhausted)
        organisations = self._organisations
        if turn.organisation is None:
            added = organisations.end_turn_of_others(
                len(claim.tasks), claim.count_by_organisation, exhausted=exhausted
            )
            if added is not None:
                self._full_at_us[added] = claim.at_us
                self._subscriptions[added] = _PartyTurns(
                    organisations.backlogged[added].watermarks,
                    share=_SUBSCRIPTION_SHARE,
                    idle_turns=_IDLE_TURNS,
                )
            if self._note_ended(claim):
                # It took what it should have skipped.
                organisations.repeat_turn_of_others()
            return added
        subscriptions = self._subscriptions[turn.organisation]
        if turn.subscription is not None:
            subscriptions.end_turn(turn.subscription, taken=len(claim.tasks), finished=exhausted)
            finished = False
        else:
            subscriptions.end_turn_of_others(
                len(claim.tasks),
                lambda: Counter(
                    task.subscription_id
                    for task in claim.tasks
                    if claim.organisations.get(task.subscription_id) == turn.organisation
                ),
                exhausted=exhausted,
            )
            # That clock may be set back: then the turns end at once.
            kept = 0 <= claim.at_us - self._full_at_us[turn.organisation] < self._keep_us
            finished = exhausted and not subscriptions.backlogged and not kept
        if not exhausted:
            self._full_at_us[turn.organisation] = claim.at_us
        self._note_ended(claim)
        organisations.end_turn(turn.organisation, taken=len(claim.tasks), finished=finished)
        if finished:
            del self._subscriptions[turn.organisation], self._full_at_us[turn.organisation]
            self._ended.pop(turn.organisation, None)
            self._marks_version += 1
        return None

    def _note_ended(self, claim: ClaimT) -> bool:
        """Skip the subscriptions that have ended from now on; return whether some are new."""
        if not self._subscriptions:
            return False
        before = count = sum(map(len, self._ended.values()))
        for task in claim.tasks:
            if task.subscription_version is not None:
                continue
            # A row of a room may outlive its subscription's for a moment, and has no owner then.
            owner = claim.organisations.get(task.subscription_id)
            if owner is None or owner not in self._subscriptions:
                continue
            known = self._ended.setdefault(owner, {})
            if task.subscription_id not in known and count < MAX_ENDED:
                known[task.subscription_id] = None
                count += 1
        return count > before

    def is_backlogged(self, organisation: OrganisationId) -> bool:
        """Return whether an organisation takes turns."""
        return organisation in self._subscriptions

    def reset(self) -> None:
        """Scan the whole queue next."""
        self._marks_version += 1
        self._organisations.reset()
        for subscriptions in self._subscriptions.values():
            subscriptions.reset()
