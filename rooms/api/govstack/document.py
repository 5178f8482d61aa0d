"""Write the OpenAPI documents of GovStack's interfaces, from the routes themselves.

Litestar's own document is that of `/v1`. These have the names of the specification.
"""

import re
from collections.abc import Iterable, Mapping
from inspect import cleandoc
from typing import Any, Final

import msgspec
from litestar import Response, get
from litestar.handlers import HTTPRouteHandler

from rooms.api.auth import SCOPES, SECURITY_SCHEME, sufficient_scopes
from rooms.api.errors import MEDIA_TYPE, Problem
from rooms.api.fast_routes import JSON
from rooms.api.govstack.callers import CLIENT_HEADER
from rooms.api.govstack.operations import OPERATION, Operation, Reply
from rooms.api.openapi import CSV
from rooms.domain.names import MAX_NAME, NAME_PATTERN
from rooms.domain.sharing import APPLICATION_PATTERN

_PATH_PARAMETER: Final = re.compile(r"\{([a-z_]+)\}")
_REFERENCE: Final = "#/components/schemas/{name}"
_MUTUAL_TLS: Final = "mutual_tls"
_ID: Final = {"type": "string", "format": "uuid"}
_PART: Final = {"type": "string", "pattern": APPLICATION_PATTERN}
_PARAMETERS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "instance_id": ("The instance of the room's owner.", _PART),
    "member_class": ("The class of the room's owner.", _PART),
    "member_code": ("The code of the room's owner.", _PART),
    "application_code": ("The room's name.", _PART),
    "member_id": (
        "The member id of the room's owner, `instance/class/code`, with `%2F` for each slash.",
        {"type": "string", "minLength": 5},
    ),
    "room_id": ("The room's name.", _PART),
    "event_type": (
        "The event type.",
        {"type": "string", "pattern": NAME_PATTERN, "maxLength": MAX_NAME},
    ),
    "event_id": ("The id of an event.", _ID),
    "version": ("The number of a version.", {"type": "integer", "minimum": 1}),
    "publisher_id": ("The id of a grant to publish.", _ID),
    "subscription_id": ("The id of a subscription.", _ID),
    "manager_id": ("The id of an organisation.", _ID),
}
"""Description and schema of each path parameter."""


def document_route(
    path: str,
    title: str,
    routes: Iterable[tuple[HTTPRouteHandler, str]],
    *,
    member_in_one_part: bool = False,
) -> HTTPRouteHandler:
    """Return the route of a document, for handlers with their paths.

    `member_in_one_part`: the document writes the owner's member id as one path parameter.
    """
    content = msgspec.json.encode(
        _document(title, list(routes), member_in_one_part=member_in_one_part)
    )

    @get(path, include_in_schema=False, sync_to_thread=False)
    def read_document() -> Response[bytes]:
        return Response(content, media_type=JSON)

    return read_document


def _document(
    title: str, routes: list[tuple[HTTPRouteHandler, str]], *, member_in_one_part: bool
) -> dict[str, Any]:
    schemas, components = _schemas(handler.opt[OPERATION] for handler, _ in routes)
    paths: dict[str, dict[str, Any]] = {}
    for handler, path in routes:
        (method,) = handler.http_methods
        shown = path
        if member_in_one_part:
            shown = path.replace("{instance_id}/{member_class}/{member_code}", "{member_id}")
            shown = shown.replace("{application_code}", "{room_id}")
        paths.setdefault(_camel_path(shown), {})[method.lower()] = _operation(
            handler, shown, schemas, client_is_required=not member_in_one_part
        )
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1"},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                SECURITY_SCHEME: {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "`Authorization: Bearer rooms_…`",
                },
                _MUTUAL_TLS: {"type": "mutualTLS"},
            },
        },
    }


def _schemas(operations: Iterable[Operation]) -> tuple[Mapping[Any, Any], dict[str, Any]]:
    """Return the schema of each type of a body, by its text, and the named ones."""
    kinds: list[Any] = [Problem]
    for operation in operations:
        kinds += [reply.kind for reply in operation.replies.values() if reply.kind is not None]
        if operation.body is not None:
            kinds.append(operation.body)
    by_text = {str(kind): kind for kind in kinds}
    found, components = msgspec.json.schema_components(by_text.values(), ref_template=_REFERENCE)
    return dict(zip(by_text, found, strict=True)), components


def _operation(
    handler: HTTPRouteHandler, path: str, schemas: Mapping[Any, Any], *, client_is_required: bool
) -> dict[str, Any]:
    operation: Operation = handler.opt[OPERATION]
    scopes = sufficient_scopes(handler.opt[SCOPES])
    text = cleandoc(getattr(handler.fn, "__doc__", None) or "")
    parameters = [
        {"name": _camel(name), "in": "path", "required": True, **_parameter(name)}
        for name in _PATH_PARAMETER.findall(path)
    ]
    parameters.append(
        {
            "name": CLIENT_HEADER,
            "in": "header",
            "required": client_is_required,
            "description": "The calling client, `instanceId/memberClass/memberCode/applicationCode`"
            ": one of the caller's own.",
            "schema": {
                "type": "string",
                "pattern": APPLICATION_PATTERN.replace("$", "(/[A-Za-z0-9_.\\-]{1,64}){3}$"),
            },
        }
    )
    parameters += [
        {"name": name, "in": "query", **found} for name, found in operation.query.items()
    ]
    parameters += [
        {"name": name, "in": "header", "description": about, "schema": {"type": "string"}}
        for name, about in operation.headers.items()
    ]
    found: dict[str, Any] = {
        "operationId": handler.handler_name,
        "summary": handler.summary,
        "description": f"{text}\n\nNeeds the scope {' or '.join(scopes)}.",
        "parameters": parameters,
        "security": [{SECURITY_SCHEME: []}, {_MUTUAL_TLS: []}],
        "responses": {
            str(status): _reply(reply, schemas) for status, reply in operation.all_replies().items()
        },
    }
    if operation.body is not None:
        found["requestBody"] = {
            "required": operation.body_is_required,
            "content": {JSON: {"schema": schemas[str(operation.body)]}},
        }
    return found


def _reply(reply: Reply, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"description": reply.description}
    if reply.kind is not None:
        media_type = MEDIA_TYPE if reply.kind is Problem else JSON
        found["content"] = {media_type: {"schema": schemas[str(reply.kind)]}}
        if reply.is_table:
            found["content"][CSV] = {"schema": {"type": "string"}}
    if reply.headers:
        found["headers"] = {
            name: {"description": about, "schema": {"type": "string"}}
            for name, about in reply.headers.items()
        }
    return found


def _parameter(name: str) -> dict[str, Any]:
    about, schema = _PARAMETERS[name]
    return {"description": about, "schema": schema}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _camel_path(path: str) -> str:
    return _PATH_PARAMETER.sub(lambda found: f"{{{_camel(found[1])}}}", path)
