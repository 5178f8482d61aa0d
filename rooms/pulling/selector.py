"""Which messages of its queue a consumer wants: by event type, publisher's header or a value in the payload.

Every condition must hold. Values are compared as text: a string in the payload as it is, a number, true, false or null
as JSON writes it. A payload that has no such place does not match.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

_decode: Final = msgspec.json.Decoder().decode
_decode_headers: Final = msgspec.json.Decoder(dict[str, str]).decode
_MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class Selector:
    """`event_types`: one of these (none given: any); `headers`: (name in small letters, value); `payload`: (keys on the
    way to the value, or indexes of lists; value).
    """

    event_types: frozenset[str] = frozenset()
    headers: tuple[tuple[str, str], ...] = ()
    payload: tuple[tuple[tuple[str, ...], str], ...] = ()

    def takes_type(self, event_type: str) -> bool:
        """Whether it may be a message of this type."""
        return not self.event_types or event_type in self.event_types

    def takes(self, event_type: str, headers: bytes | None, payload: bytes) -> bool:
        """Whether it wants this message."""
        return self.takes_type(event_type) and self._takes_headers(headers) and self._takes_payload(payload)

    def _takes_headers(self, headers: bytes | None) -> bool:
        if not self.headers:
            return True
        given = {} if headers is None else {name.lower(): value for name, value in _decode_headers(headers).items()}
        return all(given.get(name) == value for name, value in self.headers)

    def _takes_payload(self, payload: bytes) -> bool:
        if not self.payload:
            return True
        try:
            decoded = _decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # A number beyond all bounds, or lists nested too deeply: it is JSON, and has no place that can be read.
            return False
        return all(_text(_at(decoded, path)) == value for path, value in self.payload)


def _at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        match value:
            case dict():
                value = value.get(key, _MISSING)
            case list():
                value = value[int(key)] if key.isdecimal() and key.isascii() and int(key) < len(value) else _MISSING
            case _:
                return _MISSING
    return value


def _text(value: Any) -> str | None:
    match value:
        case str():
            return value
        case None | bool() | int() | float():
            return msgspec.json.encode(value).decode()
        case _:
            return None
