"""Test that hiding secrets finds all that a simple search finds, in a bounded number of calls."""

import html
import json
import re
import sys
from base64 import b64encode
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import FrameType
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from delivery.push.escapes import left_out
from delivery.push.http.client import MAX_LOCATION
from delivery.push.http.connection import KEPT_BODY_BYTES
from delivery.push.redaction import HIDDEN, MAX_STEPS, hidden_texts, hide, readings, redact
from delivery.push.text_search import Steps
from rooms.domain.attempt import AttemptResult, ErrorClass
from rooms.domain.room import MAX_HEADER_BYTES

PREFIX = "HTTP 302, and redirects are not followed: "

# The simple search: one escape, one text and one place after the other.
SIMPLE_KINDS = (
    ("%", r"%(?P<code>[0-9a-fA-F]{2})|(?P<rest>%[0-9a-fA-F]?)\Z"),
    (
        "\\",
        (
            r"\\u(?P<code>[0-9a-fA-F]{4})|\\x(?P<byte>[0-9a-fA-F]{2})|\\U(?P<long>[0-9a-fA-F]{8})"
            r"|\\[ux]\{(?P<braced>[0-9a-fA-F]+)\}"
            r"|(?P<open>\\(?:[0-3][0-7]?|[4-7]))\Z|\\(?P<octal>[0-3][0-7]{0,2}|[4-7][0-7]?)"
            r"|(?P<rest>\\(?:u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|x[0-9a-fA-F]?"
            r"|[ux]\{[0-9a-fA-F]*)?)\Z|\\(?P<character>[^uUx])"
        ),
    ),
    (
        "&",
        (
            r"(?P<open>&#(?:[0-9]+|[xX][0-9a-fA-F]+))\Z"
            r"|&#(?P<number>[0-9]+);?|&#[xX](?P<code>[0-9a-fA-F]+);?"
            r"|(?P<entity>&(?:[A-Za-z][0-9A-Za-z]{1,15};|amp|AMP|lt|LT|gt|GT|quot|QUOT))"
            r"|(?P<rest>&(?:#[xX]?|[0-9A-Za-z]{0,16}))\Z"
        ),
    ),
)
SIMPLE_CSS = (
    r"(?P<open>\\[0-9a-fA-F]{1,5})\Z|\\(?P<css>[0-9a-fA-F]{1,6})(?:\r\n|[ \t\r\n\f])?"
    r"|(?P<rest>\\)\Z|\\(?P<plain>[^0-9a-fA-F\r\n\f])"
)
CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "b": "\b", "f": "\f"}


def simple_character(match: re.Match[str]) -> str | None:
    group = match.lastgroup
    assert group is not None
    base = {
        "code": 16,
        "byte": 16,
        "long": 16,
        "braced": 16,
        "octal": 8,
        "number": 10,
        "css": 16,
    }.get(group)
    if base is not None:
        number = int(match[group], base)
        return chr(number) if number <= sys.maxunicode else None
    if group == "plain":
        return match[group]
    if group == "character":
        return CONTROLS.get(match[group], match[group])
    if group == "entity":
        character = html.unescape(match[group])
        return character if len(character) == 1 else None
    return ""


def simple_decode(text: str, pattern: str) -> tuple[str, list[int], int]:
    parts: list[str] = []
    starts: list[int] = []
    after = 0
    for match in re.finditer(pattern, text, re.DOTALL):
        character = simple_character(match)
        if character is None:
            continue
        begin, end = match.span()
        parts += text[after:begin], character
        starts += [*range(after, begin), *[begin] * len(character)]
        after = end
        if not character:
            return "".join(parts), [*starts, begin], int(match.lastgroup == "open")
    return "".join([*parts, text[after:]]), [*starts, *range(after, len(text) + 1)], 0


