"""Bounds of regular expressions: how many states the automaton of a pattern may have.

Both engines (RE2 for filters, Rust's regex for schemas) repeat a counted part as often as its count says, so `(a{1000}){1000}` is
a million states. The weight is an upper bound, made without compiling anything.
"""

import re
from typing import Final

_COUNT: Final = re.compile(r"\{(\d{1,9})(,(\d{0,9}))?\}")
_CLASS: Final = 10
_UNICODE: Final = 1000
MOST: Final = 1_000_000_000


def pattern_weight(pattern: str) -> int:
    """Return an upper bound of the states of a pattern, at most `MOST`."""
    folded = "(?i" in pattern or re.search(r"\(\?[a-zA-Z]*i", pattern) is not None
    sums, last, at = [1], 0, 0
    while at < len(pattern):
        sign = pattern[at]
        weight, length = 1, 1
        if sign == "(":
            sums[-1] += last
            sums.append(1)
            last, at = 0, at + 1
            continue
        if sign == ")" and len(sums) > 1:
            last += sums.pop()
            # What stood before the group was added when the group began.
            at += 1
            continue
        if sign == "{" and (found := _COUNT.match(pattern, at)):
            most = max(int(found[1]), int(found[3] or 0) if found[2] else 0)
            last = min(last * max(1, most + 1), MOST)
            at = found.end()
            continue
        if sign in "*+?|":
            last, at = last + 1, at + 1
            continue
        if sign == "[":
            length = _class_end(pattern, at) - at
            weight = _class_weight(pattern[at : at + length])
        elif sign == ".":
            weight = _CLASS
        elif sign == "\\" and at + 1 < len(pattern):
            weight, length = _escape(pattern, at)
        elif not sign.isascii():
            weight = 4
        sums[-1] = min(sums[-1] + last, MOST)
        last, at = weight * (4 if folded else 1), at + length
    return min(sum(sums) + last, MOST)


def _class_end(pattern: str, at: int) -> int:
    """Return where the class that begins at `at` ends."""
    index = at + 1
    if pattern.startswith("^", index):
        index += 1
    if pattern.startswith("]", index):
        index += 1
    while index < len(pattern) and pattern[index] != "]":
        if pattern.startswith("[:", index) and (end := pattern.find(":]", index)) > 0:
            index = end + 2
        elif pattern[index] == "\\":
            index += 2
        else:
            index += 1
    return min(index + 1, len(pattern))


def _class_weight(text: str) -> int:
    if "\\p" in text or "\\P" in text or (text.count("[") > 1 and "[:" not in text):
        return _UNICODE
    if text.isascii() and not text.startswith("[^") and "\\" not in text:
        return max(1, len(text) // 4)
    return _CLASS + len(text) * 4


def _escape(pattern: str, at: int) -> tuple[int, int]:
    letter = pattern[at + 1]
    if letter in "pP":
        end = pattern.find("}", at) if pattern.startswith("{", at + 2) else at + 2
        return _UNICODE, max(end - at + 1, 3)
    if letter in "wWdDsSbBxuQX":
        # In Rust's engine \w, \d and \s are Unicode's.
        return _UNICODE // 4 if letter in "wW" else _CLASS * 2, 2
    return 1, 2
