"""Test compose/*.yml without Docker: complete, pinned, with health checks, like the launcher."""

import re
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from rooms.local.java_servers import (
    ARTEMIS_VERSION,
    BROKER_XML,
    ZOOKEEPER_VERSION,
    EmbeddedArtemis,
    EmbeddedZookeeper,
)
from rooms.local.maven import MIN_JAVA
from rooms.local.nack_interceptor import SOURCE
from rooms.settings import read_settings
from tests.support import servers
from tests.support.service import ROOT

COMPOSE: Final = ROOT / "compose/full.yml"
SERVERS: Final = {"postgres", "artemis", "zookeeper", "aerospike"}
PROCESSES: Final = {"migrate": 1, "api": 2, "worker": 2, "relay": 1, "upkeep": 2}
_GIVEN: Final = {
    "ROOMS_PASSWORD": "0123abcd",
    "ROOMS_SECRET_KEY": "A" * 43 + "=",
    "ROOMS_ALLOW_TARGETS": "",
}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found = yaml.safe_load(COMPOSE.read_text())["services"]
    assert isinstance(found, dict)
    return found


def reported(value: str) -> str:
    """Return the value as compose interpolates it."""
    return re.sub(r"\$\{([A-Z_]+)[^}]*\}", lambda found: _GIVEN[found[1]], value)


def test_full_compose_has_every_service(services: dict[str, Any]) -> None:
    assert set(services) == SERVERS | set(PROCESSES)
    assert {
        name: services[name].get("deploy", {}).get("replicas", 1) for name in PROCESSES
    } == PROCESSES


def test_services_have_health_checks_and_restart(services: dict[str, Any]) -> None:
    for name, service in services.items():
        if name != "migrate":
            assert service["healthcheck"]["test"], name
            assert service["restart"] == "unless-stopped", name
    assert services["migrate"]["restart"] == "no"


def test_every_image_is_pinned_and_the_launcher_starts_the_same_versions(
    services: dict[str, Any],
) -> None:
    images = {name: service["image"] for name, service in services.items()}
    for name, image in images.items():
        assert re.fullmatch(r"[a-z/-]+:\d+\.\d+(\.\d+)*(-[a-z]+)?", image), name
    assert images["artemis"] == f"rooms-artemis:{project_version()}"
    assert images["zookeeper"] == servers.ZOOKEEPER_IMAGE
    assert images["zookeeper"].endswith(f":{ZOOKEEPER_VERSION}")
    for base in re.findall(
        r"^FROM (?!source)(\S+)", (ROOT / "compose/Dockerfile").read_text(), re.MULTILINE
    ):
        assert re.fullmatch(r"python:3\.\d+\.\d+-[a-z-]+", base)


def test_broker_image_adds_the_interceptor_to_the_launchers_version(
    services: dict[str, Any],
) -> None:
    build = services["artemis"]["build"]
    context = (COMPOSE.parent / build["context"]).resolve()
    assert context == SOURCE.parent
    assert (context / build["dockerfile"]).resolve() == servers.ARTEMIS_DOCKERFILE
    text = servers.ARTEMIS_DOCKERFILE.read_text()
    broker, jdk, result = re.findall(r"^FROM (\S+)(?: AS ([a-z]+))?$", text, re.MULTILINE)
    assert broker == (f"apache/artemis:{ARTEMIS_VERSION}", "broker")
    assert re.fullmatch(rf"eclipse-temurin:{MIN_JAVA}\.\d+\.\d+_\d+-jdk-[a-z]+", jdk[0])
    assert (jdk[1], result) == ("build", ("broker", ""))
    assert re.findall(r"^COPY (.*)$", text, re.MULTILINE) == [
        "--from=broker /opt/artemis/lib /opt/artemis/lib",
        f"{SOURCE.name} ./",
        "--from=build /build/nack-interceptor.jar /opt/artemis/lib/",
    ]
    assert re.findall(r"^WORKDIR (.*)$", text, re.MULTILINE) == ["/build"]
    assert f"javac --release {MIN_JAVA} " in text
    assert f" -classpath '/opt/artemis/lib/*' {SOURCE.name} " in text
    assert " --file nack-interceptor.jar " in text


def test_the_processes_get_settings_that_rooms_reads(services: dict[str, Any]) -> None:
    for name in PROCESSES:
        environment = {key: reported(value) for key, value in services[name]["environment"].items()}
        settings = read_settings(environment)
        assert settings.uses_relay
        read = set(
            re.findall(r'"(ROOMS_[A-Z_]+|[A-Z]+_URL)"', (ROOT / "rooms/settings.py").read_text())
        )
        assert set(environment) <= read


def test_addresses_name_services_in_depends_on(
    services: dict[str, Any],
) -> None:
    for name in set(PROCESSES) - {"migrate"}:
        hosts = {
            re.findall(r"//(?:.*@)?([a-z]+):", reported(url))[0]
            for key, url in addresses(services[name]).items()
        }
        assert hosts == SERVERS
        assert hosts - {"postgres"} | {"migrate"} == set(services[name]["depends_on"])
    assert set(services["migrate"]["depends_on"]) == {"postgres"}


def addresses(service: dict[str, Any]) -> dict[str, str]:
    return {key: value for key, value in service["environment"].items() if key.endswith("_URL")}


