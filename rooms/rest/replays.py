"""`POST /v1/subscriptions/{id}/replay`: past messages once more, or for a new subscription; and `POST /v1/recover`."""

from datetime import datetime
from typing import Annotated, Any, Final

from litestar import Response, post
from litestar.params import JSONBody
from msgspec import Meta, Struct

from rooms.domain.ids import room_of
from rooms.domain.job import JobKind
from rooms.domain.states import Scope
from rooms.errors import FieldProblem, InvalidError
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.bodies import Body
from rooms.rest.jobs import JobAccepted, accepted
from rooms.rest.paths import IdPath, parse_id
from rooms.rest.problems import documented
from rooms.rest.subscriptions import parse_subscription
from rooms.storage import jobs as job_records
from rooms.storage.subscriptions import find_subscription
from rooms.storage.transactions import transaction

MAX_RATE_PER_S: Final = 100_000
_MOST_TYPES: Final = 100
_WRITE: Final = needs(Scope.OPERATE)


class ReplayNew(Struct, forbid_unknown_fields=True, kw_only=True):
    """Which past messages a subscription is given, and how fast. Either `since` or `from_message_id` says where to begin."""

    since: Annotated[datetime, Meta(tz=True, description="Published at this time or later.")] | None = None
    from_message_id: (
        Annotated[
            str,
            Meta(
                pattern="^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$",
                description="This message and all after it, in the order of their ids.",
            ),
        ]
        | None
    ) = None
    until: Annotated[datetime, Meta(tz=True, description="Published before this time; null: before now.")] | None = None
    event_types: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=256)]],
            Meta(
                min_length=1, max_length=_MOST_TYPES, description="Only these, as far as the subscription wants them."
            ),
        ]
        | None
    ) = None
    rate_per_s: (
        Annotated[float, Meta(gt=0, le=MAX_RATE_PER_S, description="Deliveries a second; null: as fast as it goes.")]
        | None
    ) = None
    include_expired: Annotated[bool, Meta(description="Also what expired, with the room's lifetime anew.")] = False


@post(
    "/subscriptions/{subscription_id:str}/replay",
    status_code=202,
    dto=Body[ReplayNew],
    return_dto=None,
    opt=_WRITE,
    responses=documented(),
    tags=["subscriptions"],
    summary="Give past messages to a subscription",
)
async def replay(
    data: JSONBody[ReplayNew], services: Given, principal: Caller, subscription_id: IdPath
) -> Response[JobAccepted]:
    """202 with the job that makes a new delivery of each message that was published before and that the subscription wants.

    Whether the subscription had the message before does not matter. What its publisher withdrew is left out.
    """
    identity = parse_subscription(subscription_id)
    room = room_of(identity)
    if (data.since is None) == (data.from_message_id is None):
        raise InvalidError(FieldProblem("since", "either since or from_message_id says where to begin"))
    if data.from_message_id is not None and room_of(parse_id(data.from_message_id, "message")) != room:
        raise InvalidError(FieldProblem("from_message_id", "is not a message of the subscription's room"))
    said: dict[str, Any] = {
        "since": data.since and data.since.isoformat(),
        "from_message_id": data.from_message_id,
        "until": data.until and data.until.isoformat(),
        "event_types": data.event_types,
        "rate_per_s": data.rate_per_s,
        "include_expired": data.include_expired or None,
    }
    async with transaction(services.engine) as connection:
        await find_subscription(connection, principal.organisation_id, identity)
        job = await job_records.create_job(
            connection,
            principal.organisation_id,
            JobKind.REPLAY,
            new_id=services.ids.global_id(services.clock.now_ms()),
            room=room,
            arguments={
                "room_id": room,
                "subscription_id": identity,
                **{name: value for name, value in said.items() if value is not None},
            },
        )
    return accepted(job)


@post(
    "/recover",
    status_code=202,
    opt=needs(Scope.PLATFORM),
    responses=documented(),
    tags=["cluster"],
    summary="Send again what a broker has lost",
)
async def recover(services: Given, principal: Caller) -> Response[JobAccepted]:
    """202 with the job that sends again all that is unfinished and was in the broker, attempts and due times kept.

    It covers the whole installation, so that its job is read and cancelled with the scope `platform` too.
    The upkeep does so by itself where a broker was emptied. Where PostgreSQL is the broker there is nothing to do.
    """
    async with transaction(services.engine) as connection:
        job = await job_records.create_job(
            connection,
            principal.organisation_id,
            JobKind.RECOVER,
            new_id=services.ids.global_id(services.clock.now_ms()),
            room=None,
            arguments={},
        )
    return accepted(job)


ROUTES: Final = [replay, recover]
