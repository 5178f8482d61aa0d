"""Where a webhook goes: a push URL, taken apart once and checked."""

import re
from dataclasses import dataclass, field
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from urllib.parse import quote

MAX_URL = 2048
_MAX_NAME = 253

_DEFAULT_PORTS = {"http": 80, "https": 443}
_URL = re.compile(r"(?P<scheme>[^:/?]*)://(?P<authority>[^/?]*)(?P<path>/[^?]*)?(?P<query>\?.*)?")
_AUTHORITY = re.compile(r"(?:\[(?P<v6>[^\[\]]*)\]|(?P<name>[^:\[\]]*))(?::(?P<port>[^:]*))?")
_PORT = re.compile(r"[0-9]{1,5}")
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_ORIGIN_FORM = re.compile(r"/[!-~]*")
# What a path or query may hold as it is; everything else is percent-encoded.
_AS_IS = "/?:@!$&'()*+,;=-._~%[]|"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parsed push URL.

    `host` is lower-case ASCII (IDNA) without a trailing dot, or an IP literal without brackets; `path` includes the
    query and is percent-encoded ASCII, fit for a request line.
    """

    scheme: str
    host: str
    port: int
    path: str
    opening: bytes = field(init=False, repr=False, compare=False)
    """How a POST to it begins: its request line, and the line that names the host."""
    origin: tuple[str, str, int] = field(init=False, repr=False, compare=False)
    """Scheme, host and port."""

    def __post_init__(self) -> None:
        # These two go into the request's head as they are, so nothing may get here that ends a line.
        if not _ORIGIN_FORM.fullmatch(self.path) or not self.host.isascii() or not self.host.isprintable():
            raise ValueError("the host and path of a target are printable ASCII, and the path begins with '/'")
        opening = f"POST {self.path} HTTP/1.1\r\nHost: {self.authority}\r\n"
        object.__setattr__(self, "opening", opening.encode("ascii"))
        object.__setattr__(self, "origin", (self.scheme, self.host, self.port))

    @classmethod
    def parse(cls, url: str) -> "Target":
        """The target that `url` names. Raises ValueError saying what is wrong with it."""
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
        path = quote((parts["path"] or "/") + (parts["query"] or ""), safe=_AS_IS)
        target = cls(scheme=scheme, host=host, port=port or _DEFAULT_PORTS[scheme], path=path)
        if len(str(target)) > MAX_URL:
            raise ValueError(f"the URL is longer than {MAX_URL} characters once it is percent-encoded")
        return target

    @property
    def authority(self) -> str:
        """The value of the Host header: brackets for IPv6, the port only where it is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS.get(self.scheme) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


def ends_in_number(host: str) -> bool:
    """Whether resolvers may read `host` as an IPv4 address, in whatever notation (`127.1`, `0x7f.1`, `2130706433`)."""
    return _NUMBER.fullmatch(host.removesuffix(".").rpartition(".")[2].lower()) is not None


def _parse_authority(authority: str) -> tuple[str, int | None]:
    if "@" in authority:
        raise ValueError("the URL contains a user name or password; use a header of the subscription instead")
    parts = _AUTHORITY.fullmatch(authority)
    if parts is None:
        raise ValueError("the URL's host and port cannot be told apart; an IPv6 address needs brackets")
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
        raise ValueError("the URL's IPv6 address has a zone, which means nothing on another machine")
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
    if len(host) > _MAX_NAME or not all(_LABEL.fullmatch(label) for label in host.split(".")):
        raise ValueError("the URL's host is no valid domain name")
    if ends_in_number(host):
        try:
            return str(IPv4Address(host))
        except AddressValueError as exc:
            raise ValueError("the URL's IPv4 address must be written as four decimal numbers") from exc
    return host
