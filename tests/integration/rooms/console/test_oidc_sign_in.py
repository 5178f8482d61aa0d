"""Test the pages by which people sign in at a provider: sessions, roles, choice, cookies."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Final

import httpx
import pytest
from aiohttp import web

from rooms.console import sign_in_limit
from rooms.console.oidc_routes import ATTEMPTS_PER_S
from rooms.domain.role import parse_group_roles
from rooms.domain.state_machine import Scope
from tests.integration.rooms.api.conftest import Api, make_key, open_api
from tests.integration.rooms.console.browser import BASE, Browser, Document
from tests.integration.rooms.console.test_oidc import failing
from tests.support.scripted_provider import (
    CLIENT_ID,
    CLIENT_SECRET,
    ScriptedProvider,
    scripted_provider,
)

ROLES: Final = "ops=default:operator; ops=default:auditor; both=other:viewer; both=default:developer; lost=gone:owner"
DISCOVERY: Final = "/.well-known/openid-configuration"


def settings_for(provider: ScriptedProvider, roles: str = ROLES) -> dict[str, str]:
    """Return the settings of an installation at a provider."""
    return {
        "ROOMS_PUBLIC_URL": BASE.replace("http://rooms.test", "http://localhost"),
        "ROOMS_OIDC_ISSUER": provider.issuer,
        "ROOMS_OIDC_CLIENT_ID": CLIENT_ID,
        "ROOMS_OIDC_CLIENT_SECRET": CLIENT_SECRET,
        "ROOMS_OIDC_ROLES": roles,
    }


@pytest.fixture
async def provider() -> AsyncIterator[ScriptedProvider]:
    async with scripted_provider() as running:
        yield running


@pytest.fixture
async def api(database: str, provider: ScriptedProvider) -> AsyncIterator[Api]:
    async with open_api(database, gate=None, **settings_for(provider)) as opened:
        yield opened


@pytest.fixture
async def browser(api: Api) -> AsyncIterator[Browser]:
    browser = await Browser.open(api)
    async with browser.http:
        yield browser


async def begin(browser: Browser, to: str = "/console/rooms") -> httpx.Response:
    """Follow the sign-in page's link as far as the provider."""
    page = await browser.get(f"/console/sign-in?to={to}")
    (link,) = (one for one in page.links if one.startswith("/console/oidc/start"))
    return await browser.http.get(link)


async def come_back(
    browser: Browser, provider: ScriptedProvider, to: str = "/console/rooms", **more: str
) -> httpx.Response:
    """Sign in at the provider; return the answer to the browser that comes back."""
    sent = await begin(browser, to)
    assert sent.status_code == 303
    answer = provider.authorize(sent.headers["location"], **more)
    return await browser.http.get("/console/oidc/callback", params=answer)


async def signed_in(browser: Browser) -> dict[str, Any] | None:
    """Return what the API says about the browser's session."""
    key = browser.http.cookies.get("rooms_session")
    if key is None:
        return None
    answer = await browser.api.call("GET", "/whoami", key)
    found: dict[str, Any] = answer.json()
    return found if answer.is_success else None


async def test_a_person_signs_in_with_the_roles_of_their_groups(
    browser: Browser, provider: ScriptedProvider
) -> None:
    answer = await come_back(browser, provider)
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/rooms")
    me = await signed_in(browser)
    assert me is not None
    assert (me["key_name"], me["scopes"]) == ("ada@example.com", ["audit", "operate", "view"])
    assert me["organisation"]["name"] == "default"
    rows = await browser.api.sql(
        "SELECT actor_kind, actor_name, after FROM journal WHERE action = 'sign_in'"
    )
    assert [(kind, name) for kind, name, _ in rows] == [("person", "ada@example.com")]
    assert "subject-1" in str(rows[0][2])
    assert "rooms_oidc" not in browser.http.cookies
    assert "Rooms" in (await browser.get("/console/rooms")).text


