"""Test signing in at a real provider: Keycloak, fetched by Maven and started here."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from typing import Any, Final

import pytest

from rooms.local import FetchError, MissingError
from tests.integration.rooms.api.conftest import Api, open_api
from tests.integration.rooms.console.browser import Browser, Document
from tests.support.keycloak import CLIENT_ID, CLIENT_SECRET, Keycloak, keycloak
from tests.support.servers import unavailable

PUBLIC_URL: Final = "http://localhost:8080"
USERS: Final = {"ada": ["ops"], "bob": ["ops", "guests"], "eve": ["strangers"]}


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keycloak]:
    with ExitStack() as stack:
        try:
            running = stack.enter_context(
                keycloak(
                    tmp_path_factory.mktemp("keycloak"),
                    redirect_uri=f"{PUBLIC_URL}/console/oidc/callback",
                    users=USERS,
                )
            )
        except (MissingError, FetchError) as missing:
            unavailable(str(missing))
        yield running


@pytest.fixture
async def api(database: str, provider: Keycloak) -> AsyncIterator[Api]:
    settings = {
        "ROOMS_PUBLIC_URL": PUBLIC_URL,
        "ROOMS_OIDC_ISSUER": provider.issuer,
        "ROOMS_OIDC_CLIENT_ID": CLIENT_ID,
        "ROOMS_OIDC_CLIENT_SECRET": CLIENT_SECRET,
        "ROOMS_OIDC_ROLES": "ops=default:operator; guests=other:viewer",
    }
    async with open_api(database, gate=None, **settings) as opened:
        yield opened


@pytest.fixture
async def browser(api: Api) -> AsyncIterator[Browser]:
    browser = await Browser.open(api)
    async with browser.http:
        yield browser


async def come_back(browser: Browser, provider: Keycloak, user: str) -> Document:
    """Sign in at the provider, and return the first page afterwards."""
    sent = await browser.http.get("/console/oidc/start", params={"to": "/console/rooms"})
    assert sent.status_code == 303, sent.text
    answer = await asyncio.to_thread(provider.sign_in, sent.headers["location"], user)
    assert answer is not None
    found = await browser.http.get("/console/oidc/callback", params=answer, follow_redirects=True)
    return Document(found)


async def caller(browser: Browser) -> dict[str, Any]:
    key = browser.http.cookies["rooms_session"]
    found: dict[str, Any] = (await browser.api.call("GET", "/whoami", key)).json()
    return found


async def test_a_member_of_a_group_signs_in(browser: Browser, provider: Keycloak) -> None:
    page = await come_back(browser, provider, "ada")
    assert (page.status, page.path) == (200, "/console/rooms")
    me = await caller(browser)
    assert (me["key_name"], me["scopes"]) == ("ada@example.com", ["operate", "view"])
    assert me["organisation"]["name"] == "default"


async def test_a_member_of_two_organisations_chooses(browser: Browser, provider: Keycloak) -> None:
    page = await come_back(browser, provider, "bob")
    assert "bob@example.com" in page.text
    page = await browser.post("/console/oidc/organisation", {"organisation": "other"})
    assert page.path == "/console/rooms"
    me = await caller(browser)
    assert (me["organisation"]["name"], me["scopes"]) == ("other", ["view"])


async def test_a_stranger_is_refused(browser: Browser, provider: Keycloak) -> None:
    page = await come_back(browser, provider, "eve")
    assert page.status == 403
    assert "No group of eve@example.com has a role here" in page.text
    assert "rooms_session" not in browser.http.cookies


async def test_a_code_works_once(browser: Browser, provider: Keycloak) -> None:
    sent = await browser.http.get("/console/oidc/start")
    answer = await asyncio.to_thread(provider.sign_in, sent.headers["location"], "ada")
    assert answer is not None
    headers = {"Cookie": f"rooms_oidc={browser.http.cookies['rooms_oidc']}"}
    statuses = [
        (
            await browser.http.get("/console/oidc/callback", params=answer, headers=headers)
        ).status_code
        for _ in range(2)
    ]
    assert statuses == [303, 403]


async def test_a_wrong_password_leads_nowhere(browser: Browser, provider: Keycloak) -> None:
    sent = await browser.http.get("/console/oidc/start")
    where = sent.headers["location"]
    assert await asyncio.to_thread(provider.sign_in, where, "ada", "wrong") is None
