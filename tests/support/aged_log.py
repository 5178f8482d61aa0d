"""Write a log by hand in which deliveries have stopped at known steps, at known times."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from rooms.domain.state_machine import LogKind
from tests.support.sealed_segments import SCHEMA, START_S

ROOM: Final = 5
END_H: Final = 30.0
"""Length of the log in hours; its last row is at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A row of the log, hours after its beginning; `delay_h`: the wait before the step."""

    kind: LogKind
    at_h: float
    attempt: int = 0
    delay_h: float = 0.0
    failed: bool = False


@dataclass(slots=True)
class AgedLog:
    """Collects rows; writer 1 writes all of them."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    expected: dict[str, str] = field(default_factory=dict)
    """Outcome of each delivery, by id."""
    messages: int = 0

    def publish(
        self,
        subscription: str,
        outcome: str | None,
        steps: Sequence[Step],
        *,
        fanout: int = 1,
        event_type: str = "order",
    ) -> str:
        """Publish a message with one delivery, which has these rows. Return the delivery's id.

        Without an outcome the delivery does not exist. The publish row is at the time of the first
        and states `fanout` deliveries.
        """
        self.messages += 1
        number = self.messages
        born_us = _us(steps[0].at_h)
        hi = (born_us // 1000) << 16 | 0x7000
        message, delivery = (hi, _low(number, 0)), (hi | 1, _low(number, 1))
        of_message = {
            "room_id": ROOM, "message_id": _text(message), "message_hi": message[0], "message_lo": message[1],
            "event_type": event_type, "event_version": 1, "schema_version": 1,
        }  # fmt: skip
        self._add({**of_message, "kind": "published", "fanout": fanout, "ts": born_us})
        identity = _text(delivery)
        if outcome is None:
            return identity
        self.expected[identity] = outcome
        for step in steps:
            attempted = step.kind is LogKind.ATTEMPTED
            self._add(
                {
                    **of_message, "kind": step.kind.value, "ts": _us(step.at_h),
                    "subscription_id": subscription_id(subscription), "delivery_id": identity,
                    "delivery_hi": delivery[0], "delivery_lo": delivery[1], "generation": 0, "attempt": step.attempt,
                    "delay_ms": round(step.delay_h * 3_600_000) or None,
                    "latency_ms": 5.0 if attempted else None, "target_host": "shop.example" if attempted else None,
                    "http_status": (503 if step.failed else 200) if attempted else None,
                    "error_class": "status" if step.failed else None,
                }
            )  # fmt: skip
        return identity

    def _add(self, row: dict[str, Any]) -> None:
        number = len(self.rows) + 1
        self.rows.append({**row, "writer_id": 1, "writer_seq": number, "xid": number})

    def table(self) -> pa.Table:
        """Return the rows in the layout of segments."""
        return pa.Table.from_pylist(self.rows, schema=SCHEMA)


def subscription_id(name: str) -> str:
    """Return the id of a subscription of this name, of up to 12 characters."""
    return f"019b0000-0000-7003-8000-{name.encode().hex()[-12:].rjust(12, '0')}"


def _us(hours: float) -> int:
    return START_S * 1_000_000 + round(hours * 3_600_000_000)


def _low(number: int, salt: int) -> int:
    return -(1 << 63) | number << 32 | salt << 16 | ROOM


def _text(halves: tuple[int, int]) -> str:
    text = f"{halves[0]:016x}{halves[1] & (2**64 - 1):016x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def aged_log() -> AgedLog:
    """Return a log with a delivery of every verdict, on both sides of every limit."""
    log = AgedLog()
    made, tried, held = LogKind.ENQUEUED, LogKind.ATTEMPTED, LogKind.HELD
    leased, retried, ended = LogKind.LEASED, LogKind.RETRY_SCHEDULED, LogKind.DELIVERED

    def at(hours_before_end: float, kind: LogKind = made, **more: Any) -> Step:
        return Step(kind=kind, at_h=END_H - hours_before_end, **more)

    def delivered(hours: float) -> list[Step]:
        return [at(hours), at(hours, tried), at(hours, ended)]

    for hours in (29.0, 3.0, 0.0):
        log.publish("push", "delivered", delivered(hours))
    log.publish("push", "in_flight", [at(0.5), at(0.5, tried)])
    log.publish("push", "stuck", [at(2), at(2, tried)])
    log.publish("push", "held", [at(20), at(20, held)])
    log.publish("push", "stuck", [at(25), at(25, held)])
    log.publish("push", "lost", [at(20)])
    log.publish(
        "push",
        "waiting",
        [at(3.5), at(3.5, tried, failed=True), at(3.5, retried, attempt=1, delay_h=9)],
    )
    log.publish("push", "waiting", [at(10, delay_h=1000)])
    log.publish("push", None, [at(6)])
    log.publish("push", "delivered", delivered(8)[1:])
    log.publish(
        "push", "sidelined", [at(28), at(28, tried, failed=True), at(28, LogKind.SIDELINED)]
    )
    log.publish("pull", "in_flight", [at(12), at(12, leased)])
    log.publish("pull", "stuck", [at(14), at(14, leased)])
    log.publish("pull", "in_flight", [at(1), at(1, leased)])
    log.publish("pull", "waiting", [at(9)])
    log.publish("pull", "stuck", [at(25)])
    log.publish("left", "stuck", [at(7)])
    log.publish("left", "waiting", [at(5)])
    log.publish("left", "waiting", [at(20, delay_h=18)])
    log.publish("paused", "stuck", [at(8), at(7, held)])
    log.publish("paused", "held", [at(8), at(5, held)])
    return log
