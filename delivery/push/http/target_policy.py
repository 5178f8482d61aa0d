"""Configure which targets webhooks may reach, in a form that can be passed to another process."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Self

from delivery.push.http.bulkhead import LimitScope
from delivery.push.http.dns import ORGANISATION_LOOKUPS, DnsResolver, LookupLimits, SystemResolver
from delivery.push.http.ssrf import IpNetwork, SsrfGuard
from rooms.domain.push_url import REFUSED_PORTS
from rooms.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPolicy:
    """Define which targets webhooks may reach, and how names are resolved."""

    allow: tuple[IpNetwork, ...] = ()
    """Networks that webhooks may reach in addition to the public ones."""
    refuse_ports: frozenset[int] = REFUSED_PORTS
    system_resolver: bool = False
    """Resolve names with libc in place of c-ares."""
    organisation_lookups: int = ORGANISATION_LOOKUPS
    """Concurrent lookups per organisation."""

    @contextmanager
    def open_guard(
        self,
        *,
        observe: Callable[[str], None] = lambda _outcome: None,
        on_wait: Callable[[LimitScope], None] = lambda _scope: None,
    ) -> Iterator[SsrfGuard]:
        """Open a guard with a resolver of its own."""
        resolver = SystemResolver() if self.system_resolver else DnsResolver()
        limits = LookupLimits(per_organisation=self.organisation_lookups)
        try:
            yield SsrfGuard(
                self.allow,
                refuse_ports=self.refuse_ports,
                resolver=resolver,
                limits=limits,
                observe=observe,
                on_wait=on_wait,
            )
        finally:
            resolver.close()

    def to_text(self) -> str:
        """Return the policy as one command-line argument."""
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
        """Parse the output of `to_text`."""
        fields = json.loads(text)
        return cls(
            allow=tuple(ip_network(network) for network in fields["allow"]),
            refuse_ports=frozenset(fields["refuse_ports"]),
            system_resolver=fields["system_resolver"],
            organisation_lookups=fields["organisation_lookups"],
        )


def target_policy(settings: Settings) -> TargetPolicy:
    """Return the policy of the settings, which the API and the worker share."""
    return TargetPolicy(
        allow=settings.allow_targets,
        refuse_ports=settings.refuse_ports,
        system_resolver=settings.resolver == "system",
        organisation_lookups=settings.organisation_lookups,
    )
