"""Check docstrings, comments and Markdown against the style sheet in CONTRIBUTING.md.

    python -m tests.support.prose                  # the whole tree; every finding as file:line, exit code 1 if any
    python -m tests.support.prose rooms/db docs    # these files and folders only
    python -m tests.support.prose --rate           # only the forbidden words per 1,000 words of docstrings and comments

Text in `backticks`, in double quotes, in code blocks and in block quotes is not checked for words.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from pathlib import Path

from tests.support.imperative import opening_verb

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ("rooms", "delivery", "migrations", "tests", "docs")
MOST_WORDS = 35
MOST_PER_THOUSAND = 0.3
MOST_IN_LINE = 100
MOST_IN_ENTRY = 160
"""Characters of an entry of the changelog, without its bullet."""

# A term and what replaces it. Some are wrong in one sense only: their patterns leave the other senses out.
TERMS = {
    r"(?:some|every|no)body|(?:some|every)one|no\s+one|whoever|whom": "name the process or the person",
    r"told|tells?": "return, pass, log, notify or report",
    r"looks?\s+after": "handle, check or maintain",
    r"by\s+turns": "in turn, alternately",
    r"(?<!let )(?<!leave )(?<!leaves )(?<!left )(?<!it )(?<!them )alone": "only",
    r"(?<!aim )(?<!goal )(?<!idea )(?<!purpose )(?<!step )(?<!task )(?<!way )(?:is|are)\s+to(?!-)": "must",
    r"the\s+house|of\s+ours": "leave it out",
    r"comes?\s+to\s+rest": "ends, stops",
    r"lies": "is, is stored",
    r"stands(?!\s+(?:for|in\s+for)\b)": "is, is stored",
    r"rows?\s+[A-F]\d+": "only docs/compatibility.md names rows",
}
_FORBIDDEN = [
    (re.compile(rf"(?<![\w-])(?:{term})(?![\w-])", re.IGNORECASE), instead)
    for term, instead in TERMS.items()
]
_IN_NAMES = _FORBIDDEN[:2]
"""Those that names of functions and classes may not have either."""
_ROWS_ALLOWED = "compatibility.md"
_CHANGELOG = "CHANGELOG.md"
_RIDDLE = re.compile(r"\s*(What|Whatever|Who|Whoever|Whose|Whether|How|Why)\b")
_QUOTED = re.compile(r"``.+?``|`[^`]*`|\"[^\"\n]*(?:\n[^\"\n]*)?\"|“[^”]*”", re.DOTALL)
_PRAGMA = re.compile(r"#\s*(?:noqa|type:|pragma:|fmt:|ruff:|mypy:)[^#]*")
_PRAGMA_AND_REASON = re.compile(r"\s*#\s*(?:noqa|type:|pragma:|fmt:|ruff:|mypy:).*")
_NAME_WORD = re.compile(r"[A-Z]?[a-z\d]+|[A-Z]+")
_WORD = re.compile(r"[^\W_](?:[\w'\u2019.,/%-]*\w)?")


class Kind(StrEnum):
    COMMENT = "comment"
    DOCSTRING = "docstring"
    PROSE = "prose"
    """A paragraph, a heading, a list item or a table cell of a Markdown file."""
    NAME = "name"
    """The words in the name of a function or class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """Hold a piece of text and the line on which it begins."""

    kind: Kind
    line: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Finding:
    """Name a place that the style sheet forbids."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def python_passages(source: str) -> Iterator[Passage]:
    """Yield every docstring, documented attribute, block of comments and name of a definition."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text), lineno=line)):
                yield Passage(kind=Kind.DOCSTRING, line=line, text=text)
            case ast.FunctionDef(name="tell"):
                pass  # a method of Python's streams
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                words = " ".join(_NAME_WORD.findall(node.name))
                yield Passage(kind=Kind.NAME, line=node.lineno, text=words)
            case _:
                pass
    yield from _comments(source)


def _comments(source: str) -> Iterator[Passage]:
    """Yield comments; those on neighbouring lines of their own are one passage."""
    block: list[str] = []
    begins = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, column = token.start
        own_line = not token.line[:column].strip()
        text = _PRAGMA.sub("", token.string).lstrip("#!").strip()
        if block and own_line and line == last + 1:
            block.append(text)
        else:
            if block:
                yield Passage(kind=Kind.COMMENT, line=begins, text="\n".join(block))
            block, begins = [text], line
        # A comment after code is a passage of its own.
        last = line if own_line else -1
    if block:
        yield Passage(kind=Kind.COMMENT, line=begins, text="\n".join(block))


