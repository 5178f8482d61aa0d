"""Handle tasks that get no attempt: hold them until their lane can take them, cancel or release.

Publishers are notified of lanes that are saturated again and again, and hold new messages for them.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from delivery.brokers.credit_shares import CreditShares
from delivery.push.endpoints import InvalidEndpoint
from delivery.push.lane import Lane
from delivery.push.lanes import Lanes
from delivery.push.outcome_writer import OutcomeWriter
from rooms.db.queue.outcomes import DeliveryOutcome
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import SubscriptionId
from rooms.domain.state_machine import Reason, State

_SATURATION_REPORT_EVERY_S: Final = 1.0
_MAX_SATURATION_REPORTS: Final = 100
"""Lanes per check; one notification carries that many ids. Four checks a second make 400."""


class SaturationReporter:
    """Call `report` about once a second with each lane that stays saturated."""

    def __init__(self, lanes: Lanes, report: Callable[[SubscriptionId], None]) -> None:
        self._lanes = lanes
        self._report = report
        self._reported_at: dict[SubscriptionId, float] = {}

    def report_due(self, now: float) -> None:
        """Report the lanes that are due. `now`: monotonic seconds."""
        # A lane that is closed for another reason holds its tasks for that reason.
        saturated = [
            lane.subscription_id
            for lane in self._lanes.working()
            if lane.persistently_saturated and lane.closed_reason(now) in {None, Reason.SATURATED}
        ]
        before = self._reported_at
        self._reported_at = {known: before.get(known, 0.0) for known in saturated}
        due = [
            known
            for known in saturated
            if now - self._reported_at[known] >= _SATURATION_REPORT_EVERY_S
        ]
        due.sort(key=self._reported_at.__getitem__)
        for subscription_id in due[:_MAX_SATURATION_REPORTS]:
            self._reported_at[subscription_id] = now
            self._report(subscription_id)


class UnsentHandler:
    """Hold, cancel or release the tasks that get no attempt.

    `shares`: those beyond which the tasks of an organisation are held. None: the queue can keep
    tasks. If it cannot, those of full lanes are held, too, and publishers need no notice of
    saturated lanes.
    """

    def __init__(
        self, lanes: Lanes, outcome_writer: OutcomeWriter, saturation_reporter: SaturationReporter
    ) -> None:
        self._lanes = lanes
        self._outcome_writer = outcome_writer
        self._saturation_reporter = saturation_reporter
        self.shares: CreditShares | None = None
        self._to_release: list[DeliveryTask] = []

    @property
    def supports_exclude(self) -> bool:
        """Return whether the queue can keep the tasks of full lanes."""
        return self.shares is None

    def release_later(self, tasks: Iterable[DeliveryTask]) -> None:
        """Keep tasks whose claims must be released, because no attempt was made."""
        self._to_release.extend(tasks)

    def take_to_release(self) -> list[DeliveryTask]:
        """Remove and return the tasks whose claims must be released."""
        tasks, self._to_release = self._to_release, []
        return tasks

    def settle_all(self, tasks: Collection[DeliveryTask], state: State, reason: Reason) -> None:
        """Move tasks to a state without an attempt; they count for no organisation any more."""
        if self.shares is not None:
            self.shares.discard(tasks)
        for task in tasks:
            self._outcome_writer.add(DeliveryOutcome(task=task, state=state, reason=reason))

    def hold_closed(self, lane: Lane, tasks: Sequence[DeliveryTask], reason: Reason) -> None:
        """Hold tasks of a lane that is closed for this reason."""
        if reason is Reason.SATURATED:
            lane.shed_count += len(tasks)
        self.settle_all(tasks, State.HELD, reason)

    def settle_without_endpoint(
        self, tasks: Collection[DeliveryTask], endpoint: InvalidEndpoint | None
    ) -> None:
        """Cancel tasks of a deleted subscription (None); hold those with invalid settings."""
        if endpoint is None:
            self.settle_all(tasks, State.CANCELLED, Reason.SUBSCRIPTION_DELETED)
        else:
            self.settle_all(tasks, State.HELD, Reason.DISABLED)

    def hold_excess(
        self, lane: Lane, tasks: Sequence[DeliveryTask], now: float
    ) -> Sequence[DeliveryTask]:
        """Hold the tasks that are beyond the share of their organisation; return the others.

        What flows ends soon, and would come back at once.
        """
        if self.shares is None:
            return tasks
        excess = self.shares.take_excess(
            tasks, lane.endpoint.organisation, are_flowing=lane.is_flowing(now)
        )
        if not excess:
            return tasks
        self.settle_all(excess, State.HELD, Reason.SATURATED)
        held = set(map(id, excess))
        return [task for task in tasks if id(task) not in held]

    def hold_overflow(self, lane: Lane, now: float) -> None:
        """Hold the tasks that the lane will not start soon.

        If the queue can keep tasks, only those beyond the lane's rate are held. It could keep them,
        too, but would deliver hundreds of them for every few that the rate lets start.
        """
        if self.shares is None:
            self.hold_closed(lane, lane.pop_beyond_rate(now), Reason.SATURATED)
        else:
            kept_part = self.shares.kept_part(lane.endpoint.organisation)
            self.settle_all(lane.pop_overflow(now, kept_part), State.HELD, Reason.SATURATED)

    def check_lanes(self, now: float) -> None:
        """Hold the tasks of closed and overloaded lanes, and set aside those without work.

        Tasks whose claims are too short, or will be before an attempt, are released later. They are
        held if the queue cannot keep them: it would deliver them again at once.
        """
        for lane in self._lanes.working():
            if self.shares is not None:
                self.shares.adapt_kept_part(lane.endpoint.organisation, now)
            if lane.waiting or lane.subscription_id in self._lanes.full:
                reason = lane.closed_reason(now)
                if reason is not None:
                    self.hold_closed(lane, lane.drain(), reason)
                else:
                    expired = lane.pop_expired(now)
                    self.hold_overflow(lane, now)
                    if self.supports_exclude:
                        self._to_release += expired + lane.pop_unstartable(now)
                    else:
                        self.settle_all(expired, State.HELD, Reason.SATURATED)
                self._lanes.on_task_dequeued(lane)
            elif not lane.busy and (not lane.persistently_saturated or lane.is_idle(now)):
                self._lanes.set_idle(lane, now)
        self._lanes.remove_idle(now)
        if self.supports_exclude:
            self._saturation_reporter.report_due(now)
