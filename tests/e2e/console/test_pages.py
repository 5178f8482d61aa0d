"""Open every page of the console in a real browser: in both colour schemes, wide and narrow."""

from http import HTTPStatus

import pytest

from rooms.console.live import MAX_PAUSE_S
from tests.e2e.console.conftest import Open
from tests.e2e.console.world import World

WIDE, NARROW = 1280, 390


def test_every_page_is_accessible_and_every_link_of_it_leads_to_another(
    opened: Open, world: World
) -> None:
    """In one walk, as loading all pages takes most of the time."""
    window = opened()
    problems: list[str] = []
    leads: dict[str, str] = {}
    for path in world.pages():
        problems += window.page_problems(path, narrow_px=NARROW)
        links = window.page.locator("a[href^='/']").evaluate_all(
            "links => links.map(link => link.getAttribute('href').split('#')[0])"
        )
        assert links, path
        leads |= dict.fromkeys(links, path)
    assert not problems, "\n".join(problems)
    window.check()
    broken = []
    for target, path in leads.items():
        status = window.page.request.get(f"http://{window.url}{target}").status
        # A receipt is made later than its page.
        if status != HTTPStatus.OK and not target.endswith("/receipt"):
            broken.append(f"{path}: {target}: {status}")
    assert not broken, "\n".join(broken)


def test_a_dark_page_with_too_little_contrast_is_found(opened: Open) -> None:
    window = opened()
    rule = "@media (prefers-color-scheme: dark) { html, body { background: #111; } h1 { color: #222; } }"
    window.page.route("**/*.css*", lambda route: route.fulfill(body=rule, content_type="text/css"))
    problems = window.page_problems("/console")
    assert any(one.startswith("/console: dark: color-contrast") for one in problems), problems


def test_a_page_that_only_a_narrow_window_cuts_is_found(opened: Open) -> None:
    window = opened()
    rule = "@media (max-width: 400px) { h1 { width: 500px; } h1, h1 * { color: #ccc; } }"
    window.page.route("**/*.css*", lambda route: route.fulfill(body=rule, content_type="text/css"))
    problems = window.page_problems("/console", narrow_px=NARROW)
    prefix = f"/console: {NARROW} px wide: "
    assert [one for one in problems if "color-contrast" in one and prefix in one], problems
    assert [one for one in problems if "px wider than the window" in one and prefix in one]
    assert all(one.startswith(prefix) for one in problems if "dark" not in one), problems


def test_the_page_of_the_api_fits_the_window_and_shows_code_as_code(opened: Open) -> None:
    window = opened()
    assert window.open("/schema") == HTTPStatus.OK
    found = [window.overflow_px()]
    with window.width(NARROW):
        found.append(window.overflow_px())
        window.page.evaluate(
            "document.querySelectorAll('details').forEach(one => { one.open = true; })"
        )
        found.append(window.overflow_px())
    found.append(window.overflow_px())
    assert max(found) <= 0, found
    prose = window.page.locator("p, td").all_text_contents()
    assert [one for one in prose if "`" in one] == []
    window.check()


def test_the_footer_of_a_short_page_is_at_the_lower_edge_of_the_window(opened: Open) -> None:
    window = opened()
    for path in ("/console/administration", "/console/analysis"):
        window.open(path)
        for width in (WIDE, NARROW):
            with window.width(width):
                edges = window.page.evaluate(
                    "[document.querySelector('.foot').getBoundingClientRect().bottom + scrollY,"
                    " Math.max(innerHeight, document.documentElement.scrollHeight)]"
                )
            assert edges[0] == pytest.approx(edges[1], abs=1), (path, width)
    window.check()


def test_every_page_can_be_read_without_scripts(opened: Open, world: World) -> None:
    window = opened(scripts=False)
    for path in world.pages():
        assert window.open(path) == 200, path
        assert window.page.locator("h1").inner_text().strip(), path
    window.check()


