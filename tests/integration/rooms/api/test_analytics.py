"""Test the findings of the analysis over REST: pages, filters, and tenancy."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rooms.db.queries.analytics import AnalysisFinding, read_owners, replace_findings
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from tests.integration.rooms.api.conftest import Api

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
LISTS = ("incidents", "reconciliation", "ages", "cofailures", "rollups", "advice")
_COUNTS = (
    "published", "enqueued", "attempts", "failures", "unanswered", "retries", "delivered", "leased", "acked", "came_back",
    "held", "sidelined", "shoveled", "expired", "cancelled", "dropped",
)  # fmt: skip
_SHARES = tuple(
    f"{name}_{share}_ms" for name in ("latency", "end_to_end") for share in ("p50", "p95", "p99")
)


async def organisation(api: Api) -> OrganisationId:
    ((owner,),) = await api.sql("SELECT organisation_id::text FROM rooms LIMIT 1")
    return OrganisationId(owner)


def incident(owner: OrganisationId, number: int, room: int, subscription: str) -> AnalysisFinding:
    began = NOON - timedelta(hours=number)
    ended = began + timedelta(minutes=10)
    body = {
        "incident": number, "kind": "shared", "began": began.isoformat(), "ended": ended.isoformat(),
        "subscriptions": [subscription], "shared": False, "failures": 4, "attempts": 5,
        "causes": [{
            "attribute": "http_status", "value": "503", "inside": 1, "outside": 0.1, "divergence": 2.3,
            "log_odds": 3.5, "z": 8.1,
        }],
        "began_from": began.isoformat(), "began_to": began.isoformat(), "ended_from": ended.isoformat(),
        "ended_to": None, "open": True, "late": 3, "sidelined": 1, "earlier": 2,
        "changes": [{
            "at": began.isoformat(), "attribute": "policy_version", "value": "4", "subscription_id": subscription,
        }],
    }  # fmt: skip
    return AnalysisFinding(
        organisation=owner, kind="incidents", number=number, rooms=(RoomId(room),),
        subscriptions=(SubscriptionId(subscription),), began=began, ended=ended, body=body,
    )  # fmt: skip


POLICY: dict[str, float] = {
    "delay_ms": 1000.0,
    "multiplier": 2.0,
    "redeliveries": 5,
    "max_delay_ms": 60_000.0,
    "jitter": 0.1,
}


def findings_of_every_kind(
    owner: OrganisationId, number: int, room: int, subscription: str
) -> list[AnalysisFinding]:
    """Return a finding of each kind, about this room and subscription."""
    effect = {"delivered": 0.99, "attempts": 1.2, "mean_wait_s": 3.0, "p95_wait_s": None}
    bodies: dict[str, dict[str, Any]] = {
        "reconciliation": {
            "hour": NOON.isoformat(), "room_id": room,
            **dict.fromkeys(
                ("messages", "fanout", "missing", "excess", "unanchored", "enqueued", "never_enqueued", "enqueued_twice",
                 "delivered", "acked", "handed_over", "expired", "cancelled", "dropped", "purged", "sidelined", "held",
                 "in_flight", "waiting", "stuck", "unknown", "unread", "lost", "duplicates", "residual_fanout",
                 "residual_outcome"), 0,
            ),
        },
        "ages": {
            "room_id": room, "subscription_id": subscription, "outcome": "stuck", "deliveries": 2,
            "oldest_since": NOON.isoformat(), "oldest_age_s": 90_000.5, "oldest_delivery_id": "1-1",
        },
        "cofailures": {
            "first_id": subscription, "second_id": subscription, "bad_first": 3, "bad_second": 3, "bad_both": 3,
            "jaccard": 1.0, "lift": None, "phi": 1.0, "pearson": 1.0, "p": 0.01, "q": 0.02, "significant": True,
        },
        "rollups_hourly": {
            "hour": NOON.isoformat(), "room_id": room, "subscription_id": None, "event_type": "made", "target_host": None,
            **dict.fromkeys(_COUNTS, 1), **dict.fromkeys(_SHARES),
        },
        "rollups_daily": {
            "day": "2026-05-01", "room_id": room, "subscription_id": None, "event_type": "made", "target_host": None,
            **dict.fromkeys(_COUNTS, 1), **dict.fromkeys(_SHARES, 2.5),
        },
        "advice": {
            "subscription_id": subscription, "deliveries": 9, "hopeless": 0.0, "deployed": POLICY, "measured": effect,
            "replayed": effect, "reproduced": True, "recommended": POLICY, "expected": effect, "tested": None,
            "tested_deployed": None, "held_up": None, "front": [{"policy": POLICY, "expected": effect}],
            "hazards": [{"attempt": 0, "attempts": 9, "successes": 8, "hazard": 0.9, "mean_delay_ms": None}],
        },
    }  # fmt: skip
    found = [
        AnalysisFinding(
            organisation=owner, kind=kind, number=number, rooms=(RoomId(room),), subscriptions=(SubscriptionId(subscription),),
            began=NOON, ended=NOON + timedelta(hours=1), body=body,
        )
        for kind, body in bodies.items()
    ]  # fmt: skip
    return [incident(owner, number, room, subscription), *found]


@pytest.fixture
async def things(api: Api) -> dict[str, Any]:
    room = await api.room()
    subscription = await api.subscription(room["id"])
    return {
        "room": room["id"],
        "subscription": subscription["id"],
        "owner": await organisation(api),
    }


async def test_an_incident_has_its_range_cost_and_changes(api: Api, things: dict[str, Any]) -> None:
    one = incident(things["owner"], 0, things["room"], things["subscription"])
    assert replace_findings(api.url, run=1, analysed_at=NOON, findings=[one])
    (item,) = (await api.call("GET", "/analysis/incidents")).json()["items"]
    assert (item["open"], item["ended_to"]) == (True, None)
    assert (item["late"], item["sidelined"], item["earlier"]) == (3, 1, 2)
    assert item["causes"][0]["divergence"] == pytest.approx(2.3)
    assert item["changes"][0]["subscription_id"] == things["subscription"]


async def test_an_incident_of_an_older_version_is_still_listed(
    api: Api, things: dict[str, Any]
) -> None:
    one = incident(things["owner"], 0, things["room"], things["subscription"])
    newer = ("open", "late", "sidelined", "earlier", "changes")
    body = {
        name: value
        for name, value in one.body.items()
        if name not in newer and not name.endswith(("_from", "_to"))
    }
    assert replace_findings(api.url, run=1, analysed_at=NOON, findings=[replace(one, body=body)])
    (item,) = (await api.call("GET", "/analysis/incidents")).json()["items"]
    assert (item["open"], item["late"], item["began_from"], item["changes"]) == (
        False,
        None,
        None,
        [],
    )


async def test_before_anything_was_analysed_lists_are_empty(api: Api) -> None:
    for name in LISTS:
        answer = await api.call("GET", f"/analysis/{name}")
        assert answer.json() == {
            "items": [],
            "next_cursor": None,
            "analysed_at": None,
            "incomplete": False,
            "set_aside": [],
        }


async def test_incidents_come_by_pages_and_filters(api: Api, things: dict[str, Any]) -> None:
    found = [
        incident(things["owner"], number, things["room"], things["subscription"])
        for number in range(5)
    ]
    assert replace_findings(api.url, run=1, analysed_at=NOON, findings=found)
    first = (await api.call("GET", "/analysis/incidents", params={"limit": 3})).json()
    assert [one["incident"] for one in first["items"]] == [0, 1, 2]
    assert first["analysed_at"] == "2026-05-01T12:00:00Z"
    following = {"limit": 3, "cursor": first["next_cursor"]}
    rest = (await api.call("GET", "/analysis/incidents", params=following)).json()
    assert [one["incident"] for one in rest["items"]] == [3, 4]
    assert rest["next_cursor"] is None

    async def numbers(**query: Any) -> list[int]:
        answer = await api.call("GET", "/analysis/incidents", params=query)
        assert answer.status_code == 200, answer.text
        return [one["incident"] for one in answer.json()["items"]]

    assert await numbers(since="2026-05-01T11:05:00Z") == [0, 1]
    assert await numbers(until="2026-05-01T09:30:00Z") == [3, 4]
    assert await numbers(room_id=things["room"]) == [0, 1, 2, 3, 4]
    assert await numbers(room_id=things["room"] + 1) == []
    assert await numbers(subscription_id=things["subscription"], limit=1) == [0]
    assert (
        await api.call("GET", "/analysis/incidents", params={"subscription_id": "x"})
    ).status_code == 422
    # A page of an earlier analysis is not continued in a later one.
    assert replace_findings(api.url, run=2, analysed_at=NOON + timedelta(hours=1), findings=found)
    assert (await api.call("GET", "/analysis/incidents", params=following)).status_code == 422


async def test_an_incident_that_goes_on_is_still_open_after_the_log(
    api: Api, things: dict[str, Any]
) -> None:
    over = incident(things["owner"], 0, things["room"], things["subscription"])
    goes_on = replace(
        incident(things["owner"], 1, things["room"], things["subscription"]), ended=None
    )
    assert replace_findings(api.url, run=1, analysed_at=NOON, findings=[over, goes_on])
    # Asked for hours after the analysis.
    query = {"since": "2026-05-01T18:00:00Z"}
    items = (await api.call("GET", "/analysis/incidents", params=query)).json()["items"]
    assert [one["incident"] for one in items] == [1]
    query["until"] = "2026-05-01T10:00:00Z"
    assert (await api.call("GET", "/analysis/incidents", params=query)).json()["items"] == []


async def test_a_later_run_replaces_an_earlier_one_and_never_the_reverse(
    api: Api, things: dict[str, Any]
) -> None:
    one = incident(things["owner"], 7, things["room"], things["subscription"])
    assert replace_findings(api.url, run=2, analysed_at=NOON, findings=[one])
    assert not replace_findings(api.url, run=1, analysed_at=NOON - timedelta(hours=1), findings=[])
    assert len((await api.call("GET", "/analysis/incidents")).json()["items"]) == 1
    assert replace_findings(api.url, run=3, analysed_at=NOON + timedelta(hours=1), findings=[])
    assert (await api.call("GET", "/analysis/incidents")).json()["items"] == []


async def test_findings_of_a_time_to_come_are_replaced(api: Api, things: dict[str, Any]) -> None:
    # The clock of the analysis was wrong by a year, and is right again.
    one = incident(things["owner"], 0, things["room"], things["subscription"])
    now = datetime.now(UTC)
    future = now + timedelta(days=365)
    assert replace_findings(api.url, run=1, analysed_at=future, findings=[])
    assert replace_findings(api.url, run=2, analysed_at=now, findings=[one])
    found = (await api.call("GET", "/analysis/incidents")).json()
    assert len(found["items"]) == 1
    assert datetime.fromisoformat(found["analysed_at"]) == now


async def test_every_list_names_the_hours_that_were_not_read(
    api: Api, things: dict[str, Any]
) -> None:
    """The hours and reasons, and no names of segments, which are the installation's."""
    aside: list[dict[str, Any]] = [
        {"hour": "2026-05-01T11:00:00+00:00", "reason": "damaged", "segments": 2},
        {"hour": None, "reason": "foreign", "segments": 1},
    ]
    one = incident(things["owner"], 1, things["room"], things["subscription"])
    assert replace_findings(api.url, run=1, analysed_at=NOON, findings=[one], set_aside=aside)
    for name in LISTS:
        answer = (await api.call("GET", f"/analysis/{name}")).json()
        assert answer["incomplete"] is True
        assert [entry["segments"] for entry in answer["set_aside"]] == [2, 1]
        assert answer["set_aside"][0]["hour"] == "2026-05-01T11:00:00Z"
    later = NOON + timedelta(hours=1)
    assert replace_findings(api.url, run=2, analysed_at=later, findings=[one])
    answer = (await api.call("GET", "/analysis/incidents")).json()
    assert (answer["incomplete"], answer["set_aside"]) == (False, [])


