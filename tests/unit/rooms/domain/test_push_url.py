"""Push URLs: what is taken, in which form, and what is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.domain.push_url import MAX_URL, PushUrl, ends_in_number


@pytest.mark.parametrize(
    ("url", "text", "authority"),
    [
        ("http://example.com", "http://example.com/", "example.com"),
        ("HTTPS://Example.COM/Path?Q=1", "https://example.com/Path?Q=1", "example.com"),
        ("http://example.com:80/", "http://example.com/", "example.com"),
        ("https://example.com:80/", "https://example.com:80/", "example.com:80"),
        ("https://example.com:443?x=1", "https://example.com/?x=1", "example.com"),
        ("http://example.com./x", "http://example.com/x", "example.com"),
        (
            "http://bücher.example/ä?ö=ü",
            "http://xn--bcher-kva.example/%C3%A4?%C3%B6=%C3%BC",
            "xn--bcher-kva.example",
        ),
        ("http://example.com/%41%zz<>", "http://example.com/%41%zz%3C%3E", "example.com"),
        ("http://example.com/a?b?c=/@:", "http://example.com/a?b?c=/@:", "example.com"),
        ("http://web_hook:8080/", "http://web_hook:8080/", "web_hook:8080"),
        ("http://93.184.216.34:8080/", "http://93.184.216.34:8080/", "93.184.216.34:8080"),
        ("http://[2606:2800:220:1::0]/", "http://[2606:2800:220:1::]/", "[2606:2800:220:1::]"),
        ("http://[::FFFF:1.2.3.4]:8080/", "http://[::ffff:102:304]:8080/", "[::ffff:102:304]:8080"),
        ("http://127.0.0.1./", "http://127.0.0.1/", "127.0.0.1"),
        ("http://\uff11\uff12\uff17.0.0.1/", "http://127.0.0.1/", "127.0.0.1"),
    ],
)
def test_url_is_taken_apart(url: str, text: str, authority: str) -> None:
    target = PushUrl.parse(url)
    assert (str(target), target.authority) == (text, authority)
    assert PushUrl.parse(str(target)) == target


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("", "http://"),
        ("example.com", "http://"),
        ("//example.com", "http://"),
        ("ftp://example.com/", "http://"),
        ("file:///etc/passwd", "http://"),
        ("http:/example.com", "http://"),
        ("http://", "no host"),
        ("http:///path", "no host"),
        ("http://:80/", "no host"),
        ("http://user@example.com/", "user name"),
        ("http://user:secret@example.com/", "user name"),
        ("http://example.com@127.0.0.1/", "user name"),
        ("http://example.com/#x", "fragment"),
        ("http://example.com#@127.0.0.1/", "fragment"),
        ("http://example.com\\@127.0.0.1/", "backslash"),
        (" http://example.com/", "white space"),
        ("http://example.com/a b", "white space"),
        ("http://exa\tmple.com/", "white space"),
        ("http://example.com/\r\nX: y", "white space"),
        ("http://example.com/\u2028", "white space"),
        ("http://example.com/\ud800", "control"),
        ("http://exam\u200bple.com/", "control"),
        ("http://example.com\x00/", "control"),
        ("http://example.com:/", "port"),
        ("http://example.com:0/", "port"),
        ("http://example.com:65536/", "port"),
        ("http://example.com:-1/", "port"),
        ("http://example.com:8_0/", "port"),
        ("http://example.com:\u0668\u0660/", "port"),
        ("http://example.com:80:80/", "port"),
        ("http://::1/", "brackets"),
        ("http://[::1/", "brackets"),
        ("http://[]/", "IPv6"),
        ("http://[v1.x]/", "IPv6"),
        ("http://[127.0.0.1]/", "IPv6"),
        ("http://[fe80::1%25eth0]/", "zone"),
        ("http://[fe80::1%eth0]/", "zone"),
        ("http://[::1]x/", "brackets"),
        ("http://2130706433/", "four decimal"),
        ("http://0x7f.1/", "four decimal"),
        ("http://0177.0.0.1/", "four decimal"),
        ("http://127.1/", "four decimal"),
        ("http://127.0.0.01/", "four decimal"),
        ("http://0x7f000001/", "four decimal"),
        ("http://1.2.3.4.5/", "four decimal"),
        ("http://256.0.0.1/", "four decimal"),
        ("http://example.0x/", "four decimal"),
        ("http://%31%32%37.0.0.1/", "domain name"),
        ("http://a..b/", "domain name"),
        ("http://example.com../", "domain name"),
        ("http://-a.example/", "domain name"),
        ("http://a,b/", "domain name"),
        ("http://" + "a" * 64 + ".example/", "domain name"),
        ("http://" + "a." * 127 + "example/", "domain name"),
        ("http://a\u2100b/", "domain name"),
        ("http://example.com/" + "a" * MAX_URL, "longer"),
        ("http://example.com/" + "ä" * 1000, "longer"),
    ],
)
def test_what_is_wrong_is_named(url: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        PushUrl.parse(url)


@given(st.text(max_size=60) | st.from_regex(r"https?://[^/]{0,30}(/.{0,20})?", fullmatch=True))
def test_nothing_gets_into_a_request_line(url: str) -> None:
    try:
        target = PushUrl.parse(url)
    except ValueError:
        return
    assert all("!" <= char <= "~" for char in target.path + target.authority)
    assert PushUrl.parse(str(target)) == target


@pytest.mark.parametrize("path", ["", "x", "/a b", "/\r\n", "/ä"])
def test_target_made_by_hand_is_checked_too(path: str) -> None:
    with pytest.raises(ValueError, match="printable"):
        PushUrl(scheme="http", host="example.com", port=80, path=path)


@pytest.mark.parametrize(
    ("host", "number"),
    [
        ("127.1", True),
        ("0x7f.0X1", True),
        ("1", True),
        ("a.1.", True),
        ("a1", False),
        ("1.a", False),
    ],
)
def test_numbers_are_seen(host: str, number: bool) -> None:  # noqa: FBT001 an expected value
    assert ends_in_number(host) is number
