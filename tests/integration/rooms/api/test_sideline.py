"""Test sidelines and magazines over REST: lists, refusals, and requested jobs."""

from datetime import UTC, datetime
from typing import Any

import pytest

from delivery.sideline.shovel import ShovelRequest
from rooms.db.connection import Connection, open_connection
from rooms.db.jobs import requests as job_requests
from rooms.db.sideline import queries
from rooms.domain.state_machine import Reason
from tests.integration.rooms.api.conftest import Api

NEVER = "00000000-0000-7000-8000-00000000002a"


async def sidelined(api: Api, count: int = 3) -> dict[str, Any]:
    """Create a subscription with sidelined deliveries, each with another reason and error."""
    room = await api.room()
    await api.made(f"/rooms/{room['id']}/event-types", {"name": "made"})
    subscription = await api.subscription(room["id"])
    for n in range(count):
        keys = {"ordering_key": f"o-{n % 2}", "business_key": f"b-{n // 2}"}
        await api.publish(room["id"], "made", {"n": n}, correlation_id=f"c-{n}", **keys)
    await api.sql(
        """
        WITH d AS (
            UPDATE deliveries SET state = 'sidelined', reason = 'attempts_exhausted', attempts = 4, last_status = 503,
                last_error = 'status: busy' WHERE subscription_id = %s RETURNING room_id, id, subscription_id, generation
        ), o AS (DELETE FROM outbox WHERE subscription_id = %s)
        INSERT INTO sidelined (room_id, id, subscription_id, generation, reason)
        SELECT room_id, id, subscription_id, generation, 'attempts_exhausted' FROM d
        """,
        subscription["id"],
        subscription["id"],
    )
    await api.sql(
        """
        WITH s AS (SELECT id FROM sidelined WHERE subscription_id = %s ORDER BY id LIMIT 1), d AS (
            UPDATE deliveries SET reason = 'terminal_status', last_error = 'status: gone' WHERE id IN (SELECT id FROM s)
        ) UPDATE sidelined SET reason = 'terminal_status' WHERE id IN (SELECT id FROM s)
        """,
        subscription["id"],
    )
    return subscription


async def test_a_sideline_shows_why_each_delivery_failed(api: Api) -> None:
    subscription = await sidelined(api)
    answer = await api.call("GET", f"/subscriptions/{subscription['id']}/sideline", "operate")
    assert answer.status_code == 200
    items = answer.json()["items"]
    assert len(items) == 3
    first = items[0]
    assert first["reason"] == "terminal_status"
    assert first["last_error"] == "status: gone"
    assert (first["last_status"], first["attempts"], first["shovel_count"]) == (503, 4, 0)
    assert first["correlation_id"] == "c-0"
    assert first["event_type"] == "made"


async def test_pages_follow_each_other_without_gap_or_double(api: Api) -> None:
    subscription = await sidelined(api, 5)
    path = f"/subscriptions/{subscription['id']}/sideline"
    whole = [item["delivery_id"] for item in (await api.call("GET", path)).json()["items"]]
    found: list[str] = []
    cursor = None
    while True:
        page = (
            await api.call(
                "GET", path, params={"limit": 2} | ({"cursor": cursor} if cursor else {})
            )
        ).json()
        found += [item["delivery_id"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert found == whole
    assert len(set(found)) == 5


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        ({"reason": "terminal_status"}, 1),
        ({"error": "BUSY"}, 2),
        ({"correlation_id": "c-1"}, 1),
        ({"ordering_key": "o-0"}, 2),
        ({"ordering_key": "o-1"}, 1),
        ({"business_key": "b-0"}, 2),
        ({"business_key": "b-0", "ordering_key": "o-1"}, 1),
        ({"business_key": "o-1"}, 0),
        ({"event_type": "made"}, 3),
        ({"event_type": "other"}, 0),
        ({"since": "2020-01-01T00:00:00Z"}, 3),
        ({"until": "2020-01-01T00:00:00Z"}, 0),
    ],
)
async def test_it_is_filtered(api: Api, wanted: dict[str, str], count: int) -> None:
    subscription = await sidelined(api)
    answer = await api.call("GET", f"/subscriptions/{subscription['id']}/sideline", params=wanted)
    assert len(answer.json()["items"]) == count


