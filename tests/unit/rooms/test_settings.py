"""Test that settings are read once, and that every problem is reported at once."""

from dataclasses import asdict
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from delivery.brokers import open_broker
from delivery.leadership import open_election
from delivery.magazines import open_magazines
from rooms.backend_urls import (
    PARSERS,
    BackendUrlError,
    parse_aerospike_url,
    parse_zookeeper_url,
    with_standby_session,
)
from rooms.backends import backends_of
from rooms.clock import SystemClock
from rooms.domain.push_url import REFUSED_PORTS
from rooms.errors import SettingsError
from rooms.settings import read_settings


def problems(**environment: str) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        read_settings(environment)
    assert str(caught.value) == "; ".join(caught.value.problems)
    return caught.value.problems


def test_nothing_needs_to_be_set() -> None:
    settings = read_settings({})
    assert (settings.listen_host, settings.listen_port) == ("127.0.0.1", 8080)
    assert settings.data == Path(".rooms")
    assert (settings.database_url, settings.broker_url) == (None, None)
    assert (settings.farm, settings.client) == ("rooms", "default")
    assert settings.allow_targets == ()
    assert settings.refuse_ports == REFUSED_PORTS
    assert (
        settings.resolver,
        settings.organisation_connections,
        settings.endpoint_connections,
    ) == ("dns", 0, 0)
    assert settings.secret_key is None
    assert settings.max_payload_bytes == 256 * 1024
    assert settings.max_batch == 1000
    assert settings.rate_limit_per_s == 0
    assert settings.claim_ttl_s > 30
    assert settings.retention_days == 30
    assert settings.log_level == "INFO"
    assert settings.start_wait_s == 60


def test_an_empty_variable_is_one_that_is_not_set() -> None:
    names = (
        "ROOMS_LISTEN", "ROOMS_DATA", "DATABASE_URL", "BROKER_URL", "ROOMS_FARM", "ROOMS_CLIENT", "ROOMS_ALLOW_TARGETS",
        "ROOMS_SECRET_KEY", "ROOMS_MAX_PAYLOAD_BYTES", "ROOMS_CLAIM_TTL_S", "ROOMS_LOG_LEVEL",
    )  # fmt: skip
    assert read_settings(dict.fromkeys(names, "")) == read_settings({})


def test_everything_can_be_set() -> None:
    url = "postgresql://user:word@db.example:5433/rooms?sslmode=verify-full&target_session_attrs=read-write"
    settings = read_settings(
        {
            "ROOMS_LISTEN": "[::1]:99",
            "ROOMS_DATA": "/srv/rooms",
            "DATABASE_URL": url,
            "BROKER_URL": url,
            "ROOMS_FARM": "Farm_1",
            "ROOMS_CLIENT": "blue-2",
            "ROOMS_ALLOW_TARGETS": " 10.0.0.0/8, ::1/128,,192.0.2.7 ",
            "ROOMS_REFUSE_PORTS": "8500, 6660-6662",
            "ROOMS_RESOLVER": "system",
            "ROOMS_ORGANISATION_LOOKUPS": "7",
            "ROOMS_ORGANISATION_CONNECTIONS": "4000",
            "ROOMS_ENDPOINT_CONNECTIONS": "300",
            "ROOMS_SECRET_KEY": "c2VjcmV0",
            "ROOMS_MAX_PAYLOAD_BYTES": "1000",
            "ROOMS_MAX_BODY_BYTES": "2000000",
            "ROOMS_MAX_BATCH": "10",
            "ROOMS_LANE_CONCURRENCY": "8",
            "ROOMS_CLAIM_TTL_S": "35",
            "ROOMS_BROKER_LOOKAHEAD_S": "90",
            "ROOMS_RETENTION_DAYS": "3650",
            "ROOMS_RATE_LIMIT_PER_S": "7",
            "ROOMS_LOG_LEVEL": "debug",
        }
    )
    assert (settings.listen_host, settings.listen_port) == ("::1", 99)
    assert (settings.database_url, settings.broker_url) == (url, url)
    assert settings.allow_targets == (
        ip_network("10.0.0.0/8"),
        ip_network("::1/128"),
        ip_network("192.0.2.7/32"),
    )
    assert settings.refuse_ports == {8500, 6660, 6661, 6662}
    assert (settings.resolver, settings.organisation_lookups) == ("system", 7)
    assert (settings.organisation_connections, settings.endpoint_connections) == (4000, 300)
    assert (settings.farm, settings.client) == ("Farm_1", "blue-2")
    assert (settings.max_payload_bytes, settings.max_body_bytes, settings.max_batch) == (
        1000,
        2_000_000,
        10,
    )
    assert (settings.lane_concurrency, settings.claim_ttl_s, settings.rate_limit_per_s) == (
        8,
        35,
        7,
    )
    assert settings.broker_lookahead_s == 90
    assert settings.retention_days == 3650
    assert not settings.uses_relay
    assert settings.log_level == "DEBUG"


