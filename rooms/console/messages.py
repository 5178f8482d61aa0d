"""Show messages: the list of a room, one message with its timeline, and what can be done to it."""

from datetime import datetime
from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.api_client import ApiProblemError, segment
from rooms.console.charts import (
    MAX_LINES,
    TimelineLine,
    draw_timeline,
    step_kind,
    worst_first,
)
from rooms.console.filters import CORRECTABLE, is_filtered, read_filters, to_utc
from rooms.console.formatting import first_lines
from rooms.console.page import DOWNLOAD, HOME, Page, PageDep
from rooms.domain.message import MessageStatus
from rooms.domain.state_machine import RESTORABLE, UNFINISHED, State
from rooms.errors import ForbiddenError

_LIST: Final = f"{HOME}/rooms/{{room_id:str}}/messages"
_PATH: Final = f"{HOME}/messages/{{message_id:str}}"
_MORE: Final = (
    "correlation_id",
    "id",
    "version",
    "subscription_id",
    "publisher_organisation_id",
    "application",
)
FILTERS: Final = ("event_type", "state", "since", "until", "business_key", *_MORE)
_UNFINISHED: Final = frozenset(state.value for state in UNFINISHED)
_STEPS: Final = 200
_DELIVERIES: Final = 50
_MAX_PAYLOAD: Final = 100_000
"""So many characters of a payload are shown; `rooms message show` has all."""
_MS_PER_S: Final = 1000
DONE: Final = {
    "message-withdrawn": "The message is withdrawn: what waited is cancelled.",
    "message-moved": "The message has another due time.",
}


@get(_LIST)
async def list_messages(page: PageDep, room_id: FromPath[str]) -> Response[str]:
    """List the messages of a room, narrowed by the filters of the address."""
    path = f"/rooms/{segment(room_id)}"
    room = await page.api.get(path)
    found: dict[str, Any] = {"items": [], "next_cursor": None}
    error: ApiProblemError | None = None
    wanted = read_filters(page, FILTERS)
    try:
        found = await page.api.get(
            f"{path}/messages", cursor=page.query("cursor"), with_states="true", **wanted
        )
    except ApiProblemError as exc:
        if exc.status not in CORRECTABLE:
            raise
        error = exc
    return page.render(
        "messages.html",
        refused=error,
        room=room,
        found=found,
        state_options=[(state.value, page.label_of(state.value)) for state in State],
        statuses=_status_names(page),
        filtered=is_filtered(page, FILTERS),
        more_filters=is_filtered(page, _MORE),
    )


def _status_names(page: Page) -> dict[str, tuple[str, str]]:
    """Return the look and the name of each status of a message, in the viewer's language."""
    names = {
        MessageStatus.WAITING: ("off", page.text("waiting")),
        MessageStatus.IN_PROGRESS: ("busy", page.text("under way")),
        MessageStatus.SIDELINED: ("bad", page.text("sidelined")),
        MessageStatus.CANCELLED: ("off", page.text("cancelled")),
        MessageStatus.DONE: ("good", page.text("done")),
    }
    return {status.value: name for status, name in names.items()}


@get(_PATH)
async def show_message(page: PageDep, message_id: FromPath[str]) -> Response[str]:
    """Show one message without its payload, its timeline, and its deliveries."""
    return await _show(page, message_id)


@post(f"{_PATH}/payload")
async def show_payload(page: PageDep, message_id: FromPath[str]) -> Response[str]:
    """Show one message with headers and payload, which the API notes in the journal.

    A form and not a link, so that no other site, and no part that refreshes itself, can read it.
    """
    await page.form()
    if not may_read_payloads(page):
        raise ForbiddenError("your role reads no payloads")
    return await _show(page, message_id, payload=True)


@get(f"{_PATH}/payload")
async def leave_payload(page: PageDep, message_id: FromPath[str]) -> Response[Any]:
    """Go to the message: its payload is shown only after a click."""
    return page.redirect(f"{HOME}/messages/{segment(message_id)}")


@post(f"{_PATH}/withdraw")
async def withdraw(page: PageDep, message_id: FromPath[str]) -> Response[Any]:
    """Cancel what waits of a message."""
    await page.form()
    try:
        await page.api.delete(f"/messages/{segment(message_id)}")
    except ApiProblemError as exc:
        return await _show_refused(page, message_id, exc, {})
    return page.redirect(f"{HOME}/messages/{segment(message_id)}", done="message-withdrawn")


