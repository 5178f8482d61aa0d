"""Open every page on a phone in German, whose words are long.

Oracle: no text leaves the box around it, also not into the next one.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import pytest

from tests.e2e.console.test_pages import NARROW, WIDE
from tests.e2e.console.world import World
from tests.support.chromium import Watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NARROWEST: Final = 320
"""The width, in CSS pixels, at which a page must still be read without moving it (WCAG 1.4.10)."""
# What is folded may be unfolded. What moves sideways, or only a screen reader reads, may be wider.
OUTSIDE: Final = """() => {
  document.querySelectorAll('main details').forEach(one => { one.open = true; });
  const found = new Set();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  const hidden = style => style.position === 'absolute' || /auto|scroll|hidden/.test(style.overflowX);
  while (texts.nextNode()) {
    range.selectNodeContents(texts.currentNode);
    const boxes = [...range.getClientRects()].filter(box => box.width > 1);
    for (let one = texts.currentNode.parentElement; one !== document.body; one = one.parentElement) {
      const style = getComputedStyle(one);
      if (hidden(style) || one.closest('svg, thead, .skip')) break;
      if (/^(inline|contents)$/.test(style.display)) continue;
      const around = one.getBoundingClientRect();
      if (boxes.some(box => box.right > around.right + 1 || box.left < around.left - 1)) {
        found.add(`${one.tagName}.${one.className} ${texts.currentNode.data.trim().slice(0, 60)}`);
        break;
      }
    }
  }
  return [...found].slice(0, 5);
}"""

# A select is as wide as its column, and cuts off what is chosen in it. 16: its arrow.
CUT_CHOICES: Final = """() => {
  const pen = document.createElement('canvas').getContext('2d');
  return [...document.querySelectorAll('main form select')].flatMap(one => {
    const style = getComputedStyle(one);
    pen.font = style.font;
    const room = one.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight) - 16;
    return [...one.options].map(option => option.text).filter(text => pen.measureText(text).width > room);
  });
}"""


@pytest.fixture
def german(browser: "Browser", world: World) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": NARROW, "height": 900}, locale="de-DE")
    window = Watched(context.new_page(), f"127.0.0.1:{world.service.port}")
    body = {"name": "ada", "roles": ["platform", "owner"]}
    window.open(world.service.post("/sign-in-links", body)["path"])
    window.page.get_by_role("button", name="Anmelden").click()
    window.page.wait_for_url("**/console")
    yield window
    context.close()


def test_no_word_leaves_its_box(german: Watched, world: World) -> None:
    problems = []
    for path in world.pages():
        assert german.open(path) == 200, path
        for width in (NARROW, NARROWEST):
            with german.width(width):
                found = german.page.evaluate(OUTSIDE)
                problems += [f"{path}: {width} px: {one}" for one in found]
    assert not problems, "\n".join(problems)
    german.check()


def test_each_choice_of_a_policy_can_be_read(german: Watched, world: World) -> None:
    """Check who may find a room and subscribe, which must not be guessed from half a text."""
    german.open(f"/console/rooms/{world.room}/policy")
    for width in (WIDE, NARROW):
        with german.width(width):
            assert german.page.evaluate(CUT_CHOICES) == [], width
    assert german.page.locator("main select").count() == 2
    german.check()
