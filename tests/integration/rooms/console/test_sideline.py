"""Test the pages about sidelines, and the jobs that bring deliveries back."""

from typing import Any

import pytest

from delivery.sideline.magazines import SidelineMagazineCache
from delivery.sideline.shovel import SidelineShovel
from delivery.sideline.tasks import SidelineJobRunner
from rooms.clock import SystemClock
from rooms.db.jobs.jobs import JobQueue
from rooms.db.sideline.entries import SidelineEntries
from rooms.db.sideline.shovel import ShovelQueries
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.test_sideline import sidelined
from tests.integration.rooms.console.browser import Browser, Document, HtmlForm

HOSTILE = '<script>alert("x")</script>\u202e\x1b[31m'


async def finish(api: Api, job: str, *, state: str = "done") -> None:
    await api.sql(
        "UPDATE jobs SET state = %s, done = 3, total = 3, updated_at = now(), finished_at = now() WHERE id = %s",
        state,
        job,
    )


async def sideline_another(api: Api, subscription: dict[str, Any]) -> None:
    """Sideline one more delivery of a subscription."""
    await api.publish(subscription["room_id"], "made", {})
    await api.sql(
        """
        WITH d AS (
            UPDATE deliveries SET state = 'sidelined', reason = 'terminal_status', attempts = 4
            WHERE subscription_id = %s AND state <> 'sidelined' RETURNING room_id, id, subscription_id, generation
        ), o AS (DELETE FROM outbox WHERE id IN (SELECT id FROM d))
        INSERT INTO sidelined (room_id, id, subscription_id, generation, reason)
        SELECT room_id, id, subscription_id, generation, 'terminal_status' FROM d
        """,
        subscription["id"],
    )


async def run_jobs(api: Api) -> None:
    """Run the open jobs of sidelines, as the maintenance process does."""
    services = api.services
    shovel = SidelineShovel(
        services.engine,
        ShovelQueries(services.writer),
        SidelineMagazineCache(services.magazines, SidelineEntries(services.writer)),
        on_queued=lambda *_: None,
    )
    jobs = SidelineJobRunner(
        JobQueue(services.writer),
        shovel,
        services.engine,
        SystemClock(),
        on_moved=lambda *_: None,
    )
    await jobs.run(lambda: True)


async def left(api: Api, subscription: dict[str, Any]) -> int:
    """Return how many deliveries are sidelined."""
    path = f"/subscriptions/{subscription['id']}/sideline"
    return len((await api.call("GET", path)).json()["items"])


def form_of_list(page: Document, action: str) -> HtmlForm:
    """Return the form in which deliveries are ticked."""
    (form,) = [one for one in page.forms if (one.method, one.action) == ("get", action)]
    return form


async def test_nothing_sidelined_says_so(browser: Browser) -> None:
    await browser.sign_in("viewer")
    page = await browser.get("/console/sideline")
    assert page.status == 200
    assert "Nothing is sidelined" in page.text
    assert "rooms sideline overview" in page.text


@pytest.mark.parametrize(
    ("role", "link", "may_shovel"),
    [("operator", "Bring 3 deliveries back", True), ("viewer", "See the sideline", False)],
)
async def test_a_subscription_that_is_not_well_leads_to_its_sideline(
    browser: Browser, role: str, link: str, *, may_shovel: bool
) -> None:
    subscription = await sidelined(browser.api)
    at = f"/console/subscriptions/{subscription['id']}"
    await browser.sign_in(role)
    page = await browser.get(at)
    assert f"3 deliveries are sidelined. {link}" in page.text
    assert (f"{at}/sideline/shovel" in page.links) is may_shovel


async def test_from_the_list_to_messages_that_are_back(browser: Browser) -> None:
    subscription = await sidelined(browser.api)
    of = f"/console/subscriptions/{subscription['id']}/sideline"
    await browser.sign_in("operator")
    listed = await browser.get("/console/sideline")
    assert of in listed.links
    assert "terminal status 1" in listed.text
    page = await browser.get(of)
    assert f"{of}/shovel" in page.links
    preview = await browser.get(f"{of}/shovel")
    assert "Bring back 3 deliveries of sub" in preview.text
    job = await browser.submit(preview, f"{of}/shovel", rate_per_s="50")
    assert job.status == 200
    assert job.path.startswith("/console/jobs/")
    found = (await browser.api.call("GET", job.path.removeprefix("/console"))).json()
    assert (found["kind"], found["arguments"]["rate_per_s"]) == ("shovel_sideline", 50)
    await finish(browser.api, found["id"])
    done = await browser.get(job.path)
    assert "The messages are back in the queue." in done.text
    assert "3 of 3" in done.text


async def test_bringing_back_says_that_the_endpoint_still_fails(browser: Browser) -> None:
    subscription = await sidelined(browser.api)
    at = f"/console/subscriptions/{subscription['id']}/sideline/shovel"
    await browser.sign_in("operator")
    assert "The last answer of the endpoint was a failure: HTTP 503" in (await browser.get(at)).text


