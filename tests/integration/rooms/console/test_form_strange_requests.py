"""Send the console what its own pages never send."""

from dataclasses import replace
from typing import Final

import pytest

from rooms.clock import SystemClock
from rooms.console.sessions import SIGN_INS_PER_S
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.console.browser import BASE, Browser

SAME_SITE: Final = {"Origin": BASE, "Sec-Fetch-Site": "same-origin"}
DEEP: Final = "[" * 100_000
HUGE: Final = "9" * 5000


class StoppedClock(SystemClock):
    """Stand still."""

    def monotonic(self) -> float:
        return 0.0


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "null", ""])
async def test_an_origin_that_is_no_address_is_refused(browser: Browser, origin: str) -> None:
    answer = await browser.http.post(
        "/console/sign-in", data={"key": "x"}, headers={"Origin": origin}
    )
    assert answer.status_code == 403


@pytest.mark.parametrize("path", ["//[", "http://[::1/console", "//evil.example/console", "/v1"])
async def test_only_pages_of_the_console_are_live(browser: Browser, path: str) -> None:
    await browser.sign_in("viewer")
    answer = await browser.http.get("/console/live", params={"path": path})
    assert answer.status_code == 422


@pytest.mark.parametrize(
    "path", ["/console/journal/export", "/console/usage/export", "/console/live?path=/console"]
)
async def test_a_file_or_stream_is_not_live(browser: Browser, path: str) -> None:
    """Check that no stream collects an answer of any length before it sends it."""
    await browser.sign_in("owner")
    answer = await browser.http.get("/console/live", params={"path": path})
    assert answer.text == "event: end\ndata: end\n\n"


@pytest.mark.parametrize("text", ["ж", "\U0001f600", "\x00", "a\r\nSet-Cookie: x=1", "é" * 100])
async def test_a_choice_of_any_text_is_answered(browser: Browser, text: str) -> None:
    for name in ("language", "theme", "time_zone"):
        answer = await browser.http.post(
            "/console/preferences", data={name: text}, headers=SAME_SITE
        )
        assert answer.status_code == 303
        assert "x" not in browser.http.cookies
        assert (await browser.http.get("/console/sign-in")).status_code == 200


@pytest.mark.parametrize("text", ["1e308", "-1e308", "9" * 4300, "nan", "inf", "1e999"])
async def test_a_number_of_any_size_is_refused_by_its_field(browser: Browser, text: str) -> None:
    await browser.sign_in("owner")
    room = await browser.api.room()
    await browser.api.made(f"/rooms/{room['id']}/event-types", {"name": "made"})
    message = (await browser.api.publish(room["id"], "made", 1))["message_id"]
    token = dict((await browser.get("/console")).form("/console/sign-out").fields)["form_token"]
    for path, fields in (
        (f"/console/messages/{message}/move", {"delay_s": text}),
        ("/console/administration/people", {"name": "x", "roles": "viewer", "session_h": text}),
    ):
        answer = await browser.http.post(
            path, data={"form_token": token, **fields}, headers=SAME_SITE
        )
        assert answer.status_code == 422, (path, answer.text)


async def test_a_key_begins_few_sessions_a_second(api: Api) -> None:
    # Twenty sign-ins can take seconds: to them they take no time.
    api.services = replace(api.services, clock=StoppedClock())
    browser = await Browser.open(api)
    answers = [
        await browser.http.post(
            "/console/sign-in", data={"key": browser.api.keys["view"]}, headers=SAME_SITE
        )
        for _ in range(SIGN_INS_PER_S + 1)
    ]
    assert [answer.status_code for answer in answers] == [303] * SIGN_INS_PER_S + [429]
    other = {"key": browser.api.keys["operate"]}
    answer = await browser.http.post("/console/sign-in", data=other, headers=SAME_SITE)
    assert answer.status_code == 303
    await browser.close()


async def test_a_path_in_a_query_is_no_other_path(browser: Browser) -> None:
    await browser.sign_in("owner")
    own = (await browser.api.room())["id"]
    for room in (f"{own}/event-types", "../whoami", f"{own}/counts?", "x/../../keys"):
        answer = await browser.http.get("/console/retry-schedule", params={"room": room})
        assert answer.status_code in {404, 422}, (room, answer.text)


@pytest.mark.parametrize("value", ["1", "100"])
async def test_a_schedule_that_grows_beyond_all_numbers_is_drawn(
    browser: Browser, value: str
) -> None:
    await browser.sign_in("viewer")
    settings = {
        "delivery_delay_ms": "2592000000",
        "delivery_delay_multiplier": value,
        "delivery_attempts": "1000",
        "delivery_jitter": "1",
    }
    answer = await browser.http.get("/console/retry-schedule", params=settings)
    assert answer.status_code == 200


