"""Hide the values of configured headers in what an endpoint answers.

Some endpoints repeat the request, as it came or escaped: in JSON, in HTML, in a URL, in CSS, or in
several of these. A text is searched as it is and with its escapes decoded, so that every mix of
escaped and plain characters is found. What is hidden is the stretch of the original text.

This is done in the event loop of a worker. So the work for one result has a bound, and beyond it
the whole text is hidden.
"""

from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Final

from delivery.push.escapes import CSS, KINDS, left_out
from delivery.push.http.client import MAX_LOCATION
from delivery.push.http.connection import KEPT_BODY_BYTES
from delivery.push.text_search import BEGINNING_LENGTH, StepLimitError, Steps, TextSearch
from rooms.domain.attempt import AttemptResult, ErrorClass

HIDDEN: Final = "***"
MIN_LENGTH: Final = BEGINNING_LENGTH
"""Shorter values and words are no secrets, and may be part of any text."""
MAX_REDIRECT: Final = 240
"""Most characters that are kept of the description of a redirect."""
MAX_STEPS: Final = 16_000
"""Most steps for one result."""
_READING_STEPS: Final = 60
_ESCAPE_STEPS: Final = 4
"""For each character that may begin an escape: it is looked at, and its place is kept."""
_MAX_DEPTH: Final = 3
"""Escapes within escapes that are decoded, such as a URL in JSON in JSON."""
_MAX_READINGS: Final = 40
"""The number of ways to decode three kinds of escapes up to three times, one after the other."""
_MAX_WORDS: Final = 100
"""The longest words of all values that are searched beside the values."""
_BASIC: Final = "basic "


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
    found.update(_longest_first(word for word in words if len(word) >= MIN_LENGTH)[:_MAX_WORDS])
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


def redact(result: AttemptResult, texts: tuple[str, ...]) -> AttemptResult:
    """Return the result with `***` in place of these texts, also of one that is cut off.

    `texts` are those of `hidden_texts`.
    """
    detail, body = result.detail, result.body_head
    if texts and (detail or body):
        steps = Steps(MAX_STEPS)
        detail = hide(detail, texts, steps, is_cut=len(detail) >= MAX_LOCATION)
        is_cut = len(body) >= KEPT_BODY_BYTES
        body = hide(body.decode("latin-1"), texts, steps, is_cut=is_cut).encode("latin-1")
    if result.error is ErrorClass.REDIRECT and len(detail) > MAX_REDIRECT:
        # Afterwards: what is cut in the middle of a value would be no such value any more.
        detail = f"{detail[:MAX_REDIRECT]}…"
    if detail == result.detail and body == result.body_head:
        return result
    return replace(result, detail=detail, body_head=body)


def hide(found: str, texts: tuple[str, ...], steps: Steps, *, is_cut: bool) -> str:
    """Return `found` with `***` in place of these texts, or `***` if too few steps are left.

    At its end also in place of the beginning of one; `is_cut`: of the shortest beginning.
    """
    if not found:
        return found
    try:
        spans = sorted(_spans(found, texts, steps, is_cut=is_cut))
    except StepLimitError:
        return HIDDEN
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


def _spans(
    found: str, texts: tuple[str, ...], steps: Steps, *, is_cut: bool
) -> Iterator[tuple[int, int]]:
    search, spaced = _searches(texts)
    for reading, starts in readings(found):
        marks = reading.count("%") + reading.count("\\") + reading.count("&")
        steps.take(_READING_STEPS + marks * _ESCAPE_STEPS)
        # What the end of a reading may lack counts as found: it may be the last of a short value.
        shortest = 1 if is_cut else max(1, MIN_LENGTH - left_out(starts))
        spans = search.spans(reading, steps, shortest=shortest)
        if "+" in reading:  # as forms write a space
            spans += spaced.spans(reading.replace("+", " "), steps, shortest=shortest)
        for begin, end in spans:
            yield starts[begin], len(found) if end is None else starts[end]


@lru_cache(maxsize=64)  # to build them takes longer than to search a short answer
def _searches(texts: tuple[str, ...]) -> tuple[TextSearch, TextSearch]:
    # A `+` of a text may be escaped, and is a space then as well: so it is in both.
    spaced = {text.replace("+", " ") for text in texts if " " in text}
    return TextSearch(texts), TextSearch(_longest_first(spaced))


def readings(text: str) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield the text as it is, and with escapes decoded, with the place of each character.

    The places are those in the text as it is; a last one is the end. Each kind of escape is
    decoded by itself: what is an escape in JSON is none in HTML. CSS is the innermost kind.
    """
    found: list[tuple[str, Sequence[int], int]] = [(text, range(len(text) + 1), 0)]
    known = {text}
    for reading, starts, depth in found:  # which grows meanwhile
        yield reading, starts
        if depth == _MAX_DEPTH:
            continue
        for kind in KINDS:
            if kind.mark not in reading or len(found) == _MAX_READINGS:
                continue
            decoded, places = kind.decode(reading, starts)
            if decoded not in known:
                known.add(decoded)
                found.append((decoded, places, depth + 1))
    # At most 13 of the 40 are less deep, so these readings need no bound of their own.
    for reading, starts, depth in found:
        if depth == _MAX_DEPTH or CSS.mark not in reading:
            continue
        decoded, places = CSS.decode(reading, starts)
        if decoded not in known:
            known.add(decoded)
            yield decoded, places
