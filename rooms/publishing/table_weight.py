"""Count the memory of a routing table, which grows while messages are routed."""

from collections.abc import Callable


class TableWeight:
    """Count about how many bytes a routing table takes: what was read, and routes built from it.

    `on_growth` is called with the bytes that are added, or (negative) freed; None: with none.
    """

    __slots__ = ("_record_bytes", "bytes", "on_growth")

    def __init__(self, record_bytes: int) -> None:
        self._record_bytes = self.bytes = record_bytes
        self.on_growth: Callable[[int], None] | None = None

    def add(self, count: int) -> None:
        """Count the bytes of a route, or of what is built from it."""
        self.bytes += count
        if self.on_growth is not None:
            self.on_growth(count)

    def forget_routes(self) -> None:
        """Count only what was read, because the table has no routes any more."""
        self.add(self._record_bytes - self.bytes)
