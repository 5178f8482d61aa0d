"""Bound what the numbers of a JSON text cost: to decode them, and to check them by a schema.

The library of schemas compares and divides exactly, as fractions of whole numbers. So the time
depends on the magnitude, not on the length: `1e308` costs as much as 309 digits. Bounds hold for
ordinary numbers only, and the sandbox checks what contains others.
"""

import math
import re
from typing import Any, Final, TypeGuard

import msgspec

NUMBER_KEYWORDS: Final = frozenset(
    {
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum",
    }
)  # fmt: skip
"""Keywords that compare a payload's numbers with those of the schema, or divide by them."""
_WHOLE_NS: Final = 150
"""One usual number compared with a whole limit of 64 bits."""
_LONG_NS: Final = 1_500
"""Any ordinary number compared with a whole one, or divided by it."""
_FRACTION_NS: Final = 7_000
"""The same with a fraction; so long an exact comparison for equality takes, too."""
_LEAST: Final = 1e-15
_MOST: Final = 1e23
"""Magnitudes of ordinary numbers."""
_MAX_64_BITS: Final = 2**63
_SHAPES: Final = bytes.maketrans(b"123456789E:[", b"000000000e,,")
_DELETED: Final = b"+-. \t\r\n"
"""In the shape of a text a number follows a comma, and is a run of zeros, or two around an `e`.

Regular expressions take ten times as long to find nothing.
"""
_NUMBER: Final = b",0"
_ANY_EXPONENT: Final = b"0e"
_EXPONENT: Final = b"0e00"
_SLOW_EXPONENT: Final = b"0e000"
_LONG_DIGITS: Final = b"0" * 20
_TOO_MANY_DIGITS: Final = b"0" * 24
SMALL_BYTES: Final = 1024
"""A smaller text has 170 numbers such as `1e308`, of 1.7 ms, at most."""
_DECODE_NS: Final = 1_600
"""A byte of such a number."""
_MAX_EXPONENTS: Final = 10_000
"""Most exponents that are looked at for the magnitude of their numbers."""
_SEARCH_NS: Final = 500
"""So long that takes for one."""
_DECODE_EXPONENT_NS: Final = 400
"""So long msgspec takes for a number with a short exponent, such as `1e23`."""
_DECODE_SLOW_NS: Final = 700
"""So long Python takes for any number with a fraction or an exponent."""
_WITH_EXPONENT: Final = re.compile(rb"(?:^|[\s:,\[])(-?\d[\d.]*[eE][-+]?\d\d+)")
decode_small: Final = msgspec.json.Decoder().decode


def decode_json(text: bytes | msgspec.Raw, kind: Any = Any, *, many: bool = False) -> Any:
    """Return a JSON text as `kind` (a msgspec type). Raises what `msgspec.json.decode` raises.

    That takes 10 µs for a number such as `1e308`, Python less than half of one. A small text is
    searched for such numbers only if `many` are decoded without a pause.
    """
    if many or len(text) >= SMALL_BYTES:
        whole = bytes(text)
        if _is_slow(_shape(whole)) and _is_slow(_shape(_without_strings(whole))):
            return msgspec.json.Decoder(kind, float_hook=_finite).decode(whole)
    return decode_small(text) if kind is Any else msgspec.json.decode(text, type=kind)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("Number out of range")
    return value


_decode_slow: Final = msgspec.json.Decoder(float_hook=_finite).decode


