"""Declare who may do what: the rules from which `test_auth_roles` derives every status.

A new route needs a line in `ROUTES`, and its scopes in `test_auth`. What no rule says is in
`EXCEPTIONS`, by name.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum, auto
from typing import Final

from rooms.domain.principal import Restriction
from tests.integration.rooms.api.access_world import (
    LISTED,
    MESSAGE_RECEIVERS,
    PENDING,
    PULL,
    ROOM_MEMBERS,
    SHARED,
    SUBSCRIBERS,
    Caller,
)
from tests.integration.rooms.api.sharing_world import (
    MADE,
    OWNER,
    PLATFORM,
    PUBLISHER,
    STRANGER,
    SUBSCRIBER,
    SUSPENDED,
)
from tests.integration.rooms.api.test_auth import opens

UNAUTHENTICATED, FORBIDDEN, NOT_FOUND = 401, 403, 404


class Audience(Enum):
    """Name the organisations that a route's thing is visible to; to others it is not there."""

    ANYONE = auto()
    """It is about the caller's own organisation, or, by its scope, about the installation."""
    OWNER = auto()
    """The organisation whose thing it is."""
    ROOM_OWNER = auto()
    ROOM_READER = auto()
    """The room's owner, and who publishes or receives there; any organisation if it is listed."""
    ROOM_MEMBER = auto()
    """The room's owner, and who publishes or has a subscription there."""
    PUBLISHER = auto()
    """The room's owner, and who may publish there; 403 to others that see the room."""
    SUBSCRIBER = auto()
    """The organisation that owns the subscription."""
    BOTH = auto()
    """The subscriber and the room's owner."""
    READER_OF_MESSAGE = auto()
    """The room's owner, who published it, and who receives it."""
    SENDER = auto()
    """The room's owner, and who published it."""
    NAMER = auto()
    """The publisher whose id it is, in the room of the message."""
    JOB = auto()
    """The organisation of a job, which is about a subscription."""