_COMMENT = re.compile(r"^[ ]*<!--.*?-->", re.DOTALL | re.MULTILINE)
_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
_BLOCK_START = re.compile(
    r"\s*(?:#{1,6}\s|[-*+]\s|\d+[.)]\s|!!!\s|\?\?\?\+?\s|={3,}|-{3,}\s*$|\[[^\]]+\]:\s)"
)
_MARKUP = re.compile(r"^\s*(?:#{1,6}\s+|[-*+]\s+|\d+[.)]\s+)")
_LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\[\]]*\])*)\](?:\([^)]*\)|\[[^\]]*\])")


def markdown_passages(source: str) -> Iterator[Passage]:
    """Yield paragraphs, headings, list items and table cells, without code blocks, block quotes and link targets."""
    block: list[tuple[int, str]] = []
    for number, line in _text_lines(source):
        if line.lstrip().startswith("|"):
            yield from _paragraph(block)
            for cell in re.split(r"(?<!\\)\|", line):
                yield from _paragraph([(number, cell)])
            continue
        if not line.strip() or _BLOCK_START.match(line):
            yield from _paragraph(block)
        if line.strip():
            block.append((number, line))
        if line.startswith("#"):
            yield from _paragraph(block)
    yield from _paragraph(block)


def _paragraph(block: list[tuple[int, str]]) -> Iterator[Passage]:
    """Yield the lines as one passage, and empty them."""
    text = "\n".join(_plain(line) for _, line in block)
    if text.strip(" :-"):
        yield Passage(kind=Kind.PROSE, line=block[0][0], text=text)
    block.clear()


def _text_lines(source: str) -> Iterator[tuple[int, str]]:
    """Yield numbered lines; those of code, of quotes, of comments and of front matter are empty."""
    lines = _COMMENT.sub(lambda found: "\n" * found[0].count("\n"), source).split("\n")
    fence = ""
    front_matter = bool(lines) and lines[0] == "---"
    for number, line in enumerate(lines, 1):
        if front_matter:
            front_matter = number == 1 or line != "---"
            yield number, ""
            continue
        found = _FENCE.match(line)
        if fence:
            if found and found[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
            yield number, ""
        elif found:
            fence = found[1]
            yield number, ""
        else:
            yield number, "" if line.lstrip().startswith(">") else line


def _plain(line: str) -> str:
    text = _LINK.sub(r"\1", _MARKUP.sub("", line))
    return re.sub(r"<https?:[^>]*>|</?\w[^>]*>", " ", text).replace("**", "").strip()


def without_quotes(text: str) -> str:
    """Return the text with every quoted part as one word, its line breaks kept."""
    return _QUOTED.sub(lambda found: "X" + "\n" * found[0].count("\n"), text)


_SENTENCE_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)[.!?][)\]*_”\"]*(?=\s+\S)|\n\s*\n")


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield each sentence with its offset; quoted parts count as one word."""
    begins = 0
    for found in _SENTENCE_END.finditer(text):
        yield begins, text[begins : found.end()]
        begins = found.end()
    yield begins, text[begins:]


def words_of(text: str) -> int:
    return len(_WORD.findall(text))


def check(path: str, passages: Iterable[Passage]) -> Iterator[Finding]:
    """Yield what the style sheet forbids in these passages."""
    for passage in passages:
        text = without_quotes(passage.text)
        line_at = _line_finder(passage.line, text)
        for pattern, instead in _IN_NAMES if passage.kind is Kind.NAME else _FORBIDDEN:
            if path.endswith(_ROWS_ALLOWED) and "rows?" in pattern.pattern:
                continue
            for found in pattern.finditer(text):
                word = " ".join(found[0].split())
                yield Finding(
                    path=path, line=line_at(found.start()), message=f"{word!r}: {instead}"
                )
        if passage.kind is Kind.DOCSTRING and (riddle := _RIDDLE.match(passage.text)):
            message = (
                f"docstring opens with {riddle[1]!r}: open with a verb (Return, Raise, Run ...)"
            )
            yield Finding(path=path, line=passage.line, message=message)
        if passage.kind is Kind.PROSE:
            for offset, sentence in sentences(text):
                if (length := words_of(sentence)) > MOST_WORDS:
                    line = line_at(offset + len(sentence) - len(sentence.lstrip()))
                    message = f"a sentence of {length} words: at most {MOST_WORDS}, better 25"
                    yield Finding(path=path, line=line, message=message)


def _line_finder(first: int, text: str) -> Callable[[int], int]:
    """Return a function from an offset in the text to its line in the file."""
    starts = list(accumulate((len(line) + 1 for line in text.split("\n")), initial=0))
    return lambda offset: first + bisect_right(starts, offset) - 1


def check_entries(path: str, source: str) -> Iterator[Finding]:
    """Yield the entries of a changelog that are too long, or have more than one line."""
    for number, line in _text_lines(source):
        length = len(line.removeprefix("- "))
        if line.startswith("- ") and length > MOST_IN_ENTRY:
            message = f"an entry of {length} characters: at most {MOST_IN_ENTRY}; split it"
            yield Finding(path=path, line=number, message=message)
        elif line.startswith(" ") and line.strip():
            message = "an entry goes on in a second line: an entry has one"
            yield Finding(path=path, line=number, message=message)


def check_openings(path: str, source: str) -> Iterator[Finding]:
    """Yield the docstrings of modules, classes and functions that open with no imperative verb.

    That of a function may open with code: it then says only what an argument means.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if not text or opening_verb(text) is not None:
            continue
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if not (is_function and text.startswith("`")):
            message = (
                f"docstring opens with {text.split(maxsplit=1)[0]!r}: open with an imperative verb "
                "(Return, Hold, Report ...); tests/support/imperative.py lists them"
            )
            yield Finding(path=path, line=node.body[0].lineno, message=message)


