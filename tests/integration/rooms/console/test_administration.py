"""Test the index of the administration, the jobs, the cluster, and what checks the stores.

Checks are the doctor, the preview of retention, and runs of the analysis.
"""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import pytest

from delivery.leadership.postgres import PostgresElection
from rooms.db.queries.analytics import replace_findings
from rooms.ports import Membership
from tests.integration.rooms.api.test_checks import FINDING, finish
from tests.integration.rooms.console.browser import Browser
from tests.integration.rooms.console.platform_key import HOSTILE, SHOWN, sign_in_platform
from tests.support.installation import until

PATH = "/console/administration"
DOCTOR = "/console/administration/doctor"
RETENTION = "/console/administration/retention"
RUNS = "/console/analysis/runs"


@pytest.mark.parametrize(
    ("role", "open_pages", "closed_pages"),
    [
        ("viewer", {"approvals", "grants", "usage"}, {"keys", "people", "journal", "cluster"}),
        ("auditor", {"journal", "grants", "usage"}, {"keys", "people", "doctor"}),
        ("owner", {"keys", "people", "journal", "grants"}, {"organisations", "cluster"}),
    ],
)
async def test_the_index_leads_to_what_a_role_may_read(
    browser: Browser, role: str, open_pages: set[str], closed_pages: set[str]
) -> None:
    await browser.sign_in(role)
    page = await browser.get(PATH)
    assert page.status == 200
    linked = {link.removeprefix(f"{PATH}/") for link in page.links if link.startswith(f"{PATH}/")}
    assert open_pages <= linked
    assert not closed_pages & linked
    for name in sorted(open_pages):
        assert (await browser.get(f"{PATH}/{name}")).status == 200, name
    for name in sorted(closed_pages):
        assert (await browser.get(f"{PATH}/{name}")).status == 403, name


async def test_every_page_of_the_platform_opens(browser: Browser) -> None:
    await sign_in_platform(browser, "platform")
    page = await browser.get(PATH)
    assert "Parts" not in page.text  # this needs the scope operate, manage or view
    linked = [link for link in page.links if link.startswith(f"{PATH}/")]
    assert f"{PATH}/organisations" in linked
    for link in linked:
        assert (await browser.get(link)).status == 200, link


async def test_a_part_that_is_down_has_advice(browser: Browser) -> None:
    await browser.sign_in("operator")
    page = await browser.get(PATH)
    assert "No push worker runs" in page.text
    assert "rooms worker" in page.text


async def test_jobs_are_listed_by_state(browser: Browser) -> None:
    await browser.sign_in("owner")
    assert "There is no such job" in (await browser.get("/console/jobs")).text
    room = await browser.api.room()
    job = (await browser.api.call("DELETE", f"/rooms/{room['id']}?confirm=orders")).json()
    page = await browser.get("/console/jobs?state=queued")
    assert f"/console/jobs/{job['job_id']}" in page.links
    assert "delete room" in page.text
    assert "There is no such job" in (await browser.get("/console/jobs?state=failed")).text
    assert (await browser.get("/console/jobs?state=wrong")).status == 422


async def test_the_cluster_is_for_the_platform(browser: Browser) -> None:
    await sign_in_platform(browser)
    page = await browser.get(f"{PATH}/cluster")
    assert page.status == 200
    assert "No process does maintenance" in page.text
    assert "PostgreSQL is the broker here" in page.text
    fields = {"form_token": dict(page.forms[-1].fields)["form_token"], "count": "0"}
    refused = await browser.post(f"{PATH}/cluster/shards", fields)
    assert refused.status == 422
    changed = await browser.post(f"{PATH}/cluster/shards", {**fields, "count": "7"})
    assert changed.status == 200
    assert "is 7)" in changed.text


async def test_an_owner_changes_nothing_of_the_cluster(browser: Browser) -> None:
    await browser.sign_in("owner")
    token = dict((await browser.get("/console")).forms[-1].fields)["form_token"]
    for action in ("shards", "recover"):
        fields = {"form_token": token, "count": "7"}
        assert (await browser.post(f"{PATH}/cluster/{action}", fields)).status == 403


async def test_a_check_is_started_and_its_findings_are_shown(browser: Browser) -> None:
    await sign_in_platform(browser, "platform")
    page = await browser.get(DOCTOR)
    assert "Nothing was checked here yet" in page.text
    repair = page.form(DOCTOR, repair="1")
    assert repair.buttons == [""]
    page = await browser.post(DOCTOR, dict(repair.fields))
    assert "The repair has begun" in page.text
    assert "It waits for the maintenance process" in page.text
    refused = await browser.post(DOCTOR, dict(repair.fields))
    assert refused.status == 409
    (one,) = (await browser.api.call("GET", "/doctor", "platform")).json()["items"]
    finding = {**FINDING, "description": HOSTILE, "advice": HOSTILE}
    result = {"open": 1, "refused": True, "mixed": [HOSTILE], "findings": [finding]}
    await finish(browser.api, one["job_id"], result)
    page = await browser.get(DOCTOR)
    assert page.html.count(SHOWN) == 3
    assert "<script>alert" not in page.html
    assert "1 difference left" in page.text
    assert "Nothing was repaired" in page.text
    entries = (await browser.api.call("GET", "/journal?action=start_doctor")).json()["items"]
    assert {(one["actor_name"], one["outcome"]) for one in entries} == {
        ("ada", "succeeded"),
        ("ada", "refused"),
    }