# Who sees it, the restrictions that a key may have, and the status of success.
_Group = tuple[Audience, str, int]
ROUTES: Final[Mapping[_Group, tuple[str, ...]]] = {
    (Audience.ANYONE, "", 200): (
        "GET /activity",
        "GET /analysis/runs",
        "GET /cluster",
        "GET /cluster/buckets",
        "PUT /cluster/buckets",
        "GET /doctor",
        "GET /journal",
        "GET /journal/export",
        "GET /journal/verify",
        "GET /keys",
        "GET /magazines",
        "GET /organisations",
        "GET /organisations/{organisation_id}",
        "PATCH /organisations/{organisation_id}",
        "GET /organisations/{organisation_id}/quotas",
        "PATCH /organisations/{organisation_id}/quotas",
        "POST /organisations/{organisation_id}/resume",
        "POST /organisations/{organisation_id}/suspend",
        "GET /people",
        "GET /push-template",
        "PUT /push-template",
        "GET /queues",
        "GET /quotas",
        "GET /retention-preview",
        "GET /sessions",
        "GET /signing-keys",
        "GET /usage",
        "GET /usage/export",
    ),
    (Audience.ANYONE, "", 201): (
        "POST /keys",
        "POST /organisations",
        "POST /organisations/{organisation_id}/keys",
        "POST /queues",
        "POST /rooms",
        "POST /sign-in-links",
        "POST /signing-keys",
    ),
    (Audience.ANYONE, "", 202): (
        "POST /analysis/runs",
        "POST /doctor",
        "DELETE /organisations/{organisation_id}",
        "POST /recover",
        "POST /retention-preview",
    ),
    (Audience.ANYONE, "", 204): ("DELETE /push-template",),
    (Audience.ANYONE, "rooms", 200): ("GET /grants",),
    (Audience.ANYONE, "rooms event_types subscriptions", 200): (
        "GET /directory",
        "GET /rooms",
        "GET /search",
        "GET /whoami",
    ),
    (Audience.ANYONE, "rooms subscriptions", 200): (
        "GET /analysis/advice",
        "GET /analysis/ages",
        "GET /analysis/cofailures",
        "GET /analysis/incidents",
        "GET /analysis/reconciliation",
        "GET /analysis/rollups",
        "GET /jobs",
        "GET /sidelines",
        "GET /status",
        "GET /subscriptions",
    ),
    (Audience.BOTH, "rooms subscriptions", 200): (
        "GET /subscriptions/{subscription_id}",
        "GET /subscriptions/{subscription_id}/activity",
        "GET /subscriptions/{subscription_id}/counts",
        "GET /subscriptions/{subscription_id}/history",
        "POST /subscriptions/{subscription_id}/terminate",
    ),
    (Audience.BOTH, "rooms subscriptions", 202): ("POST /subscriptions/{subscription_id}/retry",),
    (Audience.JOB, "rooms subscriptions", 200): (
        "GET /jobs/{job_id}",
        "POST /jobs/{job_id}/cancel",
    ),
    (Audience.NAMER, "rooms event_types", 200): (
        "DELETE /rooms/{room_id}/messages/by-id/{caller_id}",
        "PATCH /rooms/{room_id}/messages/by-id/{caller_id}",
    ),
    (Audience.NAMER, "rooms event_types subscriptions", 200): (
        "GET /rooms/{room_id}/messages/by-id/{caller_id}",
    ),
    (Audience.OWNER, "", 200): (
        "GET /keys/{key_id}",
        "PATCH /keys/{key_id}",
        "POST /keys/{key_id}/rotate",
        "GET /magazines/{magazine}",
        "POST /people/end-sessions",
        "GET /queues/{queue}",
        "PATCH /queues/{queue}",
        "GET /queues/{queue}/sideline",
        "POST /queues/{queue}/sideline/purge",
        "GET /signing-keys/{kid}",
    ),
    (Audience.OWNER, "", 202): (
        "POST /magazines/{magazine}/sweep",
        "DELETE /queues/{queue}",
        "POST /queues/{queue}/messages",
        "POST /queues/{queue}/messages/batch",
    ),
    (Audience.OWNER, "", 204): (
        "DELETE /keys/{key_id}",
        "DELETE /sessions/{session_id}",
        "DELETE /signing-keys/{kid}",
    ),
    (Audience.PUBLISHER, "rooms event_types", 200): ("POST /rooms/{room_id}/messages/check",),
    (Audience.PUBLISHER, "rooms event_types", 202): (
        "POST /rooms/{room_id}/messages",
        "POST /rooms/{room_id}/messages/batch",
    ),
    (Audience.READER_OF_MESSAGE, "rooms event_types subscriptions", 200): (
        "GET /messages/{message_id}",
        "GET /messages/{message_id}/deliveries",
        "GET /messages/{message_id}/journey",
        "GET /messages/{message_id}/receipt",
    ),
    (Audience.ROOM_OWNER, "rooms", 200): (
        "PATCH /rooms/{room_id}",
        "GET /rooms/{room_id}/counts",
        "PUT /rooms/{room_id}/event-types/{name}/versions/{version}",
        "GET /rooms/{room_id}/grants",
        "GET /rooms/{room_id}/quotas",
        "PATCH /rooms/{room_id}/quotas",
    ),
    (Audience.ROOM_OWNER, "rooms", 201): (
        "POST /rooms/{room_id}/event-types",
        "POST /rooms/{room_id}/event-types/{name}/versions",
        "POST /rooms/{room_id}/grants",
    ),
    (Audience.ROOM_OWNER, "rooms", 202): (
        "POST /messages/{message_id}/restore",
        "DELETE /rooms/{room_id}",
        "POST /rooms/{room_id}/clear",
        "POST /rooms/{room_id}/restore",
    ),
    (Audience.ROOM_OWNER, "rooms", 204): (
        "DELETE /rooms/{room_id}/event-types/{name}",
        "DELETE /rooms/{room_id}/event-types/{name}/versions/{version}",
        "DELETE /rooms/{room_id}/grants/{grant_id}",
    ),
    (Audience.ROOM_OWNER, "rooms subscriptions", 200): (
        "POST /subscriptions/{subscription_id}/approve",
        "POST /subscriptions/{subscription_id}/reinstate",
        "POST /subscriptions/{subscription_id}/reject",
        "POST /subscriptions/{subscription_id}/suspend",
    ),
    (Audience.ROOM_MEMBER, "rooms event_types subscriptions", 200): (
        "GET /rooms/{room_id}/messages",
    ),
    (Audience.ROOM_READER, "rooms event_types subscriptions", 200): (
        "GET /rooms/{room_id}",
        "GET /rooms/{room_id}/event-types",
        "GET /rooms/{room_id}/event-types/{name}",
        "GET /rooms/{room_id}/event-types/{name}/versions",
        "GET /rooms/{room_id}/event-types/{name}/versions/{version}",
    ),
    (Audience.ROOM_READER, "rooms subscriptions", 200): ("GET /rooms/{room_id}/subscriptions",),
    (Audience.SENDER, "rooms event_types", 200): (
        "DELETE /messages/{message_id}",
        "PATCH /messages/{message_id}",
    ),
    (Audience.SUBSCRIBER, "rooms", 202): ("POST /subscriptions/{subscription_id}/replay",),
    (Audience.SUBSCRIBER, "rooms subscriptions", 200): (
        "GET /analysis/advice/{subscription_id}",
        "GET /deliveries/{delivery_id}",
        "POST /deliveries/{delivery_id}/redeliver",
        "GET /stream",
        "PATCH /subscriptions/{subscription_id}",
        "POST /subscriptions/{subscription_id}/ack",
        "GET /subscriptions/{subscription_id}/consumers",
        "GET /subscriptions/{subscription_id}/deliveries",
        "POST /subscriptions/{subscription_id}/extend",
        "POST /subscriptions/{subscription_id}/filter/test",
        "GET /subscriptions/{subscription_id}/lane",
        "POST /subscriptions/{subscription_id}/nack",
        "GET /subscriptions/{subscription_id}/ordering-keys",
        "POST /subscriptions/{subscription_id}/ordering-keys/skip",
        "POST /subscriptions/{subscription_id}/pause",
        "DELETE /subscriptions/{subscription_id}/proposal",
        "POST /subscriptions/{subscription_id}/pull",
        "GET /subscriptions/{subscription_id}/queue",
        "POST /subscriptions/{subscription_id}/resume",
        "POST /subscriptions/{subscription_id}/rotate-password",
        "POST /subscriptions/{subscription_id}/rotate-secret",
        "GET /subscriptions/{subscription_id}/sideline",
        "GET /subscriptions/{subscription_id}/sideline/schedule",
        "PUT /subscriptions/{subscription_id}/sideline/schedule",
        "GET /subscriptions/{subscription_id}/stream",
        "POST /subscriptions/{subscription_id}/test",
    ),
    (Audience.SUBSCRIBER, "rooms subscriptions", 201): ("POST /portal-links",),
    (Audience.SUBSCRIBER, "rooms subscriptions", 202): (
        "DELETE /subscriptions/{subscription_id}",
        "POST /subscriptions/{subscription_id}/clear",
        "POST /subscriptions/{subscription_id}/sideline/purge",
        "POST /subscriptions/{subscription_id}/sideline/shovel",
        "POST /subscriptions/{subscription_id}/skip-to-now",
    ),
    (Audience.SUBSCRIBER, "rooms subscriptions", 204): (
        "DELETE /subscriptions/{subscription_id}/sideline/schedule",
    ),
    (Audience.ROOM_READER, "rooms", 201): ("POST /rooms/{room_id}/subscriptions",),
}
_PUSH: Final = (OWNER, SUBSCRIBER, SUSPENDED)
_PULL: Final = (PULL, PENDING)
_AT: Final = "/subscriptions/{subscription_id}"
_DECIDED: Final = (OWNER, SUBSCRIBER, SUSPENDED, PULL)
CONFLICTS: Final[Mapping[str, tuple[str, ...]]] = {
    f"GET {_AT}/consumers": _PUSH,
    f"GET {_AT}/lane": _PULL,
    f"GET {_AT}/queue": _PUSH,
    f"GET {_AT}/stream": _PUSH,
    "GET /stream": _PUSH,
    f"POST {_AT}/ack": _PUSH,
    f"POST {_AT}/extend": _PUSH,
    f"POST {_AT}/nack": _PUSH,
    f"POST {_AT}/pull": _PUSH,
    f"POST {_AT}/rotate-secret": _PULL,
    f"POST {_AT}/rotate-password": _PUSH + _PULL,  # none is native
    f"POST {_AT}/test": _PULL,
    f"POST {_AT}/approve": _DECIDED,
    f"POST {_AT}/reject": _DECIDED,
    f"POST {_AT}/suspend": (OWNER,),
    f"POST {_AT}/reinstate": (OWNER, SUSPENDED, PULL, PENDING),
    f"DELETE {_AT}/proposal": _DECIDED,
    f"POST {_AT}/pause": (PENDING,),
    f"POST {_AT}/resume": (PENDING,),
    f"POST {_AT}/replay": (PENDING,),
    f"POST {_AT}/retry": (PENDING, SUSPENDED),
    f"POST {_AT}/ordering-keys/skip": (*_PUSH, PENDING),
    "POST /deliveries/{delivery_id}/redeliver": _PUSH,
}
"""Targets that are not of the kind, or in the state, that a route is for: 409 to who sees them."""
ABSENT: Final[Mapping[str, tuple[str, ...]]] = {
    "GET /analysis/advice/{subscription_id}": (SUSPENDED, *_PULL),
    f"GET {_AT}/sideline/schedule": (SUSPENDED, *_PULL),
}
"""Targets that have no such thing: 404 also to who sees them."""
EXCEPTIONS: Final[Mapping[tuple[str, str, str], int]] = {
    # A platform key reads the journals of others only, and has to name them.
    **{(f"GET /journal{part}", "", PLATFORM): FORBIDDEN for part in ("", "/export", "/verify")},
    # It may publish into this room, but not this type.
    **{
        (f"POST /rooms/{{room_id}}/messages{part}", room, caller): FORBIDDEN
        for part in ("", "/batch", "/check")
        for room, caller in (
            (SHARED, "owner/other type"),
            (LISTED, "owner/other type"),
            (SHARED, "publisher/other type"),
        )
    },
    # It sees the room, and has no grant to subscribe.
    ("POST /rooms/{room_id}/subscriptions", SHARED, "publisher"): FORBIDDEN,
    ("POST /rooms/{room_id}/subscriptions", SHARED, "publisher/room"): FORBIDDEN,
    # There is no such person in its organisation.
    **{
        ("POST /people/end-sessions", "", caller): NOT_FOUND
        for caller in (PUBLISHER, SUBSCRIBER, STRANGER)
    },
}
"""By route, targets and caller."""


