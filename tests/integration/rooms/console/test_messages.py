"""Test the pages about messages and deliveries, and what can be done to them."""

import re
from typing import Any

import pytest

from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.console.browser import Browser, Document

HOSTILE = '<script>alert("x")</script>\u202e\x1b[31m'


async def published(api: Api, payload: object = None, **fields: Any) -> dict[str, Any]:
    """Publish into a new room with a subscription; return their ids."""
    room = (await api.room())["id"]
    await api.made(f"/rooms/{room}/event-types", {"name": "made"})
    subscription = await api.subscription(room, "billing")
    message = (await api.publish(room, "made", payload, **fields))["message_id"]
    found = (await api.call("GET", f"/messages/{message}/deliveries")).json()["items"]
    return {
        "room": room,
        "subscription": subscription["id"],
        "message": message,
        "delivery": found[0]["id"],
    }


async def sidelined(api: Api, delivery: str, error: str = "status: gone") -> None:
    await api.sql(
        """
        WITH d AS (
            UPDATE deliveries SET state = 'sidelined', reason = 'terminal_status', attempts = 1, last_status = 410, last_error = %s
            WHERE id = %s RETURNING room_id, id, subscription_id, generation
        ), o AS (DELETE FROM outbox WHERE id IN (SELECT id FROM d))
        INSERT INTO sidelined (room_id, id, subscription_id, generation, reason)
        SELECT room_id, id, subscription_id, generation, 'terminal_status' FROM d
        """,
        error,
        delivery,
    )


def filters(page: Document, path: str) -> dict[str, str]:
    """Return the fields by which a list is narrowed."""
    (form,) = [one for one in page.forms if (one.action, one.method) == (path, "get")]
    return dict(form.fields)


async def test_the_list_has_every_filter_of_the_api(browser: Browser) -> None:
    things = await published(browser.api, business_key="case-1", correlation_id="trace-1")
    await browser.api.publish(things["room"], "made", {}, business_key="case-2")
    await browser.sign_in("viewer")
    path = f"/console/rooms/{things['room']}/messages"
    page = await browser.get(path)
    assert (page.text.count("case-1"), page.text.count("case-2")) == (1, 1)
    assert page.text.count("under way") == 2
    document = (await browser.api.http.get("/schema/openapi.json")).json()
    parameters = document["paths"]["/v1/rooms/{room_id}/messages"]["get"]["parameters"]
    names = {one["name"] for one in parameters if one["in"] == "query"}
    names -= {"limit", "cursor", "with_states"}
    assert names == set(filters(page, path))
    for query, count in (
        ("business_key=case-1", 1),
        ("correlation_id=trace-1", 1),
        ("state=delivered", 0),
        ("until=2020-01-01T00:00", 0),
        (f"subscription_id={things['subscription']}", 2),
    ):
        listed = await browser.get(f"{path}?{query}")
        found = [one for one in listed.links if one.startswith("/console/messages/")]
        assert len(found) == count, query
    wrong = await browser.get(f"{path}?version=x&event_type=made")
    assert wrong.status == 422
    assert filters(wrong, path)["event_type"] == "made"


async def test_a_payload_is_masked_until_it_is_asked_for(browser: Browser) -> None:
    things = await published(browser.api, {"amount": 4711})
    await browser.sign_in("operator", name="ada")
    path = f"/console/messages/{things['message']}"
    page = await browser.get(path)
    assert page.status == 200
    assert "4711" not in page.text

    async def reads() -> list[Any]:
        journal = (await browser.api.call("GET", "/journal?action=read_payload")).json()["items"]
        return [one["actor_name"] for one in journal]

    assert await reads() == []
    shown = await browser.submit(page, f"{path}/payload")
    assert '"amount": 4711' in shown.text
    assert len(await reads()) == 1
    again = await browser.get(f"{path}/payload")
    assert "4711" not in again.text
    assert len(await reads()) == 1


async def test_a_viewer_never_gets_a_payload(browser: Browser) -> None:
    things = await published(browser.api, {"amount": 4711})
    await browser.sign_in("viewer")
    path = f"/console/messages/{things['message']}"
    page = await browser.get(path)
    assert "Your role reads no payloads." in page.text
    refused = await browser.post(f"{path}/payload", {"form_token": token(page)})
    assert refused.status == 403
    assert "4711" not in refused.text