def simple_readings(text: str) -> list[tuple[str, list[int], int]]:
    """Return also how many escapes at the end may have been whole."""
    found = [(text, list(range(len(text) + 1)), 0, 0)]
    for reading, starts, lacking, depth in found:  # which grows meanwhile
        for mark, pattern in SIMPLE_KINDS if depth < 3 else ():
            if mark in reading and len(found) < 20:
                decoded, places, is_open = simple_decode(reading, pattern)
                if all(decoded != other for other, *_ in found):
                    starting = [starts[place] for place in places]
                    found.append((decoded, starting, lacking + is_open, depth + 1))
    for reading, starts, lacking, depth in found.copy():
        if depth < 3 and re.search(r"\\[0-9a-fA-F]", reading):
            decoded, places, is_open = simple_decode(reading, SIMPLE_CSS)
            if all(decoded != other for other, *_ in found):
                starting = [starts[place] for place in places]
                found.append((decoded, starting, lacking + is_open, depth + 1))
    return [(reading, starts, lacking) for reading, starts, lacking, _ in found]


def simple_spans(found: str, texts: Sequence[str], shortest: int) -> Iterator[tuple[int, int]]:
    for reading, starts, lacking in simple_readings(found):
        least = max(1, shortest - lacking)
        for text in texts:
            for searched in {reading, reading.replace("+", " ") if " " in text else reading}:
                for begin in range(len(searched)):
                    if searched.startswith(text, begin):
                        yield starts[begin], starts[begin + len(text)]
                    elif len(searched) - begin >= least and text.startswith(searched[begin:]):
                        yield starts[begin], len(found)


def simple_hide(found: str, texts: Sequence[str], *, is_cut: bool) -> str:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(simple_spans(found, texts, 1 if is_cut else 8)):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    kept = pairwise([0, *(place for span in merged for place in span), len(found)])
    return "***".join(found[begin:end] for begin, end in list(kept)[::2])