async def test_a_selection_goes_into_the_preview_and_the_job(browser: Browser) -> None:
    subscription = await sidelined(browser.api)
    of = f"/console/subscriptions/{subscription['id']}/sideline"
    await browser.sign_in("operator")
    page = await browser.get(f"{of}?error=GONE&reason=terminal_status")
    assert "<bdi>HTTP 503 gone</bdi>" in page.html
    assert "busy</bdi>" not in page.html
    (link,) = [one for one in page.links if one.startswith(f"{of}/shovel?")]
    preview = await browser.get(link)
    assert "Bring back 1 delivery of sub" in preview.text
    job = await browser.submit(preview, link)
    found = (await browser.api.call("GET", job.path.removeprefix("/console"))).json()
    assert found["arguments"]["error"] == "GONE"


async def test_chosen_deliveries_only(browser: Browser) -> None:
    subscription = await sidelined(browser.api)
    of = f"/console/subscriptions/{subscription['id']}/sideline"
    items = (await browser.api.call("GET", of.removeprefix("/console"))).json()["items"]
    await browser.sign_in("operator")
    chosen = "&".join(f"delivery_id={one['delivery_id']}" for one in items[:2])
    preview = await browser.get(f"{of}/shovel?{chosen}")
    assert "Bring back 2 deliveries of sub" in preview.text


async def test_wrong_filters_and_limits_are_shown_where_they_are(browser: Browser) -> None:
    subscription = await sidelined(browser.api)
    of = f"/console/subscriptions/{subscription['id']}/sideline"
    await browser.sign_in("operator")
    page = await browser.get(f"{of}?since=yesterday")
    assert page.status == 422
    assert "is not a time like" in page.text
    preview = await browser.get(f"{of}/shovel")
    refused = await browser.submit(preview, f"{of}/shovel", rate_per_s="-1")
    assert refused.status == 422
    assert ("rate_per_s", "-1") in refused.form(f"{of}/shovel").fields
    assert (await browser.get(f"{of}/shovel?since=yesterday")).status == 422
    jobs = (await browser.api.call("GET", "/jobs")).json()["items"]
    assert jobs == []


async def test_a_purge_needs_the_name(browser: Browser) -> None:
    subscription = await sidelined(browser.api)
    of = f"/console/subscriptions/{subscription['id']}/sideline"
    await browser.sign_in("operator")
    preview = await browser.get(f"{of}/purge?reason=terminal_status")
    assert "Purge 1 delivery of sub" in preview.text
    target = f"{of}/purge?reason=terminal_status"
    refused = await browser.submit(preview, target, confirm="another")
    assert refused.status == 422
    assert (await browser.api.call("GET", "/jobs")).json()["items"] == []
    job = await browser.submit(refused, target, confirm="sub")
    found = (await browser.api.call("GET", job.path.removeprefix("/console"))).json()
    assert found["kind"] == "purge_sideline"
    assert found["arguments"]["reason"] == "terminal_status"


async def test_a_schedule_is_set_changed_and_ended(browser: Browser) -> None:
    subscription = await sidelined(browser.api)
    of = f"/console/subscriptions/{subscription['id']}/sideline"
    await browser.sign_in("operator")
    page = await browser.get(of)
    refused = await browser.submit(page, f"{of}/schedule", interval_s="0")
    assert refused.status == 422
    assert ("interval_s", "0") in refused.form(f"{of}/schedule").fields
    page = await browser.submit(page, f"{of}/schedule", interval_s="600")
    assert "is shoveled every 10 min" in page.text
    page = await browser.submit(page, f"{of}/schedule/end")
    assert "The schedule has ended" in page.text
    assert "is shoveled every" not in page.text


async def test_a_job_is_cancelled(browser: Browser) -> None:
    subscription = await sidelined(browser.api)
    path = f"/subscriptions/{subscription['id']}/sideline/shovel"
    job = (await browser.api.call("POST", path)).json()["job_id"]
    await browser.sign_in("operator")
    page = await browser.get(f"/console/jobs/{job}")
    page = await browser.submit(page, f"/console/jobs/{job}/cancel")
    assert "The job is cancelled" in page.text
    assert f"/console/jobs/{job}/cancel" not in [form.action for form in page.forms]


@pytest.mark.parametrize("action", ["shovel", "purge", "schedule", "schedule/end"])
async def test_a_viewer_changes_nothing(browser: Browser, action: str) -> None:
    subscription = await sidelined(browser.api)
    of = f"/console/subscriptions/{subscription['id']}/sideline"
    job = (await browser.api.call("POST", f"{of.removeprefix('/console')}/shovel")).json()["job_id"]
    await browser.sign_in("viewer")
    page = await browser.get(of)
    assert page.status == 200
    assert "Bring back" not in page.text
    token = next(v for form in page.forms for n, v in form.fields if n == "form_token")
    fields = {"form_token": token, "confirm": "sub", "interval_s": "60"}
    assert (await browser.post(f"{of}/{action}", fields)).status == 403
    assert (await browser.post(f"/console/jobs/{job}/cancel", fields)).status == 403


