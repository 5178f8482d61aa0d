"""What is known of names: their vetted addresses, or why they have none. Bounded for each organisation and in all."""

from dataclasses import dataclass

from delivery.errors import TargetRefusedError
from rooms.domain.ids import OrganisationId


@dataclass(slots=True, kw_only=True)
class Verdict:
    """Hold the outcome of a look-up. `refusal` is set where there are no addresses. Times are monotonic seconds."""

    addresses: tuple[str, ...] = ()
    refusal: type[TargetRefusedError] | None = None
    detail: str = ""
    fresh_until: float
    """From then on it is looked up again."""
    usable_until: float
    """From then on the addresses are no good, even if no look-up is answered."""
    failures: int = 0
    """Look-ups since the last one that gave addresses."""


class NameCache:
    """Keep verdicts by organisation, so that no organisation can have those of another dropped."""

    def __init__(self, *, in_all: int, per_organisation: int) -> None:
        self._in_all = in_all
        self._per_organisation = per_organisation
        self.names: dict[OrganisationId, dict[str, Verdict]] = {}
        """By organisation and host. To be read only: each delivery looks here."""
        self._size = 0

    @property
    def size(self) -> int:
        """How many names there are."""
        return self._size

    def get(self, organisation: OrganisationId, host: str) -> Verdict | None:
        """Return what is known, however old."""
        names = self.names.get(organisation)
        return None if names is None else names.get(host)

    def put(self, organisation: OrganisationId, host: str, verdict: Verdict) -> None:
        """Keep a verdict, and drop the oldest where there are too many."""
        self._drop(organisation, host)
        if self._size >= self._in_all:
            # Who has most loses: an organisation with a few names keeps them, whatever the others do.
            largest = max(self.names, key=lambda owner: len(self.names[owner]))
            self._drop(largest, next(iter(self.names[largest])))
        names = self.names.setdefault(organisation, {})
        names[host] = verdict
        self._size += 1
        if len(names) > self._per_organisation:
            self._drop(organisation, next(iter(names)))

    def _drop(self, organisation: OrganisationId, host: str) -> None:
        names = self.names.get(organisation)
        if names is not None and names.pop(host, None) is not None:
            self._size -= 1
            if not names:
                del self.names[organisation]