def test_a_page_changes_while_it_is_open(opened: Open, world: World, frequent_port: int) -> None:
    window = opened(port=frequent_port)
    window.open("/console")
    window.page.locator("#live-state", has_text="live").wait_for()
    pull = window.page.locator("li.tile", has_text="PULL").locator("strong")
    before = int(pull.inner_text().replace(",", ""))
    body = {"event_type": "order.paid", "payload": {"amount": 1}}
    world.service.post(f"/rooms/{world.room}/messages", body)
    window.page.wait_for_function(
        "before => [...document.querySelectorAll('li.tile')].some(tile => tile.innerText.includes('PULL')"
        " && parseInt(tile.querySelector('strong').innerText.replace(',', '')) > before)",
        arg=before,
        # A page that a busy machine renders slowly is rendered less often.
        timeout=2 * MAX_PAUSE_S * 1000,
    )
    window.check()


def test_what_a_person_uses_stays_while_the_page_changes(
    opened: Open, world: World, frequent_port: int
) -> None:
    window = opened(port=frequent_port)
    window.open(f"/console/subscriptions/{world.failing}/deliveries")
    page = window.page
    page.locator("#live-state", has_text="live").wait_for()
    page.set_viewport_size({"width": 700, "height": 500})
    # In one step: the stream may replace the part between any two.
    before, moved = page.evaluate(
        """() => {
          const live = document.querySelector("#live");
          const link = live.querySelectorAll("tbody a")[2];
          link.focus({ preventScroll: true });
          live.querySelector(".scroll").scrollLeft = 30;
          live.firstElementChild.dataset.old = "yes";
          return [link.getAttribute("href"), live.querySelector(".scroll").scrollLeft];
        }"""
    )
    assert moved > 0
    body = {"event_type": "order.paid", "payload": {"amount": 1}}
    world.service.post(f"/rooms/{world.room}/messages", body)
    replaced = "() => !document.querySelector('#live').firstElementChild.dataset.old"
    page.wait_for_function(replaced, timeout=2 * MAX_PAUSE_S * 1000)
    assert page.evaluate("document.activeElement.getAttribute('href')") == before
    assert page.evaluate("document.querySelector('#live .scroll').scrollLeft") == moved
    window.check()


def test_a_table_is_read_as_cards_on_a_phone(opened: Open, world: World) -> None:
    window = opened(width=NARROW)
    window.open(f"/console/subscriptions/{world.failing}/sideline")
    cells = window.page.locator(".scroll tbody tr").first.locator("td")
    names = window.page.locator(".scroll thead th").all_inner_texts()
    assert cells.evaluate_all("cells => cells.map(cell => cell.dataset.label)") == names
    widths = window.page.locator(".scroll").evaluate_all(
        "parts => parts.map(part => part.scrollWidth - part.clientWidth)"
    )
    assert widths
    assert max(widths) <= 0


def test_a_table_in_a_card_has_the_names_of_its_own_columns(opened: Open) -> None:
    window = opened(width=NARROW)
    window.open("/console/administration/journal")
    changes = window.page.locator("table.difference")
    assert changes.count()
    for number in range(changes.count()):
        cells = changes.nth(number).locator("td")
        labels = cells.evaluate_all("cells => cells.map(cell => cell.dataset.label)")
        assert labels == ["Before", "After"] * (len(labels) // 2)
    window.check()


def test_a_row_that_is_moved_sideways_shows_that_there_is_more(opened: Open, world: World) -> None:
    window = opened()
    window.open(f"/console/rooms/{world.room}")
    for part in (".bar nav", ".tabs"):
        row = window.page.locator(part).first
        with window.width(NARROW):
            assert row.evaluate("row => row.scrollWidth > row.clientWidth")
            assert "gradient" in row.evaluate("row => getComputedStyle(row).backgroundImage")
        assert row.evaluate("row => row.scrollWidth <= row.clientWidth")
        assert row.evaluate("row => getComputedStyle(row).backgroundImage") == "none"
    window.check()


def test_the_shortcut_leads_to_the_search(opened: Open) -> None:
    window = opened()
    window.page.keyboard.press("/")
    assert window.page.evaluate("document.activeElement.name") == "q"
    window.page.keyboard.press("/")
    assert window.page.locator("form.search input").input_value() == "/"


def test_a_person_signs_out(opened: Open) -> None:
    window = opened()
    window.page.locator("details.menu summary").click()
    window.page.get_by_role("button", name="Sign out").click()
    window.page.wait_for_url("**/console/sign-in")
    assert window.open("/console") == 200
    assert "/console/sign-in" in window.page.url
    window.check()