def rules() -> Iterator[tuple[str, _Group]]:
    """Yield each route with its group."""
    for group, lines in ROUTES.items():
        for line in lines:
            yield line, group


def is_refused(line: str, group: _Group, caller: Caller) -> int | None:
    """Return the status of a refusal that does not depend on the target; None: it is not refused."""
    _, kinds, _ = group
    method, _, path = line.partition(" ")
    if not caller.valid:
        return UNAUTHENTICATED
    if not any(opens(scope, method, f"/v1{path}") for scope in caller.scopes):
        return FORBIDDEN
    if caller.session and path.endswith(MOVING):
        return FORBIDDEN
    if caller.organisation == SUSPENDED and (method != "GET" or path.endswith("/stream")):
        return FORBIDDEN
    if caller.restrictions - {Restriction(kind) for kind in kinds.split()}:
        return FORBIDDEN
    return None


MOVING: Final = ("/pull", "/ack", "/nack", "/extend", "/stream")
"""Ends of paths that sessions of the console do not call."""


def expected(line: str, group: _Group, target: Mapping[str, str], caller: Caller) -> int:
    """Return the status that a caller must get. `target`: a parameter's name to whose thing it is."""
    refusal = is_refused(line, group, caller)
    if refusal is not None:
        return refusal
    audience, _, success = group
    names = " ".join(target.values())
    if (line, names, caller.name) in EXCEPTIONS:
        return EXCEPTIONS[line, names, caller.name]
    if set(ABSENT.get(line, ())) & set(target.values()) or not (
        _is_visible(audience, target, caller) and _is_reached(audience, target, caller)
    ):
        may_know = audience is Audience.PUBLISHER and _reads_room(target, caller)
        return FORBIDDEN if may_know else NOT_FOUND
    return 409 if set(CONFLICTS.get(line, ())) & set(target.values()) else success


