"""Open every page of the console in a language that is written from right to left.

Oracle: nothing is wider than the window or cut off, wide or narrow; ids, code, numbers and drawings
are read from left to right, and the rest from right to left.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.e2e.console.test_pages import NARROW, WIDE
from tests.e2e.console.world import World
from tests.support.chromium import Watched
from tests.support.right_to_left import LANGUAGE
from tests.support.second_api import second_api

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# Elements that scroll, or that end in an ellipsis, may have more in them than is seen.
CUT = """() => {
  const scrolls = one => {
    const style = getComputedStyle(one);
    return /auto|scroll/.test(style.overflowX) || style.textOverflow === 'ellipsis' || one.closest('.skip');
  };
  const within = one => one && (scrolls(one) || within(one.parentElement));
  return [...document.querySelectorAll('body *')].filter(one => {
    const box = one.getBoundingClientRect();
    if (!box.width || !box.height || within(one) || one.closest('svg')) return false;
    const clipped = getComputedStyle(one).overflowX === 'hidden' && one.scrollWidth > one.clientWidth + 1;
    return clipped || box.left < -1 || box.right > innerWidth + 1;
  }).slice(0, 5).map(one => `${one.tagName}.${one.className} ${one.textContent.trim().slice(0, 40)}`);
}"""
TURNED = """() => [...document.querySelectorAll('code, pre, .id, td.num, svg')]
  .filter(one => getComputedStyle(one).direction !== 'ltr').map(one => one.outerHTML.slice(0, 80))"""
NOT_TURNED = """() => ['h1', 'p', 'table', 'th:not(.num)', 'label']
  .flatMap(name => [...document.querySelectorAll(`main ${name}`)])
  .filter(one => getComputedStyle(one).direction !== 'rtl').map(one => one.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def turned_port(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Serve the same world by another process of the API, with a language that is turned."""
    log = tmp_path_factory.mktemp("turned") / "log"
    with second_api(world.service, "tests.support.right_to_left", log) as port:
        yield port


def test_every_page_is_turned_and_nothing_is_cut(
    browser: "Browser", world: World, turned_port: int
) -> None:
    context = browser.new_context(viewport={"width": WIDE, "height": 900}, locale=LANGUAGE)
    try:
        window = Watched(context.new_page(), f"127.0.0.1:{turned_port}")
        body = {"name": "ada", "roles": ["platform", "owner"]}
        window.open(world.service.post("/sign-in-links", body)["path"])
        window.page.locator("main form button").click()
        window.page.wait_for_url("**/console")
        problems: list[str] = []
        for path in world.pages():
            status = window.open(path)
            if status != 200 or window.page.locator("html").get_attribute("dir") != "rtl":
                problems.append(f"{path}: {status}")
                continue
            for width in (WIDE, NARROW):
                with window.width(width):
                    problems += [f"{path}: {width} px: {one}" for one in layout_problems(window)]
        assert not problems, "\n".join(problems)
        window.check()
    finally:
        context.close()


def layout_problems(window: Watched) -> list[str]:
    """Return what is cut, and what is read in the wrong direction."""
    found = []
    if (overflow := window.overflow_px()) > 0:
        found.append(f"{overflow} px wider than the window")
    for what, script in (("cut", CUT), ("turned", TURNED), ("not turned", NOT_TURNED)):
        found += [f"{what}: {one}" for one in window.page.evaluate(script)]
    return found
