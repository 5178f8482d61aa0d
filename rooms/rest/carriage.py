"""Whether the broker that carries the copies answers, as the API tells it. Publishing goes on while it does not."""

from collections.abc import Callable

from rooms.outages import Part
from rooms.ports import Broker
from rooms.rest.store_health import StoreHealth, UpGauge


class Reach(UpGauge):
    """The gauge of the broker's answer."""

    def __init__(self, *, up: bool) -> None:
        super().__init__("rooms_broker_up", "Whether the broker answered.", up=up)


class Carriage(StoreHealth):
    """The health of the broker."""

    def __init__(self, broker: Broker, monotonic: Callable[[], float]) -> None:
        super().__init__(broker.remembers, monotonic, part=Part.BROKER)