async def test_books_of_an_earlier_version_are_read(api: Api, things: dict[str, Any]) -> None:
    """They lack the verdicts that were added since."""
    columns = (
        "messages", "fanout", "missing", "excess", "unanchored", "enqueued", "never_enqueued", "enqueued_twice",
        "delivered", "acked", "handed_over", "expired", "cancelled", "dropped", "purged", "sidelined", "held",
        "in_flight", "waiting", "lost", "duplicates", "residual_fanout", "residual_outcome",
    )  # fmt: skip
    body = {"hour": NOON.isoformat(), "room_id": things["room"], **dict.fromkeys(columns, 0)}
    one = AnalysisFinding(
        organisation=things["owner"], kind="reconciliation", number=0, rooms=(RoomId(things["room"]),),
        subscriptions=(), began=NOON, ended=NOON + timedelta(hours=1), body=body,
    )  # fmt: skip
    assert replace_findings(api.url, run=1, analysed_at=NOON, findings=[one])
    (found,) = (await api.call("GET", "/analysis/reconciliation")).json()["items"]
    assert (found["stuck"], found["unknown"], found["unread"]) == (0, 0, 0)


async def test_another_organisation_sees_no_findings(api: Api, things: dict[str, Any]) -> None:
    owner, room, subscription = things["owner"], things["room"], things["subscription"]
    replace_findings(
        api.url,
        run=1,
        analysed_at=NOON,
        findings=findings_of_every_kind(owner, 0, room, subscription),
    )
    queries = [*((name, {}) for name in LISTS), ("rollups", {"daily": "true"})]
    for name, query in queries:
        (one,) = (await api.call("GET", f"/analysis/{name}", params=query)).json()["items"]
        assert one
        assert (await api.call("GET", f"/analysis/{name}", "stranger", params=query)).json()[
            "items"
        ] == []
    advice = await api.call("GET", f"/analysis/advice/{subscription}")
    assert advice.json()["recommended"] == POLICY
    assert (
        await api.call("GET", f"/analysis/advice/{subscription}", "stranger")
    ).status_code == 404


