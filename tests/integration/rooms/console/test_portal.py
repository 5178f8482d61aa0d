"""Test the portal: what its people see and do, and what neither of the two cookies opens."""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import httpx
import pytest

from rooms.console import portal
from rooms.console.page import DOWNLOAD, PUBLIC
from rooms.console.sessions import LINKS_PER_S, SIGN_INS_PER_S
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.console.browser import Browser, Document
from tests.integration.rooms.console.scenarios.test_security import FOREIGN, SAME_SITE
from tests.integration.rooms.console.test_form_strange_requests import StoppedClock
from tests.integration.rooms.console.test_messages import published, sidelined

PORTAL: Final = "/console/portal"
HOSTILE: Final = "<script>alert(1)</script>\x1b[31m\u202e&\"'"
SECRET: Final = re.compile(r"whsec_[A-Za-z0-9+/=]+")
OWN_SESSION: Final = {f"{PORTAL}/leave", f"{PORTAL}/preferences"}
PARAMETER: Final = re.compile(r"\{([a-z_]+)(?::[a-z]+)?\}")


async def link_to(api: Api, access: str = "read", **fields: Any) -> str:
    """Return the path of a link to the portal; by default of the whole organisation."""
    if "subscription_ids" not in fields:
        own = (await api.call("GET", "/whoami")).json()["organisation"]["id"]
        fields = {"organisation_id": own, **fields}
    body = {"name": "ada", "access": access, **fields}
    return str((await api.made("/portal-links", body))["path"])


async def enter(browser: Browser, access: str = "read", **fields: Any) -> Document:
    return await browser.get(await link_to(browser.api, access, **fields))


async def things(api: Api) -> dict[str, str]:
    """Make a failed message of a subscription; return an id for each parameter of a path."""
    made = await published(api, {"note": HOSTILE})
    await sidelined(api, made["delivery"])
    shovel = f"/subscriptions/{made['subscription']}/sideline/shovel"
    job = (await api.call("POST", shovel, json={"event_type": "none"})).json()
    return {
        "room_id": str(made["room"]),
        "subscription_id": made["subscription"],
        "message_id": made["message"],
        "delivery_id": made["delivery"],
        "name": "made",
        "job_id": job["job_id"],
    }


def pages(ids: dict[str, str], method: str = "GET") -> Iterator[str]:
    """Yield the path of every page of the portal, with these ids in it."""
    for handler in portal.ROUTES:
        if method in handler.http_methods and not handler.opt.get(DOWNLOAD):
            for path in handler.paths:
                yield PARAMETER.sub(lambda found: ids[found[1]], path)


async def token(browser: Browser) -> dict[str, str]:
    page = await browser.get(PORTAL)
    return {"form_token": dict(page.form(f"{PORTAL}/leave").fields)["form_token"]}


async def test_a_link_leads_to_its_only_subscription(browser: Browser) -> None:
    ids = await things(browser.api)
    await browser.api.subscription(int(ids["room_id"]), "hidden")
    one = ids["subscription_id"]
    page = await enter(browser, subscription_ids=[one])
    assert (page.status, page.path) == (200, f"{PORTAL}/subscriptions/{one}")
    assert "billing" in page.text
    assert "Lane" in page.text
    assert "the newest delivery" in page.text
    again = await browser.get(PORTAL)
    assert again.path == page.path


async def test_several_subscriptions_are_listed_with_what_is_wrong(browser: Browser) -> None:
    ids = await things(browser.api)
    await browser.api.subscription(int(ids["room_id"]), "ledger", type="PULL")
    page = await enter(browser)
    assert page.path == f"{PORTAL}?begun=1"
    assert "billing" in page.text
    assert "ledger" in page.text
    assert re.search(r"failing \d+ \w+ ago", page.text)
    assert f"{PORTAL}/subscriptions/{ids['subscription_id']}" in page.links
    assert "ledger" not in (await browser.get(f"{PORTAL}?contains=bill")).text
    none = await browser.get(f"{PORTAL}?contains=nothing")
    assert "No subscription has this in its name." in none.text


