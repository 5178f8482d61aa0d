"""Test how the cookies of a request are read, and the preferences in them."""

import pytest

from rooms.console.sessions import MAX_COOKIES, cookies_of, preference_cookie, read_preference


def scope(value: str) -> dict[str, object]:
    return {"path": "/console", "headers": [(b"cookie", f"rooms_time_zone={value}".encode())]}


@pytest.mark.parametrize("zone", ["Europe/Berlin", "UTC", "America/Argentina/ComodRivadavia"])
def test_a_choice_is_read_as_it_was_written(zone: str) -> None:
    written = preference_cookie(scope(""), "time_zone", zone, max_age_s=60).to_header(header="")
    value = written.strip().partition(";")[0].partition("=")[2]
    assert read_preference(scope(value), "time_zone") == zone


@pytest.mark.parametrize("count", [200, MAX_COOKIES // 2 - 20])
def test_a_choice_that_takes_long_to_read_is_none(count: int) -> None:
    escaped = '"' + '\\"' * count + '"'
    assert read_preference(scope(escaped), "time_zone") is None


@pytest.mark.parametrize("space", [b"\xa0", b"\x85", b"\x0b", b"\x0c", b"\x1c"])
def test_only_spaces_and_tabs_are_no_part_of_a_name(space: bytes) -> None:
    """Check that a name which another host may set does not pass for one that it may not."""
    sent = space + b"__Host-rooms_session=evil; \t__Host-rooms_session=good"
    assert cookies_of({"headers": [(b"cookie", sent)]})["__Host-rooms_session"] == "good"
