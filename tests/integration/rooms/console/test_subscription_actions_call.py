"""Test what a person reads after a test call, and where it leads on to."""

import pytest

from rooms.domain.attempt import AttemptResult, ErrorClass
from tests.integration.rooms.api.test_sideline import sidelined
from tests.integration.rooms.console.browser import Browser, Document
from tests.integration.rooms.console.test_subscription_actions_retry import wait_for_retries

SHOVEL = "Bring 3 deliveries back"


def answer(error: ErrorClass | None, status: int | None) -> AttemptResult:
    return AttemptResult(
        status=status,
        error=error,
        detail="" if error is None else "refused",
        body_head=b"",
        retry_after=None,
        latency_ms=7.25,
    )


async def call(browser: Browser, at: str, given: AttemptResult) -> Document:
    browser.api.pings.answer = given
    return await browser.submit(await browser.get(f"{at}/test"), f"{at}/call")


async def test_a_success_leads_to_what_the_endpoint_has_missed(browser: Browser) -> None:
    subscription = await sidelined(browser.api)
    at = f"/console/subscriptions/{subscription['id']}"
    await wait_for_retries(browser.api, subscription["room_id"], subscription["id"])
    await browser.sign_in("owner")
    failed = await call(browser, at, answer(ErrorClass.STATUS, 503))
    assert SHOVEL not in failed.text
    assert "Retry now" not in failed.text
    called = await call(browser, at, answer(None, 204))
    assert SHOVEL in called.text
    assert f"{at}/sideline/shovel" in called.links
    retried = await browser.submit(called, f"{at}/retry")
    assert retried.path.startswith("/console/jobs/")


async def test_a_person_who_only_changes_settings_is_led_to_no_sideline(browser: Browser) -> None:
    subscription = await sidelined(browser.api)
    await browser.sign_in("developer")
    at = f"/console/subscriptions/{subscription['id']}"
    assert SHOVEL not in (await call(browser, at, answer(None, 204))).text


@pytest.mark.parametrize(
    ("error", "status", "language", "words"),
    [
        (ErrorClass.CONNECT, None, "en", "no connection"),
        (ErrorClass.CONNECT, None, "de", "keine Verbindung"),
        (ErrorClass.STATUS, 500, "en", "failed"),
        (ErrorClass.STATUS, 500, "de", "fehlgeschlagen"),
    ],
)
async def test_a_failure_is_said_in_words_of_the_reader(
    browser: Browser, error: ErrorClass, status: int | None, language: str, words: str
) -> None:
    subscription = await sidelined(browser.api)
    at = f"/console/subscriptions/{subscription['id']}"
    page = await browser.sign_in("owner")
    await browser.submit(page, "/console/preferences", language=language)
    called = await call(browser, at, answer(error, status))
    assert f"</svg>{words}</span>" in called.html


@pytest.mark.parametrize("below", ["test", "call", "filter"])
async def test_the_part_of_the_page_stays_marked(browser: Browser, below: str) -> None:
    subscription = await sidelined(browser.api)
    at = f"/console/subscriptions/{subscription['id']}"
    await browser.sign_in("owner")
    page = await browser.get(f"{at}/test")
    if below != "test":
        page = await browser.submit(page, f"{at}/{below}")
    assert f'<a href="{at}/test" aria-current="page">' in page.html
