"""`kill -9` before or after a step of each job that walks: another upkeep goes on, nothing is left out or done twice."""

from typing import Any

import pytest

from tests.faults.test_pull_steps import publish_many, states
from tests.support.polling import until
from tests.support.process_group import Crew
from tests.support.room import Place

COUNT = 450
"""More than two steps' worth."""


def begin(crew: Crew, place: Place, queue: str, what: str) -> str:
    """Ask for a job; its id."""
    path, body, query = {
        "restoring": (f"{place.at}/restore", {}, {}),
        "retrying": (f"/subscriptions/{queue}/retry", None, {}),
        "clearing": (f"{place.at}/clear", None, {"confirm": place.made["name"]}),
        "replaying": (f"/subscriptions/{queue}/replay", {"since": "2020-01-01T00:00:00Z"}, {}),
    }[what]
    answer = crew.call("POST", path, body, params=query)
    found: dict[str, Any] = answer.json()
    assert "job_id" in found, answer.text
    return str(found["job_id"])


def wait_for_retries(crew: Crew, place: Place) -> None:
    """Let each delivery be due in an hour, after a first attempt."""
    crew.rows("UPDATE deliveries SET attempt = 1 WHERE room_id = %s RETURNING 1", place.id)
    crew.rows(
        "UPDATE outbox SET attempt = 1, due_at = now() + interval '1 hour', delay_ms = 3600000"
        " WHERE room_id = %s RETURNING 1",
        place.id,
    )


@pytest.mark.parametrize(
    ("when", "what"),
    [
        ("before", "restoring"),
        ("after", "restoring"),
        ("before", "retrying"),
        ("after", "retrying"),
        ("after", "clearing"),
        ("after", "replaying"),
    ],
)
def test_a_walk_goes_on_where_it_was_left(crew: Crew, place: Place, when: str, what: str) -> None:
    queue = place.queue()
    publish_many(crew, place, COUNT)
    if what == "retrying":
        wait_for_retries(crew, place)
    dying = crew.start("upkeep", f"{when} {what}")
    job = begin(crew, place, queue, what)
    dying.await_death()
    left = crew.get(f"/jobs/{job}")
    assert left["state"] in {"queued", "running"}
    assert (left["done"] > 0) == (when == "after")
    crew.start("upkeep")
    until(lambda: crew.get(f"/jobs/{job}")["state"] == "done", "the job")
    done = crew.get(f"/jobs/{job}")
    assert done["done"] == done["total"] == COUNT
    kind = {
        "restoring": "restored",
        "retrying": "restored",
        "clearing": "cancelled",
        "replaying": "replayed",
    }[what]
    assert done["result"] == {"retried" if what == "retrying" else kind: COUNT}
    logged = crew.rows(
        "SELECT count(*), count(DISTINCT delivery_id), count(DISTINCT message_id) FROM delivery_log"
        " WHERE room_id = %s AND kind = %s",
        place.id, kind,
    )  # fmt: skip
    assert logged == [(COUNT, COUNT, COUNT)]
    after = {
        "restoring": {"queued": COUNT},
        "retrying": {"queued": COUNT},
        "clearing": {"cancelled": COUNT},
        "replaying": {"queued": 2 * COUNT},
    }[what]
    assert states(crew, place) == after
    assert crew.rows(
        "SELECT count(*) FROM outbox WHERE room_id = %s AND due_at <= now()", place.id
    ) == [(after.get("queued", 0),)]
