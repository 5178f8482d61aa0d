"""Parse the addresses at which clients of the broker read native queues."""

import re
from dataclasses import dataclass
from typing import Final

PROTOCOLS: Final = ("stomp", "amqp", "core")
"""STOMP 1.2, AMQP 1.0, and Artemis' own protocol, which its JMS client speaks."""
_ADDRESS_PATTERN: Final = re.compile(
    r"(?P<protocol>stomp|amqp|core)(?P<tls>s?)://"
    r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})"
)
_MAX_PORT: Final = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeAddress:
    """Hold the address of one protocol."""

    protocol: str
    """One of `PROTOCOLS`."""
    host: str
    port: int
    tls: bool


def parse_native_addresses(text: str) -> tuple[NativeAddress, ...]:
    """Parse addresses, `stomp://a:61613,amqps://b:5671`. ValueError: names the invalid part."""
    return tuple(_parse(part.strip()) for part in text.split(",") if part.strip())


def _parse(part: str) -> NativeAddress:
    found = _ADDRESS_PATTERN.fullmatch(part)
    if found is None or not 0 < int(found["port"]) <= _MAX_PORT:
        raise ValueError(
            f"{part!r} is not PROTOCOL://HOST:PORT with stomp, amqp or core,"
            " for example stomp://broker:61613 or, by TLS, amqps://broker:5671"
        )
    return NativeAddress(
        protocol=found["protocol"],
        host=found["host"].strip("[]"),
        port=int(found["port"]),
        tls=bool(found["tls"]),
    )