async def test_among_many_those_that_are_not_well_come_first(browser: Browser) -> None:
    ids = await things(browser.api)
    for number in range(6):
        await browser.api.subscription(int(ids["room_id"]), f"well-{number}", type="PULL")
    page = await enter(browser)
    first, _, rest = page.html.partition("All subscriptions")
    assert f"/subscriptions/{ids['subscription_id']}" in first
    assert "well-5" not in first
    assert "well-5" in rest
    filtered = await browser.get(f"{PORTAL}?contains=well")
    assert "All subscriptions" not in filtered.html


async def test_an_empty_portal_says_so(browser: Browser) -> None:
    page = await enter(browser)
    assert "There is no subscription here" in page.text


@pytest.mark.parametrize("access", ["read", "operate", "manage"])
async def test_every_page_is_shown_and_leads_to_no_other_place(
    browser: Browser, access: str
) -> None:
    ids = await things(browser.api)
    await browser.api.subscription(int(ids["room_id"]), "other")
    await enter(browser, access)
    for path in pages(ids):
        page = await browser.get(path)
        needed = "manage" if path.endswith("/edit") else "operate"
        if access not in (needed, "manage") and path.endswith(("/shovel", "/purge", "/edit")):
            assert page.status == 403
            continue
        assert page.status == 200, (path, page.text)
        targets = [*page.links, *(form.action for form in page.forms)]
        for target in targets:
            is_own = target == PORTAL or target.startswith((f"{PORTAL}/", f"{PORTAL}?", "#", "?"))
            assert is_own, (path, target)
        assert 'class="command"' not in page.html, path
        for target in {one.partition("#")[0] for one in page.links} - {""}:
            found = (await browser.get(target)).status
            is_file = target.endswith("/receipt")
            assert found == 200 or is_file, (path, target, found)
        for form in page.forms:
            exists = (await browser.http.request("OPTIONS", form.action)).status_code
            assert exists < 300, (path, form.action)


async def test_the_live_part_of_a_page_leads_to_no_other_place(browser: Browser) -> None:
    ids = await things(browser.api)
    await browser.api.subscription(int(ids["room_id"]), "other")
    await enter(browser, "manage")
    for path in pages(ids):
        fragment = await browser.get(path, **{"X-Rooms-Fragment": "live"})
        if fragment.path.startswith(PORTAL):
            assert fragment.status in {200, 204}, path
            assert not [one for one in fragment.links if not one.startswith((PORTAL, "#", "?"))]


async def test_other_subscriptions_are_not_there(browser: Browser) -> None:
    ids = await things(browser.api)
    hidden = await things_of_another(browser.api)
    await enter(browser, "manage", subscription_ids=[ids["subscription_id"]])
    for path in pages(hidden):
        if path not in {PORTAL, f"{PORTAL}/retry-schedule"}:
            assert (await browser.get(path)).status == 404, path
    fields = {**await token(browser), "confirm": "x", "ordering_key": "k", "overlap_s": "1"}
    for path in pages(hidden, "POST"):
        if path not in OWN_SESSION:
            answer = await browser.http.post(path, data=fields, headers=SAME_SITE)
            assert answer.status_code == 404, (path, answer.status_code)


async def things_of_another(api: Api) -> dict[str, str]:
    """Make what a portal of one subscription must not show: a room and subscription beside it."""
    room = (await api.room("other"))["id"]
    await api.made(f"/rooms/{room}/event-types", {"name": "made"})
    subscription = (await api.subscription(room, "theirs", type="PUSH"))["id"]
    message = (await api.publish(room, "made", {}))["message_id"]
    found = (await api.call("GET", f"/messages/{message}/deliveries")).json()["items"]
    await sidelined(api, found[0]["id"])
    shovel = f"/subscriptions/{subscription}/sideline/shovel"
    job = (await api.call("POST", shovel, json={"event_type": "none"})).json()
    return {
        "room_id": str(room),
        "subscription_id": subscription,
        "message_id": message,
        "delivery_id": found[0]["id"],
        "name": "made",
        "job_id": job["job_id"],
    }


