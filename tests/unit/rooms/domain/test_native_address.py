"""Where readers of native queues connect, as the login says."""

import pytest

from rooms.domain.native_address import NativeAddress, parse_native_addresses
from rooms.errors import SettingsError
from rooms.settings import read_settings


def test_each_protocol_has_its_place() -> None:
    assert parse_native_addresses(
        "stomp://broker:61613, amqps://[::1]:5671,core://b.example:61617,"
    ) == (
        NativeAddress(protocol="stomp", host="broker", port=61613, tls=False),
        NativeAddress(protocol="amqp", host="::1", port=5671, tls=True),
        NativeAddress(protocol="core", host="b.example", port=61617, tls=False),
    )
    assert parse_native_addresses("") == ()


@pytest.mark.parametrize(
    "text",
    [
        "broker:61613",
        "stomp://broker",
        "http://broker:1",
        "amqp://u:p@broker:1",
        "amqp://b:0",
        "amqp://b:65536",
        "core://b:1/x",
    ],
)
def test_what_is_none_is_named_with_an_example(text: str) -> None:
    with pytest.raises(SettingsError) as found:
        read_settings({"ROOMS_NATIVE_ADDRESSES": f"stomp://broker:61613,{text}"})
    (problem,) = found.value.problems
    assert problem.startswith(f"ROOMS_NATIVE_ADDRESSES: {text!r} is not PROTOCOL://HOST:PORT")
