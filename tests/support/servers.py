"""Real servers for tests: one that the environment names, else one started here, else a container, else the reason why not.

Tests without their server are skipped locally, and fail where CI is set. Only Aerospike may be
missing in CI too: no package registry has its server.
"""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final, NoReturn

import pytest

from rooms.local import FetchError, MissingError
from rooms.local.java_servers import BROKER_XML, USER
from rooms.local.nack_interceptor import SOURCE

ARTEMIS_DOCKERFILE: Final = Path(__file__).parents[2] / "compose/artemis.Dockerfile"
ARTEMIS_TAG: Final = "rooms-artemis:tests"
ZOOKEEPER_IMAGE: Final = "zookeeper:3.9.5"
_START_TIMEOUT_S: Final = 120

Opener = Callable[[], AbstractContextManager[str]]


def offered(variable: str, *, local: Opener, container: Opener) -> Iterator[str]:
    """The address of a server for a session, to be handed on by a fixture."""
    if given := os.environ.get(variable):
        yield given
        return
    with ExitStack() as stack:
        try:
            url = stack.enter_context(local())
        except (MissingError, FetchError) as missing:
            if not docker_answers():
                unavailable(f"{missing}. Or name a server in {variable}, or start Docker")
            url = stack.enter_context(container())
        yield url


def unavailable(reason: str) -> NoReturn:
    """Skip the test that needs what is not there; fail it in CI."""
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def docker_answers() -> bool:
    from docker import from_env
    from docker.errors import DockerException

    with suppress(DockerException, OSError):
        client = from_env(timeout=5)
        try:
            return bool(client.ping())
        finally:
            client.close()
    return False


@contextmanager
def artemis_container() -> Iterator[str]:
    """The broker's image with our own settings over its own, and the interceptor built into it."""
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.image import DockerImage
    from testcontainers.core.wait_strategies import LogMessageWaitStrategy

    password = secrets.token_hex(8)
    # The image stays: the next run builds nothing.
    with DockerImage(
        SOURCE.parent, tag=ARTEMIS_TAG, clean_up=False, dockerfile_path=str(ARTEMIS_DOCKERFILE)
    ) as image:
        container = (
            DockerContainer(str(image))
            .with_env("ARTEMIS_USER", USER)
            .with_env("ARTEMIS_PASSWORD", password)
            .with_env("JAVA_ARGS_APPEND", "-Drooms.stomp.host=0.0.0.0")
            .with_volume_mapping(
                str(BROKER_XML), "/var/lib/artemis-instance/etc-override/broker.xml", "ro"
            )
            .with_exposed_ports(61613)
            .waiting_for(LogMessageWaitStrategy("AMQ221007").with_startup_timeout(_START_TIMEOUT_S))
        )
        with container:
            yield f"stomp://{USER}:{password}@{container.get_container_host_ip()}:{container.get_exposed_port(61613)}"


@contextmanager
def zookeeper_container() -> Iterator[str]:
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.wait_strategies import PortWaitStrategy

    container = (
        DockerContainer(ZOOKEEPER_IMAGE)
        .with_env("ZOO_TICK_TIME", "500")
        .with_env("ZOO_CFG_EXTRA", "minSessionTimeout=1000 maxSessionTimeout=60000")
        .with_exposed_ports(2181)
        .waiting_for(PortWaitStrategy(2181).with_startup_timeout(_START_TIMEOUT_S))
    )
    with container:
        yield f"zookeeper://{container.get_container_host_ip()}:{container.get_exposed_port(2181)}"