async def test_read_access_gets_403_on_every_action(browser: Browser) -> None:
    ids = await things(browser.api)
    await browser.api.subscription(int(ids["room_id"]), "other")
    await enter(browser, "read")
    fields = await token(browser)
    for path in pages(ids, "POST"):
        if path not in OWN_SESSION:
            answer = await browser.http.post(path, data=fields, headers=SAME_SITE)
            assert answer.status_code == 403, path


async def test_a_form_needs_its_token_and_its_origin(browser: Browser) -> None:
    ids = await things(browser.api)
    await browser.api.subscription(int(ids["room_id"]), "other")
    await enter(browser, "manage")
    fields = await token(browser)
    before = await browser.api.sql("SELECT count(*) FROM journal")
    for path in pages(ids, "POST"):
        for headers in FOREIGN:
            answer = await browser.http.post(path, data=fields, headers=headers)
            assert answer.status_code == 403, (path, headers)
        for wrong in ("", "x"):
            answer = await browser.http.post(path, data={"form_token": wrong}, headers=SAME_SITE)
            assert answer.status_code == 403, path
    assert await browser.api.sql("SELECT count(*) FROM journal") == before


async def test_operating_brings_failed_messages_back(browser: Browser) -> None:
    ids = await things(browser.api)
    at = f"{PORTAL}/subscriptions/{ids['subscription_id']}"
    page = await enter(browser, "operate", subscription_ids=[ids["subscription_id"]])
    paused = await browser.submit(page, f"{at}/pause")
    assert "The subscription is paused" in paused.text
    assert "is active" in (await browser.submit(paused, f"{at}/resume")).text
    retried = await browser.post(f"{at}/retry", await token(browser))
    assert retried.path.startswith(f"{PORTAL}/jobs/")
    preview = await browser.get(f"{at}/sideline/shovel")
    assert "Bring back 1 delivery of billing" in preview.text
    job = await browser.submit(preview, f"{at}/sideline/shovel")
    assert job.path.startswith(f"{PORTAL}/jobs/")
    message = await browser.get(f"{PORTAL}/messages/{ids['message_id']}")
    assert "alert(1)" not in message.html
    shown = await browser.submit(message, f"{PORTAL}/messages/{ids['message_id']}/payload")
    assert "alert(1)" in shown.text
    assert "<script>alert" not in shown.html
    for action in ("edit", "credentials"):
        assert f"{at}/{action}" not in page.links
    for path in (f"{at}/edit", f"{at}/credentials/secret", f"{at}/call"):
        answer = await browser.http.post(path, data=await token(browser), headers=SAME_SITE)
        assert answer.status_code == 403


async def test_managing_edits_tests_and_rotates(browser: Browser) -> None:
    ids = await things(browser.api)
    at = f"{PORTAL}/subscriptions/{ids['subscription_id']}"
    page = await enter(browser, "manage", subscription_ids=[ids["subscription_id"]])
    called = await browser.submit(page, f"{at}/call")
    assert "success" in called.text
    form = await browser.get(f"{at}/edit")
    url = "https://hooks.example.com/other"
    refused = await browser.submit(form, f"{at}/edit", push_url="ftp://hooks.example.com")
    assert refused.status == 422
    changed = await browser.submit(refused, f"{at}/edit", push_url=url)
    assert "The subscription is changed." in changed.text
    assert url in changed.text
    rotated = await browser.submit(
        await browser.get(f"{at}/credentials"), f"{at}/credentials/secret"
    )
    secret = SECRET.search(rotated.text)
    assert secret is not None, rotated.text
    assert secret[0] not in (await browser.get(f"{at}/credentials")).text
    actors = await browser.api.sql(
        "SELECT DISTINCT actor_name FROM journal WHERE actor_kind = 'person' AND action <> 'sign_in'"
    )
    assert actors == [("ada",)]


