"""Test the checks that the maintenance process makes: the doctor, and the preview of retention."""

import asyncio
import json

from rooms.domain.state_machine import Scope
from tests.integration.rooms.api.conftest import Api, make_key

FINDING = {
    "part": "deliveries", "description": "lost work", "count": 2, "repaired": 1, "in_progress": False,
    "unavailable": False, "since": "2026-05-01T12:00:00+00:00", "examples": ["a"], "advice": None,
}  # fmt: skip


async def finish(api: Api, job: str, result: object) -> None:
    """Write a result as the maintenance process does."""
    await api.sql(
        "UPDATE jobs SET state = 'done', finished_at = now(), result = %s WHERE id = %s",
        json.dumps(result),
        job,
    )


async def test_a_check_is_a_job_with_a_result(api: Api) -> None:
    assert (await api.call("GET", "/doctor", "platform")).json()["items"] == []
    started = await api.call("POST", "/doctor", "platform", json={"repair": True})
    assert started.status_code == 202
    job = started.json()["job_id"]
    (one,) = (await api.call("GET", "/doctor", "platform")).json()["items"]
    assert (one["job_id"], one["state"], one["repair"], one["result"]) == (
        job,
        "queued",
        True,
        None,
    )
    again = await api.call("POST", "/doctor", "platform")
    assert again.status_code == 409
    other = await make_key(api.services, "other", Scope.PLATFORM)
    assert (await api.call("POST", "/doctor", other)).status_code == 409
    result = {"open": 1, "refused": False, "mixed": [], "findings": [FINDING]}
    await finish(api, job, result)
    (one,) = (await api.call("GET", "/doctor", "platform")).json()["items"]
    assert one["result"]["findings"][0]["since"] == "2026-05-01T12:00:00Z"
    assert one["result"]["open"] == 1
    assert (await api.call("GET", "/doctor", other)).json()["items"] == []
    assert (await api.call("POST", "/doctor", "platform")).status_code == 202


async def test_a_preview_of_retention_is_a_job_with_a_result(api: Api) -> None:
    wrong = await api.call("POST", "/retention-preview", "platform", json={"days": 0})
    assert wrong.status_code == 422
    started = await api.call("POST", "/retention-preview", "platform", json={"days": 7})
    job = started.json()["job_id"]
    ranges = [{"label": "20260501", "kept": False, "deliveries": 3, "stay": 1, "fate": "shrinks"}]
    await finish(api, job, {"days": 7, "total": 1, "ranges": ranges})
    (one,) = (await api.call("GET", "/retention-preview", "platform")).json()["items"]
    assert (one["days"], one["result"]["ranges"]) == (7, ranges)


async def test_a_hidden_check_is_not_among_the_jobs(api: Api) -> None:
    job = (await api.call("POST", "/doctor", "platform")).json()["job_id"]
    assert (await api.call("GET", f"/jobs/{job}")).status_code == 404
    assert (await api.call("GET", "/jobs")).json()["items"] == []


async def test_of_checks_that_are_asked_for_at_once_one_begins(api: Api) -> None:
    other = await make_key(api.services, "other", Scope.PLATFORM)
    for path in ("/doctor", "/retention-preview", "/analysis/runs"):
        answers = await asyncio.gather(
            *(api.call("POST", path, key) for key in ("platform", other) * 3)
        )
        assert sorted(answer.status_code for answer in answers) == [202, *[409] * 5]


async def test_an_analysis_is_a_job_with_a_result(api: Api) -> None:
    path = "/analysis/runs"
    started = await api.call("POST", path, "platform", json={"full": True})
    assert started.status_code == 202
    job = started.json()["job_id"]
    (one,) = (await api.call("GET", path, "platform")).json()["items"]
    assert (one["job_id"], one["full"], one["result"]) == (job, True, None)
    assert (await api.call("POST", path, "platform")).status_code == 409
    assert (await api.call("GET", path)).status_code == 403
    await finish(api, job, {"status": None, "lines": ["x"], "summary": "run 1", "incomplete": True})
    (one,) = (await api.call("GET", path, "platform")).json()["items"]
    assert (one["result"]["summary"], one["result"]["incomplete"]) == ("run 1", True)
    assert (await api.call("POST", path, "platform")).status_code == 202
