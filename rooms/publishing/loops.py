"""Loops of a filter with an end to them: CEL's list macros, each of whose rounds asks first whether there is time left.

`xs.exists(x, x > 1)` becomes `xs.exists(x, TICK ? (x > 1) : false)`, and `xs.map(x, x + 1)` becomes `xs.map(x, TICK, x + 1)`.
Where TICK is an error nothing of the round is looked at, so that what is left of a loop costs next to nothing.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

MACROS: Final = ("all", "exists", "exists_one", "filter", "map")
_MAP: Final = "map"
_ARGUMENTS: Final = 2
_TOKEN: Final = re.compile(
    r"""
    (?P<blank> \s+ | //[^\n]* )
  | (?P<text>
        (?: [rR][bB]? | [bB][rR] ) (?: \"{3}.*?\"{3} | '{3}.*?'{3} | \"[^\"\n]*\" | '[^'\n]*' )
      | [bB]? (?: \"{3}(?:\\.|[^\\])*?\"{3} | '{3}(?:\\.|[^\\])*?'{3} | \"(?:\\.|[^\\\"\n])*\" | '(?:\\.|[^\\'\n])*' )
      | `[^`\n]*`
    )
  | (?P<word> [A-Za-z_][A-Za-z0-9_]* )
  | (?P<mark> . )
    """,
    re.VERBOSE | re.DOTALL,
)


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


def bounded(expression: str, tick: str) -> str:
    """The expression, which compiles, with `tick` (an expression that is true or an error) in each round of its loops."""
    tokens = [
        _Token(found.lastgroup or "", found[0], found.start())
        for found in _TOKEN.finditer(expression)
        if found.lastgroup != "blank"
    ]
    cuts: list[tuple[int, str]] = []
    for index, (dot, word, bracket) in enumerate(zip(tokens, tokens[1:], tokens[2:], strict=False)):
        if (dot.text, word.kind, bracket.text) == (".", "word", "(") and word.text in MACROS:
            cuts += _cuts(list(_bounds(tokens[index + 3 :])), tick, is_map=word.text == _MAP)
    # From behind, so that places stay what they are; no two are the same.
    for at, text in sorted(cuts, reverse=True):
        expression = f"{expression[:at]}{text}{expression[at:]}"
    return expression


def _cuts(bounds: Sequence[tuple[int, int]], tick: str, *, is_map: bool) -> Iterator[tuple[int, str]]:
    """What to put where, in a macro whose arguments stand there."""
    if len(bounds) < _ARGUMENTS:
        return
    start, end = bounds[1]
    if is_map and len(bounds) == _ARGUMENTS:
        yield start, f"{tick}, "
        return
    yield start, f"{tick} ? ("
    yield end, "\n) : false"  # on a line of its own, as a comment may stand before it


def _bounds(tokens: Sequence[_Token]) -> Iterator[tuple[int, int]]:
    """Where each argument begins and ends, up to the bracket that closes them."""
    depth, start = 0, tokens[0].at
    for token, following in zip(tokens, (*tokens[1:], tokens[-1]), strict=True):
        if token.kind != "mark":
            continue
        if depth == 0 and token.text in {",", ")"}:
            yield start, token.at
            start = following.at
            if token.text == ")":
                return
        depth += (token.text in {"(", "[", "{"}) - (token.text in {")", "]", "}"})
