"""The stores an installation runs on, as addresses without credentials: what processes record and commands compare."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final
from urllib.parse import urlsplit

from rooms.aerospike_url import parse_aerospike_url
from rooms.brokers.stomp_url import parse_stomp_url
from rooms.settings import Settings

DATABASE: Final = "postgresql"
"""The address of what PostgreSQL does in DATABASE_URL's own database."""
HIDDEN: Final = "***@"
"""Stands in an address that takes more than the address to connect to: a login, or files for TLS."""
VARIABLES: Final[Mapping[str, str]] = {
    "broker": "BROKER_URL",
    "election": "ELECTION_URL",
    "magazines": "MAGAZINE_URL",
    "farm": "ROOMS_FARM",
    "client": "ROOMS_CLIENT",
}
"""The environment variable behind each field of `Backends`."""
STORES: Final = ("broker", "election", "magazines")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backends:
    """Addresses (DATABASE, or a URL without credentials and parameters), and the installation's names in shared stores."""

    broker: str
    election: str
    magazines: str
    farm: str
    client: str

    @property
    def shared(self) -> bool:
        """Whether any store is another than DATABASE_URL's own database. The names mean nothing otherwise."""
        return any(getattr(self, store) != DATABASE for store in STORES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """A process of the installation as the database has it. `seen_s`: seconds since it was last heard of; `running`: it was
    heard of lately and has not stopped.
    """

    name: str
    kind: str
    host: str
    pid: int
    seen_s: float
    running: bool
    backends: Backends

    @property
    def label(self) -> str:
        """The process for people."""
        return f"{self.kind} {self.pid} on {self.host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A variable with two values."""

    variable: str
    ours: str
    theirs: str


def backends_of(settings: Settings) -> Backends:
    """Return what a process of these settings runs on."""
    return Backends(
        broker=address_of(settings.broker_url),
        election=address_of(settings.election_url),
        magazines=address_of(settings.magazine_url),
        farm=settings.farm,
        client=settings.client,
    )


def address_of(url: str | None) -> str:
    """Return scheme, hosts, ports and path of a URL that the settings have accepted; None is the database."""
    if url is None:
        return DATABASE
    scheme = urlsplit(url).scheme.lower()
    match scheme:
        case "stomp" | "stomps":
            broker = parse_stomp_url(url)
            secret = broker.user or broker.ca or broker.certificate or not broker.verify
            return _address(scheme, secret, _hosts(broker.hosts))
        case "aerospike":
            cluster = parse_aerospike_url(url)
            return _address(scheme, cluster.user or cluster.tls, f"{_hosts(cluster.hosts)}/{cluster.namespace}")
        case "zookeeper":
            parts = urlsplit(url)
            login, _, hosts = parts.netloc.rpartition("@")
            return _address(scheme, login, hosts + parts.path.rstrip("/"))
        case _:
            return DATABASE


def is_secret(address: str) -> bool:
    """Return whether a connection takes more than the address."""
    return HIDDEN in address


def same_address(one: str, other: str) -> bool:
    """Return whether both name the same hosts, in whatever order, and the same place on them."""
    return _comparable(one) == _comparable(other)


def differences(ours: Backends, theirs: Backends) -> Sequence[Difference]:
    """Return where two sets of backends differ. Names count only where either has a store beside the database."""
    shared = ours.shared or theirs.shared
    return [
        Difference(variable=VARIABLES[field.name], ours=mine, theirs=other)
        for field in fields(Backends)
        if not same_address(mine := getattr(ours, field.name), other := getattr(theirs, field.name))
        and (shared or field.name in STORES)
    ]


def running(processes: Iterable[ProcessRecord]) -> Sequence[ProcessRecord]:
    """Return the processes that run, by name."""
    return sorted((process for process in processes if process.running), key=lambda process: process.name)


def describe(differing: Iterable[Difference]) -> str:
    """Return differences as one line, ours first."""
    return "; ".join(f"{one.variable} is {one.ours} here and {one.theirs} there" for one in differing)


def _address(scheme: str, secret: object, place: str) -> str:
    return f"{scheme}://{HIDDEN if secret else ''}{place}"


def _hosts(hosts: Iterable[tuple[str, int]]) -> str:
    return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in hosts)


def _comparable(address: str) -> tuple[str, tuple[str, ...], str]:
    scheme, separator, rest = address.partition("://")
    if not separator:
        return address, (), ""
    hosts, _, path = rest.removeprefix(HIDDEN).partition("/")
    return scheme, tuple(sorted(hosts.lower().split(","))), path