def test_broker_uses_the_settings_of_the_launcher(services: dict[str, Any]) -> None:
    """Both use one file. The properties that compose changes exist in it."""
    mounted = [
        mount.split(":")[0]
        for mount in services["artemis"]["volumes"]
        if "etc-override/broker.xml" in mount
    ]
    assert [(COMPOSE.parent / path).resolve() for path in mounted] == [BROKER_XML]
    named = set(re.findall(r"\$\{([a-z.]+):", BROKER_XML.read_text()))
    changed = set(
        re.findall(r"-D([a-z.]+)=", services["artemis"]["environment"]["JAVA_ARGS_APPEND"])
    )
    assert changed == {"rooms.stomp.host"}
    assert changed <= named


def test_broker_collects_garbage_as_that_of_the_launcher(
    services: dict[str, Any], tmp_path: Path
) -> None:
    """The image chooses another collector, which has to be taken back."""
    given = services["artemis"]["environment"]["JAVA_ARGS_APPEND"].split()
    launched = EmbeddedArtemis(data=tmp_path, port=61613, password="secret").argv()
    (collector,) = (word for word in launched if word.startswith("-XX:+Use"))
    assert [word for word in given if word.startswith("-XX:")] == ["-XX:-UseG1GC", collector]


def test_zookeeper_has_the_settings_of_the_launcher(
    services: dict[str, Any], tmp_path: Path
) -> None:
    server = EmbeddedZookeeper(data=tmp_path, port=2181)
    ours = dict(line.split("=", 1) for line in server.settings().splitlines())
    theirs = services["zookeeper"]["environment"]
    assert str(theirs["ZOO_TICK_TIME"]) == ours["tickTime"]
    assert str(theirs["ZOO_MAX_CLIENT_CNXNS"]) == ours["maxClientCnxns"]
    extra = dict(pair.split("=", 1) for pair in theirs["ZOO_CFG_EXTRA"].split())
    assert extra.items() <= ours.items()


def test_the_image_has_every_package(services: dict[str, Any]) -> None:
    copied = re.findall(
        r"^COPY ([a-z]+) \1$", (ROOT / "compose/Dockerfile").read_text(), re.MULTILINE
    )
    packages = re.findall(r'"([a-z]+)\*"', (ROOT / "pyproject.toml").read_text())
    assert set(copied) == set(packages)
    allowed = (ROOT / "compose/Dockerfile.dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied} <= set(allowed)
    assert services["api"]["image"] == f"rooms:{project_version()}"


def project_version() -> str:
    (found,) = re.findall(
        r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    return str(found)


@pytest.fixture(scope="module")
def beside() -> dict[str, Any]:
    """Return the services of the Spark cluster."""
    found = yaml.safe_load((COMPOSE.parent / "spark.yml").read_text())["services"]
    assert isinstance(found, dict)
    return found


def test_analysis_uses_a_cluster_of_its_own_version(
    beside: dict[str, Any], services: dict[str, Any]
) -> None:
    (version,) = re.findall(
        r"^pyspark==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
    for name in ("spark-master", "spark-worker"):
        assert beside[name]["image"] == f"apache/spark:{version}"
        assert beside[name]["healthcheck"]["test"]
    assert beside["spark-worker"]["deploy"] == {"replicas": 2}
    master = beside["spark-master"]["command"]
    host, port = (master[master.index(name) + 1] for name in ("--host", "--port"))
    assert host == "spark-master"
    assert f"spark://{host}:{port}" in beside["spark-worker"]["command"]
    submitted = beside["analysis"]["environment"]["PYSPARK_SUBMIT_ARGS"].split()
    assert submitted[submitted.index("--master") + 1] == f"spark://{host}:{port}"
    assert "spark.driver.host=analysis" in submitted
    assert submitted[-1] == "pyspark-shell"
    named = {name for service in beside.values() for name in service.get("depends_on", ())}
    assert named <= set(beside) | set(services)


def test_driver_and_executors_share_a_folder_and_its_owner(beside: dict[str, Any]) -> None:
    at = beside["analysis"]["environment"]["ROOMS_ANALYSIS_URL"]
    for name in ("analysis-folder", "spark-worker", "analysis"):
        assert beside[name]["volumes"] == [f"analysis:{at}"]
    assert beside["analysis"]["image"] == beside["analysis-folder"]["image"]
    target = beside["analysis-folder"]["build"]["target"]
    stage = (ROOT / "compose/Dockerfile").read_text().split(f" AS {target}\n")[1].split("\nFROM")[0]
    assert "--uid 185" in stage
    assert f"--owner=185 {at}" in stage
    environment = {
        name: reported(value) for name, value in beside["analysis"]["environment"].items()
    }
    del environment["PYSPARK_SUBMIT_ARGS"]
    assert read_settings(environment).analysis_location == at


def test_nginx_replaces_every_header_that_rooms_trusts() -> None:
    document = yaml.safe_load((ROOT / "compose/nginx.yml").read_text())
    api, nginx = document["services"]["api"], document["services"]["nginx"]
    settings = read_settings(api["environment"])
    (trusted,) = settings.trusted_proxies
    assert str(trusted.network_address) == nginx["networks"]["edge"]["ipv4_address"]
    configured = (ROOT / "compose/nginx.conf").read_text().lower()
    for name in settings.trusted_headers:
        assert f"proxy_set_header {name} $" in configured
    assert "x-govstack-client" not in settings.trusted_headers
    assert "ssl_verify_client       optional;" in configured
    assert re.fullmatch(r"nginx:\d+\.\d+\.\d+-[a-z]+", nginx["image"])
    assert nginx["healthcheck"]["test"]
