"""Kill API processes in mid-day: limits of a day go on from where they were."""

from pathlib import Path

import httpx

from tests.support.polling import until
from tests.support.room import Place
from tests.support.service import Service, running
from tests.support.webhook_sink import sinking

MOST = 60
PER_ROUND = 10


def used(service: Service, place: Place) -> int:
    rows = service.rows(
        "SELECT messages FROM quota_days WHERE subject = %s AND day = (now() AT TIME ZONE 'UTC')::date",
        f"room:{place.id}",
    )
    return int(rows[0][0]) if rows else 0


def test_a_killed_api_does_not_reset_a_day(tmp_path: Path) -> None:
    """Kill the API after each round whose counts were added, and once in the middle of one.

    What was added is never forgotten. A kill loses at most what was accepted in its last second, so no
    more than the limit and the last round is accepted in all.
    """
    with running(tmp_path) as service, sinking() as sink:
        place = Place.open(service, sink)
        service.call("PATCH", f"/rooms/{place.id}/quotas", {"messages_per_day": MOST})
        accepted = 0
        for _ in range(3):
            for _ in range(PER_ROUND):
                place.publish()
                accepted += 1
            until(lambda: used(service, place) >= accepted, "the counts to be added")  # noqa: B023 - it is called at once
            service.await_another("serve", service.kill("serve"))
            service.await_ready()
            assert used(service, place) == accepted
        for _ in range(PER_ROUND):
            place.publish()
            accepted += 1
        service.await_another("serve", service.kill("serve"))
        service.await_ready()
        refused = None
        while refused is None:
            answer = place.try_publish()
            if answer.status_code == httpx.codes.ACCEPTED:
                accepted += 1
            else:
                refused = answer
            assert accepted <= MOST + PER_ROUND
        assert refused.status_code == httpx.codes.TOO_MANY_REQUESTS
        assert refused.json()["limit"] == "messages_per_day"
        assert int(refused.headers["retry-after"]) >= 1
        assert MOST <= accepted <= MOST + PER_ROUND
        ((stored,),) = service.rows("SELECT count(*) FROM messages WHERE room_id = %s", place.id)
        assert stored == accepted
