"""Open every page of the console in a language that is written from right to left.

Oracle: nothing is wider than the window or cut off, wide or narrow; ids, code, numbers and drawings
are read from left to right, and the rest from right to left.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from rooms.local.services import free_port
from tests.e2e.console.test_pages import NARROW, WIDE
from tests.e2e.console.world import World
from tests.support.chromium import Watched
from tests.support.polling import until
from tests.support.right_to_left import LANGUAGE
from tests.support.service import STOP_S, environment_of

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
    port = free_port()
    log: Path = tmp_path_factory.mktemp("turned") / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.right_to_left", "serve"],
            env=environment_of(world.service.data, port),
            stdout=output,
            stderr=output,
        )
    try:

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return httpx.get(f"http://127.0.0.1:{port}/health/live").is_success
            except httpx.TransportError:
                return False

        until(answers, "the other process of the API")
        yield port
    finally:
        process.terminate()
        process.wait(STOP_S)


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_every_page_is_turned_and_nothing_is_cut(
    browser: "Browser", world: World, turned_port: int, width: int
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, locale=LANGUAGE)
    try:
        window = Watched(context.new_page(), f"127.0.0.1:{turned_port}")
        body = {"name": "ada", "roles": ["platform", "owner"]}
        window.open(world.service.post("/sign-in-links", body)["path"])
        window.page.locator("main form button").click()
        window.page.wait_for_url("**/console")
        problems: list[str] = []
        for path in world.pages():
            status = window.open(path)
            page = window.page
            if status != 200 or page.locator("html").get_attribute("dir") != "rtl":
                problems.append(f"{path}: {status}")
                continue
            if window.overflow_px() > 0:
                problems.append(f"{path}: {window.overflow_px()} px wider than the window")
            for what, script in (("cut", CUT), ("turned", TURNED), ("not turned", NOT_TURNED)):
                problems += [f"{path}: {what}: {one}" for one in page.evaluate(script)]
        assert not problems, "\n".join(problems)
        window.check()
    finally:
        context.close()
