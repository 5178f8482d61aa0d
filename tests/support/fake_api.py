"""Serve a small Rooms on loopback that answers in the shapes of the API, for tests of its clients."""

import json
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

KEY = "rooms_fake"
Answer = tuple[int, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One request as it came."""

    method: str
    path: str
    query: dict[str, str]
    search: str
    """The query as it came, where a name may stand in it more than once."""
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw) if self.raw else None


@dataclass(slots=True)
class FakeRooms:
    """Keeps everything in memory.

    `interfere` may answer in place of it, or return None to let it be.
    """

    requests: list[Seen] = field(default_factory=list)
    rooms: list[dict[str, Any]] = field(default_factory=list)
    shared: list[dict[str, Any]] = field(default_factory=list)
    directory: list[dict[str, Any]] = field(default_factory=list)
    grants: list[dict[str, Any]] = field(default_factory=list)
    organisations: list[dict[str, Any]] = field(default_factory=list)
    keys: list[dict[str, Any]] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    journal: list[dict[str, Any]] = field(default_factory=list)
    subscriptions: list[dict[str, Any]] = field(default_factory=list)
    event_types: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    waiting: deque[dict[str, Any]] = field(default_factory=deque)
    streams: deque[bytes] = field(default_factory=deque)
    """The lines that each stream sends before it breaks off."""
    acknowledged: list[str] = field(default_factory=list)
    jobs: deque[dict[str, Any]] = field(default_factory=deque)
    known: dict[str, bytes] = field(default_factory=dict)
    interfere: Callable[[Seen], Answer | None] = field(default=lambda _: None)
    headers: dict[str, str] = field(default_factory=dict)
    """Of the next answer."""
    url: str = ""

    def identity(self, number: int) -> str:
        return f"01900000-0000-7000-8000-{number:012x}"

    def sent(self, method: str, pattern: str) -> list[Seen]:
        """The requests of this method whose path fits."""
        return [
            seen
            for seen in self.requests
            if seen.method == method and re.fullmatch(pattern, seen.path)
        ]

    def answer(self, seen: Seen) -> Answer:
        self.requests.append(seen)
        if (instead := self.interfere(seen)) is not None:
            return instead
        if seen.headers.get("authorization") != f"Bearer {KEY}":
            return problem(401, "A valid API key is needed", "this API key is not known")
        for method, pattern, handler in self._routes():
            if method == seen.method and (match := re.fullmatch(pattern, seen.path)):
                found: Answer = handler(seen, *match.groups())
                return found
        return problem(404, "Not found", f"no {seen.method} {seen.path}")

    def _routes(self) -> list[tuple[str, str, Callable[..., Answer]]]:
        room, thing = r"/v1/rooms/(\d+)", r"([0-9a-f-]{36})"
        return [
            ("POST", "/v1/rooms", self._make_room),
            (
                "GET",
                "/v1/rooms",
                lambda seen: page(seen, self.shared if "shared" in seen.query else self.rooms),
            ),
            ("GET", "/v1/directory", lambda seen: page(seen, self.directory)),
            (
                "POST",
                f"{room}/grants",
                lambda seen, _: (201, {"id": self.identity(1), **seen.body}),
            ),
            ("GET", "/v1/grants", lambda seen: page(seen, self.grants)),
            ("GET", f"{room}/grants", lambda seen, _: page(seen, self.grants)),
            ("DELETE", f"{room}/grants/{thing}", lambda *_: (204, b"")),
            ("POST", "/v1/organisations", lambda seen: (201, seen.body)),
            ("GET", "/v1/organisations", lambda seen: page(seen, self.organisations)),
            (
                "GET",
                f"/v1/organisations/{thing}",
                lambda _, thing: one(self.organisations, thing),
            ),
            (
                "PATCH",
                f"/v1/organisations/{thing}",
                lambda seen, thing: changed(self.organisations, thing, seen),
            ),
            ("DELETE", f"/v1/organisations/{thing}", lambda *_: (202, self._job("queued"))),
            (
                "POST",
                f"/v1/organisations/{thing}/(suspend|resume|keys)",
                lambda seen, *_: (200, seen.body or {}),
            ),
            ("POST", "/v1/keys", lambda seen: (201, {**seen.body, "key": "rooms_new"})),
            ("GET", "/v1/keys", lambda seen: page(seen, self.keys)),
            ("GET", f"/v1/keys/{thing}", lambda _, thing: one(self.keys, thing)),
            (
                "PATCH",
                f"/v1/keys/{thing}",
                lambda seen, thing: changed(self.keys, thing, seen),
            ),
            ("POST", f"/v1/keys/{thing}/rotate", lambda *_: (200, {"key": "rooms_new"})),
            ("DELETE", f"/v1/keys/{thing}", lambda *_: (204, b"")),
            ("GET", "/v1/subscriptions", lambda seen: page(seen, self.subscriptions)),
            (
                "POST",
                f"/v1/subscriptions/{thing}/(approve|reject|suspend|reinstate|terminate)",
                lambda seen, thing, action: (200, {"id": thing, "did": action}),
            ),
            (
                "DELETE",
                f"/v1/subscriptions/{thing}/proposal",
                lambda _, thing: (200, {"id": thing, "proposal": None}),
            ),
            ("GET", f"/v1/subscriptions/{thing}/history", lambda seen, _: page(seen, self.history)),
            ("GET", f"/v1/subscriptions/{thing}/counts", lambda *_: (200, {"waiting": 3})),
            ("GET", "/v1/journal", lambda seen: page(seen, self.journal)),
            ("GET", f"{room}/counts", lambda *_: (200, {"waiting": 3})),
            ("POST", f"{room}/messages/check", lambda *_: (200, {"destination_count": 1})),
            ("GET", room, lambda _, room: one(self.rooms, int(room))),
            ("PATCH", room, lambda seen, room: changed(self.rooms, int(room), seen)),
            ("DELETE", room, self._delete_room),
            ("POST", f"{room}/event-types", self._make_event_type),
            ("GET", f"{room}/event-types", lambda seen, _: page(seen, self.event_types)),
            (
                "POST",
                f"{room}/event-types/([^/]+)/versions",
                lambda *_: (201, {"name": "paid", "version": 2}),
            ),
            ("POST", f"{room}/subscriptions", self._make_subscription),
            ("GET", f"{room}/subscriptions", lambda seen, _: page(seen, self.subscriptions)),
            ("GET", f"/v1/subscriptions/{thing}", lambda _, thing: one(self.subscriptions, thing)),
            (
                "PATCH",
                f"/v1/subscriptions/{thing}",
                lambda seen, thing: changed(self.subscriptions, thing, seen),
            ),
            ("DELETE", f"/v1/subscriptions/{thing}", lambda *_: (202, self._job("queued"))),
            ("POST", f"/v1/subscriptions/{thing}/(pause|resume|test|rotate-secret)", self._act),
            ("POST", f"/v1/subscriptions/{thing}/pull", self._pull),
            ("POST", f"/v1/subscriptions/{thing}/ack", self._ack),
            ("GET", "/v1/stream", lambda _: (200, self.streams.popleft())),
            (
                "GET",
                f"/v1/subscriptions/{thing}/deliveries",
                lambda seen, _: page(seen, [self._delivery()]),
            ),
            (
                "POST",
                f"/v1/deliveries/{thing}/redeliver",
                lambda *_: (202, self._delivery() | {"state": "queued"}),
            ),
            ("POST", f"{room}/messages", self._publish),
            ("POST", f"{room}/messages/batch", self._publish_batch),
            ("GET", f"{room}/messages", self._list_messages),
            *(
                (method, f"/v1/messages/{thing}", self._message)
                for method in ("GET", "DELETE", "PATCH")
            ),
            *(
                (method, f"{room}/messages/by-id/(.+)", self._named_message)
                for method in ("GET", "DELETE", "PATCH")
            ),
            *((method, "/v1/cluster/buckets", self._buckets) for method in ("GET", "PUT")),
            ("GET", f"/v1/messages/{thing}/journey", self._journey),
            ("GET", f"/v1/jobs/{thing}", lambda *_: (200, self.jobs.popleft())),
        ]

    def _make_room(self, seen: Seen) -> Answer:
        if any(room["name"] == seen.body["name"] for room in self.rooms):
            return problem(409, "Conflict with the present state", "there is a room of this name")
        self.rooms.append({"id": 1000 + len(self.rooms), **seen.body})
        return 201, self.rooms[-1]

    def _delete_room(self, seen: Seen, room: str) -> Answer:
        found = next(found for found in self.rooms if found["id"] == int(room))
        if seen.query.get("confirm") != found["name"]:
            return problem(
                422, "Fields of the request are wrong", "", [("confirm", "must be the room's name")]
            )
        return 202, self._job("queued")

    def _make_event_type(self, seen: Seen, _: str) -> Answer:
        self.event_types.append({"id": self.identity(900), "latest_version": 1, **seen.body})
        return 201, self.event_types[-1]

    def _make_subscription(self, seen: Seen, room: str) -> Answer:
        made = {
            "id": self.identity(500 + len(self.subscriptions)),
            "room_id": int(room),
            "status": "active",
            **seen.body,
        }
        self.subscriptions.append(made)
        return 201, {**made, **({"secret": "whsec_fake"} if made["type"] == "PUSH" else {})}

    def _act(self, _: Seen, thing: str, action: str) -> Answer:
        match action:
            case "test":
                return 200, {"status": 200, "latency_ms": 1.5, "error": None}
            case "rotate-secret":
                return 200, {"id": thing, "secret": "whsec_new"}
            case _:
                return 200, {"id": thing, "status": "paused" if action == "pause" else "active"}

    def _pull(self, seen: Seen, _: str) -> Answer:
        taken = [
            self.waiting.popleft() for _ in range(min(seen.body["max_messages"], len(self.waiting)))
        ]
        return 200, {"messages": taken}

    def _ack(self, seen: Seen, _: str) -> Answer:
        self.acknowledged += seen.body["ack_ids"]
        return 200, {
            "results": [{"ack_id": ack_id, "status": "acked"} for ack_id in seen.body["ack_ids"]]
        }

    def _publish(self, seen: Seen, _: str) -> Answer:
        return 202, self._accept(seen.body)

    def _publish_batch(self, seen: Seen, _: str) -> Answer:
        key = seen.headers["idempotency-key"]
        if key in self.known:
            if self.known[key] != seen.raw:
                return problem(
                    409,
                    "The Idempotency-Key was used for another request",
                    "the key was used with another body",
                    kind="idempotency-key-reused",
                )
            self.headers = {"Idempotent-Replayed": "true"}
            return 202, {"messages": []}
        errors = [
            (f"messages[{index}].payload.amount", "is no number")
            for index, message in enumerate(seen.body["messages"])
            if message["payload"] == {"amount": "bad"}
        ]
        if errors:
            return problem(422, "Fields of the request are wrong", "payloads do not fit", errors)
        self.known[key] = seen.raw
        return 202, {"messages": [self._accept(message) for message in seen.body["messages"]]}

    def _accept(self, message: dict[str, Any]) -> dict[str, Any]:
        identity = self.identity(100 + len(self.messages))
        self.messages.append({"id": identity, **message})
        return {
            "message_id": identity,
            "correlation_id": "c",
            "destinations": ["room-1000::subscription-x"],
        }

    def _delivery(self) -> dict[str, Any]:
        return {
            "id": self.identity(700),
            "message_id": self.identity(100),
            "state": "sidelined",
            "last_error": "\x1b[2Jno",
        }

    def _list_messages(self, seen: Seen, _: str) -> Answer:
        own = seen.query.get("id")
        return page(
            seen, [message for message in self.messages if own in {None, message.get("caller_id")}]
        )

    def _buckets(self, seen: Seen) -> Answer:
        return 200, {"count": seen.body["count"] if seen.body else 8, "used": True}

    def _message(self, seen: Seen, message: str) -> Answer:
        result = {"DELETE": "withdrawn", "PATCH": "moved"}.get(seen.method)
        if result is None:
            return 200, {"id": message, "status": "waiting", "states": {"queued": 1}}
        fate = {
            "delivery_id": self.identity(700),
            "subscription_id": self.identity(1),
            "result": result,
        }
        due = {"due_at": "2030-01-01T00:00:00Z", "expires_at": None} if seen.body else {}
        return 200, {"message_id": message, **due, "deliveries": [fate]}

    def _named_message(self, seen: Seen, _: str, own: str) -> Answer:
        for message in self.messages:
            if message.get("caller_id") == unquote(own):
                return self._message(seen, message["id"])
        return problem(404, "Not found", "your organisation published no message with this id")

    def _journey(self, seen: Seen, message: str) -> Answer:
        at = "2026-01-31T12:00:0"
        steps: list[dict[str, Any]] = [
            {"ts": f"{at}0Z", "kind": "published", "event_type": "paid"},
            {
                "ts": f"{at}1.5Z",
                "kind": "attempted",
                "attempt": 0,
                "http_status": 503,
                "latency_ms": 12.25,
            },
            {
                "ts": f"{at}1.5Z",
                "kind": "retry_scheduled",
                "attempt": 1,
                "delay_ms": 1000,
                "detail": "503",
            },
        ]
        return page(seen, [{**step, "message_id": message} for step in steps])

    def _job(self, state: str) -> dict[str, Any]:
        return {"id": self.identity(800), "kind": "delete_room", "state": state}


def one(things: list[dict[str, Any]], identity: object) -> Answer:
    found = [thing for thing in things if thing["id"] == identity]
    return (200, found[0]) if found else problem(404, "Not found", f"no {identity}")


def changed(things: list[dict[str, Any]], identity: object, seen: Seen) -> Answer:
    status, found = one(things, identity)
    if status == HTTPStatus.OK:
        found |= seen.body
    return status, found


def page(seen: Seen, items: list[dict[str, Any]]) -> Answer:
    for name in ("name", "member_id", "prefix"):
        if name in seen.query:
            items = [item for item in items if item.get(name) == seen.query[name]]
    start = int(seen.query.get("cursor", "0"))
    end = start + int(seen.query.get("limit", "50"))
    return 200, {"items": items[start:end], "next_cursor": str(end) if end < len(items) else None}


def problem(
    status: int,
    title: str,
    detail: str,
    errors: list[tuple[str, str]] | None = None,
    kind: str = "x",
) -> Answer:
    reported = [{"field": where, "message": message} for where, message in errors or []]
    return status, {
        "type": f"urn:rooms:problem:{kind}",
        "title": title,
        "status": status,
        "detail": detail,
        "errors": reported,
    }


class Served(ThreadingHTTPServer):
    """Answers from whichever fake is `current`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.current = FakeRooms()

    def renew(self) -> FakeRooms:
        """A fake that knows nothing yet."""
        self.current = FakeRooms(url=f"http://127.0.0.1:{self.server_address[1]}")
        return self.current


class _Handler(BaseHTTPRequestHandler):
    server: Served
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle_any(self) -> None:
        fake = self.server.current
        parts = urlsplit(self.path)
        seen = Seen(
            method=self.command,
            path=parts.path,
            query={name: values[0] for name, values in parse_qs(parts.query).items()},
            search=parts.query,
            headers={name.lower(): value for name, value in self.headers.items()},
            raw=self.rfile.read(int(self.headers.get("Content-Length", "0"))),
        )
        status, value = fake.answer(seen)
        extra, fake.headers = fake.headers, {}
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        kind = "text/event-stream" if isinstance(value, bytes) else "application/json"
        self.send_response(status)
        for name, text in {"Content-Type": kind, "Content-Length": str(len(body)), **extra}.items():
            self.send_header(name, text)
        self.end_headers()
        with suppress(ConnectionError):
            self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any  # noqa: N815 - http.server looks for these names

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is http.server's
        pass


@contextmanager
def serving() -> Iterator[Served]:
    """A server of fakes that listens until the end of the block."""
    with Served() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
