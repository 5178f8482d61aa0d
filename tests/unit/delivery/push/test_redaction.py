"""Test that values of configured headers are hidden in answers that repeat them."""

import html
import json
import re
import time
from base64 import b64encode
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.push.http.client import MAX_LOCATION
from delivery.push.http.connection import KEPT_BODY_BYTES
from delivery.push.redaction import MAX_REDIRECT, MIN_LENGTH, hidden_texts, readings, redact
from rooms.domain.attempt import AttemptResult, ErrorClass

TEXTS = hidden_texts(["Bearer s3cret-token-1", "short", "Basic dXNlcjpwYXNz"])
SECRET = 'Tok/en+a"b\\c<d>&e=f'


def result(body: bytes, detail: str = "") -> AttemptResult:
    return AttemptResult(500, ErrorClass.STATUS, detail, body, None, 1.0)


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        (b'{"Authorization": "Bearer s3cret-token-1"}', b'{"Authorization": "***"}'),
        (b"token s3cret-token-1, dXNlcjpwYXNz", b"token ***, ***"),
        (b"cut Bearer s3cret-tok", b"cut ***"),
        (b"cut s3cret-tok", b"cut ***"),
        (b"short Bearer \xff\x00", b"short Bearer \xff\x00"),
        (b"", b""),
    ],
)
def test_what_an_endpoint_repeats_is_hidden(body: bytes, kept: bytes) -> None:
    found = redact(result(body, f"moved to /?t={body.decode('latin-1')}"), TEXTS)
    assert found.body_head == kept
    assert "s3cret" not in found.detail
    assert (found.status, found.error, found.latency_ms) == (500, ErrorClass.STATUS, 1.0)


def test_without_long_values_the_result_is_the_same_one() -> None:
    one = result(b"a body")
    assert redact(one, hidden_texts(["short"])) is one
    assert redact(one, ()) is one


@given(
    st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=MIN_LENGTH, max_size=40),
    st.binary(max_size=30),
    st.binary(max_size=30),
)
def test_no_value_is_left_wherever_it_is(value: str, before: bytes, after: bytes) -> None:
    found = redact(result(before + value.encode() + after), hidden_texts([value]))
    assert value.encode() not in found.body_head


def kept(text: str, *values: str) -> str:
    return redact(result(text.encode("latin-1")), hidden_texts(values)).body_head.decode("latin-1")


def as_unicode(text: str) -> str:
    return "".join(f"\\u{ord(character):04X}" for character in text)


ECHOES = {
    "JSON": json.dumps(SECRET)[1:-1],
    "JSON of PHP": json.dumps(SECRET)[1:-1].replace("/", "\\/"),
    "JSON in JSON": json.dumps(json.dumps(SECRET)[1:-1])[1:-1],
    "JSON with some escapes": json.dumps(SECRET)[1:-1].replace("en", as_unicode("en")),
    "escaped as unicode": as_unicode(SECRET),
    "as bytes": "".join(f"\\x{ord(character):02x}" for character in SECRET),
    "URL": quote(SECRET, safe=""),
    "URL in lower case": quote(SECRET, safe="").replace("%2F", "%2f"),
    "form": quote_plus(SECRET),
    "URL in a URL": quote(quote(SECRET, safe=""), safe=""),
    "URL in JSON in JSON": json.dumps(json.dumps(quote(SECRET))[1:-1])[1:-1],
    "HTML": html.escape(SECRET),
    "HTML in numbers": "".join(f"&#{ord(character)};" for character in SECRET),
    "HTML in hexadecimal": "".join(f"&#x{ord(character):X};" for character in SECRET),
    "HTML in numbers with zeros": "".join(f"&#{ord(character):09};" for character in SECRET),
    "HTML in hexadecimal with zeros": "".join(f"&#x{ord(character):08X};" for character in SECRET),
    "braces": "".join(f"\\u{{{ord(character):x}}}" for character in SECRET),
    "braces with zeros": "".join(f"\\u{{{ord(character):06X}}}" for character in SECRET),
    "braces of bytes": "".join(f"\\x{{{ord(character):x}}}" for character in SECRET),
    "32 bits": "".join(f"\\U{ord(character):08x}" for character in SECRET),
    "JSON in HTML": html.escape(json.dumps(SECRET)[1:-1]),
    "HTML in HTML in HTML": html.escape(html.escape(html.escape(SECRET))),
    "HTML in JSON": json.dumps(html.escape(SECRET))[1:-1],
}


