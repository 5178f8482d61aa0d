"""Take turns of organisations at work on their sidelines, so that none waits for all of another."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rooms.domain.ids import OrganisationId, SubscriptionId

MAX_WAITING: Final = 1000
"""Subscriptions of an organisation that wait for its turns at a time; more are listed later."""


@dataclass(slots=True)
class _Waiting:
    """Hold an organisation's subscriptions behind the one it had last, and those before that."""

    behind: deque[SubscriptionId] = field(default_factory=deque)
    before: deque[SubscriptionId] = field(default_factory=deque)


class OrganisationTurns:
    """Give organisations turns, and within one organisation its subscriptions.

    It remembers who was served last. So work goes on behind that, and a subscription whose work
    fails each time delays the others of its organisation by one failure in each rotation.
    """

    def __init__(self, *, max_waiting: float = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._waiting: dict[OrganisationId | None, _Waiting] = {}
        self._order: deque[OrganisationId | None] = deque()
        self._last: OrganisationId | None = None
        self._last_served: dict[OrganisationId | None, SubscriptionId] = {}
        self.is_cut = False
        """True: an organisation has more subscriptions than may wait."""

    def clear(self) -> None:
        """Forget who waits, but not who was served last."""
        self._waiting.clear()
        self._order.clear()
        self.is_cut = False

    def add(self, subscription: SubscriptionId, organisation: OrganisationId | None) -> None:
        """Let a subscription wait. Since `clear`, they must come in the order of their ids."""
        waiting = self._waiting.setdefault(organisation, _Waiting())
        last = self._last_served.get(organisation)
        group = waiting.behind if last is None or subscription > last else waiting.before
        if len(group) < self._max_waiting:
            group.append(subscription)
        else:
            self.is_cut = True

    def start(self) -> int:
        """Begin with the organisation behind the one that had the last turn; return their number.

        All that wait have been added.
        """
        for organisation in self._last_served.keys() - self._waiting.keys():
            del self._last_served[organisation]
        last = self._last or ""
        self._order = deque(sorted(self._waiting, key=lambda one: ((one or "") <= last, one or "")))
        return len(self._order)

    def next_turn(self, limit: int) -> tuple[OrganisationId | None, Sequence[SubscriptionId]]:
        """Return whose turn it is, and so many subscriptions at most; none: all had theirs."""
        if not self._order:
            return None, ()
        organisation = self._last = self._order.popleft()
        waiting = self._waiting[organisation]
        return organisation, _first([*waiting.behind, *waiting.before], limit)

    def serve(self, organisation: OrganisationId | None, subscription: SubscriptionId) -> None:
        """Record that a subscription is served: before its work, which may fail."""
        self._last_served[organisation] = subscription

    def end_turn(
        self, organisation: OrganisationId | None, served: Sequence[SubscriptionId]
    ) -> None:
        """Let the organisation wait again if more of it waits than the first ones, now served."""
        waiting = self._waiting[organisation]
        for subscription in served:
            self._last_served[organisation] = subscription
            (waiting.behind or waiting.before).popleft()
        if waiting.behind or waiting.before:
            self._order.append(organisation)

    def waiting(self) -> Mapping[OrganisationId | None, frozenset[SubscriptionId]]:
        """Return those that still wait, by organisation."""
        return {
            organisation: frozenset((*waiting.behind, *waiting.before))
            for organisation, waiting in self._waiting.items()
            if waiting.behind or waiting.before
        }

    @property
    def is_empty(self) -> bool:
        """Return whether no organisation waits."""
        return not self._order


def _first(waiting: Iterable[SubscriptionId], limit: int) -> Sequence[SubscriptionId]:
    return [subscription for subscription, _ in zip(waiting, range(limit), strict=False)]
