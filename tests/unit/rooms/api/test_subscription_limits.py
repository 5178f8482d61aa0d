"""Check when a count of subscriptions is used again, and when it must be made anew."""

from rooms.api.subscription_limits import RecentCounts
from rooms.domain.ids import OrganisationId, RoomId
from rooms.domain.quota import organisation_subject, room_subject

ROOM, OTHER = RoomId(7), RoomId(8)
ORGANISATION = OrganisationId("o")


class Seconds:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_count_is_used_for_some_seconds_with_what_was_created_since() -> None:
    clock = Seconds()
    counts = RecentCounts(clock)
    subject = room_subject(ROOM)
    assert counts.get(subject, 1000) is None
    counts.set(subject, 100)
    counts.add(ROOM, ORGANISATION, 5)
    counts.add(OTHER, ORGANISATION, 3)
    assert counts.get(subject, 1000) == 105
    assert counts.get(organisation_subject(ORGANISATION), 1000) is None
    clock.now = 4.9
    assert counts.get(subject, 1000) == 105
    clock.now = 5.0
    assert counts.get(subject, 1000) is None


def test_near_the_limit_each_creation_counts() -> None:
    counts = RecentCounts(Seconds())
    subject = organisation_subject(ORGANISATION)
    counts.set(subject, 89)
    assert counts.get(subject, 100) == 89
    counts.add(ROOM, ORGANISATION, 1)
    assert counts.get(subject, 100) is None