async def test_the_event_types_are_read_and_not_changed(browser: Browser) -> None:
    ids = await things(browser.api)
    schema = {"type": "object", "examples": [{"amount": 7}]}
    types = f"/rooms/{ids['room_id']}/event-types"
    await browser.api.made(f"{types}/made/versions", {"schema": schema})
    page = await enter(browser, "manage", subscription_ids=[ids["subscription_id"]])
    assert f"{PORTAL}{types}" in page.links
    one = await browser.get(f"{PORTAL}{types}/made")
    assert '"amount": 7' in one.text
    assert {form.action for form in one.forms} <= {f"{PORTAL}/preferences", f"{PORTAL}/leave"}


async def test_neither_cookie_opens_what_the_other_one_does(browser: Browser) -> None:
    await things(browser.api)
    await browser.sign_in("owner")
    refused = await browser.get(PORTAL)
    assert refused.status == 401
    assert "Your session has ended" in refused.text
    console_key = browser.http.cookies["rooms_session"]
    browser.http.cookies.clear()
    await enter(browser, "manage")
    portal_key = browser.http.cookies["rooms_portal"]
    assert (await browser.get("/console")).path.startswith("/console/sign-in")
    browser.http.cookies.clear()
    for name, key, path in (
        ("rooms_session", portal_key, "/console"),
        ("rooms_portal", console_key, PORTAL),
    ):
        answer = await browser.http.get(path, headers={"Cookie": f"{name}={key}"})
        assert answer.status_code == (303 if path == "/console" else 401)
    both = f"rooms_session={console_key}; rooms_portal={portal_key}"
    for path in ("/console", PORTAL):
        answer = await browser.http.get(path, headers={"Cookie": both})
        assert answer.status_code in {200, 303}
        assert "sign-in" not in answer.headers.get("location", "")


async def test_links_open_only_what_they_are_for(browser: Browser) -> None:
    console = await browser.api.made("/sign-in-links", {"name": "ada", "roles": ["owner"]})
    wrong = console["path"].replace("/console/sign-in", f"{PORTAL}/enter")
    page = await browser.get(wrong)
    assert (page.status, "This link is not valid" in page.text) == (401, True)
    signed_in = await browser.submit(await browser.get(console["path"]), "/console/sign-in")
    assert signed_in.path == "/console"


async def test_a_link_to_a_portal_does_not_sign_in_to_the_console(browser: Browser) -> None:
    portal_token = httpx.URL(await link_to(browser.api)).params["token"]
    answer = await browser.http.post(
        "/console/sign-in", data={"token": portal_token}, headers=SAME_SITE
    )
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers


async def test_the_cookie_may_be_partitioned_by_the_framing_site(browser: Browser) -> None:
    held = ""
    for scheme, name, marks in (
        ("http", "rooms_portal", {"httponly", "path=/", "samesite=lax"}),
        (
            "https",
            "__Host-rooms_portal",
            {"httponly", "path=/", "samesite=none", "secure", "partitioned"},
        ),
    ):
        headers = {"X-Forwarded-Proto": scheme}
        entered = await browser.http.get(await link_to(browser.api), headers=headers)
        assert entered.status_code == 303
        assert "token" not in entered.headers["location"]
        parts = [part.strip() for part in entered.headers["set-cookie"].split(";")]
        assert parts[0].startswith(f"{name}=rooms_")
        attributes = {part.lower() for part in parts[1:]}
        assert {one for one in attributes if not one.startswith("max-age")} == marks
        held = parts[0]
        (age,) = [one for one in attributes if one.startswith("max-age=")]
        assert 3500 < int(age.partition("=")[2]) <= 3600
    cookie = {"Cookie": held, "X-Forwarded-Proto": "https"}
    shown = Document(await browser.http.get(PORTAL, headers=cookie))
    fields = {**dict(shown.form(f"{PORTAL}/preferences").fields), "language": "de"}
    kept = await browser.http.post(
        f"{PORTAL}/preferences", data=fields, headers={**SAME_SITE, **cookie}
    )
    assert kept.headers["location"] == PORTAL
    for one in kept.headers.get_list("set-cookie"):
        assert "SameSite=none; Secure; Partitioned" in one
        assert "Path=/console/portal;" in one


