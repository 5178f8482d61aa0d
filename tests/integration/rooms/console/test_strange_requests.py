"""Send the console what its own pages never send."""

from typing import Final

import pytest

from tests.integration.rooms.console.browser import BASE, Browser

SAME_SITE: Final = {"Origin": BASE, "Sec-Fetch-Site": "same-origin"}


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
