"""Provide the shared fixtures: one PostgreSQL, Artemis and ZooKeeper a session, one database a test.

Imported where it is asked for: each process of a run begins with this module, whatever its tests ask for.
"""

import gc
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from rooms.domain.work_location import POSTGRES_MODE, BrokerMode
from tests.support import stall_guard, xdist_order

if TYPE_CHECKING:
    from rooms.db.writer import LogWriter
    from tests.support.aerospike_server import AerospikeServer
    from tests.support.installation import Installation
    from tests.support.local_servers import TestServer

TEMPLATE = "rooms_template"
_MEMORY_BYTES = 4 * 1024**3

# The same examples everywhere, and no clock to be late by.
settings.register_profile(
    "rooms", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("rooms")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: xdist_order.rank(item.nodeid))
    for item in items:
        stall_guard.watch(item)


def pytest_collection_finish() -> None:
    # As Rooms processes do: objects that exist after import and collection are not scanned again and
    # again.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> xdist_order.Turns | None:
    return xdist_order.scheduler(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count skipped tests by reason: a line for each test would hide which ones failed."""
    skipped = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    for reason, tests in skipped.most_common():
        terminalreporter.write_line(f"SKIPPED {tests}: {reason}")


@pytest.fixture(autouse=True)
def no_outages() -> None:
    """Clear recorded outages, so that a failure made by one test is not in the next one's log."""
    from rooms.outages import OUTAGES

    OUTAGES.reset()


def at(url: str, database: str) -> str:
    """The same server, another database."""
    from sqlalchemy.engine import make_url

    return make_url(url).set(database=database).render_as_string(hide_password=False)


def administer(url: str, statement: str, *names: str) -> None:
    """One statement outside a transaction, `{}` standing for each name."""
    import psycopg
    from psycopg import sql

    with psycopg.connect(at(url, "postgres"), autocommit=True) as connection:
        connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


@contextmanager
def in_memory(otherwise: Path) -> Iterator[Path]:
    """A folder for what a test-run makes and removes thousands of times: files are made there ten times as fast."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or shutil.disk_usage(memory).free < _MEMORY_BYTES:
        yield otherwise
        return
    with tempfile.TemporaryDirectory(prefix="rooms-tests-", dir=memory) as folder:
        yield Path(folder)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder for a service's data where nothing depends on a disk."""
    with in_memory(tmp_path) as folder:
        yield folder


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of our own, or the one that the environment names."""
    from tests.support.local_servers import temporary_postgres

    given = os.environ.get("DATABASE_URL_TEST") or os.environ.get("TEST_DATABASE_URL")
    if given:
        yield given
        return
    with (
        in_memory(tmp_path_factory.mktemp("postgres")) as folder,
        temporary_postgres(folder) as url,
    ):
        # No machine crashes here, and a database is dropped ten times as fast. Who tests durability
        # starts a server.
        administer(url, "ALTER SYSTEM SET fsync = off")
        administer(url, "ALTER SYSTEM SET full_page_writes = off")
        administer(url, "ALTER SYSTEM SET max_wal_size = '256MB'")
        # No other transaction may stay open, and no other plan change, because a test was
        # slow to get there.
        administer(url, "ALTER SYSTEM SET autovacuum = off")
        administer(url, "SELECT pg_reload_conf()")
        yield url


@pytest.fixture(scope="session")
def template(postgres_url: str) -> Iterator[str]:
    """The name of a database with every migration in it, to copy from."""
    from rooms.db.schema import migrate

    name = f"{TEMPLATE}_{os.getpid()}"
    administer(postgres_url, "CREATE DATABASE {}", name)
    migrate(at(postgres_url, name))
    yield name
    administer(postgres_url, "DROP DATABASE {} WITH (FORCE)", name)


@pytest.fixture(scope="session")
def database_numbers() -> Iterator[int]:
    return count(1)


@pytest.fixture
def empty_database(postgres_url: str, database_numbers: Iterator[int]) -> Iterator[str]:
    """The address of a new database with nothing in it."""
    name = f"empty_{os.getpid()}_{next(database_numbers)}"
    administer(postgres_url, "CREATE DATABASE {}", name)
    yield at(postgres_url, name)
    administer(postgres_url, "DROP DATABASE {} WITH (FORCE)", name)


@pytest.fixture
def database(postgres_url: str, template: str, database_numbers: Iterator[int]) -> Iterator[str]:
    """The address of a new database with every migration in it.

    Copied as files: a quarter of the work of a copy through the WAL.
    """
    name = f"test_{os.getpid()}_{next(database_numbers)}"
    administer(postgres_url, "CREATE DATABASE {} TEMPLATE {} STRATEGY FILE_COPY", name, template)
    yield at(postgres_url, name)
    administer(postgres_url, "DROP DATABASE {} WITH (FORCE)", name)


@pytest.fixture
def shape() -> BrokerMode:
    """Where `installation` and `writer` queue work.

    A module of another shape has a fixture or a parameter of this name.
    """
    return POSTGRES_MODE


@pytest.fixture
async def installation(database: str, shape: BrokerMode) -> "AsyncIterator[Installation]":
    from tests.support.installation import installed

    async with installed(database, shape) as installation:
        yield installation


@pytest.fixture
async def writer(database: str, shape: BrokerMode) -> "AsyncIterator[LogWriter]":
    from rooms.db.writer import LogWriter

    async with LogWriter(database, kind="test", broker_mode=shape) as writer:
        yield writer


@pytest.fixture(scope="session")
def artemis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`stomp://user:password@host:port` of a broker that all tests share: each keeps to a ROOMS_CLIENT of its own."""
    from tests.support.local_servers import temporary_artemis
    from tests.support.servers import artemis_container, offered

    folder = tmp_path_factory.mktemp("artemis")
    yield from offered(
        "ARTEMIS_URL", local=lambda: temporary_artemis(folder), container=artemis_container
    )


@pytest.fixture(scope="session")
def zookeeper_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`zookeeper://host:port` of a ZooKeeper that all tests share: each keeps to a ROOMS_FARM of its own."""
    from tests.support.local_servers import temporary_zookeeper
    from tests.support.servers import offered, zookeeper_container

    folder = tmp_path_factory.mktemp("zookeeper")
    yield from offered(
        "ZOOKEEPER_URL", local=lambda: temporary_zookeeper(folder), container=zookeeper_container
    )


@pytest.fixture
def artemis_server(tmp_path: Path) -> "Iterator[Callable[..., TestServer]]":
    """Start a broker that only this test uses, to be killed, suspended and erased.

    `artemis_server(properties={…})`.
    """
    from rooms.local import FetchError, MissingError
    from tests.support.local_servers import make_artemis, run_server
    from tests.support.servers import unavailable

    with ExitStack() as stack:

        def start(
            *, heap_mib: int = 512, properties: Mapping[str, str] | None = None
        ) -> "TestServer":
            folder = tmp_path / f"artemis-{next(numbers)}"
            try:
                return stack.enter_context(
                    run_server(make_artemis(folder, heap_mib=heap_mib, properties=properties))
                )
            except (MissingError, FetchError) as missing:
                unavailable(str(missing))

        numbers = count(1)
        yield start


@pytest.fixture
def zookeeper_server(tmp_path: Path) -> "Iterator[Callable[[], TestServer]]":
    """Start a ZooKeeper that only this test uses, to be killed, suspended and erased."""
    from rooms.local import FetchError, MissingError
    from tests.support.local_servers import make_zookeeper, run_server
    from tests.support.servers import unavailable

    with ExitStack() as stack:

        def start() -> "TestServer":
            try:
                return stack.enter_context(
                    run_server(make_zookeeper(tmp_path / f"zookeeper-{next(numbers)}"))
                )
            except (MissingError, FetchError) as missing:
                unavailable(str(missing))

        numbers = count(1)
        yield start


@pytest.fixture(scope="session")
def aerospike_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the `aerospike://host:port/namespace` that all tests share.

    Each test uses a ROOMS_CLIENT of its own. It is the only server that may be missing in CI too.
    """
    from tests.support.aerospike_server import REASON, aerospike_address

    with aerospike_address(tmp_path_factory.mktemp("aerospike")) as url:
        if url is None:
            pytest.skip(REASON)
        yield url


@pytest.fixture
def aerospike_server(tmp_path: Path) -> "Iterator[AerospikeServer]":
    """Start a node that only this test uses, to be killed and suspended; a kill empties it."""
    from tests.support.aerospike_server import REASON
    from tests.support.aerospike_server import aerospike_server as started

    with started(tmp_path / "aerospike") as server:
        if server is None:
            pytest.skip(REASON)
        yield server