@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES.keys())
@pytest.mark.parametrize(
    "around", [("[", "]"), ("100% [", "]"), ("&amp; \\n [", "] &y"), ("%2525 \\\\\\\\n [", "]")]
)
def test_an_escaped_value_is_hidden(echo: str, around: tuple[str, str]) -> None:
    assert kept(f"{around[0]}{echo}{around[1]}", SECRET) == f"{around[0]}***{around[1]}"


@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES.keys())
def test_an_escaped_value_is_hidden_wherever_the_answer_is_cut(echo: str) -> None:
    """All but the beginning of the escape of its first character."""
    first = re.match(r"[^\\&]|\\[ux]{.+?}|\\U.{8}|\\u....|\\x..|&[^;]+;", echo)
    assert first
    for length in range(1, len(echo)):
        filler = "." * (KEPT_BODY_BYTES - length)
        expected = "***" if length >= first.end() else echo[:length]
        assert kept(filler + echo[:length], SECRET) == filler + expected


OPEN_ECHOES = {
    "octal": "".join(f"\\{ord(character):o}" for character in SECRET),
    "octal with zeros": "".join(f"\\{ord(character):03o}" for character in SECRET),
    "CSS": "".join(f"\\{ord(character):x} " for character in SECRET),
    "CSS with line ends": "".join(f"\\{ord(character):X}\r\n" for character in SECRET),
    "CSS with zeros": "".join(f"\\{ord(character):06x}" for character in SECRET),
    "CSS in JSON": json.dumps("".join(f"\\{ord(one):x} " for one in SECRET))[1:-1],
    "CSS in part": "".join(
        one if one.isalnum() else f"\\{one}" if one in "/." else f"\\{ord(one):06x}"
        for one in SECRET
    ),
    "octal in JSON": json.dumps("".join(f"\\{ord(character):o}" for character in SECRET))[1:-1],
    "numbers": "".join(f"&#{ord(character)}" for character in SECRET),
    "numbers with zeros": "".join(f"&#{ord(character):012}" for character in SECRET),
    "hexadecimal": "".join(f"&#X{ord(character):x}" for character in SECRET),
    "hexadecimal in JSON": json.dumps("".join(f"&#x{ord(one):x}" for one in SECRET))[1:-1],
    "names": html.escape(SECRET).replace("&quot;", "&quot").replace("&lt;", "&lt"),
}
"""Escapes without an end of their own."""


@pytest.mark.parametrize("echo", OPEN_ECHOES.values(), ids=OPEN_ECHOES.keys())
@pytest.mark.parametrize(
    "around", [("[", "]"), ("", ""), ("&#91;&amp;", "\\n"), ("\\133", "&#x5D;")]
)
def test_a_value_in_escapes_without_an_end_is_hidden(echo: str, around: tuple[str, str]) -> None:
    assert kept(f"{around[0]}{echo}{around[1]}", SECRET) == f"{around[0]}***{around[1]}"
    word = "".join(f"\\{ord(character):o}" for character in "8letters")
    assert kept(f"{around[0]}{word}{around[1]}", "8letters") == f"{around[0]}***{around[1]}"


@pytest.mark.parametrize("echo", OPEN_ECHOES.values(), ids=OPEN_ECHOES.keys())
def test_a_value_in_escapes_without_an_end_is_hidden_wherever_it_is_cut(echo: str) -> None:
    """All but the first character, whose escape may go on."""
    first = re.match(r"(?:[^\\&]|\\+(?:[0-9a-f]{6}|[0-9A-F]{2}\s+|[0-7]{3})|&#[^\\&]+)", echo)
    assert first
    for length in range(first.end() + 1, len(echo)):
        filler = "." * (KEPT_BODY_BYTES - length)
        assert kept(filler + echo[:length], SECRET) == f"{filler}***"


@pytest.mark.parametrize("last", ["&#49", "&#x31", "&#00000049", "\\61", "\\061", "&#92;61"])
def test_a_short_value_is_hidden_that_ends_in_an_escape_without_an_end(last: str) -> None:
    assert kept(f"is token-{last}", "token-x1") == f"is token-{last}"
    assert kept(f"is token-x{last}", "token-x1") == "is ***"
    assert kept(f"is s3cret-token-{last[:-1]}", "s3cret-token-1") == "is ***"