PIECES = [
    *("%", "%2", "%25", "%41", "%5C", "%26", "%0a", "\\", "\\u", "\\u0061", "\\x61", "\\\\", "\\n"),
    *("&", "&amp;", "&#97;", "&#x", "&bogus;", "&lt;", "+", " ", "a", "b", "aa", "u0061", "amp;"),
    *("&#97", "&#x61", "&#", "&#0000000097;", "&lt", "&lta", "\\u{61}", "\\u{", "\\x{061}", "\\U"),
    *("\\U00000061", "\\U000", "\\141", "\\14", "\\1", "\\541", "}", "{61}", "&Lowbar9;", "x61"),
    *(
        "\\61 ",
        "\\000061",
        "\\-",
        "\\6a\r\n",
        "25",
        "#98;",
        "aaaaaaaa",
        "abababab",
        "\\u0430",
        "\u00fc",
    ),
]
ESCAPED = (
    *("%{:02x}", "%25{:02x}", "\\u{:04x}", "\\x{:02x}", "&#{};", "&amp;#{};", "\\\\x{:02x}"),
    *("&#{}", "&#x{:x}", "&#{:09}", "\\u{{{:x}}}", "\\U{:08x}", "\\{:o}", "\\{:03o}", "&amp;#{}"),
    *("\\{:x} ", "\\{:06x}", "\\{:x}"),
)


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Return an answer and configured values; mostly it repeats one of them, also cut off."""
    piece = st.sampled_from(["a", "b", " ", "+", "ab", "a b", "%41", "25", "amp;", "u0061", "&"])
    value = st.lists(piece, min_size=5, max_size=12).map("".join)
    values = draw(st.lists(value, min_size=1, max_size=14))
    noise = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
    repeated = "".join(
        how.format(ord(character)) if how else character
        for character in draw(st.sampled_from(values))
        for how in [draw(st.sampled_from(["", "", "", *ESCAPED]))]
    )
    cut = draw(st.integers(0, len(repeated)) | st.just(len(repeated)))
    return f"{draw(noise)}{repeated[:cut]}{draw(noise)}", values


@given(answer=answers(), is_cut=st.booleans())
@example(answer=("x\\u0061aaaaaaa", ["aaaaaaaa"]), is_cut=False)
@example(answer=("\\u0041bcdef%67h", ["u0041bcdefgh"]), is_cut=False)
def test_all_is_hidden_that_a_simple_search_finds(
    *, answer: tuple[str, list[str]], is_cut: bool
) -> None:
    found, values = answer
    texts = hidden_texts(values)
    kept = hide(found, texts, Steps(MAX_STEPS), is_cut=is_cut)
    assert kept == simple_hide(found, texts, is_cut=is_cut)


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_the_readings_are_those_of_a_simple_decoder(text: str) -> None:
    found = [(reading, list(starts), left_out(starts)) for reading, starts in readings(text)]
    assert found == simple_readings(text)
    for _, starts in readings(text):
        assert list(starts[1:]) == list(starts)[1:]
        with pytest.raises(IndexError):
            starts[len(starts)]


ALL_READINGS = "%2561\\u0026#97;\\\\x61&amp;amp;%255c"
# Each of the 40 orders in which three kinds of escapes are decoded gives another text.
ALL_ORDERS = r"%252561\x5cx5cx61\x2526#97;&#37;26#97;%5cx26#97;&#92;x26#97;%26#38;#97;\x26#38;#97;&#38;#38;#97; "
CONFIGURED = {
    "words that begin alike": [" ".join("a" * length for length in range(8, 108))],
    "words that end otherwise": [" ".join("a" * length + "b" for length in range(25, 125))],
    "words of many beginnings": [
        " ".join(chr(33 + at % 90) + "a" * 30 + str(at) for at in range(200))
    ],
    "one long word": ["a" * (MAX_HEADER_BYTES - 100) + "b"],
    "few that almost begin alike": ["aaaa" + chr(98 + at) + "aaa" for at in range(10)],
    "words with spaces": ["a a a a " + "a " * length + "c" for length in range(70)],
    "credentials": [
        "Basic " + b64encode(b"a" * 1400 + b":" + b"a" * length + b"b" * 1400).decode()
        for length in (1, 2)
    ],
}
ANSWERED = {
    "one letter": "a" * MAX_LOCATION,
    "all readings": ALL_READINGS + "a" * MAX_LOCATION,
    "all readings of a form": ALL_READINGS + "a+" * MAX_LOCATION,
    "all orders": ALL_ORDERS + "\\61 " * MAX_LOCATION,
    "one letter in two bytes": "\\u0430%2561&amp;" + "a" * MAX_LOCATION,
    "escapes of all kinds": "%25&amp;\\\\" * MAX_LOCATION,
    "escapes of escapes": "%2525" * MAX_LOCATION,
    "escapes of one letter": "%61" * MAX_LOCATION,
    "escapes without an end": "&#97\\141" * MAX_LOCATION,
    "long escapes": f"&#{'0' * 40}97\\u{{{'0' * 40}61}}" * MAX_LOCATION,
    "different long escapes": "".join(f"&#{at:040}" for at in range(MAX_LOCATION)),
    "one long escape": "&#" + "0" * MAX_LOCATION,
    "marks only": "&" * MAX_LOCATION,
    "backslashes": "\\" * MAX_LOCATION,
    "almost a beginning": "aaaaaaa%" * MAX_LOCATION,
}


def calls_of_redact(result: AttemptResult, texts: tuple[str, ...]) -> tuple[int, AttemptResult]:
    """Return how many functions of Python and C one call of `redact` calls, and its result."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        if event in {"call", "c_call"}:
            calls += 1
            if calls > 20 * MAX_STEPS:
                raise AssertionError("redact makes too many calls")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        found = redact(result, texts)
    finally:
        sys.setprofile(before)
    return calls, found


