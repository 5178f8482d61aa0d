"""Test the prose checker on small texts."""

from pathlib import Path

import pytest

from tests.support.prose import (
    check,
    check_entries,
    check_lines,
    check_openings,
    files_in,
    main,
    markdown_passages,
    python_passages,
    rate_of,
    sentences,
    words_of,
)


def of_python(source: str) -> list[tuple[int, str]]:
    return [
        (finding.line, finding.message)
        for finding in sorted(check("a.py", python_passages(source)))
    ]


def of_markdown(source: str, path: str = "a.md") -> list[tuple[int, str]]:
    return [
        (finding.line, finding.message)
        for finding in sorted(check(path, markdown_passages(source)))
    ]


@pytest.mark.parametrize(
    "text",
    [
        "nobody waits",
        "no one waits",
        "it reaches everyone",
        "Whoever dies",
        "is told so",
        "the log tells",
        "it looks after queues",
        "by turns",
        "PUSH alone",
        "it is to be sent",
        "they are to end",
        "an error of ours",
        "the house's errors",
        "the message comes to rest",
        "the row lies there",
        "the entry stands there",
        "row B4 holds",
    ],
)
def test_finds_forbidden_words_in_docstrings_comments_and_markdown(text: str) -> None:
    (in_docstring,) = of_python(f'"""Return it.\n\n{text}\n"""\n')
    (in_comment,) = of_python(f"x = 1\n# {text}\n")
    (in_markdown,) = of_markdown(f"# Title\n\n{text}\n")
    assert [in_docstring[0], in_comment[0], in_markdown[0]] == [3, 2, 3]


@pytest.mark.parametrize(
    "text",
    [
        "a standalone process",
        "leave it alone",
        "The aim is to send less",
        "P stands for partition",
        "a store is told-apart",
        'it logs "nobody is told"',
        "`told` is a column",
        "foretell",
    ],
)
def test_leaves_other_senses_and_quotations(text: str) -> None:
    assert of_python(f'"""Return it: {text}."""\n# {text}\n') == []
    assert of_markdown(f"{text}\n") == []


@pytest.mark.parametrize("name", ["test_nobody_waits", "_told", "WhoeverDies", "no_one_left"])
def test_finds_forbidden_words_in_names_of_functions_and_classes(name: str) -> None:
    for source in (f"def {name}(): ...\n", f"async def {name}(): ...\n", f"class {name}: ...\n"):
        ((line, message),) = of_python("x = 1\n" + source)
        assert line == 2
        assert "name the process" in message or "return, pass" in message
    assert of_python("def stands_alone(foretold): ...\n") == []
    assert of_python("class A:\n    def tell(self): ...\n") == []


def test_finds_a_term_that_is_broken_over_two_lines() -> None:
    assert of_python("x = 1  # why\n# one that is\n# to be sent\n") == [(2, "'is to': must")]


def test_reads_no_strings_and_no_pragmas_of_python() -> None:
    assert of_python('x = "nobody"  # pragma: told\nprint("whoever")\n') == []


@pytest.mark.parametrize("opening", ["What", "Who", "Whose", "Whether", "How", "Why"])
def test_finds_docstrings_that_open_with_a_riddle(opening: str) -> None:
    source = f'class A:\n    """Hold a."""\n\n    b: int\n    """{opening} it is."""\n'
    ((line, message),) = of_python(source)
    assert line == 5
    assert opening in message


def test_finds_long_sentences_of_markdown_only() -> None:
    long = " ".join(["word"] * 36)
    assert of_markdown(f"Short.\n\nShort too. {long}.\n") == [
        (3, "a sentence of 36 words: at most 35, better 25")
    ]
    assert of_python(f'"""Return {long}."""\n') == []


def test_takes_items_cells_and_headings_as_sentences_of_their_own() -> None:
    half = " ".join(["word"] * 20)
    text = f"# {half}\n{half}\n\n- {half}\n- {half}\n1. {half}\n\n| {half} | {half} |\n| --- | --- |\n| {half} | {half} |\n"
    assert of_markdown(text) == []