async def test_the_cookie_of_an_attempt_shows_nothing(
    browser: Browser, provider: ScriptedProvider
) -> None:
    sent = await begin(browser)
    cookie = sent.headers["set-cookie"]
    assert all(part in cookie for part in ("HttpOnly", "SameSite=lax", "Path=/console/oidc"))
    provider.authorize(sent.headers["location"])
    for secret in (provider.asked["state"], provider.asked["nonce"]):
        assert secret not in cookie
    assert provider.asked["redirect_uri"] == "http://localhost/console/oidc/callback"
    secure = await browser.http.get("/console/oidc/start", headers={"X-Forwarded-Proto": "https"})
    assert "Secure" in secure.headers["set-cookie"]


async def test_no_other_host_of_the_domain_can_set_the_cookies(
    browser: Browser, provider: ScriptedProvider
) -> None:
    """Check that a cookie of a plain name, which such a host can set, begins nothing over HTTPS."""
    https = {"X-Forwarded-Proto": "https"}
    provider.claims = {"groups": ["both", "ops"]}
    sent = await browser.http.get("/console/oidc/start", headers=https)
    begun = sent.headers["set-cookie"]
    assert begun.startswith("__Host-rooms_oidc=")
    assert all(part in begun for part in ("Path=/;", "Secure", "HttpOnly"))
    assert "domain" not in begun.lower()
    answer = provider.authorize(sent.headers["location"])
    prefixed = begun.partition(";")[0]
    browser.http.cookies.clear()

    async def come_back_with(cookie: str) -> httpx.Response:
        headers = {"Cookie": cookie, **https}
        done = await browser.http.get("/console/oidc/callback", params=answer, headers=headers)
        browser.http.cookies.clear()
        return done

    assert (await come_back_with(prefixed.removeprefix("__Host-"))).status_code == 403
    done = await come_back_with(prefixed)
    assert done.status_code == 200
    (choice,) = [
        one
        for one in done.headers.get_list("set-cookie")
        if one.startswith("__Host-rooms_oidc_choice=")
    ]
    assert "Path=/;" in choice
    assert any(
        one.startswith('__Host-rooms_oidc="";') for one in done.headers.get_list("set-cookie")
    )
    sealed = choice.partition(";")[0]
    for cookie, status in ((sealed.removeprefix("__Host-"), 403), (sealed, 303)):
        chosen = await browser.http.post(
            "/console/oidc/organisation",
            data={"organisation": "other"},
            headers={"Origin": BASE, "Sec-Fetch-Site": "same-origin", "Cookie": cookie, **https},
        )
        browser.http.cookies.clear()
        assert chosen.status_code == status


async def test_an_answer_without_its_attempt_is_refused(
    browser: Browser, provider: ScriptedProvider
) -> None:
    """Check another browser, a cookie that was changed, and an answer that comes twice."""
    sent = await begin(browser)
    answer = provider.authorize(sent.headers["location"])
    sealed = browser.http.cookies["rooms_oidc"]
    for cookie in (None, "", "x", sealed[:-4], sealed + "AAAA", "A" * 5000, "é"):
        async with httpx.AsyncClient(transport=browser.http._transport, base_url=BASE) as stranger:
            headers = (
                {} if cookie is None else {b"cookie": f"rooms_oidc={cookie}".encode("latin-1")}
            )
            refused = await stranger.get("/console/oidc/callback", params=answer, headers=headers)
        assert refused.status_code == 403, cookie
        assert "rooms_session" not in refused.headers.get("set-cookie", "")
    assert "/token" not in provider.requests
    done = await browser.http.get("/console/oidc/callback", params=answer)
    assert done.status_code == 303
    twice = await browser.http.get("/console/oidc/callback", params=answer)
    assert twice.status_code == 403


@pytest.mark.parametrize(
    "target",
    [
        "https://evil.example.com/",
        "//evil.example.com",
        "/\\evil.example.com",
        "/console@evil.example.com",
        "javascript:alert(1)",
        "/console/../../evil",
        "\r\nSet-Cookie: x=y",
    ],
)
async def test_no_target_leads_elsewhere(
    browser: Browser, provider: ScriptedProvider, target: str
) -> None:
    sent = await browser.http.get("/console/oidc/start", params={"to": target})
    answer = provider.authorize(sent.headers["location"])
    done = await browser.http.get("/console/oidc/callback", params=answer)
    assert done.status_code == 303
    at = httpx.URL(BASE).join(done.headers["location"])
    assert (at.scheme, at.host) == ("http", "rooms.test")
    assert "set-cookie: x" not in str(done.headers).lower()


