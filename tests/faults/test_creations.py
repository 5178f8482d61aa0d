"""Kill the API between the statements of a transaction that creates several subscriptions.

All of them are there, each with its entries in the history and the journal, or none is; and none
that was answered is missing.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.process_group import Crew, Process
from tests.support.room import Place

CLIENTS = 12
MOST = 300
"""So many requests of one client are enough for two to wait at the same time."""
WHERE_WRITTEN = """
SELECT s.name, count(DISTINCT h.id), count(DISTINCT j.id) FROM subscriptions s
LEFT JOIN subscription_history h ON h.subscription_id = s.id
LEFT JOIN journal j ON j.object = '/v1/subscriptions/' || s.id
WHERE s.room_id = %s GROUP BY s.room_id, s.id, s.name
"""
ORPHANS = """
SELECT subscription_id FROM subscription_history h WHERE room_id = %s
    AND NOT EXISTS (SELECT FROM subscriptions s WHERE s.room_id = h.room_id AND s.id = h.subscription_id)
"""


def create_until_death(crew: Crew, api: Process, place: Place) -> tuple[set[str], set[str]]:
    """Create subscriptions by many clients until the API is gone: names answered, and not."""

    def client(number: int) -> Iterator[tuple[str, bool]]:
        with crew.at(api) as http:
            for count in range(MOST):
                name = f"c{number}.{count}"
                body = {"name": name, "type": "PULL"}
                try:
                    answer = http.post(f"/v1{place.at}/subscriptions", json=body)
                except httpx.TransportError:
                    yield name, False
                    return
                assert answer.status_code == httpx.codes.CREATED, answer.text
                yield name, True

    with ThreadPoolExecutor(CLIENTS) as threads:
        found = [
            one for some in threads.map(lambda n: list(client(n)), range(CLIENTS)) for one in some
        ]
    return {name for name, done in found if done}, {name for name, done in found if not done}


def written(crew: Crew, place: Place) -> set[str]:
    """Return the names of the room's subscriptions, none of which lacks an entry."""
    rows = crew.rows(WHERE_WRITTEN, place.id)
    assert [row for row in rows if row[1:] != (1, 1)] == []
    assert crew.rows(ORPHANS, place.id) == []
    return {name for name, _, _ in rows}


@pytest.mark.parametrize(
    "point",
    [
        "before creating",
        "after creating",
        "before creations' history",
        "after creations' history",
        "before creations' journal",
        "after creations' journal",
        "after creations",
    ],
)
def test_a_batch_is_there_as_a_whole_or_not_at_all(crew: Crew, place: Place, point: str) -> None:
    dying = crew.start("serve", point)
    answered, unanswered = create_until_death(crew, dying, place)
    dying.await_death()
    there = written(crew, place)
    assert answered <= there
    assert unanswered
    if point == "after creations":
        assert len(there - answered) > 1
    else:
        assert there == answered
    for name in sorted(unanswered):
        repeated = crew.call("POST", f"{place.at}/subscriptions", {"name": name, "type": "PULL"})
        assert repeated.status_code == (
            httpx.codes.CONFLICT if name in there else httpx.codes.CREATED
        )
    assert written(crew, place) == answered | unanswered
    assert crew.get("/journal/verify")["whole"] is True