def check_lines(path: str, source: str) -> Iterator[Finding]:
    """Yield the lines of docstrings and comments that are too long, with the code before them.

    Ruff does not see them in modules in which long lines of SQL are allowed. What follows a pragma
    does not count.
    """
    lines = source.splitlines()
    numbers = {
        number
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not _PRAGMA.match(token.string):
            numbers.add(token.start[0])
    for number in sorted(numbers):
        length = len(_PRAGMA_AND_REASON.sub("", lines[number - 1]))
        if length > MOST_IN_LINE:
            message = f"a line of {length} characters: at most {MOST_IN_LINE}"
            yield Finding(path=path, line=number, message=message)


def passages_of(file: Path) -> list[Passage]:
    source = file.read_text()
    return list(python_passages(source) if file.suffix == ".py" else markdown_passages(source))


def files_in(paths: Iterable[Path]) -> list[Path]:
    """Return the Python and Markdown files at these paths, without those of hidden and built folders."""
    found: set[Path] = set()
    for path in paths:
        if path.is_file():
            found.add(path)
            continue
        for suffix in ("py", "md"):
            found.update(
                file
                for file in path.rglob(f"*.{suffix}")
                if not any(
                    part.startswith(".") or part in {"__pycache__", "build", "site"}
                    for part in file.relative_to(path).parts
                )
            )
    return sorted(found)


def whole_tree() -> list[Path]:
    folders = [ROOT / name for name in PYTHON if (ROOT / name).is_dir()]
    return sorted({*files_in(folders), *ROOT.glob("*.md"), *(ROOT / "compose").glob("*.md")})


def rate_of(passages: Iterable[Passage]) -> float:
    """Return the forbidden words per 1,000 words of docstrings and comments."""
    words = forbidden = 0
    for passage in passages:
        if passage.kind in {Kind.COMMENT, Kind.DOCSTRING}:
            text = without_quotes(passage.text)
            words += words_of(text)
            forbidden += sum(len(pattern.findall(text)) for pattern, _ in _FORBIDDEN)
    return 1000 * forbidden / max(words, 1)


def main(arguments: list[str] | None = None) -> int:
    """Print findings or the rate, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.prose", description="Check the prose of the tree."
    )
    parser.add_argument(
        "paths", nargs="*", type=Path, help="files and folders; without any, the whole tree"
    )
    parser.add_argument(
        "--rate",
        action="store_true",
        help="print only the rate of forbidden words in docstrings and comments",
    )
    options = parser.parse_args(arguments)
    if missing := [path for path in options.paths if not path.exists()]:
        print(f"there is no {', '.join(map(str, missing))}", file=sys.stderr)
        return 2
    files = files_in(options.paths) if options.paths else whole_tree()
    texts = {file: passages_of(file) for file in files}
    if options.rate:
        rate = rate_of(passage for passages in texts.values() for passage in passages)
        print(
            f"{rate:.2f} forbidden words per 1,000 of docstrings and comments (limit {MOST_PER_THOUSAND})"
        )
        return int(rate > MOST_PER_THOUSAND)
    findings = sorted(
        finding
        for file, passages in texts.items()
        for finding in (*check(_name(file), passages), *_check_lines(file))
    )
    print(*findings, sep="\n" if findings else "")
    if findings:
        print(
            f"{len(findings)} findings in {len({finding.path for finding in findings})} files",
            file=sys.stderr,
        )
    return int(bool(findings))


def _check_lines(file: Path) -> Iterator[Finding]:
    name = _name(file)
    if file.name == _CHANGELOG:
        yield from check_entries(name, file.read_text())
    elif file.suffix == ".py" and not name.startswith("tests/"):
        source = file.read_text()
        yield from check_lines(name, source)
        yield from check_openings(name, source)


def _name(file: Path) -> str:
    file = file.resolve()
    return str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file)


if __name__ == "__main__":
    sys.exit(main())
