"""Test what the supervisor logs about a child that dies repeatedly."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rooms.local.child_process import Child, ChildMonitor
from rooms.local.log_file import RotatingLog

AGAIN = "child ended with code 3; restarting it"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def keeper(tmp_path: Path, said: list[str]) -> Iterator[ChildMonitor]:
    book = RotatingLog(tmp_path / "child.log", echo=said.append)
    yield ChildMonitor(
        Child(name="child", argv=["false"]),
        environment={},
        run_dir=tmp_path,
        log_file=book,
        log_line=said.append,
    )
    book.close()


def die(keeper: ChildMonitor, now: float, *, steady: bool = False) -> None:
    keeper.deaths += 1
    keeper._log_death("ended with code 3", now, steady=steady)


def test_repeated_deaths_are_logged_once_a_minute(keeper: ChildMonitor, said: list[str]) -> None:
    for second in range(300):
        die(keeper, 1000.0 + second)
    assert [line.startswith(AGAIN) for line in said[:3]] == [True] * 3
    assert len(said) == 3 + 4
    assert all("59 more times since the last report" in line for line in said[3:])


def test_death_of_a_stable_child_is_logged_at_once(keeper: ChildMonitor, said: list[str]) -> None:
    for second in range(10):
        die(keeper, 1000.0 + second)
    die(keeper, 1020.0, steady=True)
    assert len(said) == 4
    assert "7 more times since the last report" in said[-1]
