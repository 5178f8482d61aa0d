"""Who asks: what an API key stands for."""

from dataclasses import dataclass
from typing import Final

from rooms.domain.ids import KeyId, OrganisationId
from rooms.domain.states import Scope

_PLATFORM_ONLY: Final = (Scope.PLATFORM,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A known key: whose it is and what it may do."""

    key_id: KeyId
    organisation_id: OrganisationId
    scopes: frozenset[Scope]

    def may(self, *wanted: Scope) -> bool:
        """Return whether one of `wanted` is among the scopes. `admin` stands for each of them but `platform`."""
        return not self.scopes.isdisjoint(wanted) or (Scope.ADMIN in self.scopes and wanted != _PLATFORM_ONLY)

    @property
    def sees_due_only(self) -> bool:
        """Whether deliveries stay invisible until they are due (row A9): nothing but `subscribe` reads them."""
        return not self.may(Scope.MANAGE, Scope.OPERATE)