def test_every_problem_is_reported_at_once() -> None:
    found = problems(
        ROOMS_LISTEN="localhost",
        DATABASE_URL="mysql://db/rooms",
        BROKER_URL="amqp://broker:5672",
        ROOMS_FARM="a farm",
        ROOMS_CLIENT="ü",
        ROOMS_ALLOW_TARGETS="10.0.0.1/8,everywhere",
        ROOMS_REFUSE_PORTS="22-,65536",
        ROOMS_RESOLVER="hosts",
        ROOMS_ORGANISATION_LOOKUPS="0",
        ROOMS_ORGANISATION_CONNECTIONS="-1",
        ROOMS_ENDPOINT_CONNECTIONS="all",
        ROOMS_MAX_PAYLOAD_BYTES="0",
        ROOMS_MAX_BODY_BYTES="much",
        ROOMS_MAX_BATCH="-1",
        ROOMS_LANE_CONCURRENCY="1.5",
        ROOMS_CLAIM_TTL_S="5",
        ROOMS_BROKER_LOOKAHEAD_S="0",
        ROOMS_RETENTION_DAYS="3651",
        ROOMS_RATE_LIMIT_PER_S="²",
        ROOMS_LOG_LEVEL="LOUD",
    )
    expected = " ".join(found)
    for name in (
        "ROOMS_LISTEN", "DATABASE_URL", "BROKER_URL", "ROOMS_FARM", "ROOMS_CLIENT", "ROOMS_ALLOW_TARGETS",
        "ROOMS_MAX_PAYLOAD_BYTES", "ROOMS_MAX_BODY_BYTES", "ROOMS_MAX_BATCH", "ROOMS_LANE_CONCURRENCY",
        "ROOMS_CLAIM_TTL_S", "ROOMS_BROKER_LOOKAHEAD_S", "ROOMS_RETENTION_DAYS", "ROOMS_RATE_LIMIT_PER_S", "ROOMS_LOG_LEVEL",
        "ROOMS_REFUSE_PORTS", "ROOMS_RESOLVER", "ROOMS_ORGANISATION_LOOKUPS", "ROOMS_ORGANISATION_CONNECTIONS",
        "ROOMS_ENDPOINT_CONNECTIONS",
    ):  # fmt: skip
        assert name in expected
    assert len(found) == 22  # each of the two targets by itself, and of the two ports


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ROOMS_CLAIM_S", "ROOMS_CLAIM_TTL_S"),
        ("ROOMS_HORIZON_S", "ROOMS_BROKER_LOOKAHEAD_S"),
        ("ROOMS_ISOLATE_AFTER", "ROOMS_SANDBOX_AFTER_CRASHES"),
    ],
)
def test_an_old_name_is_a_problem_that_names_the_new_one(old: str, new: str) -> None:
    assert problems(**{old: "60"}) == (f"{old} is now {new}: rename the variable",)
    assert problems(**{old: "60", new: "60"}) == (f"{old} is now {new}: rename the variable",)
    assert read_settings({old: ""}) == read_settings({})


@pytest.mark.parametrize(
    ("value", "refused"),
    [
        ("", REFUSED_PORTS),
        ("default", REFUSED_PORTS),
        ("default,8500", REFUSED_PORTS | {8500}),
        ("none", frozenset()),
        ("22, 25 ,0-2", frozenset({22, 25, 0, 1, 2})),
    ],
)
def test_the_refused_ports(value: str, refused: frozenset[int]) -> None:
    assert read_settings({"ROOMS_REFUSE_PORTS": value}).refuse_ports == refused


@pytest.mark.parametrize(
    "value", ["none,22", "all", "22;25", "-1", "²", "22-99999", "3-1", "22-", "9" * 400]
)
def test_what_is_no_port_is_named(value: str) -> None:
    (found,) = problems(ROOMS_REFUSE_PORTS=value)
    assert found.startswith("ROOMS_REFUSE_PORTS: ")
    assert "default,8500" in found


