"""Count the bytes of the body that a connection receives, and share them by organisation."""

from rooms.api.server.connections import ConnectionRegistry
from rooms.domain.ids import OrganisationId


class BodyBytes:
    """Count the bytes of one body at a time.

    Those beyond the first `small_body_bytes` are reserved for the organisation that sends them.
    """

    __slots__ = ("_received", "_registry", "_reserved", "organisation", "since_check")

    def __init__(self, registry: ConnectionRegistry) -> None:
        self._registry = registry
        self._received = self._reserved = 0
        self.organisation: OrganisationId | None = None
        """Where bytes are reserved, theirs."""
        self.since_check = 0
        """Bytes since the rate was last measured."""

    def begin(self) -> None:
        """Begin with the body of another request."""
        self.since_check = self._received = 0

    def add(self, count: int) -> None:
        """Count received bytes."""
        self.since_check += count
        self._received += count

    @property
    def unreserved(self) -> int:
        """Return how many bytes must still be reserved."""
        return max(0, self._received - self._registry.limits.small_body_bytes - self._reserved)

    def reserve(self, organisation: OrganisationId | None) -> bool:
        """Reserve the unreserved bytes. False: the organisation has too many.

        None: the key was not checked yet; they are reserved with the next part, or at the next
        check.
        """
        more = self.unreserved
        self.organisation = self.organisation or organisation
        if self.organisation is None:
            return True
        if not self._registry.reserve_body_bytes(self.organisation, more):
            return False
        self._reserved += more
        return True

    def release(self) -> None:
        """Release the reserved bytes."""
        if self.organisation is not None and self._reserved:
            self._registry.release_body_bytes(self.organisation, self._reserved)
        self.organisation, self._reserved = None, 0
