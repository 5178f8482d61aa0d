"""Test the pages of organisations."""

from tests.integration.rooms.console.browser import Browser, Document
from tests.integration.rooms.console.platform_key import HOSTILE, SHOWN, sign_in_platform

PATH = "/console/administration/organisations"


async def make(browser: Browser, name: str = "health") -> tuple[Document, str]:
    """Create an organisation by the form; return its page and path."""
    form = await browser.get(f"{PATH}/new")
    page = await browser.submit(form, PATH, name=name, member_id="SE/GOV/1", contact=HOSTILE)
    assert page.status == 200
    return page, page.path.partition("?")[0]


async def test_an_organisation_is_created_changed_and_found(browser: Browser) -> None:
    await sign_in_platform(browser)
    form = await browser.get(f"{PATH}/new")
    refused = await browser.submit(form, PATH, name="health", member_id="wrong")
    assert refused.status == 422
    assert ("name", "health") in refused.form(PATH).fields
    page, path = await make(browser)
    assert SHOWN in page.html
    assert "<script>alert" not in page.html
    page = await browser.submit(page, path, name="welfare", contact="desk")
    assert "The organisation is changed." in page.text
    assert "welfare" in (await browser.get(f"{PATH}?name=welfare")).text
    assert "welfare" not in (await browser.get(f"{PATH}?name=health")).text
    taken = await browser.submit(page, path, name="default")
    assert taken.status == 409
    assert ("name", "default") in taken.form(path).fields


async def test_quotas_are_set_and_removed(browser: Browser) -> None:
    await sign_in_platform(browser)
    page, path = await make(browser)
    refused = await browser.submit(page, f"{path}/quotas", messages_per_day="-1", subscriptions="5")
    assert refused.status == 422
    assert ("messages_per_day", "-1") in refused.form(f"{path}/quotas").fields
    page = await browser.submit(refused, f"{path}/quotas", messages_per_day="1000")
    fields = page.form(f"{path}/quotas").fields
    assert ("messages_per_day", "1000") in fields
    assert ("subscriptions", "5") in fields
    refused = await browser.submit(page, f"{path}/quotas", messages_per_day="nan")
    assert refused.status == 422
    page = await browser.submit(page, f"{path}/quotas", messages_per_day="")
    assert ("messages_per_day", "") in page.form(f"{path}/quotas").fields


async def test_an_old_form_takes_back_no_other_change(browser: Browser) -> None:
    await sign_in_platform(browser)
    page, path = await make(browser)
    at = path.removeprefix("/console/administration")

    async def change(part: str, **fields: object) -> None:
        answer = await browser.api.call("PATCH", at + part, "both", json=fields)
        assert answer.is_success, answer.text

    await change("", contact="the new desk")
    await change("/quotas", messages_per_day=10, stored_messages=1_234_567)
    page = await browser.submit(page, path, name="welfare")
    await change("/quotas", messages_per_day=5)
    refused = await browser.submit(page, f"{path}/quotas", payload_bytes="-1")
    assert refused.status == 422
    assert ("messages_per_day", "10") in refused.form(f"{path}/quotas").fields
    await browser.submit(refused, f"{path}/quotas", payload_bytes="7")
    now = (await browser.api.call("GET", at, "both")).json()
    assert (now["name"], now["contact"]) == ("welfare", "the new desk")
    limits = (await browser.api.call("GET", f"{at}/quotas", "both")).json()["limits"]
    assert (limits["messages_per_day"], limits["payload_bytes"]) == (5, 7)
    assert limits["stored_messages"] == 1_234_567


async def test_it_is_suspended_with_a_reason_and_resumed(browser: Browser) -> None:
    await sign_in_platform(browser)
    page, path = await make(browser)
    page = await browser.submit(page, f"{path}/suspend", reason="unpaid <b>")
    assert "unpaid <b>" in page.text
    assert "suspended" in page.text
    page = await browser.submit(page, f"{path}/resume")
    assert "unpaid" not in page.text


async def test_it_is_deleted_only_when_its_name_was_typed(browser: Browser) -> None:
    await sign_in_platform(browser)
    page, path = await make(browser)
    refused = await browser.submit(page, f"{path}/delete", confirm="helth")
    assert refused.status == 422
    assert ("confirm", "helth") in refused.form(f"{path}/delete").fields
    answer = await browser.http.post(
        f"{path}/delete",
        data=dict([*refused.form(f"{path}/delete").fields, ("confirm", "health")]),
        headers={"Origin": "http://rooms.test", "Sec-Fetch-Site": "same-origin"},
    )
    assert answer.status_code == 303
    assert answer.headers["location"].startswith("/console/jobs/")
    page = await browser.get(path)
    assert "deleting" in page.text
    assert not [one for one in page.forms if one.action.endswith("/delete")]


async def test_its_first_key_is_shown_once(browser: Browser) -> None:
    await sign_in_platform(browser)
    page, path = await make(browser)
    refused = await browser.submit(page, f"{path}/keys", name="")
    assert refused.status == 422
    made = await browser.submit(refused, f"{path}/keys", name="first")
    assert made.status == 201
    key = next(word for word in made.text.split() if word.startswith("rooms_") and len(word) > 40)
    assert (await browser.api.call("GET", "/whoami", key)).json()["organisation"][
        "name"
    ] == "health"
    assert key not in (await browser.get(path)).html


async def test_the_own_organisation_is_neither_suspended_nor_deleted(browser: Browser) -> None:
    await sign_in_platform(browser)
    own = (await browser.api.call("GET", "/whoami")).json()["organisation"]["id"]
    page = await browser.get(f"{PATH}/{own}")
    actions = {one.action.rpartition("/")[2] for one in page.forms}
    assert not {"suspend", "delete", "resume"} & actions
    token = dict(page.forms[-1].fields)["form_token"]
    refused = await browser.post(f"{PATH}/{own}/suspend", {"form_token": token})
    assert refused.status == 409


async def test_an_owner_reads_and_changes_no_organisation(browser: Browser) -> None:
    await browser.sign_in("owner")
    own = (await browser.api.call("GET", "/whoami")).json()["organisation"]["id"]
    token = dict((await browser.get("/console")).forms[-1].fields)["form_token"]
    assert (await browser.get(f"{PATH}/{own}")).status == 403
    for action in ("", "/suspend", "/resume", "/delete", "/quotas", "/keys"):
        refused = await browser.post(f"{PATH}/{own}{action}", {"form_token": token, "name": "x"})
        assert refused.status == 403, action


async def test_what_does_not_exist_is_404(browser: Browser) -> None:
    await sign_in_platform(browser)
    assert (await browser.get(f"{PATH}/{'0' * 8}-0000-7000-8000-{'0' * 12}")).status == 404
    assert (await browser.get(f"{PATH}/..%2f..%2fwhoami")).status == 404