@pytest.mark.parametrize(
    "value",
    ["8080", ":8080", "localhost:", "localhost:0", "localhost:65536", "localhost:http", "localhost:²", "::1", "::1:80",
     "[::1]80", "[]:80", "localhost:" + "9" * 5000],
)  # fmt: skip
def test_an_address_is_a_host_and_a_port(value: str) -> None:
    (found,) = problems(ROOMS_LISTEN=value)
    assert found.startswith("ROOMS_LISTEN=")
    assert "HOST:PORT" in found


@pytest.mark.parametrize("name", ["DATABASE_URL", "BROKER_URL", "MAGAZINE_URL", "ELECTION_URL"])
@pytest.mark.parametrize(
    "value", ["rooms", "http://db/rooms", "postgres://db/rooms", "postgresql+psycopg://db/rooms"]
)
def test_an_unknown_scheme_is_reported_with_the_valid_ones(name: str, value: str) -> None:
    (found,) = problems(**{name: value})
    assert name in found
    assert "postgresql://" in found


def test_an_invalid_url_is_reported() -> None:
    (found,) = problems(DATABASE_URL="postgresql://[::1/rooms")
    assert found.startswith("DATABASE_URL is no URL")


def test_an_unknown_parameter_is_reported_with_the_valid_ones() -> None:
    (found,) = problems(DATABASE_URL="postgresql://db/rooms?ssl_mode=require&host=/run")
    assert "ssl_mode" in found
    assert "sslmode" in found


def test_the_broker_is_the_database_itself() -> None:
    for name in ("BROKER_URL", "MAGAZINE_URL", "ELECTION_URL"):
        (found,) = problems(
            **{"DATABASE_URL": "postgresql://db/rooms", name: "postgresql://db/queue"}
        )
        assert found.startswith(name)


def test_no_problem_contains_a_password() -> None:
    expected = " ".join(
        problems(
            DATABASE_URL="mysql://me:hunter2@db/x", BROKER_URL="postgresql://me:hunter2@db/x?y=1"
        )
    )
    assert "hunter2" not in expected


def test_an_election_may_be_held_in_zookeeper() -> None:
    for url in (
        "zookeeper://h1:2181,h2:2181?session_s=5&refresh_s=30",
        "zookeeper://[::1]:2181/installations",
        "zookeeper://h",
        "ZooKeeper://me:p%40ss@h/root",
    ):
        assert read_settings({"ELECTION_URL": url}).election_url == url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("zookeeper://h1:2181,,h2:2181", "no HOST:PORT in ''"),
        ("zookeeper:///path", "no HOST:PORT in ''"),
        ("zookeeper://h1:x", "no HOST:PORT in 'h1:x'"),
        (
            "zookeeper://h1?timeout=1",
            "unknown parameter timeout; valid here: refresh_s, session_s",
        ),
        ("zookeeper://h1?session_s=2&session_s=3", "twice"),
        ("zookeeper://h1/root@x", "an @ after its /"),
        ("zookeeper://h1:0", "no HOST:PORT in 'h1:0'"),
        ("zookeeper:h1", "no HOST:PORT in ''"),
        ("zookeeper://h1?session_s=0", "session_s='0', which is not a whole number from 1 to 60"),
        (
            "zookeeper://h1?refresh_s=soon",
            "refresh_s='soon', which is not a whole number from 1 to 3600",
        ),
    ],
)
def test_every_problem_of_a_zookeeper_url_is_reported(url: str, expected: str) -> None:
    (found,) = problems(ELECTION_URL=url)
    assert found.startswith("ELECTION_URL")
    assert expected in found


@pytest.mark.parametrize("character", "?/,#@:")
@pytest.mark.parametrize("scheme", ["stomp", "aerospike", "zookeeper"])
def test_no_problem_of_a_url_shows_a_part_of_its_password(scheme: str, character: str) -> None:
    url = f"{scheme}://rooms:s3cr{character}etPW@broker:0/space"
    name = {"stomp": "BROKER_URL", "aerospike": "MAGAZINE_URL", "zookeeper": "ELECTION_URL"}[scheme]
    texts = problems(**{name: url})
    assert texts
    assert not any(part in text for text in texts for part in ("s3cr", "etPW"))