@pytest.mark.parametrize("groups", [[], ["strangers"], ["lost"]])
async def test_a_person_without_a_role_is_refused(
    browser: Browser, provider: ScriptedProvider, groups: list[str]
) -> None:
    provider.claims = {"groups": groups, "email": "<b>eve</b>@example.com"}
    answer = await come_back(browser, provider)
    page = Document(answer)
    assert answer.status_code == 403
    assert "No group of <b>eve</b>@example.com has a role here" in page.text
    assert await signed_in(browser) is None


async def test_a_person_in_several_organisations_chooses(
    browser: Browser, provider: ScriptedProvider
) -> None:
    provider.claims = {"groups": ["both", "ops"]}
    answer = await come_back(browser, provider)
    page = Document(answer)
    assert answer.status_code == 200
    assert await signed_in(browser) is None
    assert all(name in page.text for name in ("default", "other"))
    chosen = {"organisation": "other"}
    forged = await browser.post(
        "/console/oidc/organisation",
        chosen,
        **{"Origin": "https://evil.example.com", "Sec-Fetch-Site": "cross-site"},
    )
    assert forged.status == 403
    refused = await browser.post("/console/oidc/organisation", {"organisation": "installation"})
    assert refused.status == 403
    assert await signed_in(browser) is None

    answer = await come_back(browser, provider)
    done = await browser.post("/console/oidc/organisation", chosen)
    assert done.path == "/console/rooms"
    me = await signed_in(browser)
    assert me is not None
    assert (me["organisation"]["name"], me["scopes"]) == ("other", ["view"])
    again = await browser.post("/console/oidc/organisation", {"organisation": "default"})
    assert again.status == 403


async def test_roles_of_several_groups_add_up(browser: Browser, provider: ScriptedProvider) -> None:
    provider.claims = {"groups": ["both", "ops"]}
    await come_back(browser, provider)
    await browser.post("/console/oidc/organisation", {"organisation": "default"})
    me = await signed_in(browser)
    assert me is not None
    expected = ["audit", "manage", "operate", "publish", "subscribe", "view"]
    assert me["scopes"] == expected


async def test_a_person_in_very_many_organisations_chooses(
    database: str, provider: ScriptedProvider
) -> None:
    names = [f"the organisation with the number {n:03}" for n in range(60)]
    roles = "; ".join(f"all={name}:owner+auditor" for name in names)
    provider.claims = {"groups": ["all"]}
    settings = settings_for(provider, f"x=gone:owner; {roles}")
    async with open_api(database, gate=None, **settings) as api:
        browser = await Browser.open(api)
        async with browser.http:
            for name in names:
                await make_key(api.services, name, Scope.VIEW)
            page = Document(await come_back(browser, provider))
            assert all(name in page.text for name in names)
            # A browser keeps 4,096 bytes of a cookie with its name and attributes.
            assert len(str(browser.http.cookies["rooms_oidc_choice"])) < 3500
            await browser.post("/console/oidc/organisation", {"organisation": names[59]})
            me = await signed_in(browser)
    assert me is not None
    assert (me["organisation"]["name"], me["scopes"]) == (names[59], ["admin", "audit", "view"])


@pytest.mark.parametrize(
    "changed",
    ["both=other:owner; both=default:owner", f"x=other:owner; {ROLES}", "ops=default:operator"],
)
async def test_a_choice_gives_no_roles_of_another_setting(
    browser: Browser, provider: ScriptedProvider, changed: str
) -> None:
    provider.claims = {"groups": ["both", "ops"]}
    await come_back(browser, provider)
    console: Any = browser.console
    state = console._app.state
    entries, _ = parse_group_roles(changed)
    state.parts = replace(state.parts, oidc=replace(state.parts.oidc, group_roles=tuple(entries)))
    for name in ("other", "default"):
        refused = await browser.post("/console/oidc/organisation", {"organisation": name})
        assert refused.status == 403
    assert await signed_in(browser) is None


