"""What the operator says about targets, in a form that also goes to another process."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Self

from delivery.addresses import Network
from delivery.bulkhead import Bound
from delivery.guard import Guard
from delivery.lookups import ORGANISATION_LOOKUPS, LookupLimits
from delivery.resolver import DnsResolver, SystemResolver
from rooms.domain.refused_ports import REFUSED_PORTS


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPolicy:
    """Say which targets webhooks may reach, and how names are looked up."""

    allow: tuple[Network, ...] = ()
    """Networks that webhooks may reach besides the public ones."""
    refuse_ports: frozenset[int] = REFUSED_PORTS
    system_resolver: bool = False
    """Whether libc resolves names, and not c-ares."""
    organisation_lookups: int = ORGANISATION_LOOKUPS
    """How many look-ups of one organisation are under way at a time."""

    @contextmanager
    def open_guard(
        self,
        *,
        observe: Callable[[str], None] = lambda _outcome: None,
        waited: Callable[[Bound], None] = lambda _bound: None,
    ) -> Iterator[Guard]:
        """Open a guard with a resolver of its own."""
        resolver = SystemResolver() if self.system_resolver else DnsResolver()
        limits = LookupLimits(per_organisation=self.organisation_lookups)
        try:
            yield Guard(
                self.allow,
                refuse_ports=self.refuse_ports,
                resolver=resolver,
                limits=limits,
                observe=observe,
                waited=waited,
            )
        finally:
            resolver.close()

    def to_text(self) -> str:
        """Return it as one argument of a command."""
        return json.dumps(
            {
                "allow": [str(network) for network in self.allow],
                "refuse_ports": sorted(self.refuse_ports),
                "system_resolver": self.system_resolver,
                "organisation_lookups": self.organisation_lookups,
            }
        )

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read what `to_text` returned."""
        said = json.loads(text)
        return cls(
            allow=tuple(ip_network(network) for network in said["allow"]),
            refuse_ports=frozenset(said["refuse_ports"]),
            system_resolver=said["system_resolver"],
            organisation_lookups=said["organisation_lookups"],
        )
