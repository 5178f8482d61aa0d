"""Parse the URLs of Aerospike clusters, STOMP brokers and ZooKeeper ensembles.

    aerospike://user:password@h1:3000,h2:3000/namespace?retries=3
    stomp://user:password@a:61613,b:61613?heartbeat_ms=5000        stomps:// is the same by TLS
    zookeeper://user:password@h1:2181,h2:2181/root?session_s=10

A `_UrlSpec` states the nodes and parameters of each kind. One reader checks them all and lists
every problem.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, unquote, urlencode

STANDBY_SESSION_S: Final = 3.0
"""Session of a standby. ZooKeeper ends it within one more tick (500 ms where Rooms starts it)."""
_MAX_PORT: Final = 65_535
_NODE: Final = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[^\s:/@\[\],]+))(?::(?P<port>[0-9]{1,5}))?"
)
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_\-$]{1,31}")
_CONTROL: Final = re.compile(r"[\x00-\x1f]")
_ESCAPES: Final = "in a password write / as %2F, ? as %3F and @ as %40"
_INTEGER: Final = re.compile("[0-9]{1,9}")


class BackendUrlError(ValueError):
    """Report every problem of a URL in `problems`, without its password."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class AerospikeUrl:
    """Describe a cluster. TLS and credentials need an Enterprise server."""

    hosts: tuple[tuple[str, int], ...]
    namespace: str
    user: str
    password: str
    tls: bool
    """By default true with credentials, and false without."""
    tls_name: str | None
    ca: str | None
    certificate: str | None
    key: str | None
    retries: int
    sleep_ms: int
    socket_timeout_ms: int
    total_timeout_ms: int
    connections: int
    threads: int
    """0: four for each processor."""
    mark_s: int
    """Seconds for which a slot that is done, or was passed while empty, is remembered as such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StompUrl:
    """Describe a broker. `hosts` are tried in their order."""

    hosts: tuple[tuple[str, int], ...]
    user: str
    password: str
    tls: bool
    ca: str | None
    """PEM file of the trusted authorities; None: those of the system."""
    certificate: str | None
    key: str | None
    verify: bool
    connect_timeout_ms: int
    heartbeat_ms: int
    """Interval of each side's heart-beats. A side that is silent for twice as long is given up."""
    receipt_timeout_ms: int
    """Time in which a broker that sends heart-beats must answer a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooKeeperUrl:
    """Describe an ensemble, and the path in it under which installations have theirs."""

    hosts: str
    root: str = ""
    user: str | None = None
    password: str = ""
    session_s: float = 10.0
    """Silence after which the server ends a session, as far as the server agrees."""
    refresh_s: float = 30.0
    """Seconds between two refreshes of all assignments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _UrlSpec:
    """State what the URLs of one kind of backend contain."""

    port: int
    nodes: str
    """Word for the nodes in problems."""
    numbers: Mapping[str, tuple[int, int, int]]
    """Parameters that are whole numbers: default, least, most."""
    flags: tuple[str, ...] = ()
    """Parameters that are true or false."""
    files: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()

    @property
    def parameters(self) -> frozenset[str]:
        return frozenset((*self.numbers, *self.flags, *self.files, *self.texts))


_TLS_FILES: Final = ("ca", "certificate", "key")
_AEROSPIKE: Final = _UrlSpec(
    port=3000,
    nodes="nodes",
    numbers={
        "retries": (3, 0, 100),
        "sleep_ms": (100, 0, 60_000),
        "socket_timeout_ms": (3_000, 10, 300_000),
        "total_timeout_ms": (5_000, 10, 300_000),
        "connections": (100, 1, 10_000),
        "threads": (0, 0, 1_000),
        "mark_s": (3_600, 1_200, 604_800),
    },
    flags=("tls",),
    files=_TLS_FILES,
    texts=("tls_name",),
)
_STOMP_NUMBERS: Final[Mapping[str, tuple[int, int, int]]] = {
    "connect_timeout_ms": (5_000, 100, 60_000),
    "heartbeat_ms": (5_000, 250, 30_000),
    "receipt_timeout_ms": (30_000, 1_000, 300_000),
}
_STOMP: Final = _UrlSpec(port=61613, nodes="brokers", numbers=_STOMP_NUMBERS)
_STOMPS: Final = _UrlSpec(
    port=61613, nodes="brokers", numbers=_STOMP_NUMBERS, flags=("verify",), files=_TLS_FILES
)
_ZOOKEEPER: Final = _UrlSpec(
    port=2181,
    nodes="servers",
    numbers={"session_s": (10, 1, 60), "refresh_s": (30, 1, 3600)},
)


def parse_aerospike_url(url: str) -> AerospikeUrl:
    """Return the parts of an aerospike:// URL. BackendUrlError lists every problem."""
    reader = _UrlReader(url, _AEROSPIKE)
    login, nodes = reader.split_login(reader.address)
    nodes, _, namespace = nodes.partition("/")
    hosts = reader.hosts(nodes)
    if not _NAMESPACE.fullmatch(namespace):
        reader.problems.append(
            "names no namespace: aerospike://HOST:PORT/NAMESPACE,"
            " of up to 31 letters, digits, '_', '-', '$'"
        )
    user, password = login or ("", "")
    tls = reader.flag("tls", default=login is not None)
    numbers = reader.numbers()
    reader.check_files()
    reader.check()
    return AerospikeUrl(
        hosts=hosts,
        namespace=namespace,
        user=user,
        password=password,
        tls=tls,
        tls_name=reader.given.get("tls_name"),
        ca=reader.given.get("ca"),
        certificate=reader.given.get("certificate"),
        key=reader.given.get("key"),
        **numbers,
    )


