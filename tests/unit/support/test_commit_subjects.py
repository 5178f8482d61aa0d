"""Test the check of commit subjects, on subjects and on a repository."""

import subprocess
from pathlib import Path

import pytest

from tests.support import commit_subjects
from tests.support.commit_subjects import main, subject_problems, subjects
from tests.support.imperative import opening_verb


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("Close the connection when an answer is cancelled", None),
        ("Merge the pages of the console", None),
        ("Close " + "x" * 66, None),
        ("Close " + "x" * 67, "73 characters"),
        ("Close the connection.", "full stop"),
        ("close the connection", "'close'"),
        ("Closes the connection", "'Closes'"),
        ("A request ends its connection", "'A'"),
        ("", "''"),
    ],
)
def test_a_subject_is_short_and_imperative(subject: str, problem: str | None) -> None:
    found = list(subject_problems(subject))
    if problem is None:
        assert found == []
    else:
        assert len(found) == 1
        assert problem in found[0]


@pytest.mark.parametrize("text", ["Reader of logs", "Reads a log", "Non-empty", "re-read it", "1"])
def test_other_words_are_no_verbs(text: str) -> None:
    assert opening_verb(text) is None


def commit(repository: Path, subject: str) -> None:
    person = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = [
        "git",
        "-C",
        str(repository),
        *person,
        "commit",
        "-q",
        "--allow-empty",
        "-m",
        subject,
    ]
    subprocess.run(command, check=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(commit_subjects, "ROOT", tmp_path)
    return tmp_path


def test_commits_of_a_range_are_checked(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for subject in ("It was so before", "Close the connection", "Closes it"):
        commit(repository, subject)
    assert main(["HEAD~2..HEAD~1"]) == 0
    assert main(["HEAD~2..HEAD"]) == 1
    assert "Closes it" in capsys.readouterr().out


def test_without_the_history_nothing_is_checked(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(repository, "It was so before")
    assert main([]) == 0
    assert "no subject was checked" in capsys.readouterr().err
    assert subjects("HEAD", repository / "nothing") is None