@post(f"{_PATH}/move")
async def move(page: PageDep, message_id: FromPath[str]) -> Response[Any]:
    """Change the due time of what waits of a message."""
    form = await page.form()
    delay_s = form.number("delay_s")
    given = {
        "deliver_at": to_utc(page, form.text("deliver_at")),
        "delay_ms": round(delay_s * _MS_PER_S) if isinstance(delay_s, int | float) else delay_s,
    }
    body = {name: value for name, value in given.items() if value is not None}
    try:
        await page.api.patch(f"/messages/{segment(message_id)}", body)
    except ApiProblemError as exc:
        return await _show_refused(page, message_id, exc, form.values())
    return page.redirect(f"{HOME}/messages/{segment(message_id)}", done="message-moved")


@post(f"{_PATH}/restore")
async def restore(page: PageDep, message_id: FromPath[str]) -> Response[Any]:
    """Begin to restore the deliveries of a message in some states, and show the job."""
    form = await page.form()
    # An empty list, too, which the API refuses: without one it restores all that is unfinished.
    states = form.many("states")
    try:
        job = await page.api.post(f"/messages/{segment(message_id)}/restore", {"states": states})
    except ApiProblemError as exc:
        return await _show_refused(page, message_id, exc, {"states": "\n".join(states)})
    return page.redirect(f"{HOME}/jobs/{job['job_id']}")


@get(f"{_PATH}/receipt", opt={DOWNLOAD: True})
async def download_receipt(page: PageDep, message_id: FromPath[str]) -> Response[str]:
    """Return the signed receipt of a message as a file."""
    path = f"/messages/{segment(message_id)}"
    found = await page.api.get(f"{path}/receipt")
    return Response(
        found["receipt"],
        media_type="application/jose",
        headers={
            "Content-Disposition": f'attachment; filename="receipt-{segment(message_id)}.jws"'
        },
    )


def may_read_payloads(page: Page) -> bool:
    """Return whether the viewer's role reads payloads at all."""
    return page.me.may("manage", "operate", "subscribe")


async def _show_refused(
    page: Page, message_id: str, error: ApiProblemError, values: dict[str, str]
) -> Response[str]:
    if error.status not in CORRECTABLE:
        raise error
    return await _show(page, message_id, values=values, error=error)


async def _show(
    page: Page,
    message_id: str,
    *,
    payload: bool = False,
    values: dict[str, str] | None = None,
    error: ApiProblemError | None = None,
) -> Response[str]:
    path = f"/messages/{segment(message_id)}"
    message = await page.api.get(path, payload=payload)
    deliveries = await page.api.get(f"{path}/deliveries", limit=_DELIVERIES)
    timeline = await page.api.get(f"{path}/journey", limit=_STEPS, cursor=page.query("cursor"))
    room = await page.optional(f"/rooms/{message['room_id']}")
    lines = _lines(deliveries["items"], timeline["items"])
    states = message["states"]
    typed = values or {}
    ticked = typed["states"].split("\n") if "states" in typed else _UNFINISHED
    return page.render(
        "message.html",
        refused=error,
        message=message,
        statuses=_status_names(page),
        room=room,
        deliveries=deliveries,
        timeline=timeline,
        names={one["id"]: one["subscription"] for one in deliveries["items"]},
        chart=draw_timeline(
            datetime.fromisoformat(message["published_at"]),
            lines,
            page.text("Steps of the message for each subscription, by the time after its publish"),
        ),
        hidden_lines=max(0, len(lines) - MAX_LINES),
        step_kind=step_kind,
        may_read=may_read_payloads(page),
        shown=payload,
        payload=_payload_lines(message) if payload else None,
        waiting=sum(states.get(name, 0) for name in ("scheduled", "queued", "held")),
        in_flight=states.get("leased", 0),
        restorable=[
            (name, count, name in ticked) for name, count in states.items() if name in RESTORABLE
        ],
        values=typed,
    )


def _payload_lines(message: dict[str, Any]) -> tuple[list[str], int] | None:
    """Return the payload as lines of indented JSON, and how many more there are.

    None: the viewer's organisation may not read it yet.
    """
    if "payload" not in message:
        return None
    return first_lines(message["payload"], _MAX_PAYLOAD)


def _lines(deliveries: list[dict[str, Any]], steps: list[dict[str, Any]]) -> list[TimelineLine]:
    """Return the steps of each delivery, what failed before the rest."""
    of: dict[str, list[dict[str, Any]]] = {}
    for step in steps:
        if step["delivery_id"] is not None:
            of.setdefault(step["delivery_id"], []).append(step)
    names = {one["id"]: one["subscription"] or one["subscription_id"] for one in deliveries}
    return worst_first(
        TimelineLine(name=names.get(identity, "…" + identity[-17:-8]), steps=found)
        for identity, found in of.items()
    )


ROUTES: Final = (
    list_messages,
    show_message,
    show_payload,
    leave_payload,
    withdraw,
    move,
    restore,
    download_receipt,
)
