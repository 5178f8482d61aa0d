"""Bound what the numbers of a JSON text cost: to decode them, and to check them by a schema.

The library of schemas compares and divides exactly, as fractions of whole numbers. So the time
depends on the magnitude, not on the length: `1e308` costs as much as 309 digits. Bounds hold for
ordinary numbers only, and the sandbox checks what contains others.
"""

import math
import re
from typing import Any, Final

import msgspec

NUMBER_KEYWORDS: Final = frozenset(
    {
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum",
    }
)  # fmt: skip
"""Keywords that compare a payload's numbers with those of the schema, or divide by them."""
_WHOLE_NS: Final = 1_200
"""One number compared with a whole one, or divided by it."""
_FRACTION_NS: Final = 7_000
"""The same with a fraction; so long an exact comparison for equality takes, too."""
_LEAST: Final = 1e-15
_MOST: Final = 1e23
"""Magnitudes of ordinary numbers in a schema."""
_EXTREME: Final = re.compile(
    # As long as a number above, or with an exponent of two digits. It follows no other digit.
    rb"(?:^|[\s:,\[])-?\d(?:[\d.]{23}|[\d.]*[eE][-+]?\d\d)"
)
_SHAPES: Final = bytes.maketrans(b"123456789E", b"000000000e")
_DELETED: Final = b"+-."
_LONG_EXPONENT: Final = b"0e00"
_MANY_DIGITS: Final = b"0" * 23
"""Parts of the shape of a text: regular expressions take ten times as long to find nothing."""


def decode_json(text: bytes, kind: Any = Any) -> Any:
    """Return a JSON text as `kind` (a msgspec type). Raises what `msgspec.json.decode` raises.

    That takes 10 µs for a number such as `1e308`, Python less than half of one.
    """
    if _LONG_EXPONENT not in text.translate(_SHAPES, _DELETED):
        return msgspec.json.decode(text, type=kind)
    return msgspec.json.Decoder(kind, float_hook=_finite).decode(text)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("Number out of range")
    return value


def keyword_ns(keyword: str, value: object) -> int:
    """Return an upper bound of the time of a keyword for one ordinary number of a payload."""
    if keyword not in NUMBER_KEYWORDS:
        return 0
    if keyword in {"const", "enum"}:
        return _FRACTION_NS * len(_numbers(value))
    return _WHOLE_NS if _is_whole(value) else _FRACTION_NS


def are_ordinary(keyword: str, value: object) -> bool:
    """Return whether `keyword_ns` bounds a keyword of `NUMBER_KEYWORDS`."""
    if keyword in {"const", "enum", "multipleOf"}:
        return all(one == 0 or _LEAST <= abs(one) <= _MOST for one in _numbers(value))
    # The greatest float is a common limit. Comparing with a large whole number is cheap.
    return all(one == 0 or abs(one) >= _LEAST for one in _numbers(value))


def has_extreme_number(payload: bytes) -> bool:
    """Return whether a JSON text may contain a number that is not ordinary."""
    shape = payload.translate(_SHAPES, _DELETED)
    return (_LONG_EXPONENT in shape or _MANY_DIGITS in shape) and _EXTREME.search(
        payload
    ) is not None


def most_values(payload: bytes) -> int:
    """Return an upper bound of the number of values in a JSON text."""
    return 1 + payload.count(b",") + payload.count(b"[") + payload.count(b"{")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def _numbers(value: object) -> list[int | float]:
    """Return the numbers in a decoded text."""
    found: list[int | float] = []
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)
        elif isinstance(one, int | float) and not isinstance(one, bool):
            found.append(one)
    return found
