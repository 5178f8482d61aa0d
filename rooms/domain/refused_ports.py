"""Destination ports that no webhook uses: HTTP sent there could only reach another protocol's server."""

from typing import Final

# The "bad ports" of the Fetch standard (fetch.spec.whatwg.org/#port-blocking), which no browser connects to either.
_FETCH: Final = (
    0, 1, 7, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95, 101, 102, 103, 104, 109, 110,
    111, 113, 115, 117, 119, 123, 135, 137, 139, 143, 161, 179, 389, 427, 465, 512, 513, 514, 515, 526, 530, 531, 532, 540,
    548, 554, 556, 563, 587, 601, 636, 989, 990, 993, 995, 1719, 1720, 1723, 2049, 3659, 4045, 4190, 5060, 5061, 6000, 6566,
    6665, 6666, 6667, 6668, 6669, 6679, 6697, 10080,
)  # fmt: skip
# Databases, caches, brokers, coordination and remote control: what stands beside Rooms in a private network.
# Between 32768 and 60999 Linux gives out ports to anything, so none of those is here: a test server may have any of them.
_SERVICES: Final = (
    445,  # SMB
    1433, 1434, 1521, 3050, 3306, 5432, 5433, 6432,  # SQL Server, Oracle, Firebird, MySQL, PostgreSQL, PgBouncer
    6379, 6380, 11211, 26379,  # Redis, memcached, Sentinel
    9042, 9160, 9300, 26257, 27017, 27018, 27019, 28015,  # Cassandra, Elasticsearch, CockroachDB, MongoDB, RethinkDB
    1883, 8883, 4222, 5671, 5672, 9092, 61613, 61614, 61616,  # MQTT, NATS, AMQP, Kafka, STOMP, OpenWire
    2181, 2379, 2380, 2888, 3888, 4369, 25672,  # ZooKeeper, etcd, Erlang
    2375, 2376, 2377, 3389, 5900, 5901,  # Docker, RDP, VNC
)  # fmt: skip

REFUSED_PORTS: Final = frozenset((*_FETCH, *_SERVICES))
"""What `ROOMS_REFUSE_PORTS` is where it is not set."""
