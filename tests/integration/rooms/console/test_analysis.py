"""Test the pages of the analysis: findings, their age, and advice that is applied."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rooms.console import analysis
from rooms.db.queries.analytics import AnalysisFinding, replace_findings
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from tests.integration.rooms.api.test_analytics import incident
from tests.integration.rooms.console.browser import Browser
from tests.integration.rooms.console.platform_key import HOSTILE, SHOWN, sign_in_platform

PATH = "/console/analysis"
POLICY = {
    "delay_ms": 2500.4,
    "multiplier": 1.5,
    "redeliveries": 8,
    "max_delay_ms": 20_000.0,
    "jitter": 0.1,
}
NOW = {"delay_ms": 1000.0, "multiplier": 2.0, "redeliveries": 5}
RANGE = {
    "delivered": {"low": 0.97, "high": 1.0},
    "attempts": {"low": 1.1, "high": 1.4},
    "mean_wait_s": {"low": 2.0, "high": 190.0},
}
EFFECT = {"delivered": 0.99, "attempts": 1.2, "mean_wait_s": 3.0, "p95_wait_s": None}
COUNTS = (
    "messages", "fanout", "missing", "excess", "unanchored", "enqueued", "never_enqueued", "enqueued_twice",
    "delivered", "acked", "handed_over", "expired", "cancelled", "dropped", "purged", "sidelined", "held",
    "in_flight", "waiting", "stuck", "unknown", "unread", "lost", "duplicates", "residual_fanout", "residual_outcome",
)  # fmt: skip


def advice(subscription: str, **fields: Any) -> dict[str, Any]:
    return {
        "subscription_id": subscription, "deliveries": 90, "hopeless": 0.0, "deployed": NOW, "measured": EFFECT,
        "replayed": EFFECT, "reproduced": True, "recommended": POLICY, "expected": EFFECT, "expected_range": RANGE, "tested": None,
        "tested_deployed": None, "held_up": None, "front": [],
        "hazards": [{"attempt": 0, "attempts": 9, "successes": 8, "hazard": 0.9, "mean_delay_ms": None}], **fields,
    }  # fmt: skip


@pytest.fixture
async def things(browser: Browser) -> dict[str, Any]:
    """Make a subscription, and write findings about it."""
    api = browser.api
    room = await api.room()
    crm = await api.subscription(room["id"], "crm")
    shop = await api.subscription(room["id"], "shop")
    owner = OrganisationId((await api.call("GET", "/whoami")).json()["organisation"]["id"])
    at = datetime.now(UTC) - timedelta(hours=2)
    bodies = {
        "reconciliation": {"hour": at.isoformat(), "room_id": room["id"], **dict.fromkeys(COUNTS, 0), "lost": 3},
        "ages": {
            "room_id": room["id"], "subscription_id": crm["id"], "outcome": "stuck", "deliveries": 2,
            "oldest_since": at.isoformat(), "oldest_age_s": 90_000.5, "oldest_delivery_id": HOSTILE,
        },
        "cofailures": {
            "first_id": crm["id"], "second_id": shop["id"], "bad_first": 3, "bad_second": 3, "bad_both": 3,
            "jaccard": 1.0, "lift": None, "phi": 1.0, "pearson": 1.0, "p": 0.01, "q": 0.02, "significant": True,
        },
        "rollups_hourly": {
            "hour": at.isoformat(), "room_id": room["id"], "subscription_id": crm["id"], "event_type": HOSTILE,
            "target_host": HOSTILE,
            **dict.fromkeys(("published", "enqueued", "attempts", "failures", "unanswered", "retries", "delivered",
                "leased", "acked", "came_back", "held", "sidelined", "shoveled", "expired", "cancelled", "dropped"), 4),
            **{f"{name}_{share}_ms": None for name in ("latency", "end_to_end") for share in ("p50", "p95", "p99")},
        },
        "advice": advice(crm["id"]),
    }  # fmt: skip
    found = [
        AnalysisFinding(
            organisation=owner, kind=kind, number=0, rooms=(RoomId(room["id"]),),
            subscriptions=(SubscriptionId(crm["id"]),), began=at, ended=at + timedelta(hours=1), body=body,
        )
        for kind, body in bodies.items()
    ]  # fmt: skip
    one = incident(owner, 0, room["id"], crm["id"])
    cause = {**one.body["causes"][0], "value": HOSTILE}
    hostile = AnalysisFinding(
        **{
            name: getattr(one, name)
            for name in (
                "organisation",
                "kind",
                "number",
                "rooms",
                "subscriptions",
                "began",
                "ended",
            )
        },
        body={**one.body, "causes": [cause]},
    )
    assert replace_findings(api.url, run=1, analysed_at=at, findings=[hostile, *found])
    return {"room": room["id"], "crm": crm["id"], "shop": shop["id"]}


@pytest.mark.parametrize("goes_on", [True, False])
async def test_the_first_page_shows_incidents_that_go_on_however_long_ago_the_log_ended(
    browser: Browser, things: dict[str, Any], *, goes_on: bool
) -> None:
    api = browser.api
    owner = OrganisationId((await api.call("GET", "/whoami")).json()["organisation"]["id"])
    one = incident(owner, 0, things["room"], things["crm"])
    at = datetime.now(UTC) - timedelta(days=2)
    body = {**one.body, "began": at.isoformat(), "ended": at.isoformat(), "open": goes_on}
    found = replace(one, began=at, ended=None if goes_on else at, body=body)
    now = datetime.now(UTC)
    assert replace_findings(api.url, run=2, analysed_at=now, findings=[found])
    await browser.sign_in("viewer")
    assert ("One subscription failed" in (await browser.get("/console")).text) is goes_on


async def test_a_shared_incident_has_its_cause_without_shares_and_counts_all(
    browser: Browser, things: dict[str, Any]
) -> None:
    api = browser.api
    owner = OrganisationId((await api.call("GET", "/whoami")).json()["organisation"]["id"])
    one = incident(owner, 0, things["room"], things["crm"])
    nothing = dict.fromkeys(("inside", "outside", "divergence", "log_odds", "z"))
    body = {
        **one.body,
        "causes": [{**one.body["causes"][0], **nothing}],
        "subscriptions_total": 5_021,
        "shared": True,
    }
    at = datetime.now(UTC)
    body |= {"began": at.isoformat(), "ended": at.isoformat()}
    found = replace(one, began=at, ended=at, body=body)
    assert replace_findings(api.url, run=2, analysed_at=at, findings=[found])
    await browser.sign_in("viewer")
    page = await browser.get(PATH)
    assert "HTTP status 503" in page.text
    assert "of the failures" not in page.text
    assert "and 5001 more" in page.text
    assert "5021 subscriptions failed together" in (await browser.get("/console")).text


async def test_beside_other_organisations_a_cause_has_its_share_of_the_failures(
    browser: Browser, things: dict[str, Any]
) -> None:
    api = browser.api
    owner = OrganisationId((await api.call("GET", "/whoami")).json()["organisation"]["id"])
    one = incident(owner, 0, things["room"], things["crm"])
    nothing = dict.fromkeys(("outside", "divergence", "log_odds", "z"))
    body = {**one.body, "causes": [{**one.body["causes"][0], **nothing}]}
    at = datetime.now(UTC)
    assert replace_findings(api.url, run=2, analysed_at=at, findings=[replace(one, body=body)])
    await browser.sign_in("viewer")
    page = await browser.get(PATH)
    assert "of the failures." in page.text
    assert "of the rest." not in page.text


async def test_beside_other_organisations_a_pair_has_no_corrected_chance(
    browser: Browser, things: dict[str, Any]
) -> None:
    api = browser.api
    owner = OrganisationId((await api.call("GET", "/whoami")).json()["organisation"]["id"])
    pair = AnalysisFinding(
        organisation=owner, kind="cofailures", number=0, rooms=(RoomId(things["room"]),),
        subscriptions=(SubscriptionId(things["crm"]), SubscriptionId(things["shop"])), began=None, ended=None,
        body={
            "first_id": things["crm"], "second_id": things["shop"], "bad_first": 3, "bad_second": 3, "bad_both": 3,
            "jaccard": 1.0, "lift": None, "phi": 1.0, "pearson": 1.0, "p": 0.01, "q": None, "significant": True,
        },
    )  # fmt: skip
    assert replace_findings(api.url, run=2, analysed_at=datetime.now(UTC), findings=[pair])
    await browser.sign_in("viewer")
    page = await browser.get(f"{PATH}/cofailures")
    assert "Chance (q)" in page.text
    assert "together" in page.text


async def test_without_a_result_a_page_says_how_to_get_one(browser: Browser) -> None:
    await browser.sign_in("viewer")
    for name in ("", "/reconciliation", "/ages", "/cofailures", "/rollups", "/advice"):
        page = await browser.get(PATH + name)
        assert "The log was not analysed yet" in page.text, name
        assert "rooms analyze" in page.text


async def test_findings_are_shown_with_their_age(browser: Browser, things: dict[str, Any]) -> None:
    await browser.sign_in("viewer")
    for name, words in {
        "": [
            "crm",
            "4 of 5 attempts",
            "HTTP status",
            "open",
            "3 late, 1 sidelined",
            "version of the settings 4",
        ],
        "/reconciliation": ["orders", "lost or missing"],
        "/ages": ["crm", "orders", "stuck", "1 d 1 h"],
        "/cofailures": ["crm", "shop", "together"],
        "/rollups": ["crm", "orders"],
        "/advice": ["crm", "change"],
    }.items():
        page = await browser.get(PATH + name)
        assert "2 hours ago" in page.text, name
        assert all(word in page.text for word in words), (name, page.text)
        assert "<script>alert" not in page.html
    assert SHOWN in (await browser.get(PATH)).html
    german = await browser.get(PATH, **{"Accept-Language": "de"})
    for text in ("HTTP-Status http_status", "Version der Einstellungen 4", "gemeinsam"):
        assert text in german.text
    assert (
        "No incident fits" in (await browser.get(f"{PATH}?subscription_id={things['shop']}")).text
    )
    assert (await browser.get(f"{PATH}?subscription_id=x")).status == 422


async def test_advice_is_applied(browser: Browser, things: dict[str, Any]) -> None:
    await browser.sign_in("developer")
    path = f"{PATH}/advice/{things['crm']}"
    page = await browser.get(path)
    assert "2,500" in page.text
    assert "97% to 100%" in page.text
    assert "2 s to 3 min 10 s" in page.text
    fields = dict(page.form(f"{path}/apply").fields)
    answer = await browser.http.post(
        f"{path}/apply",
        data=fields,
        headers={"Origin": "http://rooms.test", "Sec-Fetch-Site": "same-origin"},
    )
    assert answer.status_code == 303
    assert answer.headers["location"].startswith(f"/console/subscriptions/{things['crm']}?done=")
    found = (await browser.api.call("GET", f"/subscriptions/{things['crm']}")).json()
    assert retries(found) == [2500, 1.5, 8, 20_000, 0.1]
    page = await browser.get(path)
    assert "is set so already" in page.text
    fields["version"] = str(found["version"])
    refused = await browser.post(f"{path}/apply", {**fields, "delivery_attempts": "-1"})
    assert refused.status == 422


def retries(subscription: dict[str, Any]) -> list[Any]:
    names = ("delay_ms", "delay_multiplier", "attempts", "max_delay_ms", "jitter")
    return [subscription[f"delivery_{name}"] for name in names]


async def test_a_change_meanwhile_is_not_overwritten(
    browser: Browser, things: dict[str, Any]
) -> None:
    await browser.sign_in("developer")
    path = f"{PATH}/advice/{things['crm']}"
    fields = dict((await browser.get(path)).form(f"{path}/apply").fields)
    one = f"/subscriptions/{things['crm']}"
    await browser.api.call("PATCH", one, json={"delivery_attempts": 3})
    page = await browser.post(f"{path}/apply", fields)
    assert page.status == 409
    assert "it was changed meanwhile" in page.text
    found = (await browser.api.call("GET", one)).json()
    assert retries(found) == [None, None, 3, None, None]


async def test_advice_that_did_not_hold_is_not_offered(
    browser: Browser, things: dict[str, Any]
) -> None:
    owner = OrganisationId((await browser.api.call("GET", "/whoami")).json()["organisation"]["id"])
    finding = AnalysisFinding(
        organisation=owner, kind="advice", number=0, rooms=(RoomId(things["room"]),),
        subscriptions=(SubscriptionId(things["crm"]),), began=None, ended=None,
        body=advice(things["crm"], held_up=False),
    )  # fmt: skip
    assert replace_findings(
        browser.api.url, run=2, analysed_at=datetime.now(UTC), findings=[finding]
    )
    await browser.sign_in("developer")
    page = await browser.get(f"{PATH}/advice/{things['crm']}")
    assert "did not keep its promise" in page.text
    assert not [one for one in page.forms if one.action.endswith("/apply")]


async def test_a_viewer_and_others_apply_nothing(browser: Browser, things: dict[str, Any]) -> None:
    path = f"{PATH}/advice/{things['crm']}"
    await browser.sign_in("viewer")
    page = await browser.get(path)
    assert not [one for one in page.forms if one.action.endswith("/apply")]
    token = dict(page.forms[-1].fields)["form_token"]
    fields = {"form_token": token, "delivery_attempts": "3"}
    assert (await browser.post(f"{path}/apply", fields)).status == 403
    await browser.sign_in("owner", key="stranger")
    token = dict((await browser.get("/console")).forms[-1].fields)["form_token"]
    assert (await browser.get(path)).status == 404
    assert (await browser.post(f"{path}/apply", {**fields, "form_token": token})).status == 404
    assert "not analysed" not in (await browser.get(PATH)).text
    assert "No incident fits" in (await browser.get(PATH)).text


@pytest.mark.parametrize("path", [PATH, f"{PATH}/runs"])
async def test_a_missing_extra_is_named_before_the_click(
    browser: Browser, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    await sign_in_platform(browser)
    assert "is not installed" not in (await browser.get(path)).text
    monkeypatch.setattr(analysis, "find_spec", lambda _: None)
    page = await browser.get(path)
    assert "The extra spark is not installed" in page.text
    assert "make setup or pip install '.[spark]'" in page.text
