"""Use the console behind a trusted proxy, as nginx in front of it sends requests."""

from collections.abc import AsyncIterator

import httpx
import pytest

from rooms.console import live
from tests.integration.rooms.api.conftest import open_api
from tests.integration.rooms.console.browser import BASE, Browser

NEAR = "203.0.113.7"
FAR = "198.51.100.7"


@pytest.fixture
async def proxied(database: str) -> AsyncIterator[Browser]:
    async with open_api(
        database, ROOMS_TRUSTED_PROXIES="127.0.0.0/8", ROOMS_UNKNOWN_KEYS_PER_S="5"
    ) as api:
        browser = await Browser.open(api)
        yield browser
        await browser.close()


async def sign_in(browser: Browser, source: str, **fields: str) -> httpx.Response:
    headers = {"Origin": BASE, "Sec-Fetch-Site": "same-origin", "X-Forwarded-For": source}
    return await browser.http.post("/console/sign-in", data=fields, headers=headers)


async def test_a_key_of_a_network_signs_in_from_there_only(proxied: Browser) -> None:
    body = {"name": "desk", "scopes": ["manage"], "networks": ["203.0.113.0/24"]}
    made = await proxied.api.made("/keys", body)
    assert (await sign_in(proxied, FAR, key=made["key"])).status_code == 401
    assert (await sign_in(proxied, f"{NEAR}, {FAR}", key=made["key"])).status_code == 401
    assert (await sign_in(proxied, f"{FAR}, {NEAR}", key=made["key"])).status_code == 303
    rows = await proxied.api.sql("SELECT source FROM journal WHERE action = 'sign_in'")
    assert rows == [(NEAR,)]
    for source, status in ((NEAR, 200), (FAR, 303)):
        answer = await proxied.http.get("/console", headers={"X-Forwarded-For": source})
        assert answer.status_code == status, source


async def test_one_client_uses_up_no_tries_of_others(proxied: Browser) -> None:
    tries = [(await sign_in(proxied, FAR, token="x")).status_code for _ in range(10)]
    assert tries[0] == 401
    assert 429 in tries
    assert (await sign_in(proxied, NEAR, token="x")).status_code == 401


async def test_the_tries_of_a_client_are_its_own(proxied: Browser) -> None:
    """Check that unknown keys are limited by the address behind the proxy."""
    tries = [(await sign_in(proxied, FAR, key=f"rooms_{one:043}")).status_code for one in range(40)]
    assert 429 in tries
    assert (await sign_in(proxied, NEAR, key=f"rooms_{99:043}")).status_code == 401


async def test_pages_are_live_over_https(proxied: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_STREAM_S", 0.05)
    monkeypatch.setattr(live, "MAX_PAUSE_S", 0.1)
    proxy = {"X-Forwarded-Proto": "https", "X-Forwarded-For": NEAR}
    link = await proxied.api.made("/sign-in-links", {"name": "ada", "roles": ["viewer"]})
    token = httpx.URL(link["path"]).params["token"]
    headers = {"Origin": BASE, "Sec-Fetch-Site": "same-origin", **proxy}
    begun = await proxied.http.post("/console/sign-in", data={"token": token}, headers=headers)
    cookie = begun.headers["set-cookie"].partition(";")[0]
    answer = await proxied.http.get(
        "/console/live?path=/console", headers={"Cookie": cookie, **proxy}
    )
    assert answer.text.startswith("data: ")


async def test_a_proxy_without_sources_stops_no_links(proxied: Browser) -> None:
    """Check that one client behind it does not use up the tries of all."""
    headers = {"Origin": BASE, "Sec-Fetch-Site": "same-origin"}
    for _ in range(10):
        tried = await proxied.http.post("/console/sign-in", data={"token": "x"}, headers=headers)
        assert tried.status_code == 401


async def test_valid_links_use_up_no_tries(proxied: Browser) -> None:
    """Check an office behind one address, whose people all have links."""
    for number in range(10):
        link = await proxied.api.made("/sign-in-links", {"name": f"a{number}", "roles": ["viewer"]})
        token = httpx.URL(link["path"]).params["token"]
        assert (await sign_in(proxied, FAR, token=token)).status_code == 303
