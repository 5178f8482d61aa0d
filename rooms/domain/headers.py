"""The headers that a subscription may add to its webhooks."""

import re
from collections.abc import Iterator, Mapping
from typing import Final

MAX_HEADERS: Final = 50
MAX_BYTES: Final = 8192
"""Of all names and values together."""

_MAX_NAME: Final = 128
_TOKEN: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE: Final = re.compile(r"(?:[!-~](?:[ \t!-~]*[!-~])?)?")
# What the sender, the signature or the connection itself says; a second one would contradict it.
_RESERVED: Final = re.compile(
    r"content-.*|webhook-.*|rooms-.*|ce-.*|proxy-.*|host|connection|keep-alive|transfer-encoding|te|trailer|upgrade"
    r"|expect|accept-encoding|date|user-agent",
    re.IGNORECASE,
)


def header_problems(headers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(name of the header, what is wrong); the name is empty where it is about all of them together."""
    if len(headers) > MAX_HEADERS:
        yield "", f"takes at most {MAX_HEADERS} headers"
    if sum(len(name) + len(value) + 4 for name, value in headers.items()) > MAX_BYTES:
        yield "", f"names and values together take at most {MAX_BYTES} bytes"
    seen: set[str] = set()
    for name, value in headers.items():
        shown = name[:_MAX_NAME]
        if not _TOKEN.fullmatch(name) or len(name) > _MAX_NAME:
            yield shown, f"a header's name is a token of RFC 9110 of at most {_MAX_NAME} characters"
        elif _RESERVED.fullmatch(name):
            yield shown, "this header is the service's own to set"
        elif name.lower() in seen:
            yield shown, "this header is there twice (case does not tell headers apart)"
        seen.add(name.lower())
        if not _VALUE.fullmatch(value):
            yield shown, "a header's value is visible ASCII, with spaces only in between"
