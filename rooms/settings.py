"""The settings: read once from the environment, every problem told at once, nobody else reads it."""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

from rooms.aerospike_url import AerospikeUrlError, parse_aerospike_url
from rooms.domain.native_address import NativeAddress, parse_native_addresses
from rooms.domain.place import EMBEDDED, Shape, relayed
from rooms.domain.refused_ports import REFUSED_PORTS
from rooms.errors import SettingsError

IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

SCHEMES: Final[Mapping[str, tuple[str, ...]]] = {
    "DATABASE_URL": ("postgresql",),
    "BROKER_URL": ("postgresql", "stomp", "stomps"),
    "MAGAZINE_URL": ("postgresql", "aerospike"),
    "ELECTION_URL": ("postgresql", "zookeeper"),
}
ZOOKEEPER: Final[Mapping[str, tuple[int, int]]] = {"session_s": (1, 60), "refresh_s": (1, 3600)}
"""What a zookeeper:// URL may set, from and to: seconds of silence that end a session, seconds between two refreshes."""
_WHOLE: Final = re.compile("[0-9]{1,18}")
_PORTS: Final = 1 << 16
_PORT_RANGE: Final = re.compile("([0-9]{1,5})(?:-([0-9]{1,5}))?")
_HOST: Final = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_WORD: Final = re.compile("[A-Za-z0-9_-]+")
_WEAKEST_PART_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an operator may set. Field `listen_host` and `listen_port` are ROOMS_LISTEN."""

    listen_host: str
    listen_port: int
    data: Path
    database_url: str | None
    """None: the embedded PostgreSQL under `data`."""
    broker_url: str | None
    """None: the database."""
    election_url: str | None
    """None: the database."""
    magazine_url: str | None
    """None: the database."""
    analysis_url: str | None
    """Where exported segments and the analysis' tables lie, a path or a URI; None: under `data`."""
    export_s: int
    """Seconds between two exports of the log by the upkeep; 0: it is exported by hand alone."""
    retention_days: int
    """How many days what has ended is kept; 0: for ever."""
    farm: str
    client: str
    allow_targets: tuple[IpNetwork, ...]
    refuse_ports: frozenset[int]
    """Ports that no webhook is sent to."""
    resolver: str
    """`dns`: c-ares asks the name servers. `system`: libc does, which knows every module of nsswitch.conf."""
    organisation_lookups: int
    """Look-ups of names that one organisation may have under way in each process."""
    organisation_connections: int
    """Webhook connections that one organisation may have in each worker; 0: a quarter of all."""
    endpoint_connections: int
    """Webhook connections of one organisation to one origin in each worker; 0: an eighth of all."""
    secret_key: str | None
    """Base64 of 32 bytes; None: read from (or made in) `data`/secret-key."""
    max_payload_bytes: int
    max_body_bytes: int
    max_batch: int
    max_schema_bytes: int
    validation_ms: int
    """CPU time that the checks of one request may take in the sandbox, in all."""
    validation_processes: int
    """Sandbox processes of one API process; one organisation may have half of them."""
    validation_memory_bytes: int
    """What one sandbox process may allocate."""
    lane_concurrency: int
    claim_s: int
    isolate_after: int
    """So many workers running have to die with a copy in hand before it is attempted in a process of its own; 0: it never is."""
    horizon_s: int
    """How far ahead of its due time a copy is given to a broker that is not PostgreSQL."""
    native_addresses: tuple[NativeAddress, ...]
    """Where readers of native queues connect, as the login says; none: the hosts of `broker_url`."""
    rate_limit_per_s: int
    """Requests a second and API key; 0: unlimited."""
    loop_stall_ms: int
    """A callback that keeps the event loop for longer is logged and counted; 0: none is."""
    unknown_keys_per_s: int
    """Look-ups a second of unknown API keys from one address; 0: unlimited."""
    max_connections: int
    """Connections of clients at a time, in each API process; fewer where the system lets it have fewer files."""
    max_unauthenticated_connections: int
    """Of these, connections on which no request has had a valid key yet."""
    max_connections_per_address: int
    """Of those without a key, from one address (IPv6: one /64); 0: no bound."""
    trusted_addresses: tuple[IpNetwork, ...]
    """Proxies, which may have any number of those."""
    head_timeout_s: int
    """How long the head of a request may take."""
    idle_timeout_s: int
    """How long a connection may have no request."""
    min_body_bytes_per_s: int
    """How fast a body must come on average, after ten seconds."""
    organisation_body_bytes: int
    """Bytes of large bodies of one organisation that each API process holds at a time."""
    max_consumers: int
    """Streams, and polls that wait, of one organisation in each API process."""
    log_level: str
    start_wait_s: int

    @property
    def relayed(self) -> bool:
        """Whether another broker than PostgreSQL carries the copies."""
        return self.broker_url is not None and urlsplit(self.broker_url).scheme != "postgresql"

    @property
    def analysis(self) -> str:
        """Where the analysis lies: `segments` and `tables` are folders in it."""
        return (self.analysis_url or str(self.data.absolute() / "analysis")).rstrip("/")

    @property
    def shape(self) -> Shape:
        """How deliveries travel."""
        return relayed(horizon_ms=self.horizon_s * 1000) if self.relayed else EMBEDDED


