"""Test that messages removed by retention are unknown, and that kept ones are complete."""

from datetime import timedelta

import pytest

from delivery.maintenance.retention import RetentionRules, RetentionTask
from rooms.domain.ids import SubscriptionId
from rooms.domain.state_machine import State
from rooms.metrics import Metrics
from tests.integration.rooms.api.conftest import Api
from tests.support.installation import installed
from tests.support.old_messages import DAY, NOW, At, make_days, write

ASKED = [
    ("GET", "/messages/{message}", None),
    ("GET", "/messages/{message}/deliveries", None),
    ("GET", "/messages/{message}/journey", None),
    ("DELETE", "/messages/{message}", None),
    ("PATCH", "/messages/{message}", {"delay_ms": 1000}),
    ("POST", "/messages/{message}/restore", {"include_expired": True}),
    ("GET", "/deliveries/{delivery}", None),
    ("POST", "/deliveries/{delivery}/redeliver", None),
]


@pytest.fixture
async def subscription(api: Api) -> SubscriptionId:
    make_days(api.url, DAY)
    room = await api.room()
    return SubscriptionId((await api.subscription(room["id"]))["id"])


async def retain(api: Api) -> None:
    await RetentionTask(api.url, RetentionRules(days=30), At(NOW), Metrics()).run(lambda: True)


async def test_removed_messages_are_not_found(api: Api, subscription: SubscriptionId) -> None:
    async with installed(api.url) as installation:
        gone = await write(installation, subscription, State.EXPIRED)
        kept = await write(
            installation, subscription, State.SIDELINED, born=DAY + timedelta(hours=1)
        )
    names = {"message": gone.message, "delivery": gone.delivery}
    for method, path, _ in ASKED:
        if method == "GET":
            assert (await api.call(method, path.format_map(names))).status_code == 200
    await retain(api)
    for method, path, body in ASKED:
        answer = await api.call(method, path.format_map(names), json=body)
        assert answer.status_code == 404, f"{method} {path}: {answer.text}"
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["status"] == 404
    there = await api.call("POST", f"/deliveries/{kept.delivery}/redeliver")
    assert (there.status_code, there.json()["state"]) == (200, "queued")


async def test_lists_and_jobs_skip_removed_messages(api: Api, subscription: SubscriptionId) -> None:
    async with installed(api.url) as installation:
        gone = await write(installation, subscription, State.EXPIRED)
        kept = await write(
            installation, subscription, State.SIDELINED, born=DAY + timedelta(hours=1)
        )
    await retain(api)
    listed = (await api.call("GET", f"/rooms/{kept.room}/messages")).json()["items"]
    assert [one["id"] for one in listed] == [kept.message]
    listed = (await api.call("GET", f"/subscriptions/{subscription}/deliveries")).json()["items"]
    assert [one["id"] for one in listed] == [kept.delivery]
    replay = {"from_message_id": gone.message}
    assert (
        await api.call("POST", f"/subscriptions/{subscription}/replay", json=replay)
    ).status_code == 202
    assert (
        await api.call("POST", f"/rooms/{kept.room}/restore", json={"include_expired": True})
    ).status_code == 202
