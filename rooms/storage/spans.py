"""Ranges of time that messages, deliveries and their log are cut into, and which of them are to be gone through.

A **part** is one range of ids, with a partition of each of the three tables. A day begins **whole**; what is kept of it
when it is over stands in a partition of its own, `…_kept1`. Those of a month, and of a year, become one, so that old
remains are a handful of partitions however long an installation lives.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from psycopg import AsyncConnection
from psycopg.rows import TupleRow

from rooms.domain.ids import born_ms, first_id

TABLES: Final[Mapping[str, str]] = {"messages": "id", "deliveries": "id", "log_entries": "message_id"}
"""What is cut, and the column that is cut by."""

_NAME: Final = re.compile(r"[a-z_]+_([0-9]{4}(?:[0-9]{2}){0,2})(?:_kept([0-9]+))?")
_BOUNDS: Final = re.compile(r"FOR VALUES FROM \('([0-9a-f-]{36})'\) TO \('([0-9a-f-]{36})'\)")
_PARTITIONS: Final = """
SELECT p.relname::text, c.relname::text, pg_get_expr(c.relpartbound, c.oid) FROM pg_inherits i
    JOIN pg_class p ON p.oid = i.inhparent JOIN pg_class c ON c.oid = i.inhrelid
WHERE p.oid = ANY (ARRAY['messages', 'deliveries', 'log_entries']::regclass[])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The messages born in [low_ms, high_ms). `names`: the partition of each table; `kept`: it holds remains alone."""

    label: str
    low_ms: int
    high_ms: int
    kept: bool
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """These parts are to become one, or none."""

    label: str
    low_ms: int
    high_ms: int
    parts: Sequence[Part]

    @property
    def bounds(self) -> tuple[str, str]:
        """The first id in it, and the first after it."""
        return first_id(self.low_ms), first_id(self.high_ms)


async def parts_of(connection: AsyncConnection[TupleRow]) -> list[Part]:
    """The parts that all three tables have, the oldest first."""
    names: dict[tuple[str, str, str, bool], dict[str, str]] = {}
    for table, name, bounds in await (await connection.execute(_PARTITIONS)).fetchall():
        named, between = _NAME.fullmatch(name), _BOUNDS.fullmatch(bounds)
        if named is not None and between is not None:
            names.setdefault((between[1], between[2], named[1], named[2] is not None), {})[table] = name
    parts = [
        Part(label=label, low_ms=born_ms(low), high_ms=born_ms(high), kept=kept, names=found)
        for (low, high, label, kept), found in names.items()
        if found.keys() == TABLES.keys()
    ]
    return sorted(parts, key=lambda part: part.low_ms)


def spans_of(parts: Sequence[Part], before_ms: int) -> Iterator[Span]:
    """What to go through of the parts that end by `before_ms`: each alone, then the months and years that have several
    remains and nothing whole.
    """
    over = [part for part in parts if part.high_ms <= before_ms]
    for part in over:
        yield Span(label=part.label, low_ms=part.low_ms, high_ms=part.high_ms, parts=[part])
    for length in (6, 4):
        for label in sorted({part.label[:length] for part in over}):
            low_ms, high_ms = _range(label)
            inside = [part for part in parts if part.low_ms < high_ms and part.high_ms > low_ms]
            if high_ms <= before_ms and len(inside) > 1 and all(part.kept for part in inside):
                yield Span(label=label, low_ms=low_ms, high_ms=high_ms, parts=inside)


def _range(label: str) -> tuple[int, int]:
    """The month `202609` or the year `2026` in milliseconds."""
    low = datetime(int(label[:4]), int(label[4:] or 1), 1, tzinfo=UTC)
    next_month = (low + timedelta(days=31)).replace(day=1)
    high = next_month if len(label) > len("2026") else low.replace(year=low.year + 1)
    return int(low.timestamp() * 1000), int(high.timestamp() * 1000)
