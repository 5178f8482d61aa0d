"""Test the pages of the doctor, of the preview of retention, and of runs of the analysis."""

from tests.integration.rooms.api.test_checks import FINDING, finish
from tests.integration.rooms.console.browser import Browser
from tests.integration.rooms.console.platform_key import HOSTILE, SHOWN, sign_in_platform

DOCTOR = "/console/administration/doctor"
RETENTION = "/console/administration/retention"
RUNS = "/console/analysis/runs"


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
    assert "The analysis has begun" in begun.text
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
    assert "pip install '.[spark]'" in page.text


async def test_an_owner_checks_nothing(browser: Browser) -> None:
    await browser.sign_in("owner")
    token = dict((await browser.get("/console")).forms[-1].fields)["form_token"]
    for path in (DOCTOR, RETENTION, RUNS):
        assert (await browser.get(path)).status == 403
        assert (await browser.post(path, {"form_token": token})).status == 403
