"""What the supervisor says of a child that dies again and again."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rooms.embedded.keeper import Child, Keeper
from rooms.embedded.logbook import Logbook

AGAIN = "child ended with code 3; starting it again"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def keeper(tmp_path: Path, said: list[str]) -> Iterator[Keeper]:
    book = Logbook(tmp_path / "child.log", echo=said.append)
    yield Keeper(Child(name="child", argv=["false"]), environment={}, run=tmp_path, book=book, say=said.append)
    book.close()


def die(keeper: Keeper, now: float, *, steady: bool = False) -> None:
    keeper.deaths += 1
    keeper._say_death("ended with code 3", now, steady=steady)


def test_a_child_that_dies_each_second_gets_a_line_a_minute(keeper: Keeper, said: list[str]) -> None:
    for second in range(300):
        die(keeper, 1000.0 + second)
    assert [line.startswith(AGAIN) for line in said[:3]] == [True] * 3
    assert len(said) == 3 + 4
    assert all("after 59 deaths since the last such line" in line for line in said[3:])


def test_the_death_of_a_steady_child_is_said_at_once(keeper: Keeper, said: list[str]) -> None:
    for second in range(10):
        die(keeper, 1000.0 + second)
    die(keeper, 1020.0, steady=True)
    assert len(said) == 4
    assert "after 7 deaths since the last such line" in said[-1]