@pytest.mark.parametrize("shown", [DEEP, "[]", '{"name": 5, "delivery_delay_ms": {}}', HUGE])
async def test_what_a_form_showed_may_be_anything(browser: Browser, shown: str) -> None:
    await browser.sign_in("owner")
    room = await browser.api.room()
    token = dict((await browser.get("/console")).form("/console/sign-out").fields)["form_token"]
    fields = {"form_token": token, "shown": shown, "delivery_delay_ms": "1000"}
    answer = await browser.http.post(
        f"/console/rooms/{room['id']}/policy", data=fields, headers=SAME_SITE
    )
    assert answer.status_code in {303, 409, 422}, answer.text


@pytest.mark.parametrize(
    "path",
    [
        "/console/administration/journal?since=0001-01-01T00:00&until=9999-12-31T23:59",
        "/console/administration/journal?since=0001-01-01T00:00%2B14:00",
        "/console/administration/journal?until=9999-12-31T23:59-12:00",
        "/console/administration/usage?until=0001-01-01T00:00",
        "/console/administration/usage?since=9999-12-31T23:59&until=9999-12-31T23:59",
        "/console/administration/usage?since=0001-01-01T00:00%2B14:00",
        "/console/administration/usage?until=2026-01-01T00:00:00z",
        "/console/administration/usage?since=2026-01-01t00:00:00z&until=2026-01-02T00:00:00z",
        "/console/administration/usage?until=2026-01-01T00:00:00.123456789z",
        "/console/administration/usage?until=0001-01-01T00:00:00z",
        "/console/administration/journal?until=2026-01-01T00:00:00z",
    ],
)
async def test_the_ends_of_time_are_answered(browser: Browser, path: str) -> None:
    await browser.sign_in("owner", "auditor")
    answer = await browser.http.get(path)
    assert answer.status_code in {200, 422}, answer.text


async def test_a_whole_number_of_any_length_is_refused_by_its_field(browser: Browser) -> None:
    await browser.sign_in("owner")
    token = dict((await browser.get("/console")).form("/console/sign-out").fields)["form_token"]
    room = await browser.api.room()
    subscription = (await browser.api.subscription(room["id"]))["id"]
    answer = await browser.http.post(
        "/console/administration/keys",
        data={"form_token": token, "name": "x", "scopes": "view", "rooms": HUGE},
        headers=SAME_SITE,
    )
    assert answer.status_code == 422, answer.text
    answer = await browser.http.post(
        f"/console/subscriptions/{subscription}/sideline/shovel",
        data={"form_token": token, "max_shovels": HUGE},
        headers=SAME_SITE,
    )
    assert answer.status_code == 422, answer.text


async def test_json_that_is_nested_too_deeply_is_refused_by_its_field(browser: Browser) -> None:
    await browser.sign_in("owner")
    token = dict((await browser.get("/console")).form("/console/sign-out").fields)["form_token"]
    room = (await browser.api.room())["id"]
    await browser.api.made(f"/rooms/{room}/event-types", {"name": "made", "schema": {}})
    subscription = (await browser.api.subscription(room))["id"]
    at, deep = f"/console/rooms/{room}", "[" * 1200 + "]" * 1200
    for path, name in (
        (f"{at}/publish", "payload"),
        (f"{at}/publish/check", "payload"),
        (f"{at}/event-types", "schema"),
        (f"{at}/event-types/made/versions", "schema"),
        (f"{at}/event-types/made/versions/1", "schema"),
        (f"/console/subscriptions/{subscription}/filter", "payload"),
    ):
        fields = {"form_token": token, "event_type": "made", "name": "x", "filter": "true"}
        answer = await browser.http.post(path, data=fields | {name: deep}, headers=SAME_SITE)
        # The check is a part of a page, and always an answer.
        assert answer.status_code == (200 if path.endswith("/check") else 422), (path, answer.text)
        assert f"<code>{name}</code> is nested too deeply" in answer.text, path


async def test_json_of_any_depth_is_answered(browser: Browser) -> None:
    """Check depths about the one at which Python stops: what reads a form, and what reads a page."""
    await browser.sign_in("owner")
    token = dict((await browser.get("/console")).form("/console/sign-out").fields)["form_token"]
    room = (await browser.api.room())["id"]
    await browser.api.made(f"/rooms/{room}/event-types", {"name": "made", "schema": {}})
    for depth in range(780, 1000, 4):
        deep = "[" * depth + "]" * depth
        fields = {"form_token": token, "event_type": "made", "payload": deep}
        answer = await browser.http.post(
            f"/console/rooms/{room}/publish", data=fields, headers=SAME_SITE
        )
        assert answer.status_code in {200, 400, 422}, (depth, answer.text)
