"""Sign a browser in with every role, the platform's, too."""

from rooms.domain.state_machine import Scope
from tests.integration.rooms.api.conftest import make_key
from tests.integration.rooms.console.browser import Browser

HOSTILE = "<script>alert(1)</script>\u202egnp.exe\x1b[31m"
SHOWN = "&lt;script&gt;alert(1)&lt;/script&gt;[RLO]gnp.exe\u241b[31m"


async def sign_in_platform(browser: Browser, *roles: str) -> None:
    """Sign in with these roles (`platform` and `owner`), by a key that may give both."""
    browser.api.keys["both"] = await make_key(
        browser.api.services, "default", Scope.ADMIN, Scope.PLATFORM
    )
    await browser.sign_in(*(roles or ("platform", "owner")), key="both")
