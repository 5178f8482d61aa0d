"""Hide the values of configured headers in what an endpoint answers.

Some endpoints repeat the request, as it came or escaped: in JSON, in HTML, in a URL, or in several
of these. A text is searched as it is and with its escapes decoded, so that every mix of escaped
and plain characters is found. What is hidden is the stretch of the original text.
"""

import html
import re
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from delivery.push.http.client import MAX_LOCATION
from delivery.push.http.connection import KEPT_BODY_BYTES
from rooms.domain.attempt import AttemptResult, ErrorClass

HIDDEN: Final = "***"
MIN_LENGTH: Final = 8
"""Shorter values and words are no secrets, and may be part of any text."""
MAX_REDIRECT: Final = 240
"""Most characters that are kept of the description of a redirect."""
_MAX_DEPTH: Final = 3
"""Escapes within escapes that are decoded, such as a URL in JSON in JSON."""
_MAX_READINGS: Final = 20
"""The number of ways to decode three kinds of escapes up to three times, in whatever order."""
_MAX_WORDS: Final = 100
"""The longest words of all values that are searched beside the values."""
_BASIC: Final = "basic "
# `rest`: the beginning of an escape at which the text ends. It stands for nothing.
_URL: Final = r"%(?P<code>[0-9a-fA-F]{2})|(?P<rest>%[0-9a-fA-F]?)\Z"
_STRING: Final = (
    r"\\u(?P<code>[0-9a-fA-F]{4})|\\x(?P<byte>[0-9a-fA-F]{2})|\\(?P<character>[^ux])"
    r"|(?P<rest>\\(?:u[0-9a-fA-F]{0,3}|x[0-9a-fA-F]?)?)\Z"
)
_HTML: Final = (
    r"(?P<entity>&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z]{2,8});)"
    r"|(?P<rest>&#?[0-9A-Za-z]{0,8})\Z"
)
_KINDS: Final = tuple(
    (mark, re.compile(pattern, re.DOTALL))
    for mark, pattern in (("%", _URL), ("\\", _STRING), ("&", _HTML))
)
"""The escapes of URLs, of strings in JSON and programs, and of HTML, by the mark of each."""
_CONTROLS: Final = {"t": "\t", "n": "\n", "r": "\r", "b": "\b", "f": "\f"}


def hidden_texts(values: Iterable[str]) -> tuple[str, ...]:
    """Return what to hide: long values, and long words of them, such as the token of a scheme.

    Of Basic credentials also the user and password in clear text, and the password.
    """
    found: set[str] = set()
    words: set[str] = set()
    for value in values:
        found.add(value)
        words.update(value.split())
        if value[: len(_BASIC)].lower() == _BASIC:
            found.update(_basic_credentials(value[len(_BASIC) :].strip()))
    found.update(_longest_first(words)[:_MAX_WORDS])
    return tuple(_longest_first(text for text in found if len(text) >= MIN_LENGTH))


def _longest_first(texts: Iterable[str]) -> list[str]:
    return sorted(texts, key=lambda text: (-len(text), text))


def _basic_credentials(text: str) -> Iterator[str]:
    try:
        credentials = b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (Base64Error, ValueError):
        return
    # As bytes of a body, and as its escapes name the characters.
    for encoding in ("latin-1", "utf-8"):
        clear = credentials.decode(encoding, "replace")
        yield clear
        yield clear.partition(":")[2]


def redact(result: AttemptResult, texts: Sequence[str]) -> AttemptResult:
    """Return the result with `***` in place of these texts, also of one that is cut off."""
    detail, body = result.detail, result.body_head
    if texts and (detail or body):
        detail = hide(detail, texts, is_cut=len(detail) >= MAX_LOCATION)
        is_cut = len(body) >= KEPT_BODY_BYTES
        body = hide(body.decode("latin-1"), texts, is_cut=is_cut).encode("latin-1")
    if result.error is ErrorClass.REDIRECT and len(detail) > MAX_REDIRECT:
        # Afterwards: what is cut in the middle of a value would be no such value any more.
        detail = f"{detail[:MAX_REDIRECT]}…"
    if detail == result.detail and body == result.body_head:
        return result
    return replace(result, detail=detail, body_head=body)


def hide(found: str, texts: Sequence[str], *, is_cut: bool) -> str:
    """Return `found` with `***` in place of these texts.

    At its end also in place of the beginning of one; `is_cut`: of the shortest beginning.
    """
    min_length = 1 if is_cut else MIN_LENGTH
    spans = sorted(
        (starts[begin], len(found) if end is None else starts[end])
        for reading, starts in readings(found)
        for begin, end in _spans(reading, texts, min_length)
    )
    if not spans:
        return found
    merged = [spans[0]]
    for begin, end in spans[1:]:
        if begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    kept = pairwise([0, *(place for span in merged for place in span), len(found)])
    return HIDDEN.join(found[begin:end] for begin, end in list(kept)[::2])


def readings(text: str) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield the text as it is, and with escapes decoded, with the place of each character.

    The places are those in the text as it is; a last one is the end. Each kind of escape is
    decoded by itself: what is an escape in JSON is none in HTML.
    """
    found: list[tuple[str, Sequence[int], int]] = [(text, range(len(text) + 1), 0)]
    for reading, starts, depth in found:  # which grows meanwhile
        yield reading, starts
        if depth == _MAX_DEPTH:
            continue
        for mark, pattern in _KINDS:
            if mark not in reading or len(found) == _MAX_READINGS:
                continue
            decoded, places = _decode(reading, pattern)
            if all(decoded != other for other, _, _ in found):
                found.append((decoded, [starts[place] for place in places], depth + 1))


def _decode(text: str, pattern: re.Pattern[str]) -> tuple[str, list[int]]:
    """Decode the escapes of a text; return also where each character was, and the end."""
    parts: list[str] = []
    starts: list[int] = []
    after = 0
    for match in pattern.finditer(text):
        character = _character(match)
        if character is None:
            continue
        begin, end = match.span()
        parts += text[after:begin], character
        starts += range(after, begin)
        starts += [begin] * len(character)
        after = end
        if not character:
            return "".join(parts), [*starts, begin]
    parts.append(text[after:])
    return "".join(parts), [*starts, *range(after, len(text) + 1)]


def _character(match: re.Match[str]) -> str | None:
    """Return the character of an escape; empty: it is cut off; None: it is none."""
    match match.lastgroup:
        case "code" | "byte":
            return chr(int(match[match.lastgroup], 16))
        case "character":
            return _CONTROLS.get(match["character"], match["character"])
        case "entity":
            character = html.unescape(match["entity"])
            return character if len(character) == 1 else None
        case _:
            return ""


def _spans(found: str, texts: Sequence[str], min_length: int) -> Iterator[tuple[int, int | None]]:
    """Yield where texts begin and end; None: one that is cut off, to the end."""
    spaced = found.replace("+", " ")  # as forms write it
    for text in texts:
        for searched in {found, spaced if " " in text else found}:
            begin = searched.find(text)
            while begin >= 0:
                yield begin, begin + len(text)
                begin = searched.find(text, begin + 1)
            if (cut_at := _find_cut(searched, text, min_length)) is not None:
                yield cut_at, None


def _find_cut(found: str, text: str, min_length: int) -> int | None:
    """Return where the longest beginning of `text` begins with which `found` ends."""
    first = text[:min_length]
    begin = found.find(first, max(0, len(found) - len(text) + 1))
    while begin >= 0:
        if text.startswith(found[begin:]):
            return begin
        begin = found.find(first, begin + 1)
    return None