async def test_a_session_ends_with_its_time_and_says_so(browser: Browser) -> None:
    ids = await things(browser.api)
    at = f"{PORTAL}/subscriptions/{ids['subscription_id']}"
    page = await enter(browser, "manage", subscription_ids=[ids["subscription_id"]])
    await browser.api.sql("UPDATE api_keys SET expires_at = now() WHERE portal RETURNING 1")
    browser.api.services.keys.forget()
    for ended in (await browser.get(at), await browser.submit(page, f"{at}/pause")):
        assert ended.status == 401
        assert "Your session has ended" in ended.text
        assert not ended.forms
        assert not ended.links or ended.links == ["#main"]
    fragment = await browser.http.get(at, headers={"X-Rooms-Fragment": "live"})
    assert (fragment.status_code, fragment.text) == (401, "")
    assert (await browser.http.get(f"{PORTAL}/live?path={at}")).status_code == 401


async def test_a_link_ends_with_its_time(browser: Browser) -> None:
    link = await link_to(browser.api)
    await browser.api.sql("UPDATE sign_in_links SET expires_at = now() RETURNING 1")
    page = await browser.get(link)
    assert (page.status, "This link is not valid" in page.text) == (401, True)
    assert "rooms_portal" not in browser.http.cookies
    assert (await browser.get(f"{PORTAL}/enter?token=%00%ff")).status == 401


async def test_an_address_tries_few_links_a_second(api: Api) -> None:
    api.services = replace(api.services, clock=StoppedClock())
    browser = await Browser.open(api)
    tried = [await browser.get(f"{PORTAL}/enter?token={n}") for n in range(LINKS_PER_S + 1)]
    assert [page.status for page in tried] == [401] * LINKS_PER_S + [429]
    assert "Too many visitors" in tried[-1].text
    await browser.close()


async def test_a_link_begins_few_sessions_a_second(api: Api) -> None:
    """Its success is refunded to the address; each is a row and an entry of the journal."""
    api.services = replace(api.services, clock=StoppedClock())
    browser = await Browser.open(api)
    link = await link_to(api)
    entered = [(await browser.http.get(link)).status_code for _ in range(SIGN_INS_PER_S + 1)]
    assert entered == [303] * SIGN_INS_PER_S + [429]
    ((sessions,),) = await api.sql("SELECT count(*) FROM api_keys WHERE portal")
    assert sessions == SIGN_INS_PER_S
    other = await browser.http.get(await link_to(api))
    assert other.status_code == 303
    await browser.close()


