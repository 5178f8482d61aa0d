"""Test the console against strangers, other sites, viewers, and hostile text, on every route."""

import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any, Final

import httpx
import psycopg
import pytest
from sqlalchemy.exc import OperationalError

from rooms.console.app import PAGES
from rooms.console.page import PUBLIC
from rooms.console.sessions import is_portal_path
from rooms.db.catalog import sessions as records
from rooms.domain.state_machine import Scope
from tests.integration.rooms.api.conftest import make_key
from tests.integration.rooms.console.browser import BASE, Browser
from tests.integration.rooms.console.test_subscriptions import token

PARAMETER: Final = re.compile(r"\{[a-z_]+(?::[a-z]+)?\}")
HOSTILE: Final = "<script>alert(1)</script>\x1b[31m\u202e&\"'"
SAME_SITE: Final = {"Origin": BASE, "Sec-Fetch-Site": "same-origin"}
FOREIGN: Final[list[dict[str, str]]] = [
    {},
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": f"{BASE}.evil.example"},
    {"Origin": BASE, "Sec-Fetch-Site": "cross-site"},
    {"Origin": BASE, "Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "none"},
]
OWN_SESSION: Final = {"/console/sign-in", "/console/sign-out", "/console/preferences"}
"""Routes for every role: they are about the session of the browser itself."""


def paths(method: str) -> Iterator[tuple[str, bool]]:
    """Yield the path of each route, with its parameters filled in, and whether it is public."""
    for handler in PAGES:
        if method in handler.http_methods:
            for path in handler.paths:
                filled = PARAMETER.sub("01a208be-b1ca-7340-8715-2fb100000001", path)
                yield filled, bool(handler.opt.get(PUBLIC))


async def post(browser: Browser, path: str, headers: dict[str, str], **fields: str) -> Any:
    return await browser.http.post(path, data=fields, headers=headers)


async def test_every_page_asks_a_stranger_to_sign_in(browser: Browser) -> None:
    """The portal's do not: in a frame, there is nothing to sign in with."""
    for path, public in paths("GET"):
        answer = await browser.http.get(f"{path}?x=1")
        if is_portal_path(path):
            assert answer.status_code == 401, path
            assert "<input" not in answer.text, path
        elif public:
            assert answer.status_code == 200, path
        else:
            assert answer.status_code == 303, path
            assert answer.headers["location"].startswith("/console/sign-in?to=%2Fconsole"), path


async def test_another_site_changes_nothing(browser: Browser) -> None:
    both = await make_key(browser.api.services, "acme", Scope.ADMIN, Scope.PLATFORM)
    await browser.sign_in("platform", "owner", key=both)
    page = await browser.get("/console")
    token = dict(page.form("/console/sign-out").fields)["form_token"]
    before = await browser.api.sql("SELECT count(*) FROM journal")
    for path, _ in paths("POST"):
        for headers in FOREIGN:
            answer = await post(browser, path, headers, form_token=token)
            expected = {401, 403} if is_portal_path(path) else {403}
            assert answer.status_code in expected, (path, headers)
            assert "set-cookie" not in answer.headers, (path, headers)
    assert await browser.api.sql("SELECT count(*) FROM journal") == before


async def test_a_form_needs_the_token_of_its_session(browser: Browser) -> None:
    await browser.sign_in("owner")
    foreign = dict((await browser.get("/console")).form("/console/sign-out").fields)["form_token"]
    browser.http.cookies.clear()
    await browser.sign_in("owner")
    for path, _ in paths("POST"):
        if path == "/console/sign-in" or is_portal_path(path):
            continue
        for sent in ("", "x", "ü", foreign):
            answer = await post(browser, path, SAME_SITE, form_token=sent)
            assert answer.status_code == 403, (path, sent)


async def test_a_viewer_gets_403_on_every_action(browser: Browser) -> None:
    await browser.sign_in("viewer")
    page = await browser.get("/console")
    token = dict(page.form("/console/sign-out").fields)["form_token"]
    found = {
        path: (await post(browser, path, SAME_SITE, form_token=token)).status_code
        for path, _ in paths("POST")
        if path not in OWN_SESSION and not is_portal_path(path)
    }
    assert {path: status for path, status in found.items() if status != 403} == {}


async def test_the_session_is_in_a_cookie_that_no_script_reads(browser: Browser) -> None:
    for scheme, name, marks in (
        ("http", "rooms_session", {"httponly", "path=/", "samesite=lax"}),
        ("https", "__Host-rooms_session", {"httponly", "path=/", "samesite=lax", "secure"}),
    ):
        link = await browser.api.made("/sign-in-links", {"name": "ada", "roles": ["viewer"]})
        token = httpx.URL(link["path"]).params["token"]
        answer = await browser.http.post(
            "/console/sign-in",
            data={"token": token},
            headers={**SAME_SITE, "X-Forwarded-Proto": scheme},
        )
        assert answer.status_code == 303
        parts = [part.strip() for part in answer.headers["set-cookie"].split(";")]
        assert parts[0].startswith(f"{name}=rooms_")
        assert marks <= {part.lower() for part in parts}
        assert not any(part.lower().startswith("domain") for part in parts)


async def test_a_link_is_only_used_up_by_a_click(browser: Browser) -> None:
    link = await browser.api.made("/sign-in-links", {"name": "ada", "roles": ["viewer"]})
    await browser.get(link["path"])
    page = await browser.get(link["path"])
    signed_in = await browser.submit(page, "/console/sign-in")
    assert signed_in.path == "/console"
    again = await browser.submit(page, "/console/sign-in")
    assert again.status == 401
    assert "used up" in again.text


async def test_a_link_that_began_no_session_is_not_used_up(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = await browser.api.made("/sign-in-links", {"name": "ada", "roles": ["viewer"]})
    page = await browser.get(link["path"])

    async def fail(*_: object, **__: object) -> None:
        raise OperationalError("INSERT", None, psycopg.OperationalError("the server has gone"))

    with monkeypatch.context() as patch:
        patch.setattr(records, "create_session", fail)
        assert (await browser.submit(page, "/console/sign-in")).status == 503
    assert (await browser.submit(page, "/console/sign-in")).path == "/console"


@pytest.mark.parametrize(
    "target", ["//evil.example", "https://evil.example/console", "/v1/rooms", "/console@evil", ""]
)
async def test_signing_in_leads_to_no_other_site(browser: Browser, target: str) -> None:
    link = await browser.api.made("/sign-in-links", {"name": "ada", "roles": ["viewer"]})
    token = httpx.URL(link["path"]).params["token"]
    fields = {"token": token, "to": target}
    answer = await post(browser, "/console/sign-in", SAME_SITE, **fields)
    assert answer.headers["location"] == "/console"


async def test_signing_in_with_a_key_may_do_what_the_key_may(browser: Browser) -> None:
    page = await browser.get("/console/sign-in")
    refused = await browser.submit(page, "/console/sign-in", key="rooms_nonsense")
    assert refused.status == 401
    await browser.submit(refused, "/console/sign-in", key=browser.api.keys["operate"])
    assert "operate" in (await browser.get("/console")).text
    assert (await browser.get("/console/rooms/new")).status == 403
    fields = {**await token(browser), "name": "x"}
    assert (await browser.post("/console/rooms", fields)).status == 403


async def test_signing_out_ends_the_session_for_good(browser: Browser) -> None:
    await browser.sign_in("owner")
    kept = dict(browser.http.cookies)
    out = await browser.submit(await browser.get("/console"), "/console/sign-out")
    assert out.path == "/console/sign-in"
    browser.http.cookies.update(kept)
    browser.api.services.keys.forget()
    assert (await browser.get("/console")).path.startswith("/console/sign-in")
    actions = await browser.api.sql(
        "SELECT action, actor_kind, actor_name FROM journal WHERE action IN ('sign_in', 'sign_out') ORDER BY seq"
    )
    assert actions == [("sign_in", "person", "ada"), ("sign_out", "person", "ada")]


async def test_hostile_names_are_shown_as_text(browser: Browser) -> None:
    await browser.sign_in("owner", name="ada <b>x</b>")
    await browser.api.room("orders")
    await browser.api.sql("UPDATE rooms SET name = %s", HOSTILE)
    page = await browser.get("/console/rooms")
    assert "<script>alert" not in page.html
    assert "\x1b" not in page.html
    assert "\u202e" not in page.html
    assert "\u241b[31m[RLO]" in page.text
    assert "<b>x" not in page.html


async def test_every_page_forbids_what_is_not_its_own(browser: Browser) -> None:
    await browser.sign_in("owner")
    for path in ("/", "/console", "/console/nothing", "/console/static/0/console.css"):
        answer = await browser.http.get(path)
        policy = answer.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["cache-control"] == "no-store"


def test_no_template_needs_inline_styles_or_scripts() -> None:
    folder = files("rooms.console").joinpath("templates")
    names = [one for one in folder.iterdir() if one.name.endswith(".html")]
    assert len(names) > 5
    for one in names:
        text = one.read_text(encoding="utf-8")
        found = re.findall(
            r"\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)|\|\s*safe|javascript:", text
        )
        assert not found, (one.name, found)
        assert not re.search(r"(?:src|href|action)=\"(?:https?:)?//", text), one.name


async def test_a_form_is_bounded(browser: Browser) -> None:
    await browser.sign_in("owner")
    huge = await browser.http.post(
        "/console/rooms", content=b"name=" + b"x" * 3_000_000, headers=SAME_SITE
    )
    assert huge.status_code == 413
    many = await browser.http.post("/console/rooms", content=b"a=1&" * 5000, headers=SAME_SITE)
    assert many.status_code == 400


async def test_a_form_that_anyone_may_send_is_small(browser: Browser) -> None:
    for path in sorted(OWN_SESSION):
        large = await browser.http.post(path, content=b"to=" + b"%41" * 6000, headers=SAME_SITE)
        assert large.status_code == 413, path


async def test_a_large_form_keeps_no_other_request_waiting(browser: Browser) -> None:
    await browser.sign_in("owner")
    # A stalled loop fails the test.
    content = b"name=" + b"%e" * 1_000_000
    refused = await browser.http.post("/console/rooms", content=content, headers=SAME_SITE)
    assert refused.status_code == 403  # it has no token
