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
_PARTS: Final = 10
"""The part of a room's places that an organisation may have which does not own it."""
_OF_ROOM: Final = "ROOMS_MAX_ROOM_SUBSCRIPTIONS"
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
        for subject in (
            room_subject(room),
            organisation_subject(organisation),
            _subject_in_room(room, organisation),
        ):
            if subject in self._counts:
                until, before = self._counts[subject]
                self._counts[subject] = (until, before + count)


def _quota_text(quota: int) -> str:
    return f"the quota {QuotaLimit.SUBSCRIPTIONS} ({quota})"


def _subject_in_room(room: RoomId, organisation: OrganisationId) -> Subject:
    return f"{room_subject(room)} {organisation_subject(organisation)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """Hold how many subscriptions there are, and how many there may be."""

    most: int
    present: int
    refusal: str

    def check(self, created: int) -> None:
        if self.present + created >= self.most:
            raise QuotaConflictError(self.refusal, limit=QuotaLimit.SUBSCRIPTIONS)


@dataclass(frozen=True, slots=True)
class SubscriptionsLeft:
    """Hold the limits that a creation of subscriptions must keep."""

    bounds: Sequence[_Bound]

    def check(self, created: int = 0) -> None:
        """Raise QuotaConflictError where there may be no other after `created` new ones."""
        for bound in self.bounds:
            bound.check(created)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionLimits:
    """Find the limits of a transaction that has locked the room.

    `recent`: what was counted lately. Quotas are exact. What others create within five seconds,
    or approvals and rooms' `operational_url` add, may exceed a limit of the settings.
    """

    connection: AsyncConnection
    settings: Settings
    recent: RecentCounts | None = None

    async def left(
        self, principal: Principal, room: RoomId, *, owner: OrganisationId, pending: bool = False
    ) -> SubscriptionsLeft:
        """Return what is left to a principal in a room.

        `pending`: to subscriptions that wait for approval, which take their place in the room then.
        """
        organisation = principal.organisation_id
        bounds = (
            []
            if pending
            else await self._in_room(room, organisation, owner, is_for_owner=organisation == owner)
        )
        quota = None if principal.quotas is None else principal.quotas.subscriptions
        if quota is not None:
            await records.lock_subscriptions(self.connection, organisation)
        most = self.settings.max_subscriptions if quota is None else quota
        subject = organisation_subject(organisation)
        present = await self._count(
            subject, most, is_exact=quota is not None, organisation=organisation
        )
        limit = f"ROOMS_MAX_SUBSCRIPTIONS ({most})" if quota is None else _quota_text(quota)
        full = (
            f"your organisation has as many subscriptions as it may have, by {limit}: "
            "delete some of them, or ask the platform for a larger limit"
        )
        return SubscriptionsLeft([*bounds, _Bound(most=most, present=present, refusal=full)])

    async def check_approval(
        self, room: RoomId, organisation: OrganisationId, owner: OrganisationId
    ) -> None:
        """Raise QuotaConflictError where the room has no place for one that is approved."""
        SubscriptionsLeft(await self._in_room(room, organisation, owner, is_for_owner=True)).check()

    async def _in_room(
        self,
        room: RoomId,
        organisation: OrganisationId,
        owner: OrganisationId,
        *,
        is_for_owner: bool,
    ) -> list[_Bound]:
        """Return the room's quota, and what the settings leave to this organisation in it.

        One organisation has at most a tenth of the places in a room of another, and the owner finds
        a place in its room whatever others have there. A refusal that is not for the owner says
        nothing of others' numbers.
        """
        bounds = []
        quota = (await records.find_quotas(self.connection, room=room)).subscriptions
        most = self.settings.max_room_subscriptions
        if quota is not None or organisation != owner:
            limit = most if quota is None else quota
            if organisation != owner:
                limit = min(limit, most)
            present = await self._count(
                room_subject(room), limit, is_exact=quota is not None, room=room
            )
            full = "this room has as many subscriptions as it may have"
            if not is_for_owner:
                full += ": delete some of yours, or ask its owner for a larger limit"
            elif limit == quota:
                full += f", by {_quota_text(limit)}: delete some of them, or raise the room's quota"
            else:
                full += f", by {_OF_ROOM} ({limit}): ask the platform for a larger limit"
            bounds.append(_Bound(most=limit, present=present, refusal=full))
        own = most if organisation == owner else max(1, most // _PARTS)
        present = await self._count(
            _subject_in_room(room, organisation), own, room=room, organisation=organisation
        )
        full = (
            "the organisation of this subscription has as many subscriptions to this room as it may"
            f" have ({own}), by {_OF_ROOM}: delete some of them, or ask the platform for a larger"
            " limit"
        )
        return [*bounds, _Bound(most=own, present=present, refusal=full)]

    async def _count(
        self,
        subject: Subject,
        most: int,
        *,
        is_exact: bool = False,
        organisation: OrganisationId | None = None,
        room: RoomId | None = None,
    ) -> int:
        """Return how many there are: as counted lately, if that is known and far from `most`."""
        found = None if is_exact or self.recent is None else self.recent.get(subject, most)
        if found is None:
            found = await records.count_subscriptions(
                self.connection, organisation=organisation, room=room
            )
            if self.recent is not None:
                self.recent.set(subject, found)
        return found
