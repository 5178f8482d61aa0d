"""Test the pages of people, and `/v1/people`: who has signed in, as sessions and the journal know."""

from tests.integration.rooms.api.members import member
from tests.integration.rooms.api.sign_in import begin
from tests.integration.rooms.console.browser import BASE, Browser
from tests.integration.rooms.console.platform_key import sign_in_platform

PATH = "/console/administration/people"


async def test_a_person_is_invited_by_a_link_that_is_shown_once(browser: Browser) -> None:
    await browser.sign_in("owner")
    page = await browser.get(PATH)
    assert "ada" in page.text
    refused = await browser.submit(page, PATH, name="grace", roles="auditor", expires_min="0")
    assert refused.status == 422
    assert ("name", "grace") in refused.form(PATH).fields
    made = await browser.submit(refused, PATH, expires_min="10")
    assert made.status == 201
    link = next(word for word in made.text.split() if word.startswith(f"{BASE}/console/sign-in?"))
    guest = Browser(browser.api, browser.console)
    async with guest.http:
        form = await guest.get(link.removeprefix(BASE))
        await guest.submit(form, "/console/sign-in")
        assert (await guest.get("/console/administration/journal")).status == 200
        assert (await guest.get("/console/administration/keys")).status == 403
        assert "grace" in (await browser.get(PATH)).text
        identity = next(
            one["id"]
            for one in (await browser.api.call("GET", "/sessions")).json()["items"]
            if one["name"] == "grace"
        )
        ended = await browser.submit(await browser.get(PATH), f"{PATH}/{identity}/end")
        assert "The session is ended." in ended.text
        assert "grace" not in ended.text


async def test_roles_that_one_lacks_are_neither_offered_nor_given(browser: Browser) -> None:
    await browser.sign_in("owner")
    page = await browser.get(PATH)
    assert 'value="platform"' not in page.html
    token = dict(page.form(PATH).fields)["form_token"]
    refused = await browser.post(PATH, {"form_token": token, "name": "eve", "roles": "platform"})
    assert refused.status == 403


async def test_a_viewer_neither_invites_people_nor_ends_sessions(browser: Browser) -> None:
    await browser.sign_in("owner", name="boss")
    (session,) = (await browser.api.call("GET", "/sessions")).json()["items"]
    await browser.sign_in("viewer")
    token = dict((await browser.get("/console")).forms[-1].fields)["form_token"]
    assert (await browser.get(PATH)).status == 403
    fields = {"form_token": token, "name": "eve", "roles": "viewer"}
    assert (await browser.post(PATH, fields)).status == 403
    assert (await browser.post(f"{PATH}/{session['id']}/end", fields)).status == 403


KNOWN = f"{PATH}/known"


async def test_people_are_listed_with_their_sessions_which_end_together(browser: Browser) -> None:
    await browser.sign_in("viewer", "auditor", name="grace <b>\u00e9")
    await begin(browser.api, name="grace <b>\u00e9")
    await browser.sign_in("owner")
    page = await browser.get(KNOWN)
    row = page.text[page.text.index("grace") :]
    assert "grace &lt;b&gt;" in page.html
    assert "auditor" in row
    assert "2 sessions end within a second" in row
    form = next(
        one for one in page.forms if one.action == f"{KNOWN}/end" and "grace" in str(one.fields)
    )
    ended = await browser.post(f"{KNOWN}/end", dict(form.fields))
    assert "All sessions of this person are ended." in ended.text
    assert "grace" in ended.text
    assert "sessions end within" not in ended.text[ended.text.index("grace") :]
    names = {one["name"] for one in (await browser.api.call("GET", "/sessions")).json()["items"]}
    assert names == {"ada"}
    entries = (await browser.api.call("GET", "/journal?action=end_sessions")).json()["items"]
    assert [one["before"]["sessions"] for one in entries] == [2]


async def test_an_auditor_sees_no_people(browser: Browser) -> None:
    await browser.sign_in("auditor")
    token = dict((await browser.get("/console")).forms[-1].fields)["form_token"]
    assert (await browser.get(KNOWN)).status == 403
    refused = await browser.post(f"{KNOWN}/end", {"form_token": token, "name": "ada"})
    assert refused.status == 403


async def test_each_person_is_listed_once_by_name(browser: Browser) -> None:
    api = browser.api
    for name, role in (("ada", "owner"), ("grace", "operator")):
        await browser.sign_in(role, name=name)
    await begin(api, name="grace")
    first = (await api.call("GET", "/people?limit=1")).json()
    (ada,) = first["items"]
    assert (ada["name"], ada["by"], ada["roles"], ada["sessions"]) == (
        "ada", "console", ["owner"], 1,
    )  # fmt: skip
    rest = await api.call("GET", "/people", params={"cursor": first["next_cursor"]})
    (grace,) = rest.json()["items"]
    assert (grace["name"], grace["roles"], grace["sessions"]) == ("grace", ["operator"], 2)
    assert rest.json()["next_cursor"] is None
    assert grace["signed_in_at"] > ada["signed_in_at"]


async def test_a_page_ends_with_a_long_name_in_any_letters(browser: Browser) -> None:
    names = ["a", "\u6f22" * 128, "\U00020000" * 128]
    for name in names:
        await browser.sign_in("viewer", name=name)
    found: list[str] = []
    cursor: str | None = None
    while len(found) < len(names):
        params = {"limit": 1, **({"cursor": cursor} if cursor else {})}
        answer = await browser.api.call("GET", "/people", params=params)
        assert answer.status_code == 200, answer.text
        found += [one["name"] for one in answer.json()["items"]]
        cursor = answer.json()["next_cursor"]
    assert (found, cursor) == (names, None)


async def test_others_are_not_seen_nor_signed_out(browser: Browser) -> None:
    api = browser.api
    await browser.sign_in("owner", name="ada")
    stranger = await member(api)
    assert (await api.call("GET", "/people", stranger.key)).json()["items"] == []
    body = {"name": "ada"}
    refused = await api.call("POST", "/people/end-sessions", stranger.key, json=body)
    assert refused.status_code == 404
    (ada,) = (await api.call("GET", "/people")).json()["items"]
    assert ada["sessions"] == 1


async def test_a_session_of_the_platform_is_ended_by_the_platform(browser: Browser) -> None:
    api = browser.api
    await sign_in_platform(browser)
    await begin(api, name="ada")
    body = {"name": "ada"}
    refused = await api.call("POST", "/people/end-sessions", json=body)
    assert refused.status_code == 403
    assert {one["name"] for one in (await api.call("GET", "/sessions")).json()["items"]} == {"ada"}
    ended = await api.call("POST", "/people/end-sessions", "both", json=body)
    assert ended.json() == {"ended": 2}
    assert (await api.call("GET", "/sessions")).json()["items"] == []
    again = await api.call("POST", "/people/end-sessions", "both", json=body)
    assert again.status_code == 404