def token(page: Document) -> str:
    return next(v for form in page.forms for n, v in form.fields if n == "form_token")


async def test_a_long_payload_is_shown_in_part(browser: Browser) -> None:
    things = await published(browser.api, {"items": ["x" * 1000] * 200})
    await browser.sign_in("operator")
    page = await browser.get(f"/console/messages/{things['message']}")
    shown = await browser.submit(page, f"{page.path}/payload")
    assert "more lines." in shown.text
    assert len(shown.html) < 150_000


async def test_a_payload_of_extreme_numbers_does_not_keep_the_loop(browser: Browser) -> None:
    """The stall guard is the check: they take 10 µs each to decode."""
    made = await published(browser.api, [1e308] * 32_000)
    await browser.sign_in("operator")
    page = await browser.get(f"/console/messages/{made['message']}")
    shown = await browser.submit(page, f"{page.path}/payload")
    assert "more lines." in shown.text


async def test_a_payload_that_indents_would_blow_up_is_shown_in_part(browser: Browser) -> None:
    deep: object = [1] * 30_000
    for _ in range(500):
        deep = [deep]
    things = await published(browser.api, {"deep": deep})
    await browser.sign_in("operator")
    page = await browser.get(f"/console/messages/{things['message']}")
    # A stalled loop fails the test.
    shown = await browser.submit(page, f"{page.path}/payload")
    assert shown.status == 200
    assert "more lines." in shown.text
    assert len(shown.html) < 150_000


async def test_the_timeline_is_drawn_and_in_words(browser: Browser) -> None:
    things = await published(browser.api)
    await browser.sign_in("viewer")
    page = await browser.get(f"/console/messages/{things['message']}")
    assert 'class="timeline"' in page.html
    assert len(re.findall(r'class="mark ', page.html)) == 1
    assert "enqueued" in page.text
    assert "billing" in page.text


async def test_a_message_is_withdrawn_once(browser: Browser) -> None:
    things = await published(browser.api)
    await browser.sign_in("operator")
    path = f"/console/messages/{things['message']}"
    page = await browser.get(path)
    assert "1 delivery that waits is cancelled." in page.text
    done = await browser.submit(page, f"{path}/withdraw")
    assert "The message is withdrawn" in done.text
    again = await browser.submit(page, f"{path}/withdraw")
    assert again.status == 409
    assert "nothing could be withdrawn" in again.text


async def test_a_message_is_moved(browser: Browser) -> None:
    things = await published(browser.api)
    await browser.sign_in("operator")
    path = f"/console/messages/{things['message']}"
    page = await browser.get(path)
    refused = await browser.submit(page, f"{path}/move", delay_s="soon")
    assert refused.status == 422
    assert ("delay_s", "soon") in refused.form(f"{path}/move").fields
    await browser.submit(page, f"{path}/move", delay_s="3600")
    found = (await browser.api.call("GET", f"/messages/{things['message']}")).json()
    assert found["due_at"] > found["published_at"]
    browser.http.cookies.set("rooms_time_zone", "Europe/Berlin")
    page = await browser.get(path)
    await browser.submit(page, f"{path}/move", deliver_at="2030-01-31T12:00")
    found = (await browser.api.call("GET", f"/messages/{things['message']}")).json()
    assert found["due_at"] == "2030-01-31T11:00:00Z"


async def test_a_message_is_restored_in_chosen_states(browser: Browser) -> None:
    things = await published(browser.api)
    await browser.api.sql("UPDATE deliveries SET state = 'expired'; DELETE FROM outbox")
    await browser.sign_in("operator")
    path = f"/console/messages/{things['message']}"
    page = await browser.get(path)
    job = await browser.post(f"{path}/restore", {"form_token": token(page), "states": ["expired"]})
    assert job.path.startswith("/console/jobs/")
    found = (await browser.api.call("GET", job.path.removeprefix("/console"))).json()
    assert (found["kind"], found["arguments"]["states"]) == ("restore", ["expired"])


