"""Test how Artemis and ZooKeeper are fetched and configured, and what is reported if that fails."""

import os
import re
import socket
import stat
import sys
import threading
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner

from rooms.cli import build_cli
from rooms.local import DataInUseError, EmbeddedPostgres, FetchError, MissingError
from rooms.local.java_servers import BROKER_XML, EmbeddedArtemis, EmbeddedZookeeper, sync_time_ns
from rooms.local.maven import (
    MavenArtifact,
    MavenPackage,
    cache_dir,
    fetch_package,
    find_java,
    find_maven,
)
from rooms.local.pidfile import lock_data_dir, lock_owner
from rooms.local.services import LocalServices, free_port, is_free

CORE: Final = "{urn:activemq:core}"
PACKAGE: Final = MavenPackage(
    folder="thing-1", artifacts=[MavenArtifact(group="g", name="n", version="1", type="zip")]
)
WHOLE: Final = 'mkdir whole && touch whole/n-1.jar && cp pom.xml whole/ && echo . >> "$COUNT"'


def program(folder: Path, name: str, script: str) -> dict[str, str]:
    """Return an environment whose PATH has this program first."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"PATH": f"{folder}:{os.defpath}", "COUNT": str(folder / "count")}


@pytest.fixture
def empty_path(tmp_path: Path) -> dict[str, str]:
    return {"PATH": str(tmp_path)}


def test_missing_java_is_reported_with_advice(empty_path: dict[str, str]) -> None:
    with pytest.raises(
        MissingError,
        match=r"Java 17 or later, and PATH has no java: .*apt install default-jdk-headless maven",
    ):
        find_java(empty_path)


def test_java_home_without_java_is_reported(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"JAVA_HOME \(.*\) has no java"):
        find_java({"JAVA_HOME": str(tmp_path), "PATH": os.environ["PATH"]})


@pytest.mark.parametrize(
    ("said", "fits"), [("1.8.0_412", False), ("11.0.2", False), ("17.0.15", True), ("25", True)]
)
def test_a_java_that_is_too_old_is_refused(tmp_path: Path, said: str, *, fits: bool) -> None:
    environment = program(
        tmp_path / "bin", "java", f"echo 'openjdk version \"{said}\" 2024-01-01' >&2"
    )
    if fits:
        assert find_java(environment) == tmp_path / "bin/java"
        return
    with pytest.raises(
        MissingError, match=rf"Java 17 or later, and .*/bin/java says: .*{re.escape(said)}"
    ):
        find_java(environment)


def test_missing_maven_is_reported_with_advice(empty_path: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"PATH has no mvn: .*apt install"):
        find_maven(empty_path)
    with pytest.raises(MissingError, match="no mvn"):
        fetch_package(tmp_path / "cache", PACKAGE, empty_path)


def test_command_reports_what_is_missing_and_fails(
    empty_path: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    for name, value in {**empty_path, "ROOMS_DATA": str(tmp_path / "data")}.items():
        monkeypatch.setenv(name, value)
    for command in ("up", "run"):
        done = CliRunner().invoke(build_cli(), ["full", command])
        assert done.exit_code == 1
        assert "Java 17 or later" in done.stderr
        assert "maven" in done.stderr


def test_cache_follows_the_environment() -> None:
    assert cache_dir({"ROOMS_CACHE": "/c", "XDG_CACHE_HOME": "/x"}) == Path("/c")
    assert cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/rooms")
    assert cache_dir({}) == Path.home() / ".cache/rooms"


def test_cached_package_is_not_fetched_again(tmp_path: Path, empty_path: dict[str, str]) -> None:
    environment = program(tmp_path / "bin", "mvn", WHOLE)
    folder = fetch_package(tmp_path / "cache", PACKAGE, environment)
    assert folder == tmp_path / "cache/thing-1"
    assert (
        "<artifactId>n</artifactId><version>1</version><type>zip</type>"
        in (folder / "pom.xml").read_text()
    )
    assert fetch_package(tmp_path / "cache", PACKAGE, empty_path) == folder


def test_concurrent_fetches_run_maven_once(tmp_path: Path) -> None:
    """Both get the complete folder, and only one of them runs Maven."""
    os.mkfifo(tmp_path / "gate")
    environment = program(tmp_path / "bin", "mvn", f'read go < "{tmp_path}/gate"; {WHOLE}')
    found: list[Path] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(fetch_package(tmp_path / "cache", PACKAGE, environment))
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    (tmp_path / "gate").write_text("go\n")
    for thread in threads:
        thread.join(60)
    assert found == [tmp_path / "cache/thing-1"] * 2
    assert Path(environment["COUNT"]).read_text() == ".\n"


def test_failed_fetch_shows_the_output_of_maven_and_leaves_nothing(tmp_path: Path) -> None:
    environment = program(
        tmp_path / "bin", "mvn", "mkdir whole; echo 'no route to the repository'; exit 1"
    )
    with pytest.raises(FetchError, match="could not fetch thing-1:\nno route to the repository"):
        fetch_package(tmp_path / "cache", PACKAGE, environment)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".thing-1.lock"]


def test_broker_creates_and_deletes_no_queue_automatically() -> None:
    core = ET.parse(BROKER_XML).getroot().find(f"{CORE}core")
    assert core is not None
    settings = {
        setting.attrib["match"]: {entry.tag.removeprefix(CORE): entry.text for entry in setting}
        for setting in core.iter(f"{CORE}address-setting")
    }
    for match, setting in settings.items():
        assert "expiry-address" not in setting, match
        assert setting["max-delivery-attempts"] == "-1", match
        # Without one the broker drops what a reader of a native queue rejects.
        assert setting["dead-letter-address"] == "rooms-dead-letters", match
    everywhere = settings["#"]
    assert {
        everywhere[f"auto-{act}-{what}"]
        for act in ("create", "delete")
        for what in ("queues", "addresses")
    } == {"false"}
    assert {setting["auto-create-queues"] for setting in settings.values()} == {"false"}
    (acceptor,) = core.iter(f"{CORE}acceptor")
    assert acceptor.text is not None
    assert acceptor.text.startswith(
        "tcp://${rooms.stomp.host:127.0.0.1}:${rooms.stomp.port:61613}?protocols=STOMP,AMQP,CORE;"
    )
    texts = {entry.tag.removeprefix(CORE): entry.text for entry in core if entry.text}
    assert texts["journal-type"] == "NIO"
    assert texts["journal-datasync"] == "true"


def test_launcher_properties_are_read_by_the_broker_settings(tmp_path: Path) -> None:
    """A property that no setting reads would silently change nothing."""
    named = set(re.findall(r"\$\{([a-z.]+):", BROKER_XML.read_text()))
    server = EmbeddedArtemis(
        data=tmp_path,
        port=61613,
        password="secret",
        properties={"rooms.max.disk.usage.percent": "0"},
    )
    server.data_dir.mkdir(parents=True)
    (server.folder / "etc").mkdir()
    (server.folder / "etc/sync-time-ns").write_text("4000000\n")
    given = dict(word[2:].split("=", 1) for word in server.argv() if word.startswith("-Drooms."))
    assert given == {
        "rooms.stomp.port": "61613",
        "rooms.journal.buffer.timeout.ns": "4000000",
        "rooms.max.disk.usage.percent": "0",
    }
    assert set(given) <= named
    assert "secret" not in " ".join(server.argv())


def test_sync_time_is_bounded(tmp_path: Path) -> None:
    assert 200_000 <= sync_time_ns(tmp_path) <= 5_000_000
    assert list(tmp_path.iterdir()) == []


def test_the_servers_keep_their_ports_and_password(tmp_path: Path) -> None:
    services = LocalServices(data=tmp_path / "data")
    assert services.addresses() == {}
    services.write_addresses()
    first = services.addresses()
    assert first["DATABASE_URL"] == EmbeddedPostgres(services.folder).url
    assert len(urlsplit(first["BROKER_URL"]).password or "") == 32
    assert stat.S_IMODE(services.env_file.stat().st_mode) == 0o600
    services.write_addresses()
    assert services.addresses() == first


def test_port_in_use_is_replaced(tmp_path: Path) -> None:
    services = LocalServices(data=tmp_path / "data")
    services.write_addresses()
    before = {name: urlsplit(url) for name, url in services.addresses().items()}
    with socket.create_server(("127.0.0.1", before["ELECTION_URL"].port or 0)):
        services.write_addresses()
    after = {name: urlsplit(url) for name, url in services.addresses().items()}
    assert after["ELECTION_URL"].port != before["ELECTION_URL"].port
    assert after["BROKER_URL"] == before["BROKER_URL"]


def test_full_env_is_read_by_a_shell(tmp_path: Path) -> None:
    services = LocalServices(data=tmp_path / "with a space")
    services.write_addresses()
    script = (
        f'. \'{services.env_file}\'; printf \'%s\\n\' "$DATABASE_URL" "$BROKER_URL" "$ELECTION_URL"'
    )
    with os.popen(script) as shell:
        said = shell.read().splitlines()
    assert said == list(services.addresses().values())


def test_addresses_of_running_servers_are_not_changed(tmp_path: Path) -> None:
    services = LocalServices(data=tmp_path)
    services.write_addresses()
    assert lock_owner(services.folder) is None
    with lock_data_dir(services.folder):
        assert lock_owner(services.folder) == os.getpid()
        with pytest.raises(DataInUseError):
            services.write_addresses()
    assert lock_owner(services.folder) is None


def test_free_port_is_free() -> None:
    port = free_port()
    assert is_free(port)
    with socket.create_server(("127.0.0.1", port)):
        assert not is_free(port)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems choose from elsewhere")
def test_free_port_is_outside_the_ephemeral_range() -> None:
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not any(lowest <= free_port() <= highest for _ in range(20))


def test_zookeepers_settings_keep_it_on_loopback(tmp_path: Path) -> None:
    settings = EmbeddedZookeeper(data=tmp_path, port=2181).settings().splitlines()
    assert {"clientPort=2181", "clientPortAddress=127.0.0.1", "admin.enableServer=false"} <= set(
        settings
    )
