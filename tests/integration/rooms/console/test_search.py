"""Test searching from every page of the console."""

from urllib.parse import quote

import pytest

from rooms.api.search import SearchKind
from rooms.console.search import _PATHS, address_of
from tests.integration.rooms.console.browser import Browser
from tests.integration.rooms.console.test_messages import HOSTILE, published


async def test_an_id_leads_to_its_page_at_once(browser: Browser) -> None:
    things = await published(browser.api)
    await browser.sign_in("viewer")
    for kind, path in (("message", "messages"), ("delivery", "deliveries")):
        page = await browser.get(f"/console/search?q={things[kind]}")
        assert page.path == f"/console/{path}/{things[kind]}"
        assert page.status == 200


async def test_names_and_keys_are_listed(browser: Browser) -> None:
    things = await published(browser.api, business_key="case-1")
    await browser.sign_in("viewer")
    page = await browser.get("/console")
    assert any(form.action == "/console/search" for form in page.forms)
    for text, link in (
        ("case-1", f"/console/messages/{things['message']}"),
        ("order", f"/console/rooms/{things['room']}"),
        ("bill", f"/console/subscriptions/{things['subscription']}"),
        ("made", f"/console/rooms/{things['room']}/event-types/made"),
    ):
        assert link in (await browser.get(f"/console/search?q={text}")).links


async def test_nothing_of_others_is_found(browser: Browser) -> None:
    things = await published(browser.api, business_key="case-1")
    await browser.sign_in(key="other-admin")
    for text in ("case-1", "billing", "orders", "made", *map(str, things.values())):
        page = await browser.get(f"/console/search?q={text}")
        assert page.path.startswith("/console/search")
        assert "Nothing that you may see" in page.text


async def test_kinds_are_in_the_language_of_the_reader(browser: Browser) -> None:
    await published(browser.api, business_key="case-1")
    await browser.sign_in("viewer")
    page = await browser.get("/console/search?q=case-1", **{"Accept-Language": "de"})
    assert "Nachricht Geschäftsschlüssel" in page.text
    page = await browser.get("/console/search?q=bill", **{"Accept-Language": "de"})
    assert "billing Abonnement Name" in page.text


@pytest.mark.parametrize("text", ["", "  ", HOSTILE, "x" * 10_000])
async def test_odd_text_is_only_text(browser: Browser, text: str) -> None:
    await browser.sign_in("viewer")
    page = await browser.get(f"/console/search?q={quote(text)}")
    assert page.status == (422 if len(text) > 256 else 200)
    assert "<script>alert" not in page.html
    assert "\u202e" not in page.html


def test_each_kind_has_a_page() -> None:
    assert set(_PATHS) == {kind.value for kind in SearchKind}
    found = {"kind": "event_type", "id": "a/b", "room_id": 7}
    assert address_of(found) == "/console/rooms/7/event-types/a%2Fb"
