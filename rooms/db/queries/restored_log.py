"""Recognise the rows of the log that another server has written.

A dump that is restored into another server keeps the ids of transactions in its rows, and there the
ids begin anew. A row is **restored** if its transaction is one that this server has not begun,
`pg_snapshot_xmax` of the very statement that finds it. The export gives such rows ranges of their
own. These are recorded under another system, so that they are no progress among the transactions of
this server: when it gives the same ids, years later, its own rows are exported like all others, and
restored rows among them once more. Retention has deleted many of these by then, so the numbers of
their writers are not compared again.

A server may have begun more transactions when a row is looked at than when it was exported, never
fewer. So a row that is restored now, below the end of these ranges, was in one of them.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Callable
from typing import Final

_XID: Final = "(xid::text::bigint)"
_SUFFIX: Final = "/restored"
NEXT_XID: Final = "(SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint)"
"""The first id that is not given yet; a subquery, so it is evaluated once and not for each row."""
_SYSTEM: Final = f"(SELECT system_identifier::text || '{_SUFFIX}' FROM pg_control_system())"  # noqa: S608 - a constant of this module
_MAX_XID: Final = 1 << 62
"""Above every id of a transaction; twice as many are a bigint."""

RESTORED_END: Final = f"""
SELECT coalesce(max(end_xid), 0) FROM log_exports WHERE destination = %s AND system = {_SYSTEM} AND sealed_at IS NOT NULL
"""  # noqa: S608 - constants of this module
"""The id below which all restored rows have been exported to a destination."""
LEAST_RESTORED_END: Final = f"""
SELECT 0, coalesce(min(coalesce(e.end_xid, 0)), 0) FROM unnest(%(destinations)s::text[]) d (destination) LEFT JOIN LATERAL (
    SELECT end_xid FROM log_exports e WHERE e.destination = d.destination AND e.system = {_SYSTEM} AND e.sealed_at IS NOT NULL
    ORDER BY first_xid DESC LIMIT 1
) e ON true
"""  # noqa: S608 - constants of this module
"""The same of several destinations: what is below it has been exported to each of them."""
FIRST_RESTORED: Final = f"""
SELECT greatest({NEXT_XID}, %(end)s::bigint)
WHERE EXISTS (SELECT FROM log_entries WHERE {_XID} >= greatest({NEXT_XID}, %(end)s::bigint))
"""  # noqa: S608 - constants of this module
"""The id from which restored rows are left; no row if there are none."""

DELETE_PASSED_WRITERS: Final = f"""
DELETE FROM log_export_writers WHERE destination = %(destination)s AND system = {_SYSTEM}
    AND %(exported)s >= (SELECT coalesce(max(end_xid), 0) FROM log_exports WHERE destination = %(destination)s AND system = {_SYSTEM})
"""  # noqa: S608 - constants of this module
"""No later range has restored rows: this server has given all of their ids."""


def restored_system(system: str) -> str:
    """Return the system under which ranges of restored rows are recorded."""
    return system + _SUFFIX


def is_restored(xid: str, end: str) -> str:
    """Return the condition that a row is restored and below `end`."""
    return f"{xid} >= {NEXT_XID} AND {xid} < {end}"


def is_not_exported(xid: str, exported: str, restored_end: str) -> str:
    """Return the condition that a row's own range is not exported, nor one of restored rows.

    Both parts are ranges, which the index of transactions finds.
    """
    return f"({xid} >= {exported} AND {xid} < {NEXT_XID} OR {xid} >= greatest({exported}, {restored_end}))"


def find_range(
    first: int, has_rows: Callable[[int, int], bool], max_transactions: int
) -> tuple[int, int] | None:
    """Return the first range from `first` on that has rows, of at most `max_transactions`.

    What is empty before it is passed over in steps that double, as it may be most of all ids. None:
    the rows were deleted meanwhile.
    """
    empty, width = first, max_transactions
    while not has_rows(empty, empty + width):
        empty, width = empty + width, 2 * width
        if empty + width > _MAX_XID:
            return None
    end = empty + width
    while end - empty > max_transactions:
        middle = (empty + end) // 2
        if has_rows(empty, middle):
            end = middle
        else:
            empty = middle
    return empty, end
