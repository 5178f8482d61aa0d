"""Test how a connection waits for the answers of the broker."""

import asyncio
import socket
import time
from collections.abc import Iterator

import pytest

from delivery.brokers.artemis.connection import BrokerConnection, ConnectionEndedError
from delivery.brokers.artemis.frames import Frame, FrameParser, encode
from delivery.brokers.artemis.io_thread import SocketIo, SocketThread

WAIT_S = 0.05


@pytest.fixture
def io_thread() -> Iterator[SocketThread]:
    thread = SocketThread("I/O of a test")
    thread.start()
    yield thread
    thread.stop()


def connected(io_thread: SocketThread) -> tuple[BrokerConnection, socket.socket]:
    ours, theirs = socket.socketpair()
    connection = BrokerConnection(io_thread)
    connection.start(
        SocketIo(ours, connection, FrameParser[Frame](), send_every_s=0.0, expect_every_s=0.0)
    )
    return connection, theirs


async def test_a_receipt_that_came_while_the_process_was_frozen_counts(
    io_thread: SocketThread,
) -> None:
    """The loop goes on after the time is up, and finds the receipt there."""
    connection, broker = connected(io_thread)
    with broker:
        receipts = [connection.expect_receipt(name) for name in ("first", "last")]
        waiting = asyncio.create_task(connection.wait_all(receipts, WAIT_S))
        await asyncio.sleep(0)
        for name in ("first", "last"):
            connection.on_data(FrameParser[Frame]().feed(encode("RECEIPT", {"receipt-id": name})))
        time.sleep(2 * WAIT_S)  # noqa: ASYNC251 - the process is frozen
        await waiting
        assert connection.is_open
        connection.close()


async def test_a_missing_receipt_ends_the_connection_in_time(io_thread: SocketThread) -> None:
    connection, broker = connected(io_thread)
    with broker:
        receipts = [connection.expect_receipt(name) for name in ("first", "last")]
        connection.on_data(FrameParser[Frame]().feed(encode("RECEIPT", {"receipt-id": "first"})))
        with pytest.raises(ConnectionEndedError, match="no answer within"):
            await connection.wait_all(receipts, WAIT_S)
        assert not connection.is_open
        assert receipts[0].exception() is None
