"""Describe the stores of an installation as addresses without credentials.

Processes record these addresses, and commands compare their own settings with them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

from rooms.backend_urls import (
    parse_aerospike_url,
    parse_stomp_url,
    parse_zookeeper_url,
    scheme_of,
)
from rooms.settings import Settings

DATABASE: Final = "postgresql"
"""Address of everything that PostgreSQL does in the database of DATABASE_URL."""
REDACTED: Final = "***@"
"""Mark of an address that needs a login, or files for TLS."""
VARIABLES: Final[Mapping[str, str]] = {
    "broker": "BROKER_URL",
    "election": "ELECTION_URL",
    "magazines": "MAGAZINE_URL",
    "farm": "ROOMS_FARM",
    "client": "ROOMS_CLIENT",
}
"""Environment variable of each field of `Backends`."""
STORES: Final = ("broker", "election", "magazines")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backends:
    """Hold the addresses of the stores, and the installation's names in them.

    An address is DATABASE, or a URL without credentials and parameters.
    """

    broker: str
    election: str
    magazines: str
    farm: str
    client: str

    @property
    def uses_other_stores(self) -> bool:
        """Return whether any store is not the database of DATABASE_URL.

        The names of the installation matter only then.
        """
        return any(getattr(self, store) != DATABASE for store in STORES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """Describe a process of the installation as the database records it."""

    name: str
    kind: str
    host: str
    pid: int
    running: bool
    """It gave a sign of life recently, and has not stopped."""
    backends: Backends
    secret_keys: tuple[str, ...] | None = None
    """Names of the keys that it has, the one with which it seals first.

    None: it seals and opens nothing, or is of a version that does not record them.
    """

    @property
    def label(self) -> str:
        """Return a short description for operators."""
        return f"{self.kind} {self.pid} on {self.host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingDifference:
    """Name a variable that has another value elsewhere."""

    variable: str
    own: str
    other: str


def backends_of(settings: Settings) -> Backends:
    """Return the stores of a process with these settings."""
    return Backends(
        broker=address_of(settings.broker_url),
        election=address_of(settings.election_url),
        magazines=address_of(settings.magazine_url),
        farm=settings.farm,
        client=settings.client,
    )


def address_of(url: str | None) -> str:
    """Return scheme, hosts, ports and path of a valid URL; None means the database."""
    if url is None:
        return DATABASE
    scheme = scheme_of(url)
    match scheme:
        case "stomp" | "stomps":
            broker = parse_stomp_url(url)
            secret = broker.user or broker.ca or broker.certificate or not broker.verify
            return _format_address(scheme, secret, _format_hosts(broker.hosts))
        case "aerospike":
            cluster = parse_aerospike_url(url)
            return _format_address(
                scheme,
                cluster.user or cluster.tls,
                f"{_format_hosts(cluster.hosts)}/{cluster.namespace}",
            )
        case "zookeeper":
            ensemble = parse_zookeeper_url(url)
            secret = ensemble.user or ensemble.password
            return _format_address(scheme, secret, ensemble.hosts + ensemble.root)
        case _:
            return DATABASE


def is_secret(address: str) -> bool:
    """Return whether connecting to the address needs a login, or files for TLS."""
    return REDACTED in address


def same_address(one: str, other: str) -> bool:
    """Return whether both have the same hosts, in any order, and the same path."""
    return _comparable(one) == _comparable(other)


def differences(current: Backends, recorded: Backends) -> Sequence[SettingDifference]:
    """Return the differences of two sets of backends.

    The installation's names count only if one of the sets has a store beside the database.
    """
    shared = current.uses_other_stores or recorded.uses_other_stores
    return [
        SettingDifference(variable=VARIABLES[field.name], own=value, other=other)
        for field in fields(Backends)
        if not same_address(
            value := getattr(current, field.name), other := getattr(recorded, field.name)
        )
        and (shared or field.name in STORES)
    ]


def running_processes(processes: Iterable[ProcessRecord]) -> Sequence[ProcessRecord]:
    """Return the running processes, ordered by name."""
    return sorted(
        (process for process in processes if process.running), key=lambda process: process.name
    )


def format_differences(differing: Iterable[SettingDifference]) -> str:
    """Return the differences as one line, with the own value first."""
    return "; ".join(f"{one.variable} is {one.own} here and {one.other} there" for one in differing)


def _format_address(scheme: str, secret: object, location: str) -> str:
    return f"{scheme}://{REDACTED if secret else ''}{location}"


def _format_hosts(hosts: Iterable[tuple[str, int]]) -> str:
    return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in hosts)


def _comparable(address: str) -> tuple[str, tuple[str, ...], str]:
    scheme, separator, rest = address.partition("://")
    if not separator:
        return address, (), ""
    hosts, _, path = rest.removeprefix(REDACTED).partition("/")
    return scheme, tuple(sorted(hosts.lower().split(","))), path
