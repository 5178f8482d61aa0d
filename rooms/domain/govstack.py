"""Define what GovStack's interfaces name: clients of members, events, and templates of push URLs.

A client is a member (`instance/class/code`, as in X-Road) and one of its applications.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rooms.domain.names import MAX_NAME
from rooms.domain.push_url import MAX_URL, PushUrl
from rooms.domain.sharing import is_application, is_member_id

CLIENT_RULE: Final = (
    "is instance/class/code/application (EE/BUSINESS/123456789/orders), each part of 1 to 64 of "
    "the characters a-z, A-Z, 0-9, '_', '.' and '-'"
)
_MAX_PART: Final = 64
MAX_CLIENT: Final = 4 * _MAX_PART + 3
PLACEHOLDERS: Final = ("instanceId", "memberClass", "memberCode", "applicationCode", "eventType")
_PLACEHOLDER: Final = re.compile(r"\{([^{}]*)\}")
_DOTS: Final = frozenset({".", ".."})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientId:
    """Name an application of a member; `application` None: the member as a whole."""

    member_id: str
    application: str | None

    @classmethod
    def parse(cls, text: str) -> "ClientId":
        """Parse `instance/class/code/application`. ValueError: states the rule."""
        member_id, _, application = text.rpartition("/")
        if not is_member_id(member_id) or not is_application(application):
            raise ValueError(CLIENT_RULE)
        return cls(member_id=member_id, application=application)

    def __str__(self) -> str:
        parts = (self.member_id, self.application)
        return "/".join(part for part in parts if part is not None)

    def parts(self) -> dict[str, str]:
        """Return the parts as GovStack's schemas name them."""
        instance, member_class, code = self.member_id.split("/")
        found = {"instanceId": instance, "memberClass": member_class, "memberCode": code}
        return found if self.application is None else {**found, "applicationCode": self.application}


@dataclass(frozen=True, slots=True)
class ItemEnvelope:
    """Mark a payload that is sent in an EventItem; `publisher` None: it names no publisher."""

    publisher: ClientId | None


def event_item(
    message_id: str,
    event_type: str,
    payload: bytes | None,
    *,
    publisher: ClientId | None,
    sequence: int | None = None,
    more: Mapping[str, Any] | None = None,
) -> bytes:
    """Return GovStack's EventItem as JSON; the payload keeps its bytes, as `event`.

    `more`: further fields. A payload, publisher or sequence that is None is left out.
    """
    fields: dict[str, Any] = {"id": message_id}
    if sequence is not None:
        fields["sequence"] = sequence
    if publisher is not None:
        fields["publisherId"] = publisher.parts()
    fields |= {"eventType": event_type, **(more or {})}
    opened = json.dumps(fields, separators=(",", ":"))[:-1].encode()
    return opened + (b"}" if payload is None else b',"event":%b}' % payload)


def check_template(template: str) -> PushUrl:
    """Return the URL of a template with the longest parts. ValueError: it is no template.

    Placeholders are in the path or query only, so one host stands for the whole organisation.
    """
    unknown = sorted(set(_PLACEHOLDER.findall(template)) - set(PLACEHOLDERS))
    if unknown or re.search(r"[{}]", _PLACEHOLDER.sub("", template)):
        known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        raise ValueError(f"a template has only these placeholders: {known}")
    origin = re.match(r"[^:/?]*://[^/?]*", template)
    if origin is not None and "{" in origin[0]:
        raise ValueError("placeholders are in the path or the query, not in the host")
    if len(template) > MAX_URL:
        raise ValueError(f"the template is longer than {MAX_URL} characters")
    longest = dict.fromkeys(PLACEHOLDERS, "x" * _MAX_PART) | {"eventType": "x" * MAX_NAME}
    return PushUrl.parse(_fill(template, longest))


def push_url(template: str, client: ClientId, event_type: str) -> str:
    """Return the URL of a client and an event type. ValueError: a part is '.' or '..'."""
    values = {**client.parts(), "eventType": event_type}
    if not _DOTS.isdisjoint(values.values()):
        raise ValueError("a part of the client or the event type is '.' or '..', which no path has")
    return _fill(template, values)


def _fill(template: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda found: values[found[1]], template)