async def test_a_list_looks_at_a_bounded_number_of_deliveries(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that pages with nothing in them lead on to what a rare key selects."""
    monkeypatch.setattr(queries.scan_sideline, "__kwdefaults__", {"max_scanned": 3})
    subscription = await sidelined(api, 11)
    path = f"/subscriptions/{subscription['id']}/sideline"
    pages: list[list[str]] = []
    cursor: str | None = ""
    while cursor is not None:
        params = {"business_key": "b-4", "limit": 1} | ({"cursor": cursor} if cursor else {})
        page = (await api.call("GET", path, params=params)).json()
        pages.append([item["correlation_id"] for item in page["items"]])
        cursor = page["next_cursor"]
    assert pages == [[], [], ["c-8"], ["c-9"]]
    (one,) = (await api.call("GET", path, params={"correlation_id": "c-1"})).json()["items"]
    assert (one["ordering_key"], one["business_key"]) == ("o-1", "b-0")


@pytest.mark.parametrize(
    ("selection", "count"),
    [({"ordering_keys": ["o-0", "x"]}, 2), ({"business_keys": ["b-1", "b-0"]}, 3)],
)
async def test_a_dry_run_selects_by_keys(
    api: Api, selection: dict[str, list[str]], count: int
) -> None:
    subscription = await sidelined(api)
    for action in ("shovel", "purge"):
        path = f"/subscriptions/{subscription['id']}/sideline/{action}"
        found = (await api.call("POST", path, json=selection | {"dry_run": True})).json()
        assert (found["would_move"], len(found["sample"])) == (count, count)


async def test_a_dry_run_counts_and_moves_nothing(api: Api) -> None:
    subscription = await sidelined(api)
    path = f"/subscriptions/{subscription['id']}/sideline/shovel"
    answer = await api.call("POST", path, json={"dry_run": True, "error": "busy"})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert (found["would_move"], found["by_reason"], len(found["sample"])) == (
        2,
        {"attempts_exhausted": 2},
        2,
    )
    assert (await api.call("GET", "/jobs")).json()["items"] == []


@pytest.mark.parametrize("action", ["shovel", "purge"])
async def test_a_dry_run_says_until_when_it_looked(api: Api, action: str) -> None:
    """Check it by the clock of PostgreSQL, which stamps what is sidelined."""
    subscription = await sidelined(api)
    path = f"/subscriptions/{subscription['id']}/sideline/{action}"
    await api.sql(
        "UPDATE sidelined SET since = now() + interval '1 h' WHERE reason = 'terminal_status'"
    )

    async def preview(**selection: str) -> dict[str, Any]:
        answer = await api.call("POST", path, json=selection | {"dry_run": True})
        found: dict[str, Any] = answer.json()
        return found

    first = await preview()
    assert (first["would_move"], len(first["sample"])) == (2, 2)
    assert datetime.fromisoformat(first["until"]) <= datetime.now(UTC)
    assert (await preview(until=first["until"]))["until"] == first["until"]
    assert (await preview(until="2099-01-01T00:00:00Z"))["until"] < "2099"
    earlier = await preview(until="2020-01-01T00:00:00Z")
    assert (earlier["would_move"], earlier["until"]) == (0, "2020-01-01T00:00:00Z")


@pytest.mark.parametrize(("is_written", "grace_s"), [(True, 0.0), (False, queries.GRACE_S)])
@pytest.mark.parametrize("action", ["shovel", "purge"])
async def test_a_dry_run_ends_before_what_is_being_sidelined(
    api: Api, monkeypatch: pytest.MonkeyPatch, action: str, *, is_written: bool, grace_s: float
) -> None:
    """An entry has the time at which its transaction began, but is only seen after the commit."""
    monkeypatch.setattr(queries, "GRACE_S", grace_s)
    path = f"/subscriptions/{(await sidelined(api))['id']}/sideline/{action}"
    (entry,) = await api.sql(
        "DELETE FROM sidelined WHERE reason = 'terminal_status'"
        " RETURNING room_id, id, subscription_id, generation, reason"
    )

    async def preview(**selection: str) -> tuple[int, str]:
        answer = await api.call("POST", path, json=selection | {"dry_run": True})
        return answer.json()["would_move"], answer.json()["until"]

    async def write(worker: Connection) -> None:
        await worker.execute(
            "INSERT INTO sidelined (room_id, id, subscription_id, generation, reason)"
            " VALUES (%s, %s, %s, %s, %s)",
            entry,
        )

    async with open_connection(api.url, name="worker") as worker:
        async with worker.transaction():
            await worker.execute("SELECT")
            if is_written:
                await write(worker)
            count, until = await preview()
            if not is_written:
                await write(worker)
        assert count == 2
        assert await preview(until=until) == (2, until)
        assert (await preview())[0] == 3


async def test_a_dry_run_does_not_count_what_a_shovel_would_leave_or_end(api: Api) -> None:
    subscription = await sidelined(api, 7)
    await api.sql(
        """
        WITH d AS (SELECT id, row_number() OVER (ORDER BY id) AS n FROM deliveries WHERE subscription_id = %s)
        UPDATE deliveries t SET shovels = CASE WHEN n < 4 THEN 3 ELSE 2 END,
            expires_at = now() + CASE WHEN n IN (3, 4) THEN interval '-1 s' ELSE '1 h' END FROM d WHERE t.id = d.id
        """,
        subscription["id"],
    )
    at = f"/subscriptions/{subscription['id']}/sideline"
    found = (await api.call("POST", f"{at}/shovel", json={"dry_run": True})).json()
    assert (found["would_move"], found["by_reason"]) == (3, {"attempts_exhausted": 3})
    assert (found["too_often"], found["expired"]) == (3, 1)
    assert [item["shovel_count"] for item in found["sample"]] == [2, 2, 2]
    insisting = (
        await api.call("POST", f"{at}/shovel", json={"dry_run": True, "max_shovels": 4})
    ).json()
    assert (insisting["would_move"], insisting["too_often"], insisting["expired"]) == (5, 0, 2)
    ended = (await api.call("POST", f"{at}/purge", json={"dry_run": True})).json()
    assert (ended["would_move"], ended["too_often"], ended["expired"]) == (7, 0, 0)
    assert ended["by_reason"] == {"terminal_status": 1, "attempts_exhausted": 6}


async def test_a_shovel_is_a_job_with_its_selection(api: Api) -> None:
    subscription = await sidelined(api)
    body = {
        "reason": "attempts_exhausted",
        "since": "2026-01-01T00:00:00+01:00",
        "correlation_ids": ["c-1"],
        "delivery_ids": [NEVER],
        "ordering_keys": ["o"],
        "business_keys": ["b 1", "b 2"],
        "rate_per_s": 50,
        "concurrency": 2,
        "max_shovels": 7,
    }
    answer = await api.call(
        "POST", f"/subscriptions/{subscription['id']}/sideline/shovel", "operate", json=body
    )
    assert answer.status_code == 202, answer.text
    job = (await api.call("GET", f"/jobs/{answer.json()['job_id']}")).json()
    assert (job["kind"], job["state"], job["result"]) == ("shovel_sideline", "queued", None)
    order = ShovelRequest.from_arguments(job["arguments"])
    assert order.subscription == subscription["id"]
    assert order.selection.reason is Reason.ATTEMPTS_EXHAUSTED
    assert order.selection.since is not None
    assert order.selection.since.isoformat() == "2026-01-01T00:00:00+01:00"
    assert (order.selection.correlation_ids, order.selection.deliveries) == (("c-1",), (NEVER,))
    selection = order.selection
    assert (selection.ordering_keys, selection.business_keys) == (("o",), ("b 1", "b 2"))
    assert (order.rate_per_s, order.concurrency, order.max_shovels) == (50, 2, 7)


async def test_the_open_jobs_of_an_organisation_are_bounded_in_bytes(api: Api) -> None:
    """The process that runs jobs reads all that are open, of every organisation, each second."""
    subscription = await sidelined(api)
    at = f"/subscriptions/{subscription['id']}/sideline/shovel"
    keys = [f"{number:04}" + "x" * 250 for number in range(1000)]
    body = {"correlation_ids": keys, "ordering_keys": keys, "business_keys": keys}
    statuses = [(await api.call("POST", at, json=body)).status_code for _ in range(7)]
    assert statuses == [202] * 5 + [429] * 2
    refused = await api.call("POST", at, json=body)
    assert refused.json()["limit"] == "open_jobs"
    assert "name fewer" in refused.json()["detail"]
    assert (await api.call("POST", at, json={})).status_code == 202
    ((size,),) = await api.sql("SELECT sum(octet_length(arguments::text)) FROM jobs")
    assert size <= job_requests.MAX_OPEN_BYTES
    # A list of such jobs ends early, and goes on.
    seen: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        after = f"&cursor={cursor}" if cursor else ""
        answer = await api.call("GET", f"/jobs?limit=200{after}")
        assert len(answer.content) < 2_000_000
        seen += [one["id"] for one in answer.json()["items"]]
        cursor = answer.json()["next_cursor"]
    assert len(seen) == len(set(seen)) == 6
    await api.sql("UPDATE jobs SET state = 'done'")
    assert (await api.call("POST", at, json=body)).status_code == 202


async def test_an_organisation_has_a_limited_number_of_open_jobs(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_requests, "MAX_OPEN_JOBS", 2)
    subscription = await sidelined(api)
    at = f"/subscriptions/{subscription['id']}"
    requests: list[tuple[str, dict[str, Any]]] = [
        (f"{at}/sideline/shovel", {}),
        (f"{at}/sideline/purge", {"params": {"confirm": subscription["name"]}}),
        (f"{at}/replay", {"json": {"since": "2026-01-01T00:00:00Z"}}),
        (f"{at}/clear", {"params": {"confirm": subscription["name"]}}),
        (f"/rooms/{subscription['room_id']}/restore", {"json": {}}),
    ]
    for path, given in requests[:2]:
        assert (await api.call("POST", path, **given)).status_code == 202
    for path, given in requests:
        refused = await api.call("POST", path, **given)
        assert refused.status_code == 429, (path, refused.text)
        assert refused.json()["limit"] == "open_jobs"
        assert refused.headers["Retry-After"] == "5"
    preview = await api.call("POST", requests[0][0], json={"dry_run": True})
    assert preview.status_code == 200
    # Deletions may wait for days; they take no place of these.
    await api.sql("UPDATE jobs SET kind = 'delete_room'")
    accepted = await api.call("POST", requests[0][0])
    assert accepted.status_code == 202
    await api.sql("UPDATE jobs SET state = 'done'")
    for path, given in requests[2:4]:
        assert (await api.call("POST", path, **given)).status_code == 202, path
    deleted = await api.call("DELETE", at)
    assert deleted.status_code == 202  # what ends something is never refused


async def test_a_shovel_of_everything_needs_no_body(api: Api) -> None:
    subscription = await sidelined(api)
    answer = await api.call("POST", f"/subscriptions/{subscription['id']}/sideline/shovel")
    assert answer.status_code == 202, answer.text


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"rate_per_s": 0}, "rate_per_s"),
        ({"rate_per_s": "fast"}, "rate_per_s"),
        ({"concurrency": 17}, "concurrency"),
        ({"max_shovels": 0}, "max_shovels"),
        ({"reason": "whatever"}, "reason"),
        ({"since": "yesterday"}, "since"),
        ({"since": "2026-01-01T00:00:00"}, "since"),
        ({"correlation_ids": [""]}, "correlation_ids[0]"),
        ({"ordering_keys": ["a", ""]}, "ordering_keys[1]"),
        ({"business_keys": "b"}, "business_keys"),
        ({"delivery_ids": ["x"]}, "delivery_ids[0]"),
        ({"speed": 3}, "speed"),
    ],
)
async def test_wrong_fields_of_a_selection_are_named(
    api: Api, body: dict[str, Any], field: str
) -> None:
    subscription = await sidelined(api, 1)
    answer = await api.call(
        "POST", f"/subscriptions/{subscription['id']}/sideline/shovel", json=body
    )
    assert answer.status_code == 422, answer.text
    assert [error["field"] for error in answer.json()["errors"]] == [field]


async def test_a_purge_has_to_be_confirmed_by_name(api: Api) -> None:
    subscription = await sidelined(api)
    path = f"/subscriptions/{subscription['id']}/sideline/purge"
    for confirm in ({}, {"confirm": "another"}):
        answer = await api.call("POST", path, params=confirm)
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"] == "confirm"
    assert (await api.call("POST", path, json={"dry_run": True})).json()["would_move"] == 3
    answer = await api.call(
        "POST", path, params={"confirm": subscription["name"]}, json={"reason": "terminal_status"}
    )
    assert answer.status_code == 202, answer.text
    job = (await api.call("GET", f"/jobs/{answer.json()['job_id']}")).json()
    assert (job["kind"], job["arguments"]["reason"]) == ("purge_sideline", "terminal_status")


async def test_a_magazine_shows_its_depth_and_the_expected_one(api: Api) -> None:
    subscription = await sidelined(api, 2)
    name = f"subscription-{subscription['id']}_SIDELINE"
    empty = (await api.call("GET", f"/magazines/{name}", "operate")).json()
    assert (empty["name"], empty["depth"], empty["expected"], empty["shards"]) == (name, 0, 2, [])
    assert empty["oldest_at"] is not None
    assert (await api.call("GET", "/magazines")).json()["items"] == []
    await api.services.magazines.create(name, shards=2)  # type: ignore[arg-type]
    await api.sql("UPDATE subscriptions SET sideline_shards = 2 WHERE id = %s", subscription["id"])
    (found,) = (await api.call("GET", "/magazines")).json()["items"]
    assert [shard["shard"] for shard in found["shards"]] == [0, 1]
    assert found["counters"] == {"loaded": 0, "fired": 0, "deleted": 0, "reloaded": 0, "swept": 0}
    assert (await api.call("GET", "/magazines", "stranger")).json()["items"] == []


async def test_a_sweep_is_a_job(api: Api) -> None:
    subscription = await sidelined(api, 1)
    answer = await api.call("POST", f"/magazines/subscription-{subscription['id']}_SIDELINE/sweep")
    assert answer.status_code == 202, answer.text
    job = (await api.call("GET", f"/jobs/{answer.json()['job_id']}")).json()
    assert (job["kind"], job["arguments"]["subscription_id"]) == (
        "sweep_sideline",
        subscription["id"],
    )


@pytest.mark.parametrize(
    "name", ["nothing", "subscription-x_SIDELINE", f"subscription-{NEVER}_SIDELINE", NEVER]
)
async def test_an_unknown_magazine_is_not_found(api: Api, name: str) -> None:
    for method, path in (("GET", f"/magazines/{name}"), ("POST", f"/magazines/{name}/sweep")):
        assert (await api.call(method, path)).status_code == 404
