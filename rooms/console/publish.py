"""Publish a message from a form that is checked while it is typed."""

import uuid
from typing import Any, Final

import msgspec
from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.api_client import ApiProblemError
from rooms.console.event_types import field_problem, find_examples, page_json, parse_json
from rooms.console.fields import typed_time
from rooms.console.form import Form
from rooms.console.page import Page, PageDep
from rooms.console.rooms import ROOM, find_room
from rooms.publishing.number_bounds import decode_json

_PUBLISH: Final = f"{ROOM}/publish"
_NUMBERS: Final = ("version", "priority", "ttl_ms", "delay_ms")
_TEXTS: Final = ("event_type", "ordering_key", "business_key", "correlation_id", "id")
_BAD_REQUEST: Final = 400
_MAX_TYPES: Final = 200


@get(_PUBLISH)
async def ask_for_message(page: PageDep, room_id: FromPath[str]) -> Response[str]:
    """Show the form, with an example of the event type in the address."""
    page.require("publish")
    room = await find_room(page, room_id)
    wanted = page.query("event_type") or ""
    values = {"event_type": wanted, "payload": "{}"}
    # What this form sends twice, by a reload or a second click, is published once.
    values["idempotency_key"] = str(uuid.uuid4())
    return await _form(page, room, values, fills=True)


@post(_PUBLISH)
async def publish(page: PageDep, room_id: FromPath[str]) -> Response[Any]:
    """Publish what was typed, or only check it where that button was used."""
    form = await page.form()
    page.require("publish")
    room = await find_room(page, room_id)
    try:
        body = _body(page, form)
        if "check" in form:
            checked = await _check(page, room, body)
            return await _form(page, room, form.values(), checked=checked)
        status, content = await page.api.send(
            "POST",
            f"/rooms/{room['id']}/messages",
            body=body,
            headers={"Idempotency-Key": form.text("idempotency_key") or str(uuid.uuid4())},
        )
        document = decode_json(content) if content else {}
        if status >= _BAD_REQUEST:
            raise ApiProblemError(status, document)
    except ApiProblemError as exc:
        return await _form(page, room, form.values(), exc)
    return page.render("published.html", room=room, answer=document)


@post(f"{_PUBLISH}/check")
async def check_message(page: PageDep, room_id: FromPath[str]) -> Response[str]:
    """Return what is wrong with what is typed so far; nothing is published."""
    form = await page.form()
    page.require("publish")
    room = await find_room(page, room_id)
    error, checked = None, None
    try:
        checked = await _check(page, room, _body(page, form))
    except ApiProblemError as exc:
        error = exc
    return page.render(
        "publish_check.html",
        checked=checked,
        problem=None if error is None else error.problem,
    )


async def _check(page: Page, room: dict[str, Any], body: bytes) -> dict[str, Any]:
    status, content = await page.api.send("POST", f"/rooms/{room['id']}/messages/check", body=body)
    document: dict[str, Any] = decode_json(content) if content else {}
    if status >= _BAD_REQUEST:
        raise ApiProblemError(status, document)
    return document


def _body(page: Page, form: Form) -> bytes:
    """Return the request; its payload keeps its bytes.

    ApiProblemError: the payload is no JSON, or no event type is chosen.
    """
    payload = parse_json(form, "payload")
    if form.text("event_type") is None:
        raise field_problem("event_type", page.text("Choose an event type."))
    lines = [line for line in form.raw("headers").split("\n") if line.strip()]
    pairs = (line.partition(":") for line in lines)
    given: dict[str, Any] = {
        **{name: form.text(name) for name in _TEXTS},
        **{name: form.number(name) for name in _NUMBERS},
        "headers": {name.strip(): value.strip() for name, _, value in pairs} or None,
        "deliver_at": typed_time(page, form.text("deliver_at")),
    }
    body = {name: value for name, value in given.items() if value is not None}
    return msgspec.json.encode(body | {"payload": payload})


async def _form(
    page: Page,
    room: dict[str, Any],
    values: dict[str, str],
    error: ApiProblemError | None = None,
    *,
    fills: bool = False,
    checked: dict[str, Any] | None = None,
) -> Response[str]:
    """`fills`: start with an example of the event type."""
    types = await page.optional(f"/rooms/{room['id']}/event-types", limit=_MAX_TYPES)
    schema = await _schema(page, room, values, types)
    examples = find_examples(schema)
    if fills and examples:
        values["payload"] = page_json(examples[0])
    return page.render(
        "publish.html",
        refused=error,
        room=room,
        values=values,
        types=types,
        schema=schema,
        examples=examples,
        checked=checked,
    )


async def _schema(
    page: Page, room: dict[str, Any], values: dict[str, str], types: dict[str, Any] | None
) -> Any:
    """Return the schema of the typed event type and version; None: there is none."""
    wanted = values.get("event_type", "").strip()
    known = {one["name"]: one for one in (types or {}).get("items", ())}
    if wanted not in known:
        return None
    text = values.get("version", "").strip()
    version = text if text.isdecimal() else known[wanted]["latest_version"]
    found = await page.optional(f"/rooms/{room['id']}/event-types/{wanted}/versions/{version}")
    return None if found is None else found["schema"]


ROUTES: Final = (ask_for_message, publish, check_message)
