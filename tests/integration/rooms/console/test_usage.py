"""Test the page of usage and quotas."""

import csv
import io
import re
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.api import usage
from rooms.db.quotas import estimate_stored, limited_stores
from rooms.db.usage.read import list_usage
from rooms.errors import RateLimitedError
from tests.integration.rooms.api.test_usage import counted
from tests.integration.rooms.console.browser import Browser
from tests.integration.rooms.console.platform_key import sign_in_platform

PATH = "/console/administration/usage"


@pytest.fixture
async def room(browser: Browser) -> int:
    """Publish three messages of two types."""
    found = await browser.api.room()
    for event_type in ("order", "parcel"):
        await browser.api.made(f"/rooms/{found['id']}/event-types", {"name": event_type})
    for event_type in ("order", "order", "parcel"):
        await browser.api.publish(found["id"], event_type)
    await counted(browser.api)
    return int(found["id"])


@pytest.mark.usefixtures("room")
async def test_counts_are_grouped_and_drawn(browser: Browser) -> None:
    await browser.sign_in("viewer")
    page = await browser.get(PATH)
    assert "orders" in page.text
    assert "Published 3" in page.text
    assert "<title>Messages published</title>" in page.html
    page = await browser.get(f"{PATH}?per=day&by=event_type")
    assert "order" in page.text
    assert "parcel" in page.text
    wide = await browser.get(f"{PATH}?by=organisation,room,event_type")
    assert "default" in wide.text
    assert "Nothing was published" in (await browser.get(f"{PATH}?until=2020-01-01T00:00")).text
    assert (await browser.get(f"{PATH}?since=2020-01-01T00:00")).status == 422
    assert (await browser.get(f"{PATH}?since=soon")).status == 422


async def test_a_room_that_was_deleted_is_no_link(browser: Browser, room: int) -> None:
    link = f"/console/rooms/{room}"
    await browser.sign_in("owner")
    assert link in (await browser.get(f"{PATH}?by=room")).links
    answer = await browser.api.call("DELETE", f"/rooms/{room}?confirm=orders")
    assert answer.status_code == 202
    page = await browser.get(f"{PATH}?by=room")
    assert link not in page.links
    assert f"{room} deleted, or not shared any more" in page.text
    jobs = await browser.get("/console/jobs")
    assert jobs.status == 200
    assert str(room) in jobs.text
    assert link not in jobs.links


async def test_applications_are_a_column_and_a_filter(browser: Browser, room: int) -> None:
    body = {"name": "bound", "scopes": ["publish"], "application": "registry"}
    browser.api.keys["bound"] = (await browser.api.made("/keys", body))["key"]
    sent = {"event_type": "order", "payload": {}}
    answer = await browser.api.call("POST", f"/rooms/{room}/messages", "bound", json=sent)
    assert answer.is_success
    await counted(browser.api)
    await browser.sign_in("viewer")
    page = await browser.get(f"{PATH}?by=organisation,application&per=day")
    assert "registry" in page.text
    assert "Published 4" in page.text
    page = await browser.get(f"{PATH}?by=organisation,application&per=day&application=registry")
    assert "Published 1" in page.text
    assert (await browser.get(f"{PATH}?application=a%20b")).status == 422


@pytest.mark.usefixtures("room")
async def test_the_table_is_exported(browser: Browser) -> None:
    await browser.sign_in("auditor")
    page = await browser.get(f"{PATH}?by=event_type&per=day")
    (link,) = [link for link in page.links if "/usage/export" in link]
    answer = await browser.http.get(link)
    assert answer.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert {(row["event_type"], row["messages"]) for row in rows} == {
        ("order", "2"),
        ("parcel", "1"),
    }


async def test_quotas_are_shown_with_their_use(browser: Browser, room: int) -> None:
    own = (await browser.api.call("GET", "/whoami")).json()["organisation"]["id"]
    limits = {"messages_per_day": 4, "subscriptions": 0}
    await browser.api.call("PATCH", f"/organisations/{own}/quotas", "platform", json=limits)
    await browser.api.publish(room, "order")
    await browser.sign_in("owner")
    page = await browser.get(PATH)
    assert "of 4" in page.text
    assert "of the limit" in page.html


@pytest.mark.usefixtures("room")
async def test_stored_messages_are_counted_up_to_their_limit_only(
    browser: Browser,
) -> None:
    own = (await browser.api.call("GET", "/whoami")).json()["organisation"]["id"]
    path = f"/organisations/{own}/quotas"
    await sign_in_platform(browser, "platform", "owner")
    for most, shown in ((4, "3 of 4"), (3, "3 or more of 3"), (2, "2 or more of 2")):
        limits = {"stored_messages": most, "messages_per_day": 9}
        await browser.api.call("PATCH", path, "platform", json=limits)
        for store in await limited_stores(browser.api.services.engine):
            await estimate_stored(browser.api.services.engine, store)
        assert f"Stored messages {shown}" in (await browser.get(PATH)).text
        one = await browser.get(f"/console/administration/organisations/{own}")
        assert f"used: {shown.partition(' of')[0]}" in one.text


