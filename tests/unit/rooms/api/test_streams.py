"""Test what a stream still sends when it ends."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from delivery.pull.stream import EndReason, Stream, StreamBatch
from rooms.api.streams import StreamTransport
from rooms.metrics import Metrics


@pytest.mark.parametrize("reason", [EndReason.REVOKED, EndReason.SUSPENDED, EndReason.SHUTDOWN])
@pytest.mark.parametrize("ends_at", [0, 1, 3])
async def test_a_stream_that_ends_sends_no_more_of_its_batch(
    reason: EndReason, ends_at: int
) -> None:
    """The send under way may end; the rest goes back, as a revoked key must not get it."""
    returned: list[tuple[int, int]] = []

    def give_back(_: StreamBatch, *, sent: int, begun: int) -> None:
        returned.append((sent, begun))

    service = cast("Any", SimpleNamespace(return_undelivered=give_back))
    stream = SimpleNamespace(end_reason=reason if ends_at == 0 else None, is_gone=False)
    seen: list[bytes] = []

    async def write(data: bytes) -> None:
        seen.append(data)
        if len(seen) == ends_at:
            stream.end_reason = reason

    batch = StreamBatch(cast("Any", None), [b"%d" % number for number in range(20)])
    sent = await StreamTransport(service, Metrics())._send_batch(
        cast("Stream", stream), batch, lambda _, message: message, write
    )
    assert sent == ends_at
    assert seen == [b"0", b"1", b"2"][:ends_at]
    assert returned == [(ends_at, ends_at)]
