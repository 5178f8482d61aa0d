"""Write log rows as sealed segments: ids, columns and files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from delivery.analytics.runs.manifest import Partition, partitions_of
from delivery.analytics.sealing.check import check_segments
from delivery.analytics.sealing.files import LocalFiles
from delivery.analytics.sealing.layout import SEGMENT_COLUMNS, part_of
from delivery.analytics.sealing.manifest import manifest_name
from delivery.analytics.sealing.seal import describe
from delivery.analytics.spark.segments import HadoopFiles

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

START_S: Final = 1_767_225_600
"""2026-01-01T00:00:00Z."""
KINDS: Final = ("published", "enqueued", "attempted", "retry_scheduled", "delivered", "sidelined")
PUBLISHED, ENQUEUED, ATTEMPTED, RETRIED, DELIVERED, SIDELINED = range(6)
WORKERS: Final = 4
TYPES: Final = ("order.created", "order.paid", "invoice.sent")
_ARROW: Final = {
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "string": pa.string(),
    "timestamp": pa.timestamp("us", "UTC"),
}
_ADDED_LATER: Final = {
    "publisher_id",
    "publisher_organisation_id",
    "application",
    "worker_version",
}
SCHEMA: Final = pa.schema(
    [
        pa.field(column.name, _ARROW[column.type], column.nullable)
        for column in SEGMENT_COLUMNS
        if column.name not in _ADDED_LATER
    ]
)
"""Of an earlier version's export: what reads these segments reads older ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Messages by number: room and second; deliveries by number: message and subscription."""

    room: Ints
    t: Floats
    message: Ints
    subscription: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """All ids as text and as halves."""

    messages: list[str]
    deliveries: list[str]
    subscriptions: list[str]
    halves: Mapping[str, Ints]

    @classmethod
    def of(cls, sent: Sent, *, rooms: int, per_room: int) -> "Names":
        """Make the ids from times and rooms."""
        ms = START_S * 1000 + np.rint(sent.t * 1000).astype(np.int64)
        room = 1000 + sent.room
        message_hi, message_lo, messages = _identities(ms, room, 0)
        delivery_hi, delivery_lo, deliveries = _identities(ms[sent.message], room[sent.message], 1)
        numbers = np.arange(rooms * per_room)
        before = np.full(len(numbers), (START_S - 9999) * 1000)
        _, _, subscriptions = _identities(before, 1000 + numbers // per_room, 2)
        halves = {
            "message_hi": message_hi,
            "message_lo": message_lo,
            "delivery_hi": delivery_hi,
            "delivery_lo": delivery_lo,
        }
        return cls(
            messages=messages, deliveries=deliveries, subscriptions=subscriptions, halves=halves
        )


def _identities(ms: Ints, room: Ints, salt: int) -> tuple[Ints, Ints, list[str]]:
    """Make UUIDv7s as halves and text: the millisecond, a counter, the room."""
    count = np.arange(len(ms), dtype=np.int64)
    hi = (ms << 16) | 0x7000 | salt
    lo = np.int64(-(1 << 63)) | (count << 32) | room
    unsigned = zip(hi.view(np.uint64).tolist(), lo.view(np.uint64).tolist(), strict=True)
    texts = [f"{a:016x}{b:016x}" for a, b in unsigned]
    return hi, lo, [f"{t[:8]}-{t[8:12]}-{t[12:16]}-{t[16:20]}-{t[20:]}" for t in texts]


def table_of(
    sent: Sent,
    names: Names,
    columns: Mapping[str, Floats],
    seq: Ints,
    *,
    skew_s: Sequence[float],
    hosts: Mapping[int, int],
    per_room: int,
) -> pa.Table:
    """Return the rows with the columns of a segment."""
    rooms = 1000 + sent.room
    targets = [
        f"host-{hosts.get(number, 100 + number)}.example"
        for number in range(len(names.subscriptions))
    ]
    kind = columns["kind"].astype(np.int64)
    of_message = columns["message"].astype(np.int64)
    none = np.isnan(columns["delivery"])
    of_delivery = np.nan_to_num(columns["delivery"]).astype(np.int64)
    of_subscription = sent.subscription[of_delivery]
    writer = columns["writer"].astype(np.int64)
    skew = np.asarray(skew_s)[writer]
    ts = START_S * 1_000_000 + np.rint((columns["t"] + skew) * 1e6).astype(np.int64)
    push = kind >= ATTEMPTED
    tried = kind == ATTEMPTED
    failed = tried & (columns["status"] != 200)

    def some(
        values: Sequence[Any], index: Ints, absent: npt.NDArray[np.bool_], kind: pa.DataType = None
    ) -> pa.Array:
        taken = pa.array(values, kind).take(pa.array(index))
        return pc.if_else(pa.array(absent), pa.scalar(None, taken.type), taken)

    def numbers_of(name: str, kind: pa.DataType) -> pa.Array:
        return pa.array(columns[name], mask=np.isnan(columns[name])).cast(kind)

    count = len(kind)
    zero = np.zeros(count, dtype=np.int64)
    data = {
        "room_id": pa.array(rooms[of_message], pa.int32()),
        "message_id": pa.array(names.messages).take(pa.array(of_message)),
        "message_hi": pa.array(names.halves["message_hi"][of_message]),
        "message_lo": pa.array(names.halves["message_lo"][of_message]),
        "writer_id": pa.array(writer + 1, pa.int32()),
        "writer_seq": pa.array(seq),
        "xid": pa.array(ts // 1000),
        "ts": pa.array(ts, pa.timestamp("us", "UTC")),
        "kind": pa.array(KINDS).take(pa.array(kind)),
        "subscription_id": some(names.subscriptions, of_subscription, none),
        "delivery_id": some(names.deliveries, of_delivery, none),
        "delivery_hi": pa.array(names.halves["delivery_hi"][of_delivery], mask=none),
        "delivery_lo": pa.array(names.halves["delivery_lo"][of_delivery], mask=none),
        "generation": numbers_of("generation", pa.int32()),
        "attempt": numbers_of("attempt", pa.int32()),
        "event_version": pa.array(zero + 1, pa.int32()),
        "fanout": pa.array(zero + per_room, pa.int32(), mask=kind != PUBLISHED),
        "payload_bytes": pa.array(zero + 200, pa.int32(), mask=kind != PUBLISHED),
        "policy_version": pa.array(zero + 1, pa.int32(), mask=none),
        "delay_ms": numbers_of("delay_ms", pa.int64()),
        "latency_ms": numbers_of("latency_ms", pa.float32()),
        "worker": pa.array(writer + 1, pa.int32(), mask=~push),
        "http_status": numbers_of("status", pa.int32()),
        "schema_version": pa.array(zero + 1, pa.int32()),
        "correlation_id": pa.array([f"c-{number}" for number in range(len(sent.t))]).take(
            pa.array(of_message)
        ),
        "event_type": pa.array(TYPES).take(pa.array(of_message % len(TYPES))),
        "target_host": some(targets, of_subscription, ~push),
        "worker_host": some([f"machine-{number}" for number in range(WORKERS + 1)], writer, ~tried),
        "error_class": some(
            ["timeout", "status"], (columns["status"] == 503).astype(np.int64), ~failed
        ),
        "detail": pa.nulls(count, pa.string()),
    }
    return pa.table(data, schema=SCHEMA)


def hours(rows: pa.Table) -> dict[str, pa.Table]:
    """Return the rows by partition folder."""
    ts = rows.column("ts").cast(pa.int64()).to_numpy()
    hour = ts // 3_600_000_000
    found = {}
    for one in np.unique(hour):
        at = np.datetime64(int(one) * 3600, "s")
        folder = f"dt={str(at)[:10]}/hr={str(at)[11:13]}"
        found[folder] = rows.take(pa.array(np.flatnonzero(hour == one)))
    return found


def write(rows: pa.Table, root: Path, *, name: str = "a", files: int = 1) -> None:
    """Seal the rows as segments, `files` an hour."""
    for folder, some in hours(rows).items():
        for number in range(files):
            part = some.slice(
                some.num_rows * number // files,
                some.num_rows * (number + 1) // files - some.num_rows * number // files,
            )
            write_sealed(part, root, f"{folder}/{name}-{number}.parquet")


def write_sealed(rows: pa.Table, root: Path, path: str) -> None:
    """Write rows as a segment of an hour, with its manifest."""
    at = root / path
    at.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, at, compression="zstd", write_page_checksum=True)
    (entry,) = (entry for entry in LocalFiles(str(root)).entries() if entry.path == path)
    place = part_of(path)
    assert place is not None, path
    manifest = describe(LocalFiles(str(root)), entry, part=place[0], name=place[1])
    at.with_name(manifest_name(at.name)).write_text(manifest.text())


def sealed_partitions(files: HadoopFiles) -> list[Partition]:
    """Return the partitions of sealed segments."""
    assert files.local_folder is not None
    found = check_segments(LocalFiles(files.local_folder), {}, now_ms=0, trust_known=True)
    assert not found.set_aside, found.set_aside
    return list(partitions_of(files.root, found.sound).values())