@pytest.mark.parametrize("values", CONFIGURED.values(), ids=CONFIGURED.keys())
@pytest.mark.parametrize("answer", ANSWERED.values(), ids=ANSWERED.keys())
def test_the_work_for_an_answer_is_bounded(values: list[str], answer: str) -> None:
    assert sum(map(len, values)) <= MAX_HEADER_BYTES
    body = answer[:KEPT_BODY_BYTES].encode()
    detail = PREFIX + answer[:MAX_LOCATION]
    texts = hidden_texts(values)
    for result in (
        AttemptResult(200, None, "", body, None, 1.0),
        AttemptResult(302, ErrorClass.REDIRECT, detail, body, None, 1.0),
    ):
        calls, _ = calls_of_redact(result, texts)
        assert calls <= 2 * MAX_STEPS, "a comparison is three steps, and four calls"


def test_escapes_of_css_are_decoded_however_many_readings_there_are() -> None:
    echo = "".join(f"\\{ord(character):x} " for character in "Bearer t0ken")
    assert len(list(readings(ALL_ORDERS))) == 40
    found = hide(f"{ALL_ORDERS}{echo}", ("Bearer t0ken",), Steps(MAX_STEPS), is_cut=False)
    assert found == f"{ALL_ORDERS}{HIDDEN}"


def test_beyond_the_bound_the_whole_text_is_hidden() -> None:
    texts = hidden_texts(CONFIGURED["words that begin alike"])
    answer = ANSWERED["all readings"][:KEPT_BODY_BYTES]
    result = AttemptResult(302, ErrorClass.REDIRECT, f"{PREFIX}{answer}", answer.encode(), None, 1)
    found = redact(result, texts)
    assert (found.detail, found.body_head) == (HIDDEN, HIDDEN.encode())


TOKENS = [f"Bearer t0ken-{number:02}-{'x' * 20}" for number in range(50)]
LINE = 'a "b" <c href="http://x.test/?d=%20e&f=g">+h</c>\n'
ORDINARY = {
    "JSON": json.dumps({"error": LINE * 30}),
    "JSON in JSON": json.dumps({"error": json.dumps({"error": LINE * 30})}),
    "HTML in JSON": json.dumps({"error": html.escape(LINE * 30)}),
    "JSON in HTML": html.escape(json.dumps({"error": LINE * 30})),
    "other letters in JSON": json.dumps({"error": "\u0436\u0430\u043b\u044c " * 80}),
    "spaces in HTML": "<td>&nbsp;" * 120,
    "URL in a URL": "https://a.test/?to=" + quote("https://b.test/?to=" + quote(LINE * 20)),
    "form": quote_plus(LINE * 30),
}


@pytest.mark.parametrize("values", [TOKENS[:1], TOKENS], ids=["one header", "50 headers"])
@pytest.mark.parametrize("answer", ORDINARY.values(), ids=ORDINARY.keys())
def test_ordinary_answers_stay_within_the_bound(values: list[str], answer: str) -> None:
    secret = values[-1]
    body = f"{secret} {answer}"[: KEPT_BODY_BYTES - 1]
    result = AttemptResult(500, ErrorClass.STATUS, "", body.encode(), None, 1.0)
    assert redact(result, hidden_texts(values)).body_head.decode() == body.replace(secret, HIDDEN)


@pytest.mark.parametrize("values", [TOKENS[:1], TOKENS], ids=["one header", "50 headers"])
@pytest.mark.parametrize("parameters", [ORDINARY["URL in a URL"], ORDINARY["form"]])
def test_ordinary_redirects_stay_within_the_bound(values: list[str], parameters: str) -> None:
    location = f"https://a.test/?{quote(values[-1])}&{parameters}"[: MAX_LOCATION - len(PREFIX) - 1]
    body = f'<a href="{html.escape(location[:300])}">moved</a>'.encode()
    result = AttemptResult(302, ErrorClass.REDIRECT, PREFIX + location, body, None, 1.0)
    found = redact(result, hidden_texts(values))
    assert found.detail.startswith(f"{PREFIX}https://a.test/?***&{parameters[:50]}")
    assert found.body_head.startswith(b'<a href="https://a.test/?***&amp;')