@pytest.mark.parametrize("filler", ["x", "é", "%0D", '"'])
async def test_a_target_that_no_cookie_holds_leads_to_the_first_page(
    browser: Browser, provider: ScriptedProvider, filler: str
) -> None:
    sent = await browser.http.get(f"/console/oidc/start?to=/console/rooms?x={filler * 3500}")
    assert len(sent.headers["set-cookie"]) < 4096
    answer = provider.authorize(sent.headers["location"])
    done = await browser.http.get("/console/oidc/callback", params=answer)
    assert (done.status_code, done.headers["location"]) == (303, "/console")


async def test_an_organisation_that_is_being_deleted_is_not_offered(
    browser: Browser, provider: ScriptedProvider
) -> None:
    provider.claims = {"groups": ["both"]}
    await browser.api.sql(
        "UPDATE organisations SET status = 'deleting' WHERE name = 'other' RETURNING 1"
    )
    answer = await come_back(browser, provider)
    assert answer.status_code == 303
    me = await signed_in(browser)
    assert me is not None
    assert me["organisation"]["name"] == "default"


async def test_a_provider_that_is_away_leaves_the_other_ways(
    browser: Browser, provider: ScriptedProvider
) -> None:
    provider.instead[DISCOVERY] = failing
    page = Document(await begin(browser))
    assert page.status == 503
    assert "sign in with an API key or a link" in page.text
    assert page.form("/console/sign-in").method == "post"
    assert (await browser.sign_in("viewer")).status == 200


async def test_the_provider_says_no(browser: Browser, provider: ScriptedProvider) -> None:
    said = "<script>alert(1)</script>"
    answer = await come_back(browser, provider, error="access_denied", error_description=said)
    assert answer.status_code == 403
    assert said not in answer.text
    assert said in Document(answer).text


async def test_one_address_causes_few_requests_a_second(
    browser: Browser, provider: ScriptedProvider
) -> None:
    sent = await begin(browser)
    answer = provider.authorize(sent.headers["location"], code="another")
    sealed = browser.http.cookies["rooms_oidc"]
    headers = {"Cookie": f"rooms_oidc={sealed}"}
    tried = await asyncio.gather(
        *(
            browser.http.get("/console/oidc/callback", params=answer, headers=headers)
            for _ in range(5 * ATTEMPTS_PER_S)
        )
    )
    statuses = [one.status_code for one in tried]
    assert set(statuses) == {403, 429}
    assert provider.requests.count("/token") == statuses.count(403)


async def test_nothing_is_there_without_a_provider(database: str) -> None:
    async with open_api(database) as api:
        browser = await Browser.open(api)
        async with browser.http:
            await browser.sign_in("viewer")
            for path in ("start", "callback"):
                assert (await browser.get(f"/console/oidc/{path}")).status == 404
            page = await browser.get("/console/sign-in")
            assert not any("oidc" in link for link in page.links)


async def test_a_slow_provider_and_one_client_do_not_stop_the_sign_ins_of_others(
    database: str, provider: ScriptedProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a trusted proxy: who is unnamed is refused soon, and who is named has an own rate."""
    monkeypatch.setattr(sign_in_limit, "MAX_WAIT_S", 0.05)
    settings = {**settings_for(provider), "ROOMS_TRUSTED_PROXIES": "127.0.0.0/8"}
    async with open_api(database, gate=None, **settings) as api:
        browser = await Browser.open(api)
        async with browser.http:
            sent = await begin(browser)
            answer = provider.authorize(sent.headers["location"])
            headers = {"Cookie": f"rooms_oidc={browser.http.cookies['rooms_oidc']}"}
            asked, released = asyncio.Semaphore(0), asyncio.Event()

            async def slow(_: web.Request) -> web.StreamResponse:
                asked.release()
                await released.wait()
                return web.Response(status=500)

            async def come(**more: str) -> int:
                got = await browser.http.get(
                    "/console/oidc/callback", params=answer, headers=headers | more
                )
                return got.status_code

            provider.instead["/token"] = slow
            held = [asyncio.create_task(come()) for _ in range(ATTEMPTS_PER_S)]
            for _ in held:
                await asked.acquire()
            async with asyncio.timeout(5):
                assert await come() == 429
            named = asyncio.create_task(come(**{"X-Forwarded-For": "203.0.113.7"}))
            async with asyncio.timeout(5):
                await asked.acquire()
            released.set()
            assert 429 not in await asyncio.gather(*held, named)
