"""Parse and check push URLs, and list the ports that no webhook is sent to.

HTTP to such a port could only reach the server of another protocol.
"""

import re
from dataclasses import dataclass, field
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Final
from urllib.parse import quote

MAX_URL = 2048
_MAX_HOST = 253

_DEFAULT_PORTS = {"http": 80, "https": 443}
_URL = re.compile(r"(?P<scheme>[^:/?]*)://(?P<authority>[^/?]*)(?P<path>/[^?]*)?(?P<query>\?.*)?")
_AUTHORITY = re.compile(r"(?:\[(?P<v6>[^\[\]]*)\]|(?P<name>[^:\[\]]*))(?::(?P<port>[^:]*))?")
_PORT = re.compile(r"[0-9]{1,5}")
_HOST_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMERIC_LABEL = re.compile(r"[0-9]+|0x[0-9a-f]*")
_ORIGIN_FORM = re.compile(r"/[!-~]*")
# Characters that stay in a path or query. All others are percent-encoded.
_SAFE_CHARS = "/?:@!$&'()*+,;=-._~%[]|"

# The "bad ports" of the Fetch standard (fetch.spec.whatwg.org/#port-blocking).
_FETCH_BAD_PORTS: Final = (
    0, 1, 7, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95, 101,
    102, 103, 104, 109, 110, 111, 113, 115, 117, 119, 123, 135, 137, 139, 143, 161, 179, 389, 427,
    465, 512, 513, 514, 515, 526, 530, 531, 532, 540, 548, 554, 556, 563, 587, 601, 636, 989, 990,
    993, 995, 1719, 1720, 1723, 2049, 3659, 4045, 4190, 5060, 5061, 6000, 6566, 6665, 6666, 6667,
    6668, 6669, 6679, 6697, 10080,
)  # fmt: skip
# Databases, caches, brokers, coordination and remote control, as found in a private network.
# None is from 32768 to 60999, where Linux assigns ports to any program, such as a test server.
_SERVICE_PORTS: Final = (
    445,  # SMB
    1433, 1434, 1521, 3050, 3306,  # SQL Server, Oracle, Firebird, MySQL
    5432, 5433, 6432,  # PostgreSQL, PgBouncer
    6379, 6380, 11211, 26379,  # Redis, memcached, Sentinel
    9042, 9160, 9300, 26257,  # Cassandra, Elasticsearch, CockroachDB
    27017, 27018, 27019, 28015,  # MongoDB, RethinkDB
    1883, 8883, 4222, 5671, 5672, 9092,  # MQTT, NATS, AMQP, Kafka
    61613, 61614, 61616,  # STOMP, OpenWire
    2181, 2379, 2380, 2888, 3888, 4369, 25672,  # ZooKeeper, etcd, Erlang
    2375, 2376, 2377, 3389, 5900, 5901,  # Docker, RDP, VNC
)  # fmt: skip

REFUSED_PORTS: Final = frozenset((*_FETCH_BAD_PORTS, *_SERVICE_PORTS))
"""Default of `ROOMS_REFUSE_PORTS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushUrl:
    """Hold the parts of a push URL."""

    scheme: str
    host: str
    """Lower-case ASCII (IDNA) without a trailing dot, or an IP literal without brackets."""
    port: int
    path: str
    """Path and query, percent-encoded, as in a request line."""
    request_head: bytes = field(init=False, repr=False, compare=False)
    """Begin of a POST: its request line and Host header."""
    origin: tuple[str, str, int] = field(init=False, repr=False, compare=False)
    """Scheme, host and port."""

    def __post_init__(self) -> None:
        # Both go into the request's head as they are, so they must not contain a line end.
        if (
            not _ORIGIN_FORM.fullmatch(self.path)
            or not self.host.isascii()
            or not self.host.isprintable()
        ):
            raise ValueError(
                "the host and path of a target are printable ASCII, and the path begins with '/'"
            )
        opening = f"POST {self.path} HTTP/1.1\r\nHost: {self.authority}\r\n"
        object.__setattr__(self, "request_head", opening.encode("ascii"))
        object.__setattr__(self, "origin", (self.scheme, self.host, self.port))

    @classmethod
    def parse(cls, url: str) -> "PushUrl":
        """Parse a URL. ValueError: states the problem."""
        if len(url) > MAX_URL:
            raise ValueError(f"the URL is longer than {MAX_URL} characters")
        if any(char.isspace() or not char.isprintable() for char in url):
            raise ValueError("the URL contains white space or control characters")
        if "\\" in url:
            raise ValueError("the URL contains a backslash")
        if "#" in url:
            raise ValueError("the URL has a fragment ('#…'), which no request carries")
        parts = _URL.fullmatch(url)
        if parts is None or parts["scheme"].lower() not in _DEFAULT_PORTS:
            raise ValueError("the URL must begin with http:// or https://")
        scheme = parts["scheme"].lower()
        host, port = _parse_authority(parts["authority"])
        path = quote((parts["path"] or "/") + (parts["query"] or ""), safe=_SAFE_CHARS)
        target = cls(scheme=scheme, host=host, port=port or _DEFAULT_PORTS[scheme], path=path)
        if len(str(target)) > MAX_URL:
            raise ValueError(
                f"the URL is longer than {MAX_URL} characters once it is percent-encoded"
            )
        return target

    @property
    def authority(self) -> str:
        """Return the Host header: IPv6 in brackets, and the port unless it is the default."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS.get(self.scheme) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


def ends_in_number(host: str) -> bool:
    """Return whether resolvers may read a host as IPv4 (`127.1`, `0x7f.1`, `2130706433`)."""
    return _NUMERIC_LABEL.fullmatch(host.removesuffix(".").rpartition(".")[2].lower()) is not None


def _parse_authority(authority: str) -> tuple[str, int | None]:
    if "@" in authority:
        raise ValueError(
            "the URL contains a user name or password; use a header of the subscription instead"
        )
    parts = _AUTHORITY.fullmatch(authority)
    if parts is None:
        raise ValueError(
            "the URL's host and port cannot be separated; an IPv6 address needs brackets"
        )
    port = None
    if parts["port"] is not None:
        port = int(parts["port"]) if _PORT.fullmatch(parts["port"]) else 0
        if not 0 < port < 1 << 16:
            raise ValueError("the URL's port is not a number from 1 to 65535")
    if parts["v6"] is not None:
        return _parse_v6(parts["v6"]), port
    return _parse_name(parts["name"]), port


def _parse_v6(text: str) -> str:
    if "%" in text:
        raise ValueError("the URL's IPv6 address has a zone, which is valid on one machine only")
    try:
        return str(IPv6Address(text))
    except AddressValueError as exc:
        raise ValueError("the URL's host in brackets is no IPv6 address") from exc


def _parse_name(text: str) -> str:
    if not text:
        raise ValueError("the URL has no host")
    try:
        host = text.encode("idna").decode("ascii").lower().removesuffix(".")
    except UnicodeError as exc:
        raise ValueError("the URL's host is no valid domain name") from exc
    if len(host) > _MAX_HOST or not all(_HOST_LABEL.fullmatch(label) for label in host.split(".")):
        raise ValueError("the URL's host is no valid domain name")
    if ends_in_number(host):
        try:
            return str(IPv4Address(host))
        except AddressValueError as exc:
            raise ValueError(
                "the URL's IPv4 address must be written as four decimal numbers"
            ) from exc
    return host