def is_hidden(line: str, target: Mapping[str, str]) -> bool:
    """Return whether a 404 must read like that of an unknown id: not what is visibly absent."""
    return may_exist(target) and not set(ABSENT.get(line, ())) & set(target.values())


def distinct_targets(
    line: str, group: _Group, targets: Iterable[Mapping[str, str]], caller: Caller
) -> Iterator[Mapping[str, str]]:
    """Yield the targets of a call without those that are refused for the same reason.

    The guard refuses before it looks at the target. Of what an organisation does not see, one
    target is enough for its keys that may do less than all.
    """
    is_refusal = is_refused(line, group, caller) is not None
    is_less = caller.name != caller.organisation
    reasons = set()
    for target in targets:
        audience = Audience.ROOM_READER if group[0] is Audience.PUBLISHER else group[0]
        is_hidden_to_all = is_less and not _is_visible(audience, target, caller)
        reason = "refused" if is_refusal else "hidden" if is_hidden_to_all else str(target)
        if reason not in reasons:
            reasons.add(reason)
            yield target


def _subscription_of(target: Mapping[str, str]) -> str:
    """Return the subscription of a target; without one, that which the body of the request names."""
    of = ("subscription_id", "delivery_id", "job_id", "room_id")
    return next((target[name] for name in of if name in target), PULL)


