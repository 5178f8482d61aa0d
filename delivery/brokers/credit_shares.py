"""Share a consumer's credit between organisations, so that none takes all of it.

Tasks of an endpoint that hangs keep their credit until the time-out. With thousands of such
webhooks one organisation could use up the credit of each worker, and nothing of others would be
claimed meanwhile. So an organisation gets no more once it has as much as is free. That is half of
the credit if it is the only one, a third if there are two such, and so on. Others find some left.

The same holds for bytes.

Consumers skip such an organisation. If their queue cannot do that, what it has beyond its share is
held in PostgreSQL, and no more is released than it may have. Lanes that flow keep what they got,
because it ends soon. So they keep less of it the longer their organisation is over its share, and
its other lanes find room.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Final

from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import OrganisationId, SubscriptionId

_MARGIN: Final = 16
"""A share ends a part of the credit before it is all that is free, so that no claim is small."""

_EXPECTED_TTL_S: Final = 2.0
"""Tasks are expected for so long after the first of them: another worker may get them."""

_HALVE_EVERY_S: Final = 0.5
"""Each lane has given way after that, and released tasks that were under way have come."""
_DOUBLE_EVERY_S: Final = 10.0
_MOST_HALVINGS: Final = 7


class _Use:
    """Count what an organisation has (None: subscriptions whose rows are gone)."""

    __slots__ = ("count", "flowing", "flowing_size", "organisation", "size")

    def __init__(self, organisation: OrganisationId | None) -> None:
        self.organisation = organisation
        self.count = self.size = 0
        self.flowing = self.flowing_size = 0
        """Those of them that came to lanes that flowed."""


class CreditShares:
    """Count unsettled tasks and their bytes, and find the organisations with too many of them.

    Tasks are known as the very objects that were added: any other key costs more.
    """

    def __init__(self, *, credit: int, max_bytes: int, overhead_bytes: int = 0) -> None:
        """Share so many tasks and bytes; a task counts for its payload and `overhead_bytes`."""
        self._credit = credit
        self._max_bytes = max_bytes
        self._overhead_bytes = overhead_bytes
        self._margin, self._margin_bytes = credit // _MARGIN, max_bytes // _MARGIN
        self._unsettled: dict[int, tuple[DeliveryTask, _Use, bool]] = {}
        self._uses: dict[OrganisationId | None, _Use] = {}
        self._bytes = self._flowing = 0
        self._over: frozenset[OrganisationId] = frozenset()
        self._expected: dict[OrganisationId, tuple[int, float]] = {}
        """Tasks that were queued for an organisation, and until when they are expected."""
        self.is_shared = True
        """False: there is no other organisation for which something must be left."""
        self._halvings: dict[OrganisationId, tuple[int, float]] = {}
        """Times that the part that lanes may keep was halved, and when it changed last."""

    def __len__(self) -> int:
        return len(self._unsettled)

    def __contains__(self, task: DeliveryTask) -> bool:
        return id(task) in self._unsettled

    def add(
        self,
        tasks: Iterable[DeliveryTask],
        owners: Mapping[SubscriptionId, OrganisationId],
        *,
        are_flowing: bool = False,
    ) -> None:
        """Count tasks, each for the owner of its subscription, unless they are counted already."""
        unsettled, uses, overhead = self._unsettled, self._uses, self._overhead_bytes
        for task in tasks:
            if id(task) in unsettled:
                continue
            organisation = owners.get(task.subscription_id)
            use = uses.get(organisation)
            if use is None:
                use = uses[organisation] = _Use(organisation)
            unsettled[id(task)] = task, use, are_flowing
            size = len(task.payload) + overhead
            use.count += 1
            use.size += size
            self._bytes += size
            if are_flowing:
                use.flowing += 1
                use.flowing_size += size
                self._flowing += 1

    def discard(self, tasks: Iterable[DeliveryTask]) -> None:
        """Count tasks no longer; those that are not counted change nothing."""
        unsettled, overhead = self._unsettled, self._overhead_bytes
        for task in tasks:
            found = unsettled.pop(id(task), None)
            if found is None:
                continue
            _, use, was_flowing = found
            size = len(task.payload) + overhead
            use.count -= 1
            use.size -= size
            self._bytes -= size
            if was_flowing:
                use.flowing -= 1
                use.flowing_size -= size
                self._flowing -= 1
            if not use.count:
                del self._uses[use.organisation]
                self._over = self._over.difference({use.organisation})

    def take_excess(
        self, tasks: Sequence[DeliveryTask], organisation: OrganisationId, *, are_flowing: bool
    ) -> Sequence[DeliveryTask]:
        """Count a subscription's tasks for its organisation; return those beyond its share.

        These are the last ones of the lowest priority. They count no longer, and must get an
        outcome at once: what hangs would leave no credit to others. `are_flowing`: return
        none, because they end soon.
        """
        self.add(tasks, {tasks[0].subscription_id: organisation}, are_flowing=are_flowing)
        self.on_arrived(organisation, len(tasks))
        count = 0 if are_flowing else min(len(tasks), self.excess_of(organisation))
        if not count:
            return ()
        excess = sorted(tasks, key=attrgetter("priority"), reverse=True)[-count:]
        self.discard(excess)
        return excess

    def excess_of(self, organisation: OrganisationId) -> int:
        """Return how many tasks of an organisation must end, so that it has as much as is free."""
        use = self._uses.get(organisation)
        if use is None or not self.is_shared:
            return 0
        free, free_bytes = self._free_for(use)
        excess, excess_bytes = max(0, use.count - free) // 2, max(0, use.size - free_bytes) // 2
        return max(excess, excess_bytes * use.count // max(1, use.size))

    def kept_part(self, organisation: OrganisationId) -> float:
        """Return which part of their usual work an organisation's lanes may keep: 1, or less."""
        halvings, _ = self._halvings.get(organisation, (0, 0.0))
        return 0.5**halvings

    def adapt_kept_part(self, organisation: OrganisationId, now: float) -> None:
        """Halve the part that lanes may keep until their organisation is within its share.

        Then double it from time to time. `now`: monotonic seconds.
        """
        halvings, since = self._halvings.get(organisation, (0, -_HALVE_EVERY_S))
        if now - since < _HALVE_EVERY_S:
            return
        if self._is_over_share(organisation):
            self._halvings[organisation] = min(_MOST_HALVINGS, halvings + 1), now
        elif doublings := min(halvings, int((now - since) / _DOUBLE_EVERY_S)):
            self._halvings[organisation] = halvings - doublings, now
            if halvings == doublings:
                del self._halvings[organisation]

    def room_for(self, organisation: OrganisationId, now: float) -> int | None:
        """Return how many tasks may be queued for an organisation; None: there is no bound.

        `now`: monotonic seconds.
        """
        if not self.is_shared:
            return None
        if self._is_over_share(organisation):
            return 0
        use = self._uses.get(organisation) or _Use(organisation)
        free, free_bytes = self._free_for(use)
        room = (free - use.count) // 2
        if self._unsettled:
            room = min(room, self._as_tasks(free_bytes - use.size) // 2)
        expected, until = self._expected.get(organisation, (0, 0.0))
        return max(0, room - (expected if now < until else 0))

    def expect(self, organisation: OrganisationId, count: int, now: float) -> None:
        """Leave room for tasks that were queued for an organisation, for a while."""
        self._expected = {one: known for one, known in self._expected.items() if now < known[1]}
        expected, until = self._expected.get(organisation, (0, now + _EXPECTED_TTL_S))
        self._expected[organisation] = expected + count, until

    def on_arrived(self, organisation: OrganisationId, count: int) -> None:
        """Expect so many tasks less, as they are counted now."""
        if (known := self._expected.get(organisation)) is not None:
            self._expected[organisation] = max(0, known[0] - count), known[1]

    def free(self, most: int) -> int:
        """Return how many tasks of the usual size may come, at most `most`."""
        limit = min(most, self._credit - len(self._unsettled))
        if self._unsettled:
            limit = min(limit, self._as_tasks(self._max_bytes - self._bytes))
        return limit

    def _as_tasks(self, size: int) -> int:
        return size * len(self._unsettled) // max(1, self._bytes)

    def is_short(self, most: int) -> bool:
        """Return whether an organisation may be over its share, or get there with `most` more."""
        return bool(self._over) or self._is_short(self.free(most))

    def _is_short(self, limit: int) -> bool:
        count, size = len(self._unsettled), self._bytes
        spare, spare_bytes = self._credit - 2 * count, self._max_bytes - 2 * size
        return (
            spare <= self._margin
            or spare < 2 * limit
            or spare_bytes <= self._margin_bytes
            or (count > 0 and self._as_tasks(spare_bytes) < 2 * limit)
        )

    def over_share(self) -> frozenset[OrganisationId]:
        """Return the organisations that get nothing now, as they have about as much as is free.

        They stay among these until they have a quarter less than that. Else each task that ends
        would bring a claim for the next one.
        """
        if not self.is_shared or not (self._over or self._is_short(0)):
            self._over = frozenset()
            return self._over
        free, free_bytes = self._credit - len(self._unsettled), self._max_bytes - self._bytes
        self._over = frozenset(
            known
            for known, use in self._uses.items()
            if known is not None and self._has_its_share(use, free, free_bytes)
        )
        return self._over

    def _has_its_share(self, use: _Use, free: int, free_bytes: int) -> bool:
        return (
            use.count + min(self._margin, free // 4) >= free
            or use.size + min(self._margin_bytes, free_bytes // 4) >= free_bytes
            or (
                use.organisation in self._over
                and (4 * use.count > 3 * free or 4 * use.size > 3 * free_bytes)
            )
        )

    def _is_over_share(self, organisation: OrganisationId) -> bool:
        """Return whether one is among those of `over_share`, where lanes that flow give way."""
        is_over = self.is_shared and bool(self._over or self._is_short(0))
        if is_over:
            use = self._uses.get(organisation) or _Use(organisation)
            is_over = self._has_its_share(use, *self._free_for(use))
        if is_over != (organisation in self._over):
            self._over ^= {organisation}
        return is_over

    def _free_for(self, use: _Use) -> tuple[int, int]:
        """Return how many tasks and bytes are free for one organisation, now or soon.

        It has its share sooner where others have more than theirs. But what flows ends or is held
        within a second or so. So the others' part of that is free already.
        """
        free, free_bytes = self._credit - len(self._unsettled), self._max_bytes - self._bytes
        has_more_free = (
            use.count + self._margin < free
            and use.size + self._margin_bytes < free_bytes
            and use.organisation not in self._over
        )
        if has_more_free or self._flowing == use.flowing:
            return free, free_bytes
        others = [one for one in self._uses.values() if one is not use and one.flowing]
        return (
            free + _given_up([(one.count, one.flowing) for one in others], free),
            free_bytes + _given_up([(one.size, one.flowing_size) for one in others], free_bytes),
        )

    def free_for_each(self, most: int) -> int:
        """Return the same as `free`, if all that comes may be one organisation's.

        It is one that is not over its share, and is not after that either.
        """
        limit = self.free(most)
        if not self.is_shared or limit <= 1 or not self._is_short(limit):
            return limit
        within = [
            use
            for known, use in self._uses.items()
            if known is not None and known not in self._over
        ]
        free = self._credit - len(self._unsettled) - max((use.count for use in within), default=0)
        limit = min(limit, max(1, free // 2))
        if self._unsettled:
            free_bytes = (
                self._max_bytes - self._bytes - max((use.size for use in within), default=0)
            )
            limit = min(limit, max(1, self._as_tasks(free_bytes) // 2))
        return limit


def _given_up(others: Sequence[tuple[int, int]], free: int) -> int:
    """Return what others give up until each has as much as is free.

    `others`: what each has, and how much of that flows.
    """
    over = [(have - free, flowing) for have, flowing in others if have > free]
    return sum(min(excess // (len(over) + 1), flowing) for excess, flowing in over)
