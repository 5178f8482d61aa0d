"""Serve `/v1/push-template`: where the webhooks of GovStack's subscriptions go."""

from typing import Annotated, Final

from litestar import delete, get, put
from litestar.params import JSONBody
from msgspec import Meta, Struct

from rooms.api.auth import Caller, ServicesDep, require_scopes
from rooms.api.changes import ChangeDep
from rooms.api.codec import Body
from rooms.db.catalog.organisations import find_push_template, update_organisation
from rooms.db.connection import transaction
from rooms.domain.govstack import PLACEHOLDERS, check_template
from rooms.domain.push_url import MAX_URL
from rooms.domain.state_machine import Scope
from rooms.errors import FieldProblem, InvalidError

_TAGS: Final = ["organisations"]
_PATH: Final = "/push-template"
_WRITE: Final = require_scopes(Scope.MANAGE)

Template = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_URL,
        description="A URL with the placeholders "
        + ", ".join(f"`{{{name}}}`" for name in PLACEHOLDERS)
        + " in its path or query, such as the address of a security server.",
    ),
]


class PushTemplate(Struct, forbid_unknown_fields=True, kw_only=True):
    """Set the URL to which webhooks of GovStack's subscriptions go."""

    template: Template


class PushTemplateResponse(Struct, kw_only=True):
    """Show the template of the organisation; null: it has none, and cannot subscribe with PUSH."""

    template: str | None


@get(
    _PATH,
    opt=require_scopes(Scope.MANAGE, Scope.OPERATE),
    tags=_TAGS,
    summary="Read the template of push URLs",
)
async def read_push_template(services: ServicesDep, principal: Caller) -> PushTemplateResponse:
    """Return the URL that GovStack's subscriptions of this organisation are made with."""
    async with transaction(services.engine) as connection:
        found = await find_push_template(connection, principal.organisation_id)
    return PushTemplateResponse(template=found)


@put(
    _PATH,
    status_code=200,
    dto=Body[PushTemplate],
    return_dto=None,
    opt=_WRITE,
    tags=_TAGS,
    summary="Set the template of push URLs",
)
async def change_push_template(
    data: JSONBody[PushTemplate], services: ServicesDep, principal: Caller, change: ChangeDep
) -> PushTemplateResponse:
    """Register the endpoint of the organisation for GovStack's PUSH.

    Later subscriptions use it. A present one does after `PATCH …/subs/{eventType}` with `delivery`.
    """
    try:
        services.check_push_url(check_template(data.template))
    except ValueError as exc:
        raise InvalidError(FieldProblem("template", str(exc))) from exc
    async with change.transaction() as connection:
        before = await find_push_template(connection, principal.organisation_id, lock=True)
        change.before = {"has_template": before is not None}
        change.after = {"has_template": True}
        await update_organisation(
            connection, principal.organisation_id, {"push_template": data.template}
        )
    return PushTemplateResponse(template=data.template)


@delete(_PATH, opt=_WRITE, tags=_TAGS, summary="Remove the template of push URLs")
async def remove_push_template(principal: Caller, change: ChangeDep) -> None:
    """Remove the template. Subscriptions keep the URLs that they were made with."""
    async with change.transaction() as connection:
        before = await find_push_template(connection, principal.organisation_id, lock=True)
        change.before = {"has_template": before is not None}
        await update_organisation(connection, principal.organisation_id, {"push_template": None})


ROUTES: Final = [read_push_template, change_push_template, remove_push_template]
