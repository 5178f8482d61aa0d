"""Check a chain of the journal as a whole."""

from collections.abc import Iterable

from rooms.domain.journal import ChainBreak, ChainCheck, ChainedEntry


def check_chain(entries: Iterable[ChainedEntry]) -> ChainBreak | None:
    """Return the first break in a part of a chain; None: it is whole."""
    check = ChainCheck()
    for chained in entries:
        if (found := check.add(chained)) is not None:
            return found
    return None
