"""Test the list of all sidelines."""

import pytest

from rooms.db.sideline import overview
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.test_sideline import sidelined

_OF_OTHERS = """
    INSERT INTO sidelined (room_id, id, subscription_id, generation, reason, since)
    SELECT 1000000, gen_random_uuid(), ('ffffffff-0000-7000-8000-' || lpad(n::text, 12, '0'))::uuid, 0, 'orphan', now()
    FROM generate_series(1, 3) n
"""
"""Sidelined deliveries of subscriptions newer than each of a test."""


@pytest.fixture(params=["few", "many"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with both statements: that of few subscriptions, and that of many."""
    if request.param == "many":
        monkeypatch.setattr(overview, "MAX_SCANNED", -1)
    return str(request.param)


@pytest.mark.usefixtures("size")
async def test_it_lists_sidelines_that_are_not_empty_and_why(api: Api) -> None:
    subscription = await sidelined(api)
    await api.subscription(subscription["room_id"], "well")
    path = f"/subscriptions/{subscription['id']}/sideline/schedule"
    await api.call("PUT", path, json={"interval_s": 60})
    answer = await api.call("GET", "/sidelines", "operate")
    assert answer.status_code == 200
    (found,) = answer.json()["items"]
    assert found["subscription_id"] == subscription["id"]
    assert found["by_reason"] == {"attempts_exhausted": 2, "terminal_status": 1}
    assert (found["sidelined"], found["room"], found["name"]) == (3, "orders", "sub")
    assert found["last_status"] == 503
    assert found["schedule_interval_s"] == 60
    assert answer.json()["next_cursor"] is None


@pytest.mark.usefixtures("size")
async def test_another_organisation_finds_none(api: Api) -> None:
    await sidelined(api)
    answer = await api.call("GET", "/sidelines", "other-admin")
    assert answer.json() == {"items": [], "next_cursor": None}


@pytest.mark.usefixtures("size")
async def test_a_restricted_key_finds_its_own(api: Api) -> None:
    subscription = await sidelined(api)
    other = await api.subscription(subscription["room_id"], "other")
    for chosen, count in ((subscription, 1), (other, 0)):
        body = {"name": "part", "scopes": ["operate"], "subscriptions": [chosen["id"]]}
        key = (await api.made("/keys", body))["key"]
        assert len((await api.call("GET", "/sidelines", key)).json()["items"]) == count


async def test_it_looks_at_a_bounded_number_of_subscriptions(
    api: Api, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    """Of its own, or of those of all organisations that have something sidelined."""
    subscription = await sidelined(api)
    if size == "few":
        for n in range(3):
            await api.subscription(subscription["room_id"], f"well-{n}")
    else:
        await api.sql(_OF_OTHERS)
    monkeypatch.setattr(overview.list_sidelines, "__kwdefaults__", {"max_scanned": 2})
    first = (await api.call("GET", "/sidelines")).json()
    assert first["items"] == []
    params = {"cursor": first["next_cursor"]}
    second = (await api.call("GET", "/sidelines", params=params)).json()
    assert [one["subscription_id"] for one in second["items"]] == [subscription["id"]]
    params = {"cursor": second["next_cursor"]}
    third = (await api.call("GET", "/sidelines", params=params)).json()
    assert third == {"items": [], "next_cursor": None}