@pytest.mark.parametrize("escape", ["&#{}83;", "&#{}83", "&#x{}53;", "\\u{{{}53}}", "\\x{{{}53}}"])
def test_any_number_of_zeros_is_read_once(escape: str) -> None:
    echo = "".join(escape.format("0" * 100) for _ in range(8))
    assert kept(f"{echo}]", "S" * 8).startswith("***")
    zeros = escape.format("0" * 1_000_000).rstrip("3;}") + "\\&%"
    begin = time.process_time()
    for _ in readings(zeros * 2):
        pass
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    "text",
    ["&#1114112;", "&#99999999", "&#x110000;", "\\u{110000}", "\\U00110000", "\\Users", "\\u{}x"],
)
def test_what_names_no_character_is_left(text: str) -> None:
    assert [reading for reading, _ in readings(f"{text} ")] == [f"{text} "]


def test_the_longest_of_many_words_are_hidden() -> None:
    words = [f"word{number:04}" for number in range(500)]
    texts = hidden_texts([" ".join(words), "the-longest-word"])
    assert len(texts) == 101, "the value, and 100 words of all"
    assert texts[0] == " ".join(words)
    assert "the-longest-word" in texts


def test_words_of_a_form_are_hidden() -> None:
    value = "ab cd ef gh ij"
    assert kept(f"x={quote_plus(value)}&y", value) == "x=***&y"


@pytest.mark.parametrize(
    "credentials", ["user:pass-word", "user:a:pass", "us\u00e9r:passw\u00f6rd-1"]
)
def test_basic_credentials_are_hidden_in_clear_text(credentials: str) -> None:
    value = f"Basic {b64encode(credentials.encode()).decode()}"
    body = f"no user {credentials}, {value}".encode()
    found = redact(result(body), hidden_texts([value])).body_head
    assert found == b"no user ***, ***"
    password = credentials.partition(":")[2]
    if len(password) >= MIN_LENGTH:
        assert (
            password.encode()
            not in redact(result(f"[{password}]".encode()), hidden_texts([value])).body_head
        )


@pytest.mark.parametrize(
    ("value", "echo"),
    [
        ("one+two three", "k=one%2Btwo+three&x=1"),
        (f"Basic {b64encode(b'svc:blue +horse 77!').decode()}", "password=blue+%2Bhorse+77%21&x=1"),
    ],
)
def test_a_value_with_a_plus_and_a_space_is_hidden_in_a_form(value: str, echo: str) -> None:
    found = redact(result(echo.encode()), hidden_texts([value])).body_head
    assert found.startswith(echo.split("=", maxsplit=1)[0].encode() + b"=***")
    assert found.endswith(b"&x=1")


@pytest.mark.parametrize("value", ["Basic !!!", "Basic", "basic ====", "Basic w6k"])
def test_what_is_no_basic_credentials_is_hidden_as_it_is(value: str) -> None:
    assert all(text in value for text in hidden_texts([value]))


def redirect(location: str) -> AttemptResult:
    detail = f"HTTP 302, and redirects are not followed: {location[:MAX_LOCATION]}"
    return AttemptResult(302, ErrorClass.REDIRECT, detail, b"", None, 1.0)


@pytest.mark.parametrize("padding", [0, 150, 190, 199, 230, MAX_LOCATION - 4, MAX_LOCATION - 1])
def test_a_value_in_a_redirect_is_hidden_before_it_is_cut(padding: int) -> None:
    to = "https://a.test/?" + "p" * padding
    for secret in ("s3cret-token-1", "s3cret-" + "x" * 4000):
        found = redact(redirect(f"{to}{secret}"), hidden_texts([f"Bearer {secret}"]))
        assert "s3" not in found.detail
        assert len(found.detail) <= MAX_REDIRECT + 1
        assert found.detail.startswith("HTTP 302, and redirects are not followed: https://a.test/")


def test_a_long_redirect_is_cut_without_secrets_too() -> None:
    assert len(redact(redirect("x" * 3000), ()).detail) == MAX_REDIRECT + 1


@given(
    st.lists(
        st.sampled_from(["%25", "\\\\", "&amp;", "\\u0025", "%5Cx26", "&#92;", "x"]), max_size=300
    )
)
def test_the_readings_of_a_text_are_few(pieces: list[str]) -> None:
    text = "".join(pieces)
    found = list(readings(text))
    assert len(found) <= 40
    for reading, starts in found:
        assert len(starts) == len(reading) + 1
        assert list(starts) == sorted(starts)
        assert starts[-1] <= len(text)
