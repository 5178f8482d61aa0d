"""Check how many subscriptions an organisation and a room may have, by quotas and settings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db import quotas as records
from rooms.domain.ids import OrganisationId, RoomId
from rooms.domain.principal import Principal
from rooms.domain.quota import QuotaLimit, Subject, organisation_subject, room_subject
from rooms.errors import QuotaConflictError
from rooms.settings import Settings

_REMEMBERED_S: Final = 5.0
_MAX_REMEMBERED: Final = 10_000
_NEAR: Final = 0.9
"""From this part of a limit on, each creation counts."""


class RecentCounts:
    """Remember for some seconds how many subscriptions an organisation or a room has.

    To count ten thousand takes longer than to create one. So a burst of creations counts once in a
    while, until a limit is near.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        """Take the clock, in seconds."""
        self._monotonic = monotonic
        self._counts: dict[Subject, tuple[float, int]] = {}

    def get(self, subject: Subject, most: int) -> int | None:
        """Return a count that is not old and not near the limit `most`, or None."""
        until, count = self._counts.get(subject, (0.0, 0))
        return count if self._monotonic() < until and count < _NEAR * most else None

    def set(self, subject: Subject, count: int) -> None:
        """Remember a count that was just read."""
        if len(self._counts) >= _MAX_REMEMBERED:
            self._counts.clear()
        self._counts[subject] = (self._monotonic() + _REMEMBERED_S, count)

    def add(self, room: RoomId, organisation: OrganisationId, count: int) -> None:
        """Count subscriptions that were created."""
        for subject in (room_subject(room), organisation_subject(organisation)):
            if subject in self._counts:
                until, before = self._counts[subject]
                self._counts[subject] = (until, before + count)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """Hold how many subscriptions there are, and how many there may be."""

    whose: str
    most: int
    present: int

    def check(self, created: int) -> None:
        if self.present + created >= self.most:
            raise QuotaConflictError(
                f"{self.whose} has {self.present + created} subscriptions, and may have"
                f" {self.most}: delete some, or ask for a larger limit",
                limit=QuotaLimit.SUBSCRIPTIONS,
            )


@dataclass(frozen=True, slots=True)
class SubscriptionsLeft:
    """Hold the limits that a creation of subscriptions must keep."""

    bounds: Sequence[_Bound]

    def check(self, created: int = 0) -> None:
        """Raise QuotaConflictError where there may be no other after `created` new ones."""
        for bound in self.bounds:
            bound.check(created)


async def subscriptions_left(
    connection: AsyncConnection,
    principal: Principal,
    room: RoomId,
    settings: Settings,
    *,
    pending: bool = False,
    recent: RecentCounts | None = None,
) -> SubscriptionsLeft:
    """Return what is left to a principal in a room that the transaction has locked.

    `pending`: to subscriptions that wait for approval, which take their place in the room then.
    `recent`: what was counted lately. Quotas are exact. What several processes create within five
    seconds may exceed a limit of the settings.
    """
    bounds = [] if pending else [await _room_bound(connection, room, settings, recent)]
    organisation = principal.organisation_id
    quota = None if principal.quotas is None else principal.quotas.subscriptions
    most = settings.max_subscriptions if quota is None else quota
    subject = organisation_subject(organisation)
    present = None if quota is not None or recent is None else recent.get(subject, most)
    if present is None:
        if quota is not None:
            await records.lock_subscriptions(connection, organisation)
        present = await records.count_subscriptions(connection, organisation=organisation)
        if recent is not None:
            recent.set(subject, present)
    bounds.append(_Bound(whose="your organisation", most=most, present=present))
    return SubscriptionsLeft(bounds)


async def check_approval(connection: AsyncConnection, room: RoomId, settings: Settings) -> None:
    """Raise QuotaConflictError where a locked room has no place for one that is approved."""
    (await _room_bound(connection, room, settings, None)).check(0)


async def _room_bound(
    connection: AsyncConnection, room: RoomId, settings: Settings, recent: RecentCounts | None
) -> _Bound:
    quota = (await records.find_quotas(connection, room=room)).subscriptions
    most = settings.max_room_subscriptions
    if quota is not None:
        most = min(quota, most)
    subject = room_subject(room)
    present = None if quota is not None or recent is None else recent.get(subject, most)
    if present is None:
        present = await records.count_subscriptions(connection, room=room)
        if recent is not None:
            recent.set(subject, present)
    return _Bound(whose="this room", most=most, present=present)