class _Reader:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.problems: list[str] = []

    def text(self, name: str, default: str) -> str:
        return self._environment.get(name) or default

    def optional(self, name: str) -> str | None:
        return self._environment.get(name) or None

    def number(self, name: str, default: int, low: int, high: int) -> int:
        value = self._environment.get(name)
        if not value:
            return default
        if not _WHOLE.fullmatch(value) or not low <= int(value) <= high:
            self.problems.append(f"{name}={value!r} is not a whole number from {low} to {high}")
            return default
        return int(value)

    def url(self, name: str) -> str | None:
        value = self._environment.get(name)
        if not value:
            return None
        if value.partition("://")[0].lower() in {"stomp", "stomps"} & set(SCHEMES[name]):
            return self._stomp(name, value)
        if value.startswith("aerospike://") and "aerospike" in SCHEMES[name]:
            return self._aerospike(name, value)
        try:
            parts = urlsplit(value)
        except ValueError as exc:
            self.problems.append(f"{name} is no URL: {exc}")
            return None
        scheme = parts.scheme
        if scheme not in SCHEMES[name]:
            valid = ", ".join(f"{known}://" for known in SCHEMES[name])
            self.problems.append(f"{name} starts with {scheme or 'no scheme'}://; valid here: {valid}")
            return None
        if scheme == "zookeeper":
            return self._zookeeper(name, value)
        from psycopg.pq import Conninfo  # the command line reads settings too, and has no use for a driver

        known = {option.keyword.decode() for option in Conninfo.get_defaults()}
        if unknown := [key for key in parse_qs(parts.query, keep_blank_values=True) if key not in known]:
            valid = ", ".join(sorted(known))
            self.problems.append(
                f"{name} has the parameter {', '.join(unknown)}, which means nothing; valid here: {valid}"
            )
        return value

    def _stomp(self, name: str, value: str) -> str:
        from rooms.brokers.stomp_url import StompUrlError, parse_stomp_url  # which in turn asks for SCHEMES

        try:
            parse_stomp_url(value)
        except StompUrlError as exc:
            self.problems += [f"{name} {problem}" for problem in exc.problems]
        return value

    def _aerospike(self, name: str, value: str) -> str:
        try:
            parse_aerospike_url(value)
        except AerospikeUrlError as exc:
            self.problems += [f"{name} {problem}" for problem in exc.problems]
        return value

    def _zookeeper(self, name: str, value: str) -> str:
        parts = urlsplit(value)
        for host in parts.netloc.rpartition("@")[2].split(","):
            if not _HOST.fullmatch(host):
                self.problems.append(f"{name}: {host!r} is not HOST:PORT; zookeeper://h1:2181,h2:2181 names several")
        for key, values in parse_qs(parts.query, keep_blank_values=True).items():
            low, high = ZOOKEEPER.get(key, (0, 0))
            if not high:
                valid = ", ".join(ZOOKEEPER)
                self.problems.append(f"{name} has the parameter {key}, which means nothing; valid here: {valid}")
            elif not _WHOLE.fullmatch(values[-1]) or not low <= int(values[-1]) <= high:
                self.problems.append(f"{name}: {key}={values[-1]!r} is not a whole number from {low} to {high}")
        return value

    def address(self, name: str, default: str) -> tuple[str, int]:
        value = self.text(name, default)
        host, _, port = value.rpartition(":")
        plain = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not plain or (":" in plain) != (plain != host) or not _WHOLE.fullmatch(port) or not 0 < int(port) < _PORTS:
            self.problems.append(f"{name}={value!r} is not HOST:PORT, for example {default} or [::1]:8080")
            return "127.0.0.1", 8080
        return plain, int(port)

    def networks(self, name: str) -> tuple[IpNetwork, ...]:
        found = []
        for part in filter(None, (piece.strip() for piece in self.text(name, "").split(","))):
            try:
                found.append(ipaddress.ip_network(part))
            except ValueError as exc:
                self.problems.append(f"{name}: {exc}; it takes CIDR blocks, for example 127.0.0.0/8,10.1.0.0/16")
        return tuple(found)

    def ports(self, name: str, default: frozenset[int]) -> frozenset[int]:
        found: set[int] = set()
        value = self.text(name, "default").strip()
        for part in filter(None, (piece.strip() for piece in value.split(",") if value != "none")):
            ends = _PORT_RANGE.fullmatch(part)
            low, high = (int(ends[1]), int(ends[2] or ends[1])) if ends is not None else (1, 0)
            if part == "default":
                found |= default
            elif low <= high < _PORTS:
                found |= set(range(low, high + 1))
            else:
                self.problems.append(
                    f"{name}: {part!r} is no port; it takes ports and ranges, `default` for those refused where it is not"
                    " set, for example default,8500,6660-6669; or `none`"
                )
        return frozenset(found)

    def choice(self, name: str, default: str, *valid: str) -> str:
        value = self.text(name, default)
        if value not in valid:
            self.problems.append(f"{name} is one of {', '.join(valid)}")
        return value

    def native_addresses(self, name: str) -> tuple[NativeAddress, ...]:
        try:
            return parse_native_addresses(self.text(name, ""))
        except ValueError as exc:
            self.problems.append(f"{name}: {exc}")
            return ()