@pytest.mark.parametrize(
    "password",
    ["s3cr@W Y?etPW", "s3cr@W Y/etPW", "1/etPW", "s3cr@WY/etPW", "a?ca=etPW", "a?retries=etPW", "a?session_s=etPW", "a?tls=etPW",
     "s3cr?ca=etPW&key=WY", "s3cr@WY?heartbeat_ms=etPW", "s3cr@WY:1?x=/etPW/etPW"],
)  # fmt: skip
@pytest.mark.parametrize("scheme", ["stomp", "stomps", "aerospike", "zookeeper"])
def test_no_piece_of_a_password_is_taken_for_another_part_of_a_url(
    scheme: str, password: str
) -> None:
    """A password may be right after its last @, or the URL is refused."""
    path = "" if scheme.startswith("stomp") else "/space"
    try:
        found: Any = PARSERS[scheme](f"{scheme}://rooms:{password}@host:1234{path}")
    except BackendUrlError as exc:
        text = str(exc)
    else:
        text = "".join(
            f"{name} {value}" for name, value in asdict(found).items() if name != "password"
        )
    assert not any(part in text for part in ("s3cr", "W Y", "WY", "etPW"))


def test_a_broker_and_its_backups_by_stomp(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("")
    for url in (
        "stomp://localhost",
        "stomp://me:p%40ss@a:61613,b:61614?heartbeat_ms=1000&connect_timeout_ms=100&receipt_timeout_ms=1000",
        "stomps://me:word@[::1]:61617,b/?verify=false",
        f"stomps://b?ca={ca}",
    ):
        settings = read_settings({"BROKER_URL": url})
        assert settings.broker_url == url
        assert settings.uses_relay
    assert not read_settings({}).uses_relay
    assert not read_settings(
        {"BROKER_URL": "postgresql://a/b", "DATABASE_URL": "postgresql://a/b"}
    ).uses_relay


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("stomp://", "HOST:PORT"),
        ("stomp://a:61613,", "HOST:PORT"),
        ("stomp://a:0", "HOST:PORT"),
        ("stomp://a:61613/queue", "HOST:PORT"),
        ("stomp://a?heartbeat=1", "connect_timeout_ms, heartbeat_ms, receipt_timeout_ms"),
        ("stomp://a?ca=/ca.pem", "unknown parameter"),
        ("stomps://a?ca=/there/is/none.pem", "no file"),
        (f"stomps://a?key={__file__}", "certificate"),
        ("stomps://a?verify=perhaps", "verify"),
        ("stomp://a?heartbeat_ms=1", "from 250 to 30000"),
        ("stomp://a?heartbeat_ms=500&heartbeat_ms=600", "twice"),
        ("stomp://a%0A:b@a", "control character"),
        ("STOMP://a?ca=x", "unknown parameter"),
        ("amqp://a", "stomps://"),
    ],
)
def test_every_problem_of_a_stomp_url_is_reported(url: str, expected: str) -> None:
    (found,) = problems(BROKER_URL=url)
    assert found.startswith("BROKER_URL")
    assert expected in found


def test_no_problem_of_a_stomp_url_contains_its_password() -> None:
    assert "hunter2" not in " ".join(problems(BROKER_URL="stomp://me:hunter2@a:b:c,d:0?x=1"))