async def test_a_restricted_key_sees_findings_about_what_it_may_use(
    api: Api, things: dict[str, Any]
) -> None:
    owner, room, subscription = things["owner"], things["room"], things["subscription"]
    other = await api.room("other")
    elsewhere = await api.subscription(other["id"], "elsewhere")
    found = [
        incident(owner, 0, room, subscription),
        incident(owner, 1, other["id"], elsewhere["id"]),
        replace(
            incident(owner, 2, room, subscription),
            rooms=(RoomId(room), RoomId(other["id"])),
            subscriptions=(SubscriptionId(subscription), SubscriptionId(elsewhere["id"])),
        ),
    ]
    replace_findings(api.url, run=1, analysed_at=NOON, findings=found)
    for name, restriction, numbers in (
        ("all", {}, [0, 1, 2]),
        ("room", {"rooms": [room]}, [0]),
        ("both", {"rooms": [room, other["id"]]}, [0, 1, 2]),
        ("queue", {"subscriptions": [elsewhere["id"]]}, [1]),
    ):
        made = await api.made("/keys", {"name": name, "scopes": ["operate"], **restriction})
        answer = await api.call("GET", "/analysis/incidents", made["key"])
        assert [one["incident"] for one in answer.json()["items"]] == numbers, name


async def test_the_owners_of_findings_are_read_with_those_who_subscribe(
    api: Api, things: dict[str, Any]
) -> None:
    room, subscription = things["room"], things["subscription"]
    grant = {"organisation_id": "other", "kind": "subscribe"}
    await api.made(f"/rooms/{room}/grants", grant)
    body = {"name": "guest", "type": "PULL"}
    guest = await api.made(f"/rooms/{room}/subscriptions", body, key="stranger")
    owners = read_owners(api.url)
    assert owners.of_room(room) == owners.of_subscription(subscription) == things["owner"]
    assert owners.of_subscription(guest["id"]) == guest["organisation_id"] != things["owner"]
    assert owners.of_room(room + 1) is None
    unknown = api.services.ids.generate(RoomId(room), api.services.clock.now_ms())
    assert owners.of_subscription(unknown) is None, "its organisation was deleted"
    await api.sql("UPDATE rooms SET deleting = true WHERE id = %s RETURNING 1", room)
    gone = read_owners(api.url)
    assert gone.of_room(room) is gone.of_subscription(guest["id"]) is None
