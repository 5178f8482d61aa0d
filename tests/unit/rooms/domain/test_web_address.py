"""Test which addresses of the web an operator may configure."""

import pytest

from rooms.domain.web_address import check_address, check_origin, is_protected


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://rooms.example.com", "https://rooms.example.com"),
        ("https://rooms.example.com/", "https://rooms.example.com"),
        ("https://[2001:db8::1]:8443", "https://[2001:db8::1]:8443"),
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://[::1]", "http://[::1]"),
        ("http://localhost:8080", "http://localhost:8080"),
    ],
)
def test_an_origin_has_no_path(text: str, origin: str) -> None:
    assert check_origin(text) == origin
    assert is_protected(text)


def test_an_address_stays_as_it_is() -> None:
    for text in ("https://id.example.com/realms/a", "https://id.example.com/"):
        assert check_address(text) == text
    assert is_protected("https://id.example.com/a?tenant=1")
    with pytest.raises(ValueError, match="query"):
        check_address("https://id.example.com/a?tenant=1")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rooms.example.com",
        "ftp://rooms.example.com",
        "http://rooms.example.com",
        "http://localhost.example.com",
        "http://127.0.0.1.example.com",
        "https://",
        "https://a:b@rooms.example.com",
        "https://rooms.example.com#x",
        "https://rooms.example.com:99999",
        "https://rooms.example.com:x",
        "https://rooms.example.com\n",
        "https://rooms.example.com/ x",
        "https://*.example.com",
        "https://a.example.com; x",
        "https://römer.example.com",
        "https://[::1",
        "javascript:alert(1)",
        "https://" + "a" * 2000,
    ],
)
def test_what_is_no_protected_address_is_refused(text: str) -> None:
    for check in (check_origin, check_address):
        with pytest.raises(ValueError, match=r"\w"):
            check(text)
    assert not is_protected(text)


def test_an_origin_with_a_path_is_refused() -> None:
    for text in ("https://rooms.example.com/console", "https://rooms.example.com?x=1"):
        with pytest.raises(ValueError, match="end after"):
            check_origin(text)