def test_skips_code_quotes_comments_and_link_targets() -> None:
    text = "```sh\nnobody\n```\n\n> told\n\n<!-- whom\nwhom -->\n\n[a link](nobody.md) and `whom`\n\n~~~\ntold\n```\n~~~\n"
    assert of_markdown(text) == []


def test_front_matter_is_not_prose() -> None:
    assert of_markdown("---\ntitle: nobody\n---\nnobody\n") == [
        (4, "'nobody': name the process or the person")
    ]


def test_rows_may_be_named_in_the_table_of_compatibility() -> None:
    assert of_markdown("| row B4 |\n", "docs/compatibility.md") == []


def test_an_entry_of_the_changelog_is_one_short_line() -> None:
    source = f"# Changelog\n\n- {'x' * 160}\n- {'x' * 161}\n- Two\n  lines\n\n{'x' * 161}\n"
    assert [finding.line for finding in check_entries("CHANGELOG.md", source)] == [4, 6]


def test_lines_of_docstrings_and_comments_are_short_and_those_of_sql_need_not_be() -> None:
    long = "x" * 99
    source = "\n".join(
        [
            f'"""Return {long}.',
            "",
            f"{long}x",
            f"{long}xx",
            '"""',
            f'sql = """{long}"""  # noqa: E501 - SQL',
            f"y = 1  # {long}",
            f"# {long}",
            f"# type: {long}",
            'z = """',
            f"# {long}",
            '"""',
        ]
    )
    assert [finding.line for finding in check_lines("a.py", source)] == [1, 4, 7, 8]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""Read a log."""\n', []),
        ('"""A reader of logs."""\n', [1]),
        ('"""Reads a log."""\n', [1]),
        ('class A:\n    """Hold a log."""\n', []),
        ('class A:\n    """The log."""\n', [2]),
        ('class A:\n    """`b` in memory."""\n', [2]),
        ('class A:\n    b: int\n    """The number."""\n', []),
        ('def a(b):\n    """`b`: the log."""\n', []),
        ('async def a(b):\n    """Reads a log."""\n', [2]),
    ],
)
def test_docstrings_open_with_an_imperative_verb(source: str, lines: list[int]) -> None:
    assert [finding.line for finding in check_openings("a.py", source)] == lines


def test_the_changelog_is_checked_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "CHANGELOG.md").write_text(f"- {'x' * 161}\n")
    assert main([str(tmp_path)]) == 1
    assert "CHANGELOG.md:1: an entry of 161 characters" in capsys.readouterr().out


def test_a_sentence_ends_at_its_mark_and_not_inside_of_a_number_or_abbreviation() -> None:
    found = [
        text.strip()
        for _, text in sentences("Version 3.11 does, e.g. in a.py. (Then this.) And this")
    ]
    assert found == ["Version 3.11 does, e.g. in a.py.", "(Then this.)", "And this"]


def test_counts_words_as_a_reader_does() -> None:
    assert words_of("the leader's term — 2 s, at most 1,000 + 3") == 9


def test_the_rate_counts_docstrings_and_comments() -> None:
    source = '"""Return nobody in ten words of text and so on."""\nx = 1\n# and ten more words of text that are all fine\n'
    assert rate_of(python_passages(source)) == pytest.approx(1000 / 20)


def test_reports_files_and_lines_and_exits_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.md").write_text("Fine.\n")
    (tmp_path / "b.py").write_text('"""Return it."""\n\n# told\n')
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "c.md").write_text("told\n")
    assert [file.name for file in files_in([tmp_path])] == ["a.md", "b.py"]
    assert main([str(tmp_path)]) == 1
    assert f"{tmp_path}/b.py:3: 'told'" in capsys.readouterr().out
    assert main([str(tmp_path / "a.md")]) == 0
    assert main([str(tmp_path / "none")]) == 2


def test_prints_the_rate_against_its_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.py"
    file.write_text('"""Return it."""\n')
    assert main(["--rate", str(file)]) == 0
    assert capsys.readouterr().out.startswith("0.00 forbidden words per 1,000")
    file.write_text('"""Return what nobody has."""\n')
    assert main(["--rate", str(file)]) == 1