def parse_stomp_url(url: str) -> StompUrl:
    """Return the parts of a stomp:// or stomps:// URL. BackendUrlError lists every problem."""
    tls = scheme_of(url) == "stomps"
    reader = _UrlReader(url, _STOMPS if tls else _STOMP)
    login, nodes = reader.split_login(reader.address)
    hosts = reader.hosts(nodes.removesuffix("/"))
    user, password = login or ("", "")
    if _CONTROL.search(user + password):
        reader.problems.append("has a control character in its user or password")
    verify = reader.flag("verify", default=True)
    numbers = reader.numbers()
    reader.check_files()
    reader.check()
    return StompUrl(
        hosts=hosts,
        user=user,
        password=password,
        tls=tls,
        ca=reader.given.get("ca"),
        certificate=reader.given.get("certificate"),
        key=reader.given.get("key"),
        verify=verify,
        **numbers,
    )


def parse_zookeeper_url(url: str) -> ZooKeeperUrl:
    """Return the parts of a zookeeper:// URL. BackendUrlError lists every problem."""
    reader = _UrlReader(url, _ZOOKEEPER)
    authority, slash, path = reader.address.partition("/")
    if "@" in path:
        reader.problems.append(f"has an @ after its /; {_ESCAPES}")
    login, nodes = reader.split_login(authority)
    reader.hosts(nodes)
    user, password = login or ("", "")
    numbers = reader.numbers()
    reader.check()
    return ZooKeeperUrl(
        hosts=nodes,
        root=f"{slash}{path}".rstrip("/"),
        user=user or None,
        password=password,
        **numbers,
    )


def scheme_of(url: str) -> str:
    """Return the scheme of any URL, also of one with brackets in its password."""
    return url.partition(":")[0].lower()


PARSERS: Final[Mapping[str, Callable[[str], object]]] = {
    "aerospike": parse_aerospike_url,
    "stomp": parse_stomp_url,
    "stomps": parse_stomp_url,
    "zookeeper": parse_zookeeper_url,
}
"""Parsers by scheme. Each raises BackendUrlError."""


def with_standby_session(url: str) -> str:
    """Return an election's URL with a session short enough for a standby, unless it sets one."""
    address, _, text = url.partition("?")
    query = dict(parse_qsl(text))
    if scheme_of(url) != "zookeeper" or "session_s" in query:
        return url
    return f"{address}?{urlencode({**query, 'session_s': f'{STANDBY_SESSION_S:g}'})}"


class _UrlReader:
    """Read one URL by its spec, and collect its problems."""

    def __init__(self, url: str, spec: _UrlSpec) -> None:
        """Split off the parameters. `address` is the part between scheme and parameters."""
        self.problems: list[str] = []
        self._spec = spec
        self.address, _, query = url.partition("://")[2].partition("?")
        pairs = parse_qsl(query, keep_blank_values=True)
        self.given = dict(pairs)
        if len(self.given) != len(pairs):
            self.problems.append("has a parameter twice")
        self._query = query
        # Without a login before them, what would be the nodes may be a part of the password.
        self._hides_nodes = "@" in url
        if "@" in query:
            self.given = {}  # they may be parts of the password
            self.problems.append(f"has an @ after its ?; {_ESCAPES}")
        elif unknown := sorted(set(self.given) - spec.parameters):
            self.problems.append(
                f"has the unknown parameter {', '.join(unknown)};"
                f" valid here: {', '.join(sorted(spec.parameters))}"
            )

    def split_login(self, authority: str) -> tuple[tuple[str, str] | None, str]:
        """Return user and password (None: there is no @) and the rest.

        `authority` is the address, or the part of it before its path.
        """
        login, at, rest = authority.rpartition("@")
        if at:
            # The password may go on after its first @.
            self._hides_nodes = "@" in self.address[len(authority) :] + self._query
        user, _, password = login.partition(":")
        return (unquote(user), unquote(password)) if at else None, rest

    def hosts(self, nodes: str) -> tuple[tuple[str, int], ...]:
        """Return hosts and ports of nodes that are separated by commas."""
        hosts = []
        port = self._spec.port
        for node in nodes.split(","):
            found = _NODE.fullmatch(node)
            number = int(found["port"] or port) if found else 0
            if found is None or not 0 < number <= _MAX_PORT:
                self.problems.append(
                    f"has no HOST:PORT before a / or ?; {_ESCAPES}"
                    if self._hides_nodes
                    else f"has no HOST:PORT in {node!r};"
                    f" {self._spec.nodes} are listed as a:{port},b:{port}"
                )
            else:
                hosts.append((found["six"] or found["name"], number))
        return tuple(hosts)

    def numbers(self) -> dict[str, int]:
        """Return every number, given or by default."""
        numbers = {}
        for name, (default, low, high) in self._spec.numbers.items():
            text = self.given.get(name, str(default))
            numbers[name] = int(text) if _INTEGER.fullmatch(text) else -1
            if not low <= numbers[name] <= high:
                self.problems.append(
                    f"has {name}={text!r}, which is not a whole number from {low} to {high}"
                )
        return numbers

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a parameter that is true or false."""
        text = self.given.get(name, "true" if default else "false")
        if name in self._spec.flags and text not in {"true", "false"}:
            self.problems.append(f"has a {name} that is neither true nor false")
        return text == "true"

    def check_files(self) -> None:
        """Require that each file exists."""
        names = [name for name in self._spec.files if name in self.given]
        if "key" in names and "certificate" not in names:
            self.problems.append("has a key without its certificate")
        self.problems += [
            f"names a {name} that is no file: {self.given[name]}"
            for name in names
            if not Path(self.given[name]).is_file()
        ]

    def check(self) -> None:
        """Raise BackendUrlError if there are problems."""
        if self.problems:
            raise BackendUrlError(self.problems)