async def test_another_organisation_finds_nothing(browser: Browser) -> None:
    subscription = await sidelined(browser.api)
    of = f"/console/subscriptions/{subscription['id']}/sideline"
    job = (await browser.api.call("POST", f"{of.removeprefix('/console')}/shovel")).json()["job_id"]
    await browser.sign_in(key="other-admin")
    assert "Nothing is sidelined" in (await browser.get("/console/sideline")).text
    for path in (of, f"{of}/shovel", f"{of}/purge", f"/console/jobs/{job}"):
        assert (await browser.get(path)).status == 404


async def test_hostile_errors_are_text(browser: Browser) -> None:
    subscription = await sidelined(browser.api)
    await browser.api.sql("UPDATE deliveries SET last_error = %s", f"status: {HOSTILE}")
    await browser.sign_in("operator")
    of = f"/console/subscriptions/{subscription['id']}/sideline"
    for path in ("/console/sideline", of, f"{of}/shovel", f"{of}/purge"):
        page = await browser.get(path)
        assert page.status == 200
        assert "<script>alert" not in page.html
        assert "[RLO]\u241b[31m" in page.text


@pytest.mark.parametrize("action", ["purge", "shovel"])
@pytest.mark.parametrize("query", ["", "?reason=terminal_status", "?until=2099-01-01T00%3A00"])
async def test_what_the_preview_did_not_show_stays(
    browser: Browser, action: str, query: str
) -> None:
    api = browser.api
    subscription = await sidelined(api, 1)
    at = f"/console/subscriptions/{subscription['id']}/sideline/{action}{query}"
    await browser.sign_in("operator")
    preview = await browser.get(at)
    assert "1 delivery of sub" in preview.text
    assert "What is sidelined later stays" in preview.text
    await sideline_another(api, subscription)
    if action == "purge":
        preview = await browser.submit(preview, at, confirm="another")
        assert preview.status == 422
        assert "Purge 1 delivery of sub" in preview.text
        await browser.submit(preview, at, confirm="sub")
    else:
        await browser.submit(preview, at)
    await run_jobs(api)
    assert await left(api, subscription) == 1
    # A new preview shows what is there now.
    assert "1 delivery of sub" in (await browser.get(at)).text


async def test_an_earlier_end_of_the_filter_holds(browser: Browser) -> None:
    subscription = await sidelined(browser.api)
    at = f"/console/subscriptions/{subscription['id']}/sideline/purge?until=2020-01-01T00%3A00"
    await browser.sign_in("operator")
    preview = await browser.get(at)
    assert "Purge 0 deliveries of sub" in preview.text
    job = await browser.submit(preview, at, confirm="sub")
    found = (await browser.api.call("GET", job.path.removeprefix("/console"))).json()
    assert found["arguments"]["until"] == "2020-01-01T00:00:00+00:00"


async def test_a_time_of_the_preview_that_is_none_is_refused(browser: Browser) -> None:
    subscription = await sidelined(browser.api)
    at = f"/console/subscriptions/{subscription['id']}/sideline/purge"
    await browser.sign_in("operator")
    preview = await browser.get(at)
    refused = await browser.submit(preview, at, sidelined_before="soon", confirm="sub")
    assert refused.status == 422
    assert (await browser.api.call("GET", "/jobs")).json()["items"] == []


@pytest.mark.parametrize("action", ["purge", "shovel"])
@pytest.mark.parametrize(
    ("language", "said"),
    [("en", "Choose at least one delivery."), ("de", "Wählen Sie mindestens eine Zustellung aus.")],
)
async def test_nothing_ticked_is_not_everything(
    browser: Browser, action: str, language: str, said: str
) -> None:
    subscription = await sidelined(browser.api)
    of = f"/console/subscriptions/{subscription['id']}/sideline"
    await browser.sign_in("operator")
    browser.http.cookies.set("rooms_language", language)
    page = await browser.get(f"{of}?reason=terminal_status")
    form = form_of_list(page, f"{of}/shovel")
    answer = await browser.http.get(
        f"{of}/{action}", params=dict(form.fields), follow_redirects=True
    )
    back = Document(answer)
    assert back.path.partition("?")[0] == of
    assert said in back.text
    assert "1" in back.text
    assert ("reason", "terminal_status") in form_of_list(back, f"{of}/shovel").fields
    assert back.html.count('name="delivery_id"') == 1


async def test_the_ticked_ones_keep_the_filters(browser: Browser) -> None:
    subscription = await sidelined(browser.api)
    of = f"/console/subscriptions/{subscription['id']}/sideline"
    items = (await browser.api.call("GET", of.removeprefix("/console"))).json()["items"]
    await browser.sign_in("operator")
    page = await browser.get(f"{of}?error=busy")
    fields = form_of_list(page, f"{of}/shovel").fields
    ticked = [("delivery_id", one["delivery_id"]) for one in items if "busy" in one["last_error"]]
    answer = await browser.http.get(f"{of}/purge", params=[*fields, *ticked])
    preview = Document(answer)
    assert "Purge 2 deliveries of sub" in preview.text
    (back,) = [one for one in preview.links if one.startswith(f"{of}?")]
    assert "error=busy" in back
