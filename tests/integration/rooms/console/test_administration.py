"""Test the index of the administration, the jobs, and the cluster."""

import pytest

from tests.integration.rooms.console.browser import Browser
from tests.integration.rooms.console.platform_key import sign_in_platform

PATH = "/console/administration"


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