def read_settings(environment: Mapping[str, str]) -> Settings:
    """The settings in `environment`; SettingsError names every variable that is wrong, and what it takes."""
    read = _Reader(environment)
    host, port = read.address("ROOMS_LISTEN", "127.0.0.1:8080")
    settings = Settings(
        listen_host=host,
        listen_port=port,
        data=Path(read.text("ROOMS_DATA", ".rooms")),
        database_url=read.url("DATABASE_URL"),
        broker_url=read.url("BROKER_URL"),
        election_url=read.url("ELECTION_URL"),
        magazine_url=read.url("MAGAZINE_URL"),
        analysis_url=read.optional("ROOMS_ANALYSIS_URL"),
        export_s=read.number("ROOMS_EXPORT_S", 0, 0, 86_400),
        retention_days=read.number("ROOMS_RETENTION_DAYS", 30, 0, 3650),
        farm=read.text("ROOMS_FARM", "rooms"),
        client=read.text("ROOMS_CLIENT", "default"),
        allow_targets=read.networks("ROOMS_ALLOW_TARGETS"),
        refuse_ports=read.ports("ROOMS_REFUSE_PORTS", REFUSED_PORTS),
        resolver=read.choice("ROOMS_RESOLVER", "dns", "dns", "system"),
        organisation_lookups=read.number("ROOMS_ORGANISATION_LOOKUPS", 32, 1, 256),
        organisation_connections=read.number("ROOMS_ORGANISATION_CONNECTIONS", 0, 0, 65_536),
        endpoint_connections=read.number("ROOMS_ENDPOINT_CONNECTIONS", 0, 0, 65_536),
        secret_key=read.optional("ROOMS_SECRET_KEY"),
        max_payload_bytes=read.number("ROOMS_MAX_PAYLOAD_BYTES", 256 * 1024, 1, _WEAKEST_PART_BYTES),
        max_body_bytes=read.number("ROOMS_MAX_BODY_BYTES", 16 * 1024 * 1024, 1024, 1 << 30),
        max_batch=read.number("ROOMS_MAX_BATCH", 1000, 1, 10_000),
        max_schema_bytes=read.number("ROOMS_MAX_SCHEMA_BYTES", 256 * 1024, 1024, 16 * 1024 * 1024),
        validation_ms=read.number("ROOMS_VALIDATION_MS", 1000, 10, 60_000),
        validation_processes=read.number("ROOMS_VALIDATION_PROCESSES", 2, 1, 64),
        validation_memory_bytes=read.number("ROOMS_VALIDATION_MEMORY_BYTES", 512 * 1024 * 1024, 1 << 26, 1 << 36),
        lane_concurrency=read.number("ROOMS_LANE_CONCURRENCY", 32, 1, 1000),
        claim_s=read.number("ROOMS_CLAIM_S", 60, 35, 3600),
        isolate_after=read.number("ROOMS_ISOLATE_AFTER", 3, 0, 1000),
        horizon_s=read.number("ROOMS_HORIZON_S", 60, 1, 86_400),
        native_addresses=read.native_addresses("ROOMS_NATIVE_ADDRESSES"),
        rate_limit_per_s=read.number("ROOMS_RATE_LIMIT_PER_S", 0, 0, 1_000_000),
        loop_stall_ms=read.number("ROOMS_LOOP_STALL_MS", 250, 0, 60_000),
        unknown_keys_per_s=read.number("ROOMS_UNKNOWN_KEYS_PER_S", 100, 0, 1_000_000),
        max_connections=read.number("ROOMS_MAX_CONNECTIONS", 8192, 2, 1_000_000),
        max_unauthenticated_connections=read.number("ROOMS_MAX_UNAUTHENTICATED_CONNECTIONS", 2048, 1, 1_000_000),
        max_connections_per_address=read.number("ROOMS_MAX_CONNECTIONS_PER_ADDRESS", 512, 0, 1_000_000),
        trusted_addresses=read.networks("ROOMS_TRUSTED_ADDRESSES"),
        head_timeout_s=read.number("ROOMS_HEAD_TIMEOUT_S", 10, 1, 3600),
        idle_timeout_s=read.number("ROOMS_IDLE_TIMEOUT_S", 75, 1, 86_400),
        min_body_bytes_per_s=read.number("ROOMS_MIN_BODY_BYTES_PER_S", 1024, 0, 1 << 30),
        organisation_body_bytes=read.number("ROOMS_ORGANISATION_BODY_BYTES", 256 * 1024 * 1024, 1024, 1 << 40),
        max_consumers=read.number("ROOMS_MAX_CONSUMERS", 2000, 1, 1_000_000),
        log_level=read.text("ROOMS_LOG_LEVEL", "INFO").upper(),
        start_wait_s=read.number("ROOMS_START_WAIT_S", 60, 0, 3600),
    )
    for name in ("farm", "client"):
        if not _WORD.fullmatch(getattr(settings, name)):
            read.problems.append(f"ROOMS_{name.upper()} takes letters, digits, '-' and '_' only")
    parts = {
        "BROKER_URL": settings.broker_url,
        "ELECTION_URL": settings.election_url,
        "MAGAZINE_URL": settings.magazine_url,
    }
    for name, url in parts.items():
        if url not in {None, settings.database_url} and urlsplit(url).scheme == "postgresql":
            read.problems.append(
                f"{name}: PostgreSQL does this in its own database only; leave it out, or DATABASE_URL's value"
            )
    if settings.log_level not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
        read.problems.append("ROOMS_LOG_LEVEL is one of DEBUG, INFO, WARNING, ERROR")
    if read.problems:
        raise SettingsError(read.problems)
    return settings
