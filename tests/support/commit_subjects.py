"""Check the subjects of commits against the rules in CONTRIBUTING.md.

    python -m tests.support.commit_subjects            # all since SINCE
    python -m tests.support.commit_subjects main..HEAD # those of a range

Without git, or where the history is cut off, as in a source archive or a shallow clone, nothing is
checked, and the command says so.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.support.imperative import opening_verb
from tests.support.prose import ROOT

SINCE: Final = "be4a5eea4e354de8f8728b2accd93df4b096de4d"
"""The last commit before the rules were followed."""
MOST_CHARACTERS: Final = 72


def subject_problems(subject: str) -> Iterator[str]:
    """Yield what the rules forbid in a subject."""
    if len(subject) > MOST_CHARACTERS:
        yield f"{len(subject)} characters: at most {MOST_CHARACTERS}"
    if subject.endswith("."):
        yield "it ends with a full stop: leave it out"
    if opening_verb(subject) is None:
        first = subject.split(maxsplit=1)[0] if subject.strip() else ""
        yield (
            f"it opens with {first!r}: open with an imperative verb with a capital; "
            "tests/support/imperative.py lists them"
        )


def subjects(commits: str, repository: Path) -> list[tuple[str, str]] | None:
    """Return short ids and subjects of a range, newest first; None: there is no such history."""
    command = ["git", "-C", str(repository), "log", "--format=%h %s", commits, "--"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    lines = (line.partition(" ") for line in found.stdout.splitlines())
    return [(commit, subject) for commit, _, subject in lines]


def main(arguments: list[str] | None = None) -> int:
    """Print what is wrong with the subjects, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.commit_subjects", description="Check subjects of commits."
    )
    parser.add_argument(
        "commits", nargs="?", default=f"{SINCE}..HEAD", help="a range, as git log takes it"
    )
    commits: str = parser.parse_args(arguments).commits
    found = subjects(commits, ROOT)
    if found is None:
        print(f"no subject was checked: git has no history of {commits} here", file=sys.stderr)
        return 0
    wrong = [
        f"{commit}: {problem}: {subject}"
        for commit, subject in found
        for problem in subject_problems(subject)
    ]
    if wrong:
        print(*wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
