"""List the routes of GovStack's interfaces: which scopes open them, for which roles, with which bodies."""

from typing import Any, Final

from rooms.domain.state_machine import Scope
from tests.integration.rooms.api.govstack.conftest import MADE, PUBLISHER

# The scopes that open a route besides `admin`; then the answer to owner, publisher, subscriber,
# stranger and platform: "+" it may, whatever the answer is; "3": 403; "4": 404.
MANAGE, PUBLISH, SUBSCRIBE, OPERATE = Scope.MANAGE, Scope.PUBLISH, Scope.SUBSCRIBE, Scope.OPERATE
R1: Final = "/r1/{instance_id}/{member_class}/{member_code}/{application_code}"
MEMBER: Final = "/rooms/{instance_id}/{member_class}/{member_code}"
FIRST: Final = MEMBER + "/{application_code}"
API: Final = "/api"
PLATFORM: Final = frozenset({Scope.PLATFORM})
READ_ROOM: Final = frozenset({MANAGE, OPERATE, PUBLISH, SUBSCRIBE})
READ_TYPES: Final = frozenset({MANAGE, OPERATE, PUBLISH})
READ_SUBSCRIPTIONS: Final = frozenset({MANAGE, OPERATE, SUBSCRIBE})
EXPECTED: Final[dict[str, tuple[frozenset[Scope], str]]] = {
    f"POST {R1}/api/v1/eventType": (frozenset({MANAGE}), "+4443"),
    f"GET {R1}/api/v1/eventType": (frozenset({MANAGE, OPERATE, PUBLISH}), "+++43"),
    f"GET {R1}/api/v1/eventType/{{event_type}}": (
        frozenset({MANAGE, OPERATE, PUBLISH}),
        "+++43",
    ),
    f"DELETE {R1}/api/v1/eventType/{{event_type}}": (frozenset({MANAGE}), "+4443"),
    f"POST {R1}/pub/v1/{{event_type}}": (frozenset({PUBLISH}), "++343"),
    f"GET {R1}/pub/v1/{{event_type}}/{{event_id}}": (frozenset({MANAGE, OPERATE}), "+++43"),
    f"DELETE {R1}/pub/v1/{{event_type}}/{{event_id}}": (frozenset({PUBLISH, OPERATE}), "++443"),
    f"GET {R1}/api/v1/subs": (frozenset({MANAGE, OPERATE, SUBSCRIBE}), "44+43"),
    f"POST {R1}/api/v1/subs/{{event_type}}": (frozenset({MANAGE}), "+3+43"),
    f"GET {R1}/api/v1/subs/{{event_type}}": (frozenset({MANAGE, OPERATE, SUBSCRIBE}), "44+43"),
    f"PATCH {R1}/api/v1/subs/{{event_type}}": (frozenset({MANAGE}), "44+43"),
    f"DELETE {R1}/api/v1/subs/{{event_type}}": (frozenset({MANAGE}), "44+43"),
    f"GET {R1}/pull/v1/{{event_type}}": (frozenset({SUBSCRIBE}), "44+43"),
    f"DELETE {R1}/pull/v1/{{event_type}}/{{event_id}}": (frozenset({SUBSCRIBE}), "44+43"),
    f"GET {MEMBER}": (READ_ROOM, "+3333"),
    f"POST {MEMBER}": (frozenset({MANAGE}), "+3333"),
    f"GET {FIRST}": (READ_ROOM, "+++43"),
    f"PUT {FIRST}": (frozenset({MANAGE}), "+4443"),
    f"DELETE {FIRST}": (frozenset({MANAGE}), "+4443"),
    f"PUT {FIRST}/event-types/{{event_type}}/versions": (frozenset({MANAGE}), "+4443"),
    f"DELETE {FIRST}/event-types/{{event_type}}/versions/{{version}}": (
        frozenset({MANAGE}),
        "+4443",
    ),
    f"POST {FIRST}/publish": (frozenset({PUBLISH}), "++343"),
    f"GET {FIRST}/pull": (frozenset({SUBSCRIBE}), "44+43"),
    f"DELETE {FIRST}/pull/{{event_id}}": (frozenset({SUBSCRIBE}), "44+43"),
    f"GET {FIRST}/event-types": (READ_TYPES, "+++43"),
    f"POST {FIRST}/event-types": (frozenset({MANAGE}), "+4443"),
    f"DELETE {FIRST}/event-types/{{event_type}}": (frozenset({MANAGE}), "+4443"),
    f"GET {FIRST}/event-types/{{event_type}}/versions": (READ_TYPES, "+++43"),
    f"POST {FIRST}/event-types/{{event_type}}/versions": (frozenset({MANAGE}), "+4443"),
    f"GET {FIRST}/publishers": (frozenset({MANAGE, OPERATE, Scope.AUDIT}), "+4443"),
    f"POST {FIRST}/publishers": (frozenset({MANAGE}), "+4443"),
    f"PUT {FIRST}/publishers/{{publisher_id}}": (frozenset({MANAGE}), "+4443"),
    f"DELETE {FIRST}/publishers/{{publisher_id}}": (frozenset({MANAGE}), "+4443"),
    f"GET {FIRST}/subscriptions": (READ_SUBSCRIPTIONS, "+++43"),
    f"POST {FIRST}/subscriptions": (frozenset({MANAGE}), "+3+43"),
    f"GET {FIRST}/subscriptions/{{subscription_id}}": (READ_SUBSCRIPTIONS, "+4+43"),
    f"POST {FIRST}/subscriptions/{{subscription_id}}": (frozenset({MANAGE}), "+4443"),
    f"DELETE {FIRST}/subscriptions/{{subscription_id}}": (frozenset({MANAGE}), "+4+43"),
    f"GET {FIRST}/subscriptions/{{subscription_id}}/queue": (
        READ_SUBSCRIPTIONS | {Scope.AUDIT},
        "+4+43",
    ),
    f"GET {API}/members": (PLATFORM, "3333+"),
    f"GET {API}/admin/members": (PLATFORM, "3333+"),
    f"GET {API}/export/members": (PLATFORM, "3333+"),
    f"GET {API}/admin/export/members": (PLATFORM, "3333+"),
    f"GET {API}/admin/managers": (PLATFORM, "3333+"),
    f"POST {API}/admin/managers": (PLATFORM, "3333+"),
    f"DELETE {API}/admin/managers/{{manager_id}}": (PLATFORM, "33334"),
    f"GET {API}/admin/export/managers": (PLATFORM, "3333+"),
    f"GET {API}/admin/export{FIRST}/event-types": (READ_TYPES, "+++43"),
    f"GET {API}/export/rooms/{{application_code}}/event-types": (READ_TYPES, "+4443"),
    f"GET {FIRST}/events": (frozenset({MANAGE, OPERATE}), "+++43"),
    f"GET {FIRST}/events/{{event_id}}": (frozenset({MANAGE, OPERATE}), "+++43"),
}
BODIES: Final[dict[str, Any]] = {
    f"POST {API}/admin/managers": {"name": "new", "member_id": "EE/GOV/new"},
    f"POST {R1}/api/v1/eventType": {"eventType": "another"},
    f"POST {R1}/pub/v1/{{event_type}}": {"eventType": MADE, "event": 1},
    f"POST {R1}/api/v1/subs/{{event_type}}": {"eventType": MADE, "delivery": "PULL"},
    f"PATCH {R1}/api/v1/subs/{{event_type}}": {"eventType": MADE},
    f"POST {MEMBER}": {
        "name": "new",
        "delivery_delay_ms": 1000,
        "delivery_delay_multiplier": 2,
        "delivery_attempts": 3,
    },
    f"POST {FIRST}/publish": {"eventType": MADE, "content": 1},
    f"POST {FIRST}/event-types": {"name": "new"},
    f"POST {FIRST}/event-types/{{event_type}}/versions": {"schema": None},
    f"PUT {FIRST}": {"description": "changed"},
    f"PUT {FIRST}/event-types/{{event_type}}/versions": {"version": 1, "schema": None},
    f"POST {FIRST}/publishers": {"organisation_id": PUBLISHER, "event_types": ["x"]},
    f"PUT {FIRST}/publishers/{{publisher_id}}": {"event_types": ["x"]},
    f"POST {FIRST}/subscriptions": {"name": "new", "type": "PULL"},
    f"POST {FIRST}/subscriptions/{{subscription_id}}": {"approved": False},
}
QUERIES: Final = {
    f"GET {FIRST}/pull": "?subscriptionId={subscription_id}",
    f"DELETE {FIRST}/pull/{{event_id}}": "?subscriptionId={subscription_id}",
}
"""Routes whose query names the resource."""
