"""Test the pages of the journal."""

from rooms.console.journal import differences
from tests.integration.rooms.console.browser import Browser
from tests.integration.rooms.console.platform_key import HOSTILE, SHOWN, sign_in_platform

PATH = "/console/administration/journal"


def test_a_difference_names_each_field_that_changed() -> None:
    before = {"name": "old", "same": 1, "inner": {"a": None, "list": [1, 2]}, "gone": True}
    after = {"name": "new", "same": 1, "inner": {"a": 2, "list": []}, "items": [{"b": "c"}]}
    assert list(differences(before, after)) == [
        ("name", "old", "new"),
        ("inner.a", "null", "2"),
        ("inner.list", "1, 2", "[]"),
        ("gone", "true", ""),
        ("items[0].b", "", "c"),
    ]
    assert list(differences(None, None)) == []
    assert list(differences("a", "b")) == [("", "a", "b")]
    wide = {str(number): number for number in range(100)}
    assert len(list(differences(None, wide))) == 61


async def test_entries_are_found_and_show_what_changed(browser: Browser) -> None:
    room = await browser.api.room()
    await browser.api.call(
        "PATCH", f"/rooms/{room['id']}", json={"delivery_attempts": 7, "description": HOSTILE}
    )
    await browser.api.call("DELETE", f"/rooms/{room['id']}", "publish")
    await browser.sign_in("auditor")
    page = await browser.get(f"{PATH}?object=/v1/rooms/{room['id']}")
    assert "delivery_attempts" in page.text
    assert SHOWN in page.html
    assert "<script>alert" not in page.html
    assert "refused" in page.text
    page = await browser.get(f"{PATH}?action=change_room&outcome=succeeded")
    assert "delivery_attempts" in page.text
    assert 'class="badge warn"' not in page.html
    assert "No entry fits" in (await browser.get(f"{PATH}?actor=unknown")).text
    assert "No entry fits" in (await browser.get(f"{PATH}?since=2199-01-01T00:00")).text
    assert (await browser.get(f"{PATH}?since=yesterday")).status == 422


async def test_the_chain_is_verified_and_exported(browser: Browser) -> None:
    await browser.api.room()
    await browser.sign_in("auditor")
    page = await browser.get(f"{PATH}/verify")
    assert "The chain is whole." in page.text
    exported = await browser.http.get(f"{PATH}/export?format=ndjson")
    assert exported.headers["content-type"] == "application/x-ndjson"
    assert "attachment" in exported.headers["content-disposition"]
    answer = await browser.api.call("GET", "/journal/export")
    assert exported.text == answer.text
    table = await browser.http.get(f"{PATH}/export?format=csv")
    assert table.text.startswith("seq,id,")
    assert (await browser.get(f"{PATH}/export?format=exe")).status == 422
    await browser.api.sql("ALTER TABLE journal DISABLE TRIGGER USER")
    await browser.api.sql("UPDATE journal SET action = 'nothing' WHERE seq = 1 RETURNING 1")
    broken = await browser.get(f"{PATH}/verify")
    assert "The chain is broken at entry 1." in broken.text


async def test_the_platform_reads_the_journals_of_others(browser: Browser) -> None:
    await browser.api.room("elsewhere", "stranger")
    await sign_in_platform(browser, "platform")
    page = await browser.get(PATH)
    assert "create room" in page.text
    other = (await browser.api.call("GET", "/whoami", "stranger")).json()["organisation"]["id"]
    page = await browser.get(f"{PATH}?organisation_id={other}")
    assert "create room" in page.text
    assert (await browser.get(f"{PATH}/verify?organisation_id={other}")).status == 200
    export = await browser.http.get(f"{PATH}/export?organisation_id={other}")
    assert export.status_code == 200
    assert (await browser.get(f"{PATH}/verify")).status == 422  # of one organisation only


async def test_an_auditor_reads_no_other_journal(browser: Browser) -> None:
    other = (await browser.api.call("GET", "/whoami", "stranger")).json()["organisation"]["id"]
    await browser.sign_in("auditor")
    for path in (PATH, f"{PATH}/verify", f"{PATH}/export"):
        assert (await browser.get(f"{path}?organisation_id={other}")).status == 403
        assert (await browser.get(f"{path}?organisation_id=*")).status == 403


async def test_actions_are_in_the_language_of_the_reader_and_have_their_code(
    browser: Browser,
) -> None:
    await browser.api.room()
    await browser.sign_in("auditor")
    english = (await browser.get(f"{PATH}?action=create_room")).text
    assert "create room create_room" in english
    page = await browser.get(f"{PATH}?action=create_room", **{"Accept-Language": "de"})
    assert "Raum anlegen create_room" in page.text
    assert "create room" not in page.text