async def test_retention_is_previewed(browser: Browser) -> None:
    await sign_in_platform(browser)
    page = await browser.get(RETENTION)
    refused = await browser.submit(page, RETENTION, days="0")
    assert refused.status == 422
    assert ("days", "0") in refused.form(RETENTION).fields
    await browser.submit(refused, RETENTION, days="7")
    (one,) = (await browser.api.call("GET", "/retention-preview", "platform")).json()["items"]
    ranges = [
        {"label": "20260501", "kept": False, "deliveries": 30, "stay": 1, "fate": "shrinks"},
        {"label": "20260502", "kept": False, "deliveries": 5, "stay": 4, "fate": "stays"},
    ]
    await finish(browser.api, one["job_id"], {"days": 7, "total": 2, "ranges": ranges})
    assert "29 of 35 deliveries would be deleted" in (await browser.get(RETENTION)).text


async def test_an_analysis_is_started_and_its_progress_is_shown(browser: Browser) -> None:
    await sign_in_platform(browser)
    begun = await browser.submit(await browser.get("/console/analysis"), RUNS)
    assert "The analysis is queued" in begun.text
    assert "It waits for the maintenance process" in begun.text
    again = await browser.submit(begun, RUNS, where={"full": "1"})
    assert again.status == 409
    (one,) = (await browser.api.call("GET", "/analysis/runs", "platform")).json()["items"]
    result = {"status": HOSTILE, "lines": [HOSTILE], "summary": None, "incomplete": False}
    await finish(browser.api, one["job_id"], result)
    await browser.api.sql("UPDATE jobs SET state = 'running' WHERE id = %s", one["job_id"])
    page = await browser.get(RUNS)
    assert page.html.count(SHOWN) == 2
    assert "<script>alert" not in page.html
    assert "Open the job, or cancel it" in page.text
    await finish(browser.api, one["job_id"], result | {"summary": "run 7", "incomplete": True})
    page = await browser.get(RUNS)
    assert "run 7" in page.text
    assert "incomplete" in page.text
    assert SHOWN in (await browser.get(f"/console/jobs/{one['job_id']}")).html


async def test_what_is_missing_for_an_analysis_is_shown(browser: Browser) -> None:
    await sign_in_platform(browser)
    await browser.submit(await browser.get("/console/analysis"), RUNS)
    await browser.api.sql("UPDATE jobs SET state = 'failed', error = 'Spark needs Java 17'")
    page = await browser.get(RUNS)
    assert "Spark needs Java 17" in page.text
    assert "Java for larger logs" in page.text
    assert "pip install '.[spark]'" in page.text
    assert "make setup" in page.text


async def test_a_failed_analysis_is_shown_at_its_lists_until_another_succeeds(
    browser: Browser,
) -> None:
    at = "/console/analysis"
    await sign_in_platform(browser)
    await browser.submit(await browser.get(at), RUNS)
    assert "The last run" not in (await browser.get(at)).text
    now = datetime.now(UTC)
    await browser.api.sql(
        "UPDATE jobs SET state = 'failed', error = %s, finished_at = %s", HOSTILE, now
    )
    for path in (at, f"{at}/ages"):
        page = await browser.get(path)
        assert "The last run of the analysis failed" in page.text
        assert SHOWN in page.html
        assert "<script>alert" not in page.html
    await browser.sign_in("viewer")
    assert "The last run" not in (await browser.get(at)).text
    await sign_in_platform(browser)
    for hours, shown in ((-1, True), (1, False)):
        analysed = now + timedelta(hours=hours)
        assert replace_findings(browser.api.url, run=2 + hours, analysed_at=analysed, findings=[])
        assert ("The last run" in (await browser.get(at)).text) == shown


@pytest.mark.parametrize(
    ("path", "target"), [("/console/analysis", RUNS), (DOCTOR, DOCTOR), (RETENTION, RETENTION)]
)
async def test_a_queued_job_waits_for_maintenance_only_while_there_is_none(
    browser: Browser, path: str, target: str
) -> None:
    await sign_in_platform(browser)
    page = await browser.get(path)
    kind = {"repair": "1"} if target == DOCTOR else {}
    fields = {"days": "7"} if target == RETENTION else {}
    page = await browser.post(target, dict(page.form(target, **kind).fields) | fields)
    assert "rooms upkeep" in page.text
    async with (
        PostgresElection(
            browser.api.url, member="one", clock=browser.api.services.clock
        ) as election,
        election.join(["upkeep/jobs"]) as membership,
    ):
        await until(holds_work(membership), "the work to be held")
        page = await browser.get(target)
    assert "rooms upkeep" not in page.text
    assert "It begins within seconds" in page.text


def holds_work(membership: Membership) -> Callable[[], Awaitable[bool]]:
    async def holds() -> bool:
        return bool(membership.epoch("upkeep/jobs"))

    return holds


async def test_an_owner_checks_nothing(browser: Browser) -> None:
    await browser.sign_in("owner")
    token = dict((await browser.get("/console")).forms[-1].fields)["form_token"]
    for path in (DOCTOR, RETENTION, RUNS):
        assert (await browser.get(path)).status == 403
        assert (await browser.post(path, {"form_token": token})).status == 403
