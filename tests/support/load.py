"""Publishers and a puller that go on through failures, and remember all that they were promised."""

import random
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from tests.support.api_client import plain_client
from tests.support.polling import until
from tests.support.room import EVENT_TYPE, Place
from tests.support.webhook_sink import Arrival, Reply

_PAUSE_S = 0.05
# Time enough to acknowledge a hundred messages on a machine that does much else.
_LEASE_MS = 3000
_POLL_MS = 500
_UNREADY = {httpx.codes.SERVICE_UNAVAILABLE}
# A proxy or load balancer would say these where a process is away; ours is simply not there.
_AWAY = (httpx.TransportError,)


class Uneven:
    """A webhook that takes its time, and answers 500 for a share of the calls that a seed draws."""

    def __init__(self, seed: int, share: float, *, after_s: float) -> None:
        self._draw = random.Random(seed).random
        self._share = share
        self._after_s = after_s
        self._turn = threading.Lock()
        self.succeeded: list[str] = []

    def __call__(self, arrival: Arrival) -> Reply:
        with self._turn:
            if self._draw() < self._share:
                return Reply(status=500, after_s=self._after_s)
            self.succeeded.append(arrival.webhook_id)
        return Reply(after_s=self._after_s)


@dataclass
class Load:
    """Record the load: `accepted` is every message answered 202, by its idempotency key."""

    place: Place
    pace_s: float
    accepted: dict[str, str] = field(default_factory=dict)
    received: set[str] = field(default_factory=set)
    acknowledged: set[str] = field(default_factory=set)
    repeated: int = 0
    unexpected: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _publishing: list[threading.Thread] = field(default_factory=list)
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def start(self, publishers: int, queue: str) -> None:
        self._publishing = [
            threading.Thread(target=self._publish_until_stopped) for _ in range(publishers)
        ]
        self._pulling = threading.Thread(target=self._pull_until_stopped, args=[queue])
        self._drained = threading.Event()
        for thread in (*self._publishing, self._pulling):
            thread.start()

    def await_progress(self) -> None:
        """Until publishes are answered again."""
        before = len(self.accepted)
        until(
            lambda: len(self.accepted) > before + len(self._publishing),
            "publishes to be accepted again",
        )

    def end_publishing(self) -> None:
        """Let each publisher come to the 202 of its last message."""
        self._stop.set()
        for thread in self._publishing:
            thread.join(60)
            assert not thread.is_alive(), "a publisher did not get its last 202"

    def end_pulling(self) -> None:
        self._drained.set()
        self._pulling.join(60)
        assert not self._pulling.is_alive()

    def _client(self) -> httpx.Client:
        http = self.place.service.http
        return plain_client(base_url=http.base_url, headers=dict(http.headers), timeout=10)

    def _publish_until_stopped(self) -> None:
        path, run, number = f"/v1{self.place.at}/messages", secrets.token_hex(4), 0
        with self._client() as http:
            while not self._stop.wait(self.pace_s):
                number += 1
                key = f"{run}-{number}"
                body = {"event_type": EVENT_TYPE, "payload": {"key": key}}
                while (answer := self._post(http, path, body, key)) is None:
                    self.repeated += 1
                    # Not a wait for anything: a publisher does not hammer on a service that is down.
                    threading.Event().wait(_PAUSE_S)
                with self._turn:
                    if answer.status_code == httpx.codes.ACCEPTED:
                        self.accepted[key] = answer.json()["message_id"]
                    else:
                        self.unexpected.append(f"publish: {answer.status_code} {answer.text}")

    def _pull_until_stopped(self, queue: str) -> None:
        path = f"/v1/subscriptions/{queue}"
        body = {"max_messages": 100, "wait_ms": _POLL_MS, "lease_ms": _LEASE_MS}
        with self._client() as http:
            while not self._drained.is_set():
                answer = self._post(http, f"{path}/pull", body)
                if answer is None:
                    self._drained.wait(_PAUSE_S)
                elif answer.status_code != httpx.codes.OK:
                    self.unexpected.append(f"pull: {answer.status_code} {answer.text}")
                elif messages := answer.json()["messages"]:
                    self.received.update(message["message_id"] for message in messages)
                    ack_ids = {message["ack_id"]: message["message_id"] for message in messages}
                    self._acknowledge(http, f"{path}/ack", ack_ids)

    def _acknowledge(self, http: httpx.Client, path: str, ack_ids: dict[str, str]) -> None:
        answer = self._post(http, path, {"ack_ids": list(ack_ids)})
        if answer is None:
            return
        if answer.status_code not in {httpx.codes.OK, httpx.codes.CONFLICT}:
            self.unexpected.append(f"ack: {answer.status_code} {answer.text}")
        elif answer.status_code == httpx.codes.OK:
            results = answer.json()["results"]
            self.acknowledged.update(
                ack_ids[one["ack_id"]] for one in results if one["status"] == "acked"
            )

    def _post(
        self, http: httpx.Client, path: str, body: object, key: str | None = None
    ) -> httpx.Response | None:
        """The answer; None where it is worth another try."""
        headers = {} if key is None else {"Idempotency-Key": key}
        try:
            answer = http.post(path, json=body, headers=headers)
        except _AWAY:
            return None
        if answer.status_code in _UNREADY:
            if "retry-after" not in answer.headers:
                self.unexpected.append(f"503 without Retry-After: {answer.text}")
            return None
        return answer


@contextmanager
def loading(place: Place, queue: str, *, publishers: int, pace_s: float) -> Iterator[Load]:
    """Load on a room while the block runs, and until its last publish was answered."""
    load = Load(place, pace_s)
    load.start(publishers, queue)
    try:
        yield load
    finally:
        load.end_publishing()
        load.end_pulling()
