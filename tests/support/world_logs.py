"""Write a simulated world as log rows in the layout of segments."""

import numpy as np
import pyarrow as pa

from tests.support.failure_worlds import ERRORS, World, type_names
from tests.support.sealed_segments import SCHEMA, START_S


def log_rows(world: World) -> pa.Table:
    """Return the rows of attempts and of sidelined deliveries, by time, as workers log them."""
    tried = world.attempts
    gave_up = np.flatnonzero(world.gave_up)
    rows = np.concatenate((np.arange(len(tried["us"])), gave_up))
    sidelined = np.arange(len(rows)) >= len(tried["us"])
    failed = (tried["error"][rows] >= 0) & ~sidelined
    ids = subscription_ids(world)
    machines = [f"machine-{number}" for number in range(world.plan.machines)]

    def of(name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return tried[name][rows]

    def ids_of(values: np.ndarray[tuple[int], np.dtype[np.int64]], salt: int) -> list[str]:
        return [f"{salt:08x}-0000-7000-8000-{value:012x}" for value in values.tolist()]

    writer = of("worker") + 1
    seq = np.zeros(len(rows), dtype=np.int64)
    for one in np.unique(writer):
        own = writer == one
        seq[own] = np.arange(1, int(own.sum()) + 1)
    count = len(rows)
    zeros = np.zeros(count, dtype=np.int64)
    deliveries = of("delivery")
    columns = {
        "room_id": pa.array(of("room") + 1000, pa.int32()),
        "message_id": pa.array(ids_of(deliveries, 1)),
        "message_hi": pa.array(deliveries),
        "message_lo": pa.array(zeros),
        "writer_id": pa.array(writer, pa.int32()),
        "writer_seq": pa.array(seq),
        "xid": pa.array(np.arange(count)),
        "ts": pa.array(of("us"), pa.timestamp("us", "UTC")),
        "kind": pa.array(["attempted", "sidelined"]).take(pa.array(sidelined.astype(np.int64))),
        "subscription_id": pa.array(ids).take(pa.array(of("subscription"))),
        "delivery_id": pa.array(ids_of(deliveries, 2)),
        "delivery_hi": pa.array(deliveries),
        "delivery_lo": pa.array(zeros),
        "generation": pa.array(zeros, pa.int32()),
        "attempt": pa.array(of("attempt"), pa.int32()),
        "event_version": pa.array(of("event_version") + 1, pa.int32()),
        "policy_version": pa.array(zeros + 1, pa.int32()),
        "worker": pa.array(writer, pa.int32()),
        "http_status": pa.array(
            np.where(of("error") >= 0, of("status"), 200),
            mask=sidelined | ((of("error") >= 0) & (of("status") < 0)),
        ).cast(pa.int32()),
        "schema_version": pa.array(zeros + 1, pa.int32()),
        "event_type": pa.array(type_names(world.plan.types)).take(pa.array(of("event_type"))),
        "target_host": pa.array(world.host_names).take(pa.array(of("host"))),
        "worker_host": pa.array(machines).take(pa.array(of("machine"))),
        "error_class": pa.array(ERRORS).take(pa.array(of("error"), mask=~failed)),
    }
    return pa.table(
        {field.name: columns.get(field.name, pa.nulls(count, field.type)) for field in SCHEMA},
        schema=SCHEMA,
    )


def subscription_ids(world: World) -> list[str]:
    """Return the subscriptions' ids by number."""
    return [
        f"{START_S:08x}-0000-7000-8000-{number:012x}" for number in range(len(world.plan.rooms))
    ]
