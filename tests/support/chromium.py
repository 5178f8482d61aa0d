"""Drive Debian's Chromium, and check what a page does that it must not.

A machine without Chromium skips these tests; in CI they fail.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from tests.support.servers import unavailable

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Frame, Page

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
_FAILING: Final = frozenset({"serious", "critical"})
_OF_LAYOUT: Final = (
    "aria-hidden-focus",
    "button-name",
    "color-contrast",
    "label",
    "link-in-text-block",
    "link-name",
    "nested-interactive",
    "scrollable-region-focusable",
    "select-name",
    "summary-name",
)
"""Rules of axe whose result depends on what a layout shows, and how."""


@contextmanager
def chromium(*arguments: str) -> Iterator["Browser"]:
    """Start a browser without a window, with more arguments of its command."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        unavailable("there is no Chromium: install Debian's package `chromium`")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ("--no-sandbox", *arguments)
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watched:
    """Hold a page, its errors, and the requests that it made to other hosts."""

    page: "Page"
    url: str
    """The host and port of its own requests."""
    scheme: str = "http"
    framing: str | None = None
    """The host and port of a page that frames the pages of the service."""
    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._note)
        self.page.on("request", self._check)

    def _note(self, message: Any) -> None:
        if message.type in {"error", "warning"}:
            self.errors.append(message.text)

    def _check(self, request: Any) -> None:
        target = urlsplit(request.url)
        if target.scheme in {"http", "https", "ws", "wss"} and target.netloc not in {
            self.url,
            self.framing,
        }:
            self.foreign.append(request.url)

    def open(self, path: str) -> int:
        """Open a page and return the status of its answer."""
        answer = self.page.goto(f"{self.scheme}://{self.url}{path}")
        assert answer is not None
        return answer.status

    def accessibility_problems(
        self, frame: "Frame | None" = None, *, only: Sequence[str] = ()
    ) -> list[str]:
        """Return each rule of axe that the page, or a frame in it, breaks seriously.

        With the elements. `only`: the rules that are looked at, by default all.
        """
        from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]

        options = {"resultTypes": ["violations"]} | ({"runOnly": [*only]} if only else {})
        document = frame or self.page
        # Half a megabyte, which takes longer than some of its rules.
        axe = Axe("null") if document.evaluate("'axe' in window") else Axe()
        found = axe.run(document, options=options).response["violations"]
        return [
            f"{one['id']}: {one['help']}: {[node['target'] for node in one['nodes']][:5]}"
            for one in found
            if one["impact"] in _FAILING
        ]

    def page_problems(self, path: str, *, narrow_px: int | None = None) -> list[str]:
        """Open a page and return what is wrong with it, in either colour scheme.

        `narrow_px`: a second width of the window.
        """
        if (status := self.open(path)) != HTTPStatus.OK:
            return [f"{path}: {status}"]
        found = self.accessibility_problems() + self._layout_problems()
        if narrow_px is not None:
            with self.width(narrow_px):
                narrow = self.accessibility_problems(only=_OF_LAYOUT) + self._layout_problems()
            found += [f"{narrow_px} px wide: {one}" for one in narrow]
        return [f"{path}: {one}" for one in found]

    def _layout_problems(self) -> list[str]:
        # Nothing but colours differs. Without motion, they change at once.
        self.page.emulate_media(color_scheme="dark", reduced_motion="reduce")
        found = [f"dark: {one}" for one in self.accessibility_problems(only=["color-contrast"])]
        self.page.emulate_media(color_scheme="light", reduced_motion="reduce")
        if (overflow := self.overflow_px()) > 0:
            found.append(f"{overflow} px wider than the window")
        if (headings := self.page.locator("h1").count()) != 1:
            found.append(f"{headings} headings of the first level")
        return found

    @contextmanager
    def width(self, width_px: int) -> Iterator[None]:
        """Have a window of this width for as long as the context lasts; the page stays."""
        size = self.page.viewport_size
        assert size is not None
        self.page.set_viewport_size({"width": width_px, "height": size["height"]})
        try:
            yield
        finally:
            self.page.set_viewport_size(size)

    def overflow_px(self) -> int:
        """Return by how much the page is wider than the window."""
        width: int = self.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        return width

    def check(self) -> None:
        """Check that the page made no error, and asked no other host for anything."""
        assert not self.errors, self.errors
        assert not self.foreign, self.foreign
