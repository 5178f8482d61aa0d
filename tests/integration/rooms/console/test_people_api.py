"""Test `/v1/people`: who has signed in, as the console's sessions and the journal know it."""

from tests.integration.rooms.api.members import member
from tests.integration.rooms.api.sign_in import begin
from tests.integration.rooms.console.browser import Browser
from tests.integration.rooms.console.platform_key import sign_in_platform


async def test_each_person_is_listed_once_by_name(browser: Browser) -> None:
    api = browser.api
    for name, role in (("ada", "owner"), ("grace", "operator")):
        await browser.sign_in(role, name=name)
    await begin(api, name="grace")
    first = (await api.call("GET", "/people?limit=1")).json()
    (ada,) = first["items"]
    assert (ada["name"], ada["by"], ada["roles"], ada["sessions"]) == (
        "ada", "console", ["owner"], 1,
    )  # fmt: skip
    rest = await api.call("GET", "/people", params={"cursor": first["next_cursor"]})
    (grace,) = rest.json()["items"]
    assert (grace["name"], grace["roles"], grace["sessions"]) == ("grace", ["operator"], 2)
    assert rest.json()["next_cursor"] is None
    assert grace["signed_in_at"] > ada["signed_in_at"]


async def test_others_are_not_seen_nor_signed_out(browser: Browser) -> None:
    api = browser.api
    await browser.sign_in("owner", name="ada")
    stranger = await member(api)
    assert (await api.call("GET", "/people", stranger.key)).json()["items"] == []
    body = {"name": "ada"}
    refused = await api.call("POST", "/people/end-sessions", stranger.key, json=body)
    assert refused.status_code == 404
    (ada,) = (await api.call("GET", "/people")).json()["items"]
    assert ada["sessions"] == 1


async def test_a_session_of_the_platform_is_ended_by_the_platform(browser: Browser) -> None:
    api = browser.api
    await sign_in_platform(browser)
    await begin(api, name="ada")
    body = {"name": "ada"}
    refused = await api.call("POST", "/people/end-sessions", json=body)
    assert refused.status_code == 403
    assert {one["name"] for one in (await api.call("GET", "/sessions")).json()["items"]} == {"ada"}
    ended = await api.call("POST", "/people/end-sessions", "both", json=body)
    assert ended.json() == {"ended": 2}
    assert (await api.call("GET", "/sessions")).json()["items"] == []
    again = await api.call("POST", "/people/end-sessions", "both", json=body)
    assert again.status_code == 404
