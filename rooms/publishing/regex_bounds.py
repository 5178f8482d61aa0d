"""Bound the number of states of a regular expression's automaton.

Both engines (RE2 for filters, Rust's regex for schemas) repeat a counted part as often as its
count, so `(a{1000}){1000}` has a million states. The bound is found without compiling the pattern.
"""

import re
from typing import Final

_REPETITION: Final = re.compile(r"\{(\d{1,9})(,(\d{0,9}))?\}")
_CLASS_WEIGHT: Final = 10
_UNICODE_CLASS_WEIGHT: Final = 1000
MAX_WEIGHT: Final = 1_000_000_000


def pattern_weight(pattern: str) -> int:
    """Return an upper bound of the states of a pattern, at most `MAX_WEIGHT`."""
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
            # The part before the group was added when the group began.
            at += 1
            continue
        if sign == "{" and (found := _REPETITION.match(pattern, at)):
            most = max(int(found[1]), int(found[3] or 0) if found[2] else 0)
            last = min(last * max(1, most + 1), MAX_WEIGHT)
            at = found.end()
            continue
        if sign in "*+?|":
            last, at = last + 1, at + 1
            continue
        if sign == "[":
            length = _class_end(pattern, at) - at
            weight = _class_weight(pattern[at : at + length])
        elif sign == ".":
            weight = _CLASS_WEIGHT
        elif sign == "\\" and at + 1 < len(pattern):
            weight, length = _escape(pattern, at)
        elif not sign.isascii():
            weight = 4
        sums[-1] = min(sums[-1] + last, MAX_WEIGHT)
        last, at = weight * (4 if folded else 1), at + length
    return min(sum(sums) + last, MAX_WEIGHT)


def _class_end(pattern: str, at: int) -> int:
    """Return the end of the class that begins at `at`."""
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
        return _UNICODE_CLASS_WEIGHT
    if text.isascii() and not text.startswith("[^") and "\\" not in text:
        return max(1, len(text) // 4)
    return _CLASS_WEIGHT + len(text) * 4


def _escape(pattern: str, at: int) -> tuple[int, int]:
    letter = pattern[at + 1]
    if letter in "pP":
        end = pattern.find("}", at) if pattern.startswith("{", at + 2) else at + 2
        return _UNICODE_CLASS_WEIGHT, max(end - at + 1, 3)
    if letter in "wWdDsSbBxuQX":
        # In Rust's engine \w, \d and \s are Unicode's.
        return _UNICODE_CLASS_WEIGHT // 4 if letter in "wW" else _CLASS_WEIGHT * 2, 2
    return 1, 2
