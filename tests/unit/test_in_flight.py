"""Which entries were handed out by a process, and how many of them are remembered."""

from datetime import UTC, datetime

from delivery.magazines.in_flight import InFlight
from delivery.magazines.repetition import RESTART_S
from rooms.domain.magazine import Entry, Slot, Stored

LATER_S = 100.0


def handed(*pointers: int) -> list[Stored]:
    return [
        Stored(
            slot=Slot(0, pointer),
            entry=Entry(id=f"e-{pointer}", body=b""),
            loaded_at=datetime(2026, 1, 1, tzinfo=UTC),
            fire_ts=None,
        )
        for pointer in pointers
    ]


def test_what_was_handed_out_is_known_until_it_is_discarded() -> None:
    in_flight = InFlight()
    in_flight.add(handed(1, 2), 5.0)
    assert in_flight.ids([Slot(0, 2), Slot(0, 3), Slot(1, 1), Slot(0, 1)], LATER_S) == ["e-2", None, None, "e-1"]
    in_flight.discard([Slot(0, 2), Slot(0, 3)])
    assert in_flight.ids([Slot(0, 1), Slot(0, 2)], LATER_S) == ["e-1", None]


def test_what_was_handed_out_just_now_is_still_in_its_slot() -> None:
    in_flight = InFlight()
    in_flight.add(handed(1), 5.0)
    assert in_flight.ids([Slot(0, 1)], 5.0 + RESTART_S / 2) == [None]
    assert in_flight.ids([Slot(0, 1)], 5.0 + RESTART_S) == ["e-1"]


def test_the_oldest_are_forgotten_beyond_the_limit() -> None:
    in_flight = InFlight(most=2)
    in_flight.add(handed(1, 2, 3), 5.0)
    assert in_flight.ids([Slot(0, 1), Slot(0, 2), Slot(0, 3)], LATER_S) == [None, "e-2", "e-3"]