def _room_of(target: Mapping[str, str]) -> str:
    if "room_id" in target:
        return target["room_id"]
    return LISTED if _subscription_of(target) == PENDING else SHARED


def may_exist(target: Mapping[str, str]) -> bool:
    """Return whether a path names a thing that is in its room."""
    inside = target.keys() & {"name", "grant_id", "caller_id"}
    return bool(target) and not (inside and target.get("room_id") == LISTED)


def _is_visible(audience: Audience, target: Mapping[str, str], caller: Caller) -> bool:
    """Return whether the caller's organisation may see the target."""
    if target and not may_exist(target):
        return False
    mine, room = caller.organisation, _room_of(target)
    is_shared = room == SHARED
    if audience is Audience.ANYONE or (audience is Audience.ROOM_READER and not is_shared):
        return True
    receiver = SUBSCRIBERS.get(_subscription_of(target))
    organisations: dict[Audience, Collection[str | None]] = {
        Audience.OWNER: (SUBSCRIBERS.get(target.get("magazine", ""), OWNER),),
        Audience.ROOM_OWNER: (OWNER,),
        Audience.JOB: (OWNER,),
        Audience.ROOM_READER: ROOM_MEMBERS,
        Audience.ROOM_MEMBER: ROOM_MEMBERS if is_shared else (OWNER, SUBSCRIBER),
        Audience.PUBLISHER: (OWNER, PUBLISHER) if is_shared else (OWNER,),
        Audience.SUBSCRIBER: (receiver,),
        Audience.BOTH: (OWNER, receiver),
        Audience.READER_OF_MESSAGE: (OWNER, target.get("message_id"), SUBSCRIBER, SUSPENDED),
        Audience.SENDER: (OWNER, target.get("message_id")),
        Audience.NAMER: (target.get("caller_id"),),
    }
    return mine in organisations[audience]


def _is_reached(audience: Audience, target: Mapping[str, str], caller: Caller) -> bool:
    """Return whether the target is in what a restricted key is for."""
    if audience is Audience.ANYONE:
        return True
    if caller.rooms is not None and _room_of(target) not in caller.rooms:
        return False
    if caller.event_types is not None and target.keys() & {"name", "message_id", "caller_id"}:
        return MADE in caller.event_types
    if caller.subscriptions is not None:
        if audience is Audience.NAMER:
            return False
        if audience is Audience.READER_OF_MESSAGE:
            return bool(caller.subscriptions & MESSAGE_RECEIVERS)
        if audience in {Audience.SUBSCRIBER, Audience.BOTH, Audience.ROOM_OWNER, Audience.JOB}:
            return _subscription_of(target) in caller.subscriptions
    return True


def sees_room(target: Mapping[str, str], caller: Caller) -> bool:
    """Return whether the caller sees the room in which a path names a thing."""
    room = {"room_id": target["room_id"]} if len(target) > 1 and "room_id" in target else {}
    return bool(room) and _reads_room(room, caller)


def _reads_room(target: Mapping[str, str], caller: Caller) -> bool:
    return all(test(Audience.ROOM_READER, target, caller) for test in (_is_visible, _is_reached))