def test_an_aerospike_url_is_read_whole() -> None:
    plain = parse_aerospike_url("aerospike://h1:3100,h2/rooms")
    assert plain.hosts == (("h1", 3100), ("h2", 3000))
    assert (plain.namespace, plain.user, plain.tls) == ("rooms", "", False)
    assert (plain.retries, plain.sleep_ms, plain.socket_timeout_ms, plain.total_timeout_ms) == (
        3,
        100,
        3000,
        5000,
    )
    assert plain.connections == 100
    full = parse_aerospike_url(
        "aerospike://me:a%40b@[::1]:4333/ns?tls_name=n&retries=0&threads=7&mark_s=7200"
    )
    assert (full.hosts, full.user, full.password) == ((("::1", 4333),), "me", "a@b")
    assert (full.tls, full.tls_name, full.retries, full.threads, full.mark_s) == (
        True,
        "n",
        0,
        7,
        7200,
    )
    assert not parse_aerospike_url("aerospike://me:word@h/ns?tls=false").tls
    url = "aerospike://h1:3000,h2:3000/rooms?connections=7"
    assert read_settings({"MAGAZINE_URL": url}).magazine_url == url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("aerospike://h1:3000", "namespace"),
        ("aerospike://h1:3000/a/b", "namespace"),
        ("aerospike:///rooms", "HOST:PORT"),
        ("aerospike://h1:3000,/rooms", "HOST:PORT"),
        ("aerospike://h1:99999/rooms", "HOST:PORT"),
        ("aerospike://h1/rooms?timeout=5", "connections"),
        ("aerospike://h1/rooms?retries=x", "from 0 to 100"),
        ("aerospike://h1/rooms?retries=1&retries=2", "twice"),
        ("aerospike://h1/rooms?tls=perhaps", "tls"),
        ("aerospike://h1/rooms?ca=/there/is/none.pem", "no file"),
        ("aerospike://h1/rooms?mark_s=5", "from 1200"),
        (f"aerospike://h1/rooms?key={__file__}", "certificate"),
        ("aerospike://me:hunter2@h1?x=1", "namespace"),
    ],
)
def test_every_problem_of_an_aerospike_url_is_reported(url: str, expected: str) -> None:
    found = " ".join(problems(MAGAZINE_URL=url))
    assert found.startswith("MAGAZINE_URL")
    assert expected in found
    assert "hunter2" not in found


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"ROOMS_PLAIN_PORT": "closed"}, "ROOMS_TLS_LISTEN"),
        ({"ROOMS_TLS_LISTEN": "0.0.0.0:8443"}, "ROOMS_TLS_CERT"),
        ({"ROOMS_TLS_CERT": "a", "ROOMS_TLS_KEY": "b"}, "ROOMS_TLS_LISTEN"),
        ({"ROOMS_TLS_CLIENT_CRL": "a"}, "ROOMS_TLS_CLIENT_CA"),
        ({"ROOMS_TLS_CLIENT_AUTH": "required"}, "ROOMS_TLS_CLIENT_CA"),
        ({"ROOMS_TLS_LISTEN": "8443"}, "HOST:PORT"),
        ({"ROOMS_TRUSTED_HEADERS": "forwarded"}, "x-govstack-client"),
        ({"ROOMS_CERTIFICATE_IDENTITY": "subject={CN}"}, "makes no identifier"),
        ({"ROOMS_TRUSTED_PROXIES": "nginx"}, "CIDR"),
    ],
)
def test_settings_of_tls_and_proxies_name_what_they_need(given: dict[str, str], named: str) -> None:
    assert named in problems(**given)[0]


def test_settings_of_tls_and_proxies() -> None:
    settings = read_settings(
        {
            "ROOMS_TLS_LISTEN": "[::]:8443",
            "ROOMS_TLS_CERT": "server.pem",
            "ROOMS_TLS_KEY": "key.pem",
            "ROOMS_PLAIN_PORT": "closed",
            "ROOMS_TRUSTED_HEADERS": "X-Forwarded-For, x-govstack-client",
        }
    )
    assert (settings.tls_listen, settings.plain_port) == (("::", 8443), "closed")
    assert settings.trusted_headers == {"x-forwarded-for", "x-govstack-client"}
    assert read_settings({"ROOMS_TRUSTED_HEADERS": "none"}).trusted_headers == frozenset()
    assert len(read_settings({}).trusted_headers) == 3


OIDC = {
    "ROOMS_PUBLIC_URL": "https://rooms.example.com/",
    "ROOMS_OIDC_ISSUER": "https://id.example.com/realms/a",
    "ROOMS_OIDC_CLIENT_ID": "rooms",
    "ROOMS_OIDC_CLIENT_SECRET": "a-secret",
    "ROOMS_OIDC_ROLES": "ops=default:operator",
}