async def test_a_restore_without_a_state_is_refused(browser: Browser) -> None:
    things = await published(browser.api)
    await browser.sign_in("operator")
    path = f"/console/messages/{things['message']}"
    page = await browser.get(path)
    assert ("states", "queued") in page.form(f"{path}/restore").fields
    refused = await browser.post(f"{path}/restore", {"form_token": token(page)})
    assert refused.status == 422
    assert "<code>states</code>" in refused.html
    assert refused.html.count('<span class="wrong">') == 1
    assert "states" not in dict(refused.form(f"{path}/restore").fields)
    assert (await browser.api.call("GET", "/jobs")).json()["items"] == []


async def test_a_receipt_is_a_file(browser: Browser) -> None:
    things = await published(browser.api)
    await browser.sign_in("viewer")
    answer = await browser.http.get(f"/console/messages/{things['message']}/receipt")
    assert answer.status_code == 200
    assert answer.headers["content-disposition"].startswith("attachment")
    assert answer.text.count(".") == 2


async def test_a_sidelined_delivery_is_sent_again(browser: Browser) -> None:
    things = await published(browser.api)
    await browser.sign_in("operator")
    path = f"/console/deliveries/{things['delivery']}"
    page = await browser.get(path)
    assert f"{path}/redeliver" not in [form.action for form in page.forms]
    await sidelined(browser.api, things["delivery"])
    page = await browser.get(path)
    assert '<p class="notice bad"><bdi>HTTP 410 gone</bdi></p>' in page.html
    done = await browser.submit(page, f"{path}/redeliver")
    assert "The delivery is queued again" in done.text
    again = await browser.submit(page, f"{path}/redeliver")
    assert again.status == 409


async def test_attempts_have_status_answer_and_time(browser: Browser) -> None:
    things = await published(browser.api)
    await browser.api.sql(
        """INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
            attempt, http_status, latency_ms, target_host, detail, answer_head)
        VALUES (1, 999999, %s, %s, 'attempted', %s, %s, 0, 0, 503, 12.5, 'hooks.example.com', 'status', %s)""",
        *(things[name] for name in ("room", "message", "subscription", "delivery")),
        HOSTILE.encode(),
    )
    await browser.sign_in("viewer")
    for path in (f"deliveries/{things['delivery']}", f"messages/{things['message']}"):
        page = await browser.get(f"/console/{path}")
        assert "503" in page.text
        assert "12.5 ms" in page.text
        assert "<script>alert" not in page.html
    page = await browser.get(f"/console/deliveries/{things['delivery']}")
    assert "hooks.example.com" in page.text
    assert "[RLO]\u241b[31m" in page.text


@pytest.mark.parametrize("action", ["withdraw", "move", "restore", "payload"])
async def test_a_viewer_changes_no_message(browser: Browser, action: str) -> None:
    things = await published(browser.api)
    await browser.sign_in("viewer")
    path = f"/console/messages/{things['message']}"
    page = await browser.get(path)
    assert (await browser.post(f"{path}/{action}", {"form_token": token(page)})).status == 403
    path = f"/console/deliveries/{things['delivery']}/redeliver"
    assert (await browser.post(path, {"form_token": token(page)})).status == 403


async def test_another_organisation_finds_no_message(browser: Browser) -> None:
    things = await published(browser.api)
    await browser.sign_in(key="other-admin")
    for path in (
        f"rooms/{things['room']}/messages",
        f"messages/{things['message']}",
        f"messages/{things['message']}/receipt",
        f"deliveries/{things['delivery']}",
    ):
        assert (await browser.get(f"/console/{path}")).status == 404


async def test_hostile_messages_are_text(browser: Browser) -> None:
    long = "x" * 90
    things = await published(
        browser.api, {HOSTILE: [HOSTILE]}, business_key=HOSTILE[:30] + long, headers={"x-a": "<b>"}
    )
    await sidelined(browser.api, things["delivery"], HOSTILE)
    await browser.sign_in("operator")
    page = await browser.get(f"/console/messages/{things['message']}")
    shown = await browser.submit(page, f"{page.path}/payload")
    for one in (page, shown, await browser.get(f"/console/rooms/{things['room']}/messages")):
        assert one.status == 200
        assert "<script>alert" not in one.html
        assert "\u202e" not in one.html
        assert "<b>" not in one.html