async def test_a_further_session_of_a_link_ends_the_one_that_would_end_first(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = browser.api
    monkeypatch.setattr("rooms.db.catalog.sessions.MAX_LIVE_OF_LINK", 3)
    other = await enter(browser)
    assert other.status == 200
    link = await link_to(api)
    live = "SELECT id FROM api_keys WHERE portal AND revoked_at IS NULL ORDER BY id"
    for _ in range(3):
        assert (await browser.http.get(link)).status_code == 303
    (of_other,), *begun = await api.sql(live)
    (oldest,), (idle,), (newest,) = begun
    await api.sql(
        f"UPDATE api_keys SET expires_at = expires_at - interval '9 min' WHERE id = '{idle}'"
    )
    assert (await browser.http.get(link)).status_code == 303
    found = [one for (one,) in await api.sql(live)]
    assert found[:3] == [of_other, oldest, newest]
    assert len(found) == 4
    assert (await browser.http.get(link)).status_code == 303
    assert oldest not in [one for (one,) in await api.sql(live)]
    assert (await browser.get(PORTAL)).status == 200, "the newest one goes on"


async def test_the_sessions_of_a_link_that_begin_at_once_are_counted(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of several processes, whose rates are their own."""
    monkeypatch.setattr("rooms.db.catalog.sessions.MAX_LIVE_OF_LINK", 2)
    monkeypatch.setattr("rooms.console.sessions.TokenBuckets.take", lambda *_: True)
    link = await link_to(browser.api)
    answers = await asyncio.gather(*(browser.http.get(link) for _ in range(8)))
    assert [one.status_code for one in answers] == [303] * 8
    counted = (
        "SELECT count(*), count(*) FILTER (WHERE revoked_at IS NULL) FROM api_keys WHERE portal"
    )
    assert list(map(tuple, await browser.api.sql(counted))) == [(8, 2)]


async def test_a_session_that_has_ended_leaves_room_for_another(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = browser.api
    monkeypatch.setattr("rooms.db.catalog.sessions.MAX_LIVE_OF_LINK", 2)
    link = await link_to(api)
    for _ in range(2):
        await browser.http.get(link)
    (kept,), (left,) = await api.sql("SELECT id FROM api_keys WHERE portal ORDER BY id")
    assert (await api.call("DELETE", f"/sessions/{left}")).status_code == 204
    await browser.http.get(link)
    assert (kept, True) in [
        tuple(row)
        for row in await api.sql("SELECT id, revoked_at IS NULL FROM api_keys WHERE portal")
    ]


async def test_a_browser_that_keeps_no_cookie_is_recognized(browser: Browser) -> None:
    link = await link_to(browser.api)
    entered = await browser.http.get(link)
    browser.http.cookies.clear()
    page = await browser.get(entered.headers["location"])
    assert (page.status, "kept no cookie" in page.text) == (401, True)


async def test_leaving_ends_the_session(browser: Browser) -> None:
    await things(browser.api)
    page = await enter(browser)
    kept = dict(browser.http.cookies)
    left = await browser.submit(page, f"{PORTAL}/leave")
    assert (left.status, "Your session has ended" in left.text) == (401, True)
    browser.http.cookies.update(kept)
    browser.api.services.keys.forget()
    assert (await browser.get(PORTAL)).status == 401
    entries = await browser.api.sql(
        "SELECT action, object, actor_name FROM journal WHERE action IN ('sign_in', 'sign_out') ORDER BY seq"
    )
    assert entries == [("sign_in", PORTAL, "ada"), ("sign_out", PORTAL, "ada")]


async def test_hostile_names_are_shown_as_text(browser: Browser) -> None:
    ids = await things(browser.api)
    await browser.api.subscription(int(ids["room_id"]), "other")
    await browser.api.sql("UPDATE subscriptions SET name = %s || id WHERE true", HOSTILE)
    await browser.api.sql("UPDATE organisations SET name = %s || id WHERE true", HOSTILE)
    await browser.api.sql("UPDATE rooms SET name = %s WHERE true", HOSTILE)
    await enter(browser, "manage")
    for path in pages(ids):
        page = await browser.get(path)
        assert page.status == 200, path
        assert "<script>alert" not in page.html, path
        if not path.endswith("/edit"):  # fields send back what they show
            assert "\x1b" not in page.html, path
            assert "\u202e" not in page.html, path
    assert "\u241b[31m[RLO]" in (await browser.get(PORTAL)).text


async def test_every_address_of_the_portal_is_one_of_the_portal() -> None:
    for handler in portal.ROUTES:
        for path in handler.paths:
            assert path == PORTAL or path.startswith(f"{PORTAL}/")
    public = {min(handler.paths) for handler in portal.ROUTES if handler.opt.get(PUBLIC)}
    assert public == {f"{PORTAL}/enter", f"{PORTAL}/leave", f"{PORTAL}/preferences"}