class NumberScan:
    """Find what the numbers of a JSON text may cost, without decoding it."""

    __slots__ = ("_bare", "_exponents", "_has_slow", "_shape", "_text", "has_long")

    def __init__(self, text: bytes) -> None:
        """Scan a text. `has_long`: a number of it may have more than 64 bits."""
        self._text = text
        self._exponents, self._has_slow, self.has_long = 0, False, False
        self._shape = shape = _shape(text)
        if _EXPONENT in shape or _LONG_DIGITS in shape:
            # Texts such as ids look alike.
            self._bare = _without_strings(text)
            self._shape = shape = _shape(self._bare)
            self._exponents = shape.count(_EXPONENT)
            self._has_slow = _is_slow(shape)
            self.has_long = _LONG_DIGITS in shape

    @property
    def has_too_many(self) -> bool:
        """Return whether there are so many exponents that `find_extreme` does not look at them."""
        return self._exponents > _MAX_EXPONENTS

    @property
    def decode_ns(self) -> int:
        """Return an upper bound of the time that `decode` takes for exponents, beside its bytes."""
        if not self._has_slow:
            return _DECODE_EXPONENT_NS * self._exponents
        floats = self._bare.count(b".") + self._shape.count(_ANY_EXPONENT)
        return _DECODE_SLOW_NS * min(floats, self.count())

    def decode(self) -> Any:
        """Return the decoded text, as `decode_json` does."""
        return _decode_slow(self._text) if self._has_slow else decode_small(self._text)

    @property
    def rough_count(self) -> int:
        """Return an upper bound of the numbers in the text, by its length."""
        return len(self._shape) // 2 + 1

    def count(self) -> int:
        """Return a close upper bound of the numbers in the text."""
        return 1 + self._shape.count(_NUMBER)

    @property
    def search_ns(self) -> int:
        """Return an upper bound of the time that `find_extreme` takes."""
        return _SEARCH_NS * min(self._exponents, _MAX_EXPONENTS)

    def find_extreme(self) -> bool:
        """Return whether a number may not be ordinary, and set `has_long` by all of them."""
        if self.has_too_many or (self.has_long and _TOO_MANY_DIGITS in self._shape):
            return True
        if self._exponents:
            for number in _WITH_EXPONENT.findall(self._bare):
                magnitude = abs(float(number))
                if magnitude > _MAX_64_BITS:
                    self.has_long = True
                if magnitude and not _LEAST <= magnitude <= _MOST:
                    return True
        return False


def _is_slow(shape: bytes) -> bool:
    """Return whether msgspec may take long for a number, most of all for a halfway case."""
    return _EXPONENT in shape and (_SLOW_EXPONENT in shape or _LONG_DIGITS in shape)


def _shape(text: bytes) -> bytes:
    return text.translate(_SHAPES, _DELETED)


def _without_strings(text: bytes) -> bytes:
    """Return a JSON text with nothing in its strings; what follows an error in it may differ."""
    if b"\\" in text:
        text = text.replace(rb"\\", b"").replace(rb"\"", b"")
    return b'""'.join(text.split(b'"')[::2])


def keyword_ns(keyword: str, value: object) -> tuple[int, int]:
    """Return upper bounds of the time of a keyword for one ordinary number of a payload.

    The first is for a text without long numbers.
    """
    if keyword not in NUMBER_KEYWORDS:
        return 0, 0
    if keyword in {"const", "enum"}:
        all_ns = _FRACTION_NS * len(_numbers(value))
        return all_ns, all_ns
    if not _is_whole(value):
        return _FRACTION_NS, _FRACTION_NS
    is_short = keyword != "multipleOf" and abs(value) <= _MAX_64_BITS
    return _WHOLE_NS if is_short else _LONG_NS, _LONG_NS


def unscanned_ns_per_byte(number_ns: int, long_number_ns: int) -> int:
    """Return an upper bound of the time for the numbers of any small text, and to decode them.

    The arguments are sums of `keyword_ns`. A byte of any number takes less than a long ordinary
    one if only whole limits compare it. 0: there are other keywords.
    """
    only_limits = long_number_ns >= number_ns * (_LONG_NS // _WHOLE_NS)
    return long_number_ns + _DECODE_NS if only_limits else 0


def are_ordinary(keyword: str, value: object) -> bool:
    """Return whether `keyword_ns` bounds a keyword of `NUMBER_KEYWORDS`."""
    if keyword in {"const", "enum", "multipleOf"}:
        return all(one == 0 or _LEAST <= abs(one) <= _MOST for one in _numbers(value))
    # The greatest float is a common limit. Comparing with a large whole number is cheap.
    return all(one == 0 or abs(one) >= _LEAST for one in _numbers(value))


def _is_whole(value: object) -> TypeGuard[int | float]:
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
