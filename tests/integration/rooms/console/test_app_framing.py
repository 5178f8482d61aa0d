"""Test which sites may frame which pages of the console."""

import pytest

from tests.integration.rooms.api.conftest import open_api
from tests.integration.rooms.console.browser import Browser

SITES = "https://shop.example.com, https://desk.example.com:8443/"


@pytest.mark.parametrize("sites", ["", SITES])
async def test_only_the_portal_is_framed_and_only_by_the_sites_that_are_set(
    database: str, sites: str
) -> None:
    async with open_api(database, gate=None, ROOMS_FRAME_ANCESTORS=sites) as api:
        browser = await Browser.open(api)
        async with browser.http:
            for path in ("/", "/console", "/console/sign-in", "/console/portals", "/console/rooms"):
                headers = (await browser.http.get(path)).headers
                assert headers["content-security-policy"].endswith("; frame-ancestors 'none'"), path
                assert headers["x-frame-options"] == "DENY"
            for path in ("/console/portal", "/console/portal/deliveries"):
                headers = (await browser.http.get(path)).headers
                ancestors = headers["content-security-policy"].rpartition("; frame-ancestors ")[2]
                if sites:
                    expected = "https://shop.example.com https://desk.example.com:8443"
                    assert ancestors == expected
                    assert "x-frame-options" not in headers
                else:
                    assert (ancestors, headers["x-frame-options"]) == ("'none'", "DENY")
