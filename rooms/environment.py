"""Read values of each kind from environment variables, and collect what is wrong with them."""

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from rooms.backend_urls import PARSERS, BackendUrlError, scheme_of
from rooms.domain.member_identity import CertificateRules
from rooms.domain.native_address import NativeAddress, parse_native_addresses
from rooms.domain.role import GroupRoles, parse_group_roles
from rooms.domain.web_address import check_origin
from rooms.postgres_urls import parse_postgres_url

IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

SCHEMES: Final[Mapping[str, tuple[str, ...]]] = {
    "DATABASE_URL": ("postgresql",),
    "BROKER_URL": ("postgresql", "stomp", "stomps"),
    "MAGAZINE_URL": ("postgresql", "aerospike"),
    "ELECTION_URL": ("postgresql", "zookeeper"),
}
_PARAMETER: Final = re.compile("[a-z_]+")
_WHOLE_NUMBER: Final = re.compile("[0-9]{1,18}")
_PORT_COUNT: Final = 1 << 16
_PORT_RANGE: Final = re.compile("([0-9]{1,5})(?:-([0-9]{1,5}))?")


class EnvironmentReader:
    """Read variables into `problems`, which each invalid one adds to; its default goes on."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.problems: list[str] = []

    def text(self, name: str, default: str) -> str:
        return self._environment.get(name) or default

    def optional(self, name: str) -> str | None:
        return self._environment.get(name) or None

    def path(self, name: str) -> Path | None:
        value = self.optional(name)
        return None if value is None else Path(value)

    def names(self, name: str, default: str) -> frozenset[str]:
        """Return a part of the names in `default`; `none` is the empty one."""
        given = self.text(name, default).lower().split(",")
        found = frozenset(filter(None, (part.strip() for part in given))) - {"none"}
        if found - set(default.split(",")):
            self.problems.append(f"{name} takes names of {default}, or none")
        return found

    def certificate_rules(self, name: str, default: str) -> CertificateRules:
        try:
            return CertificateRules.parse(self.text(name, default))
        except ValueError as exc:
            self.problems.append(f"{name}: {exc}")
            return CertificateRules.parse(default)

    def number(self, name: str, default: int, low: int, high: int) -> int:
        value = self._environment.get(name)
        if not value:
            return default
        if not _WHOLE_NUMBER.fullmatch(value) or not low <= int(value) <= high:
            self.problems.append(f"{name}={value!r} is not a whole number from {low} to {high}")
            return default
        return int(value)

    def url(self, name: str) -> str | None:
        value = self._environment.get(name)
        if not value:
            return None
        if value != value.strip():
            self.problems.append(f"{name} begins or ends with a space: remove it")
            return None
        scheme = scheme_of(value)
        if scheme not in SCHEMES[name]:
            valid = ", ".join(f"{known}://" for known in SCHEMES[name])
            shown = f"{scheme}://" if "://" in value else "no scheme"
            self.problems.append(f"{name} starts with {shown}; valid here: {valid}")
            return None
        try:
            if scheme in PARSERS:
                PARSERS[scheme](value)
            else:
                self._check_parameters(name, parse_postgres_url(value))
        except BackendUrlError as exc:
            self.problems += [f"{name} {problem}" for problem in exc.problems]
        return value

    def _check_parameters(self, name: str, given: Iterable[str]) -> None:
        # The command line reads settings too, and needs no driver.
        from psycopg.pq import Conninfo

        known = {option.keyword.decode() for option in Conninfo.get_defaults()}
        if unknown := set(given) - known:
            # Anything else may be a part of a password with an unencoded question mark.
            words = sorted(filter(_PARAMETER.fullmatch, unknown))
            self.problems.append(
                f"{name} has the unknown parameter {', '.join(words) or 'after its ?'};"
                f" valid here: {', '.join(sorted(known))}"
            )

    def address(self, name: str, default: str) -> tuple[str, int]:
        value = self.text(name, default)
        host, _, port = value.rpartition(":")
        plain = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if (
            not plain
            or (":" in plain) != (plain != host)
            or not _WHOLE_NUMBER.fullmatch(port)
            or not 0 < int(port) < _PORT_COUNT
        ):
            self.problems.append(
                f"{name}={value!r} is not HOST:PORT, for example {default} or [::1]:8080"
            )
            return "127.0.0.1", 8080
        return plain, int(port)

    def optional_address(self, name: str) -> tuple[str, int] | None:
        return self.address(name, "127.0.0.1:8443") if self.optional(name) else None

    def networks(self, name: str) -> tuple[IpNetwork, ...]:
        found = []
        for part in filter(None, (piece.strip() for piece in self.text(name, "").split(","))):
            try:
                found.append(ipaddress.ip_network(part))
            except ValueError as exc:
                self.problems.append(
                    f"{name}: {exc}; it takes CIDR blocks, for example 127.0.0.0/8,10.1.0.0/16"
                )
        return tuple(found)

    def ports(self, name: str, default: frozenset[int]) -> frozenset[int]:
        found: set[int] = set()
        value = self.text(name, "default").strip()
        for part in filter(None, (piece.strip() for piece in value.split(",") if value != "none")):
            ends = _PORT_RANGE.fullmatch(part)
            low, high = (int(ends[1]), int(ends[2] or ends[1])) if ends is not None else (1, 0)
            if part == "default":
                found |= default
            elif low <= high < _PORT_COUNT:
                found |= set(range(low, high + 1))
            else:
                self.problems.append(
                    f"{name}: {part!r} is no port; it takes ports and ranges, for example"
                    " default,8500,6660-6669 (`default`: those refused by default); or `none`"
                )
        return frozenset(found)

    def choice(self, name: str, default: str, *valid: str) -> str:
        value = self.text(name, default)
        if value not in valid:
            self.problems.append(f"{name} is one of {', '.join(valid)}")
        return value

    def address_of_web(self, name: str, check: Callable[[str], str]) -> str | None:
        value = self.optional(name)
        try:
            return None if value is None else check(value)
        except ValueError as exc:
            self.problems.append(f"{name}: {exc}")
            return None

    def origins(self, name: str) -> tuple[str, ...]:
        found = []
        for part in filter(None, map(str.strip, self.text(name, "").split(","))):
            try:
                found.append(check_origin(part))
            except ValueError as exc:
                self.problems.append(f"{name}: {part!r}: {exc}")
        return tuple(dict.fromkeys(found))

    def group_roles(self, name: str) -> Sequence[GroupRoles]:
        found, problems = parse_group_roles(self.text(name, ""))
        self.problems += [f"{name}: {problem}" for problem in problems]
        return found

    def native_addresses(self, name: str) -> tuple[NativeAddress, ...]:
        try:
            return parse_native_addresses(self.text(name, ""))
        except ValueError as exc:
            self.problems.append(f"{name}: {exc}")
            return ()