def test_openid_connect_needs_its_settings() -> None:
    settings = read_settings(OIDC)
    assert settings.public_url == "https://rooms.example.com"
    assert settings.oidc_issuer == "https://id.example.com/realms/a"
    assert (settings.oidc_scopes, settings.oidc_groups_claim) == ("openid profile email", "groups")
    assert "a-secret" not in repr(settings)
    assert read_settings({}).oidc_issuer is None


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({"ROOMS_PUBLIC_URL": ""}, ["ROOMS_OIDC_ISSUER needs ROOMS_PUBLIC_URL"]),
        (
            {"ROOMS_OIDC_CLIENT_ID": "", "ROOMS_OIDC_ROLES": ""},
            ["ROOMS_OIDC_ISSUER needs ROOMS_OIDC_CLIENT_ID, ROOMS_OIDC_ROLES"],
        ),
        (
            {"ROOMS_OIDC_ISSUER": ""},
            [
                "ROOMS_OIDC_CLIENT_ID needs ROOMS_OIDC_ISSUER",
                "ROOMS_OIDC_CLIENT_SECRET needs ROOMS_OIDC_ISSUER",
                "ROOMS_OIDC_ROLES needs ROOMS_OIDC_ISSUER",
            ],
        ),
        ({"ROOMS_OIDC_SCOPES": "profile"}, ["ROOMS_OIDC_SCOPES: openid must be one of them"]),
        (
            {"ROOMS_PUBLIC_URL": "http://rooms.example.com", "ROOMS_OIDC_ROLES": "x; y"},
            [
                "ROOMS_PUBLIC_URL: it must begin with https://; http:// is for this machine only",
                "ROOMS_OIDC_ROLES: 'x' has not the form GROUP=ORGANISATION:ROLE+ROLE",
                "ROOMS_OIDC_ROLES: 'y' has not the form GROUP=ORGANISATION:ROLE+ROLE",
            ],
        ),
    ],
)
def test_every_problem_of_openid_connect_is_reported(
    changes: dict[str, str], problems: list[str]
) -> None:
    with pytest.raises(SettingsError) as refused:
        read_settings(OIDC | changes)
    assert list(refused.value.problems) == problems


def test_sites_that_may_frame_the_portal() -> None:
    sites = " https://shop.example.com ,https://shop.example.com/,,http://localhost:3000"
    settings = read_settings({"ROOMS_FRAME_ANCESTORS": sites})
    assert settings.frame_ancestors == ("https://shop.example.com", "http://localhost:3000")
    assert read_settings({}).frame_ancestors == ()
    for wrong in ("*", "'self'", "https://*", "https://a.example.com; script-src *", "data:"):
        with pytest.raises(SettingsError, match="ROOMS_FRAME_ANCESTORS"):
            read_settings({"ROOMS_FRAME_ANCESTORS": f"https://right.example.com,{wrong}"})


_BRACKETS = "pa[ss]w[rd"


@pytest.mark.parametrize(
    "environment",
    [
        {"BROKER_URL": f"stomp://rooms:{_BRACKETS}@h:61613"},
        {"ELECTION_URL": f"zookeeper://rooms:{_BRACKETS}@h:2181"},
        {"MAGAZINE_URL": f"aerospike://rooms:{_BRACKETS}@h:3000/test?tls=false"},
        {"DATABASE_URL": f"postgresql://rooms:{_BRACKETS}@h/rooms"},
    ],
)
def test_a_password_may_have_brackets(environment: dict[str, str]) -> None:
    settings = read_settings(environment)
    assert settings.uses_relay == ("BROKER_URL" in environment)
    assert _BRACKETS not in str(backends_of(settings))
    if settings.election_url is not None:
        url = with_standby_session(settings.election_url)
        assert url == f"{settings.election_url}?session_s=3"
        assert parse_zookeeper_url(url).password == _BRACKETS


def test_who_opens_a_store_names_the_valid_schemes_of_any_url() -> None:
    url = f"http://rooms:{_BRACKETS}@h"
    with pytest.raises(SettingsError, match="ELECTION_URL starts with http://; valid here"):
        open_election(url, client="default", member="m", clock=SystemClock())
    with pytest.raises(SettingsError, match="BROKER_URL starts with http://; valid here"):
        open_broker(url, claim_s=60, farm="rooms", client="default")
    with pytest.raises(SettingsError, match="MAGAZINE_URL starts with http://; valid here"):
        open_magazines(url, farm="rooms", client="default")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("postgresql:rooms", "DATABASE_URL is no URL"),
        (" postgresql://h/db", "DATABASE_URL begins or ends with a space"),
        ("postgresql://h/db\n", "DATABASE_URL begins or ends with a space"),
        ("postgresql://u:hunter2@h:notaport/db", "DATABASE_URL has a port"),
        ("postgresql://u:1?hunter2@h/db", "DATABASE_URL has"),
    ],
)
def test_an_address_of_the_database_that_would_fail_later_is_a_problem(
    url: str, reason: str
) -> None:
    (found,) = problems(DATABASE_URL=url)
    assert found.startswith(reason)
    assert "hunter2" not in found


def test_the_database_may_have_several_hosts() -> None:
    url = "postgresql://h1:5432,h2:5433/rooms?target_session_attrs=read-write"
    assert read_settings({"DATABASE_URL": url}).database_url == url
