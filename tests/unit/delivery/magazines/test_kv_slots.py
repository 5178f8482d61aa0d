"""The ids of entries that a process fired, and their limit."""

from datetime import UTC, datetime

from delivery.magazines.kv_slots import FiredEntryIds
from delivery.magazines.kv_store import RESTART_S
from rooms.domain.magazine import Entry, Slot, StoredEntry

LATER_S = 100.0


def handed(*pointers: int) -> list[StoredEntry]:
    return [
        StoredEntry(
            slot=Slot(0, pointer),
            entry=Entry(id=f"e-{pointer}", body=b""),
            loaded_at=datetime(2026, 1, 1, tzinfo=UTC),
            fire_ts=None,
        )
        for pointer in pointers
    ]


def test_fired_ids_are_known_until_discarded() -> None:
    in_flight = FiredEntryIds()
    in_flight.add(handed(1, 2), 5.0)
    assert in_flight.ids([Slot(0, 2), Slot(0, 3), Slot(1, 1), Slot(0, 1)], LATER_S) == [
        "e-2",
        None,
        None,
        "e-1",
    ]
    in_flight.discard([Slot(0, 2), Slot(0, 3)])
    assert in_flight.ids([Slot(0, 1), Slot(0, 2)], LATER_S) == ["e-1", None]


def test_a_recently_fired_id_is_not_named() -> None:
    in_flight = FiredEntryIds()
    in_flight.add(handed(1), 5.0)
    assert in_flight.ids([Slot(0, 1)], 5.0 + RESTART_S / 2) == [None]
    assert in_flight.ids([Slot(0, 1)], 5.0 + RESTART_S) == ["e-1"]


def test_the_oldest_ids_are_dropped_beyond_the_limit() -> None:
    in_flight = FiredEntryIds(max_entries=2)
    in_flight.add(handed(1, 2, 3), 5.0)
    assert in_flight.ids([Slot(0, 1), Slot(0, 2), Slot(0, 3)], LATER_S) == [None, "e-2", "e-3"]
