"""Who asks: what an API key stands for."""

from dataclasses import dataclass

from rooms.domain.ids import KeyId, OrganisationId
from rooms.domain.states import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A known key: whose it is and what it may do."""

    key_id: KeyId
    organisation_id: OrganisationId
    scopes: frozenset[Scope]

    def may(self, *wanted: Scope) -> bool:
        """Whether one of `wanted` is among the scopes; `admin` may do everything."""
        return Scope.ADMIN in self.scopes or not self.scopes.isdisjoint(wanted)

    @property
    def sees_due_only(self) -> bool:
        """Whether deliveries stay invisible until they are due (row A9): nothing but `subscribe` reads them."""
        return not self.may(Scope.MANAGE, Scope.OPERATE)