@pytest.mark.usefixtures("room")
async def test_the_platform_reads_the_usage_of_all(browser: Browser) -> None:
    await browser.sign_in("owner")
    own = (await browser.api.call("GET", "/whoami")).json()["organisation"]["id"]
    other = (await browser.api.call("GET", "/whoami", "stranger")).json()["organisation"]["id"]
    assert (await browser.get(f"{PATH}?organisation_id={other}")).status == 403
    assert (await browser.get(f"{PATH}/export?organisation_id=*")).status == 403
    await sign_in_platform(browser, "platform")
    page = await browser.get(f"{PATH}?by=organisation")
    assert "default" in page.text
    page = await browser.get(f"{PATH}?organisation_id={own}")
    assert "no limit" in page.text


class Refusals:
    """Refuse to read the later parts of an export so often, one row a part."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self._read, self._left = list_usage, count
        monkeypatch.setattr(usage, "_EXPORT_BATCH", 1)
        monkeypatch.setattr(usage, "list_usage", self)

    async def __call__(self, connection: AsyncConnection, query: Any, **page: Any) -> Any:
        if page["after"] is not None and self._left:
            self._left -= 1
            raise RateLimitedError("others use the connections", retry_after_s=0)
        return await self._read(connection, query, **page)


@pytest.mark.usefixtures("room")
async def test_an_export_waits_where_its_later_parts_are_refused_for_now(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    await browser.sign_in("viewer")
    whole = (await browser.http.get(f"{PATH}/export?by=event_type")).text
    assert len(whole.splitlines()) == 3
    Refusals(monkeypatch, 2)
    assert (await browser.http.get(f"{PATH}/export?by=event_type")).text == whole


@pytest.mark.usefixtures("room")
async def test_an_export_that_cannot_be_completed_breaks_off(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A browser then reports a failed download: the end of the answer is missing."""
    await browser.sign_in("viewer")
    Refusals(monkeypatch, 1000)
    with pytest.raises(Exception, match="response started"):
        await browser.http.get(f"{PATH}/export?by=event_type")


async def test_the_first_page_has_each_hour_although_many_share_the_rooms(
    browser: Browser, room: int
) -> None:
    """Each hour has a row for each of those who publish into an own room."""
    await browser.api.sql(
        "INSERT INTO usage_hours (room_id, hour, owner_id, organisation_id, event_type, application, messages)"
        " SELECT r.id, date_trunc('hour', now(), 'UTC') - h * interval '1 hour', r.organisation_id, o, 'order', 'a',"
        " CASE WHEN o = r.organisation_id THEN 100 ELSE 1 END"
        " FROM rooms r, generate_series(0, 23) h, LATERAL ("
        "  SELECT r.organisation_id AS o UNION ALL SELECT gen_random_uuid() FROM generate_series(h, h + 5)) x"
        " WHERE r.id = %s RETURNING 1",
        room,
    )
    await browser.sign_in("viewer")
    page = await browser.get("/console")
    assert "Published 2,403" in page.text
    assert "at most 103 an hour" in page.text


async def hours(browser: Browser, room: int, count: int) -> datetime:
    """Count one message in each of the last hours; return the time of the newest one."""
    statement = (
        "INSERT INTO usage_hours (room_id, hour, owner_id, organisation_id, event_type, application, messages)"
        " SELECT r.id, date_trunc('hour', now(), 'UTC') - h * interval '1 hour', r.organisation_id,"
        " r.organisation_id, 'order', 'a', 1 FROM rooms r, generate_series(1, %s) h WHERE r.id = %s"
        " RETURNING hour"
    )
    newest: datetime = max(at for (at,) in await browser.api.sql(statement, count, room))
    return newest


@pytest.mark.parametrize(
    ("asked", "drawn"), [(24, 24), (200, 200), (250, 250), (499, 499), (720, 499)]
)
async def test_every_hour_that_is_drawn_is_counted(
    browser: Browser, asked: int, drawn: int
) -> None:
    """Also more of them than a page of the API has; of more than 500, the last ones."""
    room = await browser.api.room()
    newest = await hours(browser, int(room["id"]), 720)
    until = newest + timedelta(hours=1)
    since = until - timedelta(hours=asked)
    await browser.sign_in("viewer")
    span = {"since": since.isoformat(), "until": until.isoformat()}
    page = await browser.get(f"{PATH}?{urlencode(span)}")
    assert f"Published {drawn} " in page.text
    (chart,) = re.findall(r"<title>Messages published</title>.*?</svg>", page.html, re.DOTALL)[:1]
    assert chart.count("<rect") == drawn
    is_cut = "only the last 499 of them are drawn" in page.text
    assert is_cut is (asked > drawn)
