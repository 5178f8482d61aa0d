"""Test what the pages about subscriptions say to a person who looks for what to do."""

import re

import pytest

from rooms.db.queries.stats import MAX_AGE_S, QueueStats
from rooms.db.queries.subscription_counts import OrganisationStats
from tests.integration.rooms.console.browser import Browser
from tests.integration.rooms.console.test_subscriptions import world


async def test_an_open_circuit_says_what_closes_it(browser: Browser) -> None:
    room, crm = await world(browser.api, circuit_failures=1)
    await browser.api.sql(
        "INSERT INTO lanes (room_id, id, circuit_open, circuit_since, probe_at)"
        " VALUES (%s, %s, true, now(), now() + interval '5 min') RETURNING 1",
        room,
        crm,
    )
    await browser.sign_in("operator")
    page = await browser.get(f"/console/subscriptions/{crm}")
    assert "The next probe: in 5 minutes" in page.text
    resume = f"/console/subscriptions/{crm}/resume"
    assert "Close the circuit now" in page.text
    done = await browser.submit(page, resume)
    assert "circuit open" not in done.text


async def test_times_are_exact_where_a_person_likes_it(browser: Browser) -> None:
    _, crm = await world(browser.api)
    await browser.sign_in("viewer")
    at = f"/console/subscriptions/{crm}"
    page = await browser.get(at)
    assert "ago</time>" in page.html
    await browser.submit(page, "/console/preferences", times="exact")
    assert "ago</time>" not in (await browser.get(at)).html


async def test_a_list_without_deliveries_says_what_to_do(browser: Browser) -> None:
    room, crm = await world(browser.api)
    await browser.sign_in("owner")
    at = f"/console/subscriptions/{crm}/deliveries"
    page = await browser.get(at)
    assert f"rooms publish {room} EVENT_TYPE" in page.text
    assert f"/console/rooms/{room}/publish" in page.links
    assert "No delivery is like this" in (await browser.get(f"{at}?state=held")).text


async def test_the_home_page_says_what_could_not_be_counted(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A zero would say that nothing waits, while the database is too busy to count."""

    async def counts(*_: object) -> QueueStats:
        return QueueStats(up=True, held={"paused": 12_345})

    monkeypatch.setattr(OrganisationStats, "counts", counts)
    await browser.sign_in("viewer")
    page = await browser.get("/console")
    assert page.text.count("not known") == 4
    assert "12,345" in page.text


async def test_the_home_page_counts_a_retry_that_is_due_once(browser: Browser) -> None:
    room, crm = await world(browser.api)
    for _ in range(3):
        await browser.api.publish(room, "order.made", 1)
    await browser.api.sql(
        "UPDATE outbox SET attempt = 1, due_at = now() WHERE subscription_id = %s", crm
    )
    await browser.sign_in("viewer")
    page = await browser.get("/console")
    (row,) = re.findall(rf"<tr>(?:(?!</tr>).)*{crm}.*?</tr>", page.html, re.DOTALL)
    assert re.findall(r'<td class="num">(\d+)</td>', row) == ["3", "0"]


async def test_the_home_page_groups_those_that_fail_alike(browser: Browser) -> None:
    """Two causes are two rows, whichever subscriptions failed at the same time."""
    api = browser.api
    room = (await api.room("shop"))["id"]
    await api.made(f"/rooms/{room}/event-types", {"name": "order.made"})
    for number in range(10):
        host = "one" if number % 2 else "two"
        url = f"https://{host}.example.com/hook"
        await api.subscription(room, f"hook-{number}", push_url=url)
    await api.publish(room, "order.made", 1)
    await api.sql(
        "WITH o AS (UPDATE outbox SET attempt = 1, due_at = now() RETURNING id) UPDATE deliveries d"
        " SET last_error = 'status: busy', last_status = 500 FROM o WHERE d.id = o.id RETURNING 1"
    )
    await browser.sign_in("viewer")
    page = await browser.get("/console")
    rows = re.findall(r"<tr>(?:(?!</tr>).)*hook-(?:(?!</tr>).)*</tr>", page.html, re.DOTALL)
    assert len(rows) == 2
    for row in rows:
        assert "5 subscriptions" in row
        assert "and 2 more" in row
        assert row.count("hook-") == 5
        assert "busy" in row
        assert re.findall(r'<td class="num">(\d+)</td>', row) == ["5", "0"]
    assert {one in page.text for one in ("one.example.com", "two.example.com")} == {True}


async def test_the_backlog_says_what_is_due_later_and_how_old_its_counts_may_be(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Subscriptions are read at once, so their rows may be ahead of the counts."""

    async def counts(*_: object) -> QueueStats:
        return QueueStats(up=True, depth={"push": 96}, not_due={"push": 93})

    monkeypatch.setattr(OrganisationStats, "counts", counts)
    await browser.sign_in("viewer")
    page = await browser.get("/console")
    assert "PUSH 3 due 93 later" in page.text
    assert f"counts of the last {MAX_AGE_S:.0f} seconds" in page.text


async def test_what_is_not_there_is_said_instead_of_drawn(browser: Browser) -> None:
    room, crm = await world(browser.api)
    pulled = await browser.api.subscription(room, "ledger", type="PULL")
    await browser.api.publish(room, "order.made", 1)
    await browser.sign_in("viewer")
    page = await browser.get(f"/console/subscriptions/{crm}")
    assert "None was answered in this hour" in page.text
    assert "None of them was delivered" in page.text
    assert "half within" not in page.text
    listed = await browser.get(f"/console/subscriptions/{pulled['id']}/deliveries")
    (row,) = re.findall(r"<tbody>.*?</tbody>", listed.html, re.DOTALL)
    assert re.findall(r"<td>([^<]*)</td></tr>", row) == ["due"]


@pytest.mark.parametrize("form", ["edit", "publish", "subscriptions/new", "policy", "new"])
async def test_a_viewer_gets_no_form_that_would_be_refused(browser: Browser, form: str) -> None:
    room, crm = await world(browser.api)
    await browser.sign_in("viewer")
    path = {
        "edit": f"/console/subscriptions/{crm}/edit",
        "new": "/console/rooms/new",
    }.get(form, f"/console/rooms/{room}/{form}")
    assert (await browser.get(path)).status == 403


@pytest.mark.parametrize(
    ("kind", "language", "cause"),
    [
        ("PULL", "en", "no consumer pulls them, or too slowly"),
        ("PULL", "de", "Kein Verbraucher holt sie ab"),
        ("PUSH", "en", "the endpoint is slow, or a limit of the lane is reached"),
    ],
)
async def test_a_subscription_that_is_behind_says_why_and_leads_to_its_queue(
    browser: Browser, kind: str, language: str, cause: str
) -> None:
    room, crm = await world(browser.api, type=kind)
    await browser.api.publish(room, "order.made", 1)
    await browser.api.sql(
        "UPDATE outbox SET due_at = now() - interval '2 min' WHERE subscription_id = %s RETURNING 1",
        crm,
    )
    await browser.sign_in("operator")
    at = f"/console/subscriptions/{crm}"
    page = await browser.get(at, **{"Accept-Language": language})
    notice = page.html.partition('<section class="notice')[2].partition("</section>")[0]
    assert cause in notice
    assert (f'href="{at}/queue"' in notice) is (kind == "PULL")
