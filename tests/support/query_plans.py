"""Plans as a process keeps them: made on a writer's terms, without a look at any value."""

import re
from collections.abc import Iterator, Mapping

import psycopg

from rooms.db.writer import _PLANNER_SETTINGS

_PLACEHOLDER = re.compile(r"%\((\w+)\)s")


def kept_plans(
    connection: psycopg.Connection[tuple[object, ...]], statements: Mapping[str, str]
) -> Iterator[tuple[str, list[str]]]:
    """The lines of each statement's plan, by the statement's name."""
    connection.execute(_PLANNER_SETTINGS)
    for name, text in statements.items():
        numbers: dict[str, int] = {}

        def number(found: re.Match[str], known: dict[str, int] = numbers) -> str:
            return f"${known.setdefault(found[1], len(known) + 1)}"

        statement = _PLACEHOLDER.sub(number, text).replace("%%", "%")
        explained = connection.execute(f"EXPLAIN (GENERIC_PLAN, COSTS OFF) {statement}".encode())
        yield name, [str(row[0]) for row in explained]
