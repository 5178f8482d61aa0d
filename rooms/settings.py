"""Read the settings from the environment, once, and report every problem at once.

No other module reads environment variables for settings.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rooms.backend_urls import scheme_of
from rooms.domain.member_identity import DEFAULT_RULES, CertificateRules
from rooms.domain.native_address import NativeAddress
from rooms.domain.push_url import REFUSED_PORTS
from rooms.domain.role import GroupRoles
from rooms.domain.web_address import check_address, check_origin
from rooms.domain.work_location import POSTGRES_MODE, BrokerMode, relayed_mode
from rooms.environment import SCHEMES, EnvironmentReader, IpNetwork
from rooms.errors import SettingsError

__all__ = ["SCHEMES", "IpNetwork", "Settings", "read_settings"]

RENAMED: Final[Mapping[str, str]] = {
    "ROOMS_CLAIM_S": "ROOMS_CLAIM_TTL_S",
    "ROOMS_HORIZON_S": "ROOMS_BROKER_LOOKAHEAD_S",
    "ROOMS_ISOLATE_AFTER": "ROOMS_SANDBOX_AFTER_CRASHES",
    "ROOMS_TRUSTED_ADDRESSES": "ROOMS_TRUSTED_PROXIES",
}
"""New names of variables by their old ones. An old name that is set is a problem, not ignored."""
PROXY_HEADERS: Final = "x-forwarded-for,x-forwarded-client-cert,x-govstack-client"
"""The headers by which a proxy names the client, its certificate, and the member that it is."""
_IDENTIFIER: Final = re.compile("[A-Za-z0-9_-]+")
_MAX_PAYLOAD_LIMIT_BYTES: Final = 1024 * 1024


_MAX_RESOURCE_BODY_BYTES: Final = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Hold every setting. ROOMS_LISTEN sets both `listen_host` and `listen_port`."""

    listen_host: str
    """Address and port of the API."""
    listen_port: int
    plain_port: str
    """`closed`: the API is only on `ROOMS_TLS_LISTEN`."""
    tls_listen: tuple[str, int] | None
    """Address and port of the API with TLS 1.2 or later. By default there is none."""
    tls_cert: Path | None
    """PEM file: the certificate of the TLS port, followed by its intermediate ones. All files of
    TLS are read again within five seconds of a change.
    """
    tls_key: Path | None
    """PEM file: the private key of `ROOMS_TLS_CERT`, without a password."""
    tls_client_ca: Path | None
    """PEM file: the authorities whose client certificates are accepted. Without it none is asked
    for.
    """
    tls_client_crl: Path | None
    """PEM file: a revocation list of each authority that issues client certificates. A list that is
    missing or has expired refuses the certificates of its authority.
    """
    tls_client_auth: str
    """`required`: a client of the TLS port must have a certificate."""
    certificate_identity: CertificateRules
    """Rules by which a client certificate names a member, with commas between them: the first that
    finds something decides. `uri=PREFIX`: the rest of a SAN URI. `subject=TEMPLATE`: attributes of
    the subject in braces. Both make `instance/class/code` or `instance/class/code/application`.
    """
    data: Path
    """Folder for data, logs, the API key and the encryption key."""
    database_url: str | None
    """PostgreSQL 16 or later. Without it, Rooms runs an embedded PostgreSQL in `ROOMS_DATA`."""
    broker_url: str | None
    """Broker of PUSH and PULL queues. By default PostgreSQL; or Artemis:
    `stomp://user:password@a:61613,b:61613`, with its backups, and `stomps://` for TLS.
    Parameters: `heartbeat_ms=5000`, `connect_timeout_ms=5000`, `receipt_timeout_ms=30000`; with
    TLS also `ca`, `certificate`, `key` (PEM files) and `verify=false`.
    """
    election_url: str | None
    """Store of leadership. By default PostgreSQL; or `zookeeper://h1:2181,h2:2181`, also
    `zookeeper://user:password@h1:2181/root`. Parameters: `session_s=10` (3 for a standby) and
    `refresh_s=30`.
    """
    magazine_url: str | None
    """Store of sidelines and handler queues. By default PostgreSQL; or
    `aerospike://h1:3000,h2:3000/namespace`. Parameters: `retries=3`, `sleep_ms=100`,
    `socket_timeout_ms=3000`, `total_timeout_ms=5000`, `connections=100`, `threads=0`,
    `mark_s=3600`. For an Enterprise server also `aerospike://user:password@…` (with TLS, unless
    `tls=false`), `tls_name`, `ca`, `certificate` and `key` (PEM files). A namespace that evicts
    records is refused.
    """
    analysis_url: str | None
    """Folder for the exported log (`segments`) and the results of the analysis (`tables`), or
    `s3://…`, `gs://…`, `hdfs://…`. By default `analysis` in `ROOMS_DATA`.
    """
    export_s: int
    """Seconds between two exports of the log by the maintenance process; 0 switches it off. Needs
    the extra `spark`.
    """
    retention_days: int
    """Days that finished messages, deliveries, log entries and jobs are kept; 0 keeps them for
    ever. Unfinished and sidelined deliveries are kept whatever their age. `rooms retention`
    previews what would be deleted.
    """
    journal_retention_days: int
    """Days that entries of the journal are kept; 0 keeps them for ever. The oldest are deleted, and
    the rest can still be verified. The newest entry of an organisation is kept whatever its age.
    """
    usage_retention_days: int
    """Days that usage by the hour is kept; 0 keeps it for ever."""
    farm: str
    """Name of this installation in stores that several installations share."""
    client: str
    """Second part of that name. Joined by `-`: `a-b` with `c` is the same as `a` with `b-c`."""
    allow_targets: tuple[IpNetwork, ...]
    """Networks that webhooks may reach although they are private. `make run` opens loopback."""
    refuse_ports: frozenset[int]
    """Ports that no webhook is sent to. `default` means ports of other protocols: the Fetch
    standard's bad ports, databases and brokers. `none` refuses no port. Example:
    `default,8500,6660-6669`.
    """
    resolver: str
    """Resolver of webhook names. `dns` uses c-ares, with /etc/hosts and /etc/resolv.conf. `system`
    uses libc, for names that only another module of nsswitch.conf knows.
    """
    organisation_lookups: int
    """Concurrent look-ups of webhook names for one organisation, of 256 in each process."""
    organisation_connections: int
    """Webhook connections of one organisation in each worker, of 8,192 (fewer where the system
    allows fewer files); 0 means a quarter. With one organisation only, set 8192.
    """
    endpoint_connections: int
    """Webhook connections of one organisation to one scheme, host and port in each worker; 0 means
    an eighth of all.
    """
    secret_key: str | None
    """Base64 of 32 bytes that encrypt signing secrets and headers of webhooks in the database.
    Several, with commas between them, are valid at a time: the first one seals. By default
    generated in `secret-key` in `ROOMS_DATA`; back it up.
    """
    unknown_secret_keys: str
    """If something was sealed with a key that is not there, a process does not start (`refuse`), or
    starts and holds the deliveries of these subscriptions (`hold`).
    """
    max_payload_bytes: int
    """Largest payload of a message, also in handler queues; 413 above."""
    max_body_bytes: int
    """Largest request body; 413 above."""
    max_batch: int
    """Most messages in one batch."""
    max_schema_bytes: int
    """Largest JSON Schema; 422 above. A stored one that is larger is refused when a message of its
    version is published.
    """
    max_room_schema_bytes: int
    """Most bytes of the schemas of all versions in a room; 422 above. Publishing holds them in
    memory. Each version counts as 256 bytes more.
    """
    validation_ms: int
    """CPU time that the schemas and filters of one request may take in the sandbox. Above it a
    payload is refused (422), and a filter counts as failed. One filter may take a quarter of
    it.
    """
    validation_processes: int
    """Sandbox processes of one API process, started on demand. One organisation may use half of
    them.
    """
    validation_memory_bytes: int
    """Memory that one sandbox process may allocate."""
    max_handler_queues: int
    """Handler queues of one organisation; 409 above. Maintenance looks at each every 30 seconds."""
    max_rooms: int
    """Rooms of one organisation; 409 above."""
    max_subscriptions: int
    """Subscriptions of one organisation that have not ended; 409 above. Its quota `subscriptions`
    goes before.
    """
    max_room_subscriptions: int
    """Subscriptions of others to one room, and of its owner; 409 above. One other organisation may
    have a tenth. A publish reads all after a change; the room's quota may only lower the limit.
    """
    lane_concurrency: int
    """Concurrent webhook calls for each subscription and worker, where the subscription sets no
    `max_concurrency`.
    """
    claim_ttl_s: int
    """Seconds after which the claims of a worker that stopped responding are released."""
    sandbox_after_crashes: int
    """Workers in a row that must die with a delivery in flight before it is attempted in a sandbox
    process. If it kills that too, it is sidelined as `stuck`; 0 switches this off.
    """
    broker_lookahead_s: int
    """Seconds before its due time at which a scheduled message is sent to a broker other than
    PostgreSQL. Until then it waits in PostgreSQL.
    """
    native_addresses: tuple[NativeAddress, ...]
    """Addresses that the login of a native subscription shows:
    `stomp://host:port,amqps://host:port,core://host:port`; a protocol that ends in `s` means
    TLS. By default the hosts of `BROKER_URL`.
    """
    rate_limit_per_s: int
    """Requests per second for each API key; 0 means no limit."""
    guest_changes_per_s: int
    """Changes per second that an organisation may make to its subscriptions in a room of another
    one, in each API process; 429 above. Those that wait for approval count, too. 0 means no limit.
    """
    loop_stall_ms: int
    """Milliseconds after which a stalled event loop is logged with its stack and counted in
    `rooms_loop_stalls_total`; 0 switches this off.
    """
    unknown_keys_per_s: int
    """Unknown API keys per second that are looked up for one address (IPv6: one /64); 429 above.
    Valid keys do not count. 0 means no limit.
    """
    max_connections: int
    """Client connections of one API process; fewer where the system allows fewer files (`ulimit
    -Hn`).
    """
    max_unauthenticated_connections: int
    """Of these, connections without a valid key so far. For a new one above the limit, the oldest
    idle one is closed.
    """
    max_connections_per_address: int
    """Connections without a valid key from one address (IPv6: one /64); 0 means no limit."""
    trusted_proxies: tuple[IpNetwork, ...]
    """Networks of proxies and security servers. The limits for one address do not apply to them,
    and the headers in `ROOMS_TRUSTED_HEADERS` are believed from them only.
    """
    trusted_headers: frozenset[str]
    """The headers that every trusted proxy sets itself or removes. One that it passes on from its
    clients must not be named here: it would let them be any member.
    """
    head_timeout_s: int
    """Seconds in which a client must send request line and headers; 408 afterwards."""
    idle_timeout_s: int
    """Seconds after which an idle connection is closed."""
    min_body_bytes_per_s: int
    """Average speed that a request body must have after ten seconds; 408 below. 0 means no limit.
    """
    organisation_body_bytes: int
    """Bytes of request bodies that one API process holds for one organisation, above the first 64
    KiB of each; 429 above. At least `ROOMS_MAX_BODY_BYTES`. The same number of bytes of unread
    answers is held before the fullest connections are closed.
    """
    organisation_queries: int
    """Queries of one organisation at a time in one API process, of the 20 connections for all but
    publishing and pulling. Further ones wait 10 s; 429 afterwards.
    """
    query_timeout_s: int
    """Seconds after which PostgreSQL stops a query of the API; 503 with the advice to narrow it."""
    max_consumers: int
    """Streams and waiting polls of one organisation in one API process; 429 above. Each ten
    subscriptions of a stream count as one.
    """
    public_url: str | None
    """Address at which browsers reach the service: `https://rooms.example.com`. People who sign in
    by OpenID Connect come back to it; register `…/console/oidc/callback` with the provider.
    """
    frame_ancestors: tuple[str, ...]
    """Sites that may show the portal in a frame, separated by commas: `https://shop.example.com`.
    Other pages cannot be framed. Browsers keep the portal's cookie in such a frame with HTTPS only.
    """
    oidc_issuer: str | None
    """OpenID Connect provider at which people sign in to the console. It needs `ROOMS_PUBLIC_URL`,
    `ROOMS_OIDC_CLIENT_ID` and `ROOMS_OIDC_ROLES`.
    """
    oidc_client_id: str | None
    """Client that the provider knows Rooms by."""
    oidc_client_secret: str | None = field(repr=False)
    """Secret of that client; a public client has none."""
    oidc_scopes: str
    """Scopes to ask for, with spaces between them; `openid` is one of them."""
    oidc_groups_claim: str
    """Claim of the ID token that lists a person's groups; `realm_access.roles` is a claim within
    another.
    """
    oidc_roles: Sequence[GroupRoles]
    """Roles of the provider's groups in organisations:
    `GROUP=ORGANISATION:ROLE+ROLE;GROUP=ORGANISATION:ROLE`. The group `*` is each person who signs
    in.
    """
    log_level: str
    """`DEBUG`, `INFO`, `WARNING` or `ERROR`."""
    start_wait_s: int
    """Seconds that a starting process waits for a PostgreSQL that is unavailable or recovering.
    Commands wait only while it recovers.
    """

    @property
    def uses_relay(self) -> bool:
        """Return whether another broker than PostgreSQL carries the deliveries."""
        return self.broker_url is not None and scheme_of(self.broker_url) != "postgresql"

    @property
    def max_resource_body_bytes(self) -> int:
        """Return the largest body of a request that is no batch of messages.

        It is decoded at once on the event loop, and the largest schema or payload fits.
        """
        largest = max(self.max_schema_bytes, self.max_payload_bytes)
        return min(self.max_body_bytes, max(_MAX_RESOURCE_BODY_BYTES, 2 * largest))

    @property
    def analysis_location(self) -> str:
        """Return the path or URL of the folder with `segments` and `tables`."""
        return (self.analysis_url or str(self.data.absolute() / "analysis")).rstrip("/")

    @property
    def broker_mode(self) -> BrokerMode:
        """Return how deliveries reach workers and consumers."""
        return (
            relayed_mode(lookahead_ms=self.broker_lookahead_s * 1000)
            if self.uses_relay
            else POSTGRES_MODE
        )


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Return the settings. SettingsError names every invalid variable and its valid values."""
    read = EnvironmentReader(environment)
    host, port = read.address("ROOMS_LISTEN", "127.0.0.1:8080")
    settings = Settings(
        listen_host=host,
        listen_port=port,
        plain_port=read.choice("ROOMS_PLAIN_PORT", "open", "open", "closed"),
        tls_listen=read.optional_address("ROOMS_TLS_LISTEN"),
        tls_cert=read.path("ROOMS_TLS_CERT"),
        tls_key=read.path("ROOMS_TLS_KEY"),
        tls_client_ca=read.path("ROOMS_TLS_CLIENT_CA"),
        tls_client_crl=read.path("ROOMS_TLS_CLIENT_CRL"),
        tls_client_auth=read.choice("ROOMS_TLS_CLIENT_AUTH", "optional", "optional", "required"),
        certificate_identity=read.certificate_rules("ROOMS_CERTIFICATE_IDENTITY", DEFAULT_RULES),
        data=Path(read.text("ROOMS_DATA", ".rooms")),
        database_url=read.url("DATABASE_URL"),
        broker_url=read.url("BROKER_URL"),
        election_url=read.url("ELECTION_URL"),
        magazine_url=read.url("MAGAZINE_URL"),
        analysis_url=read.optional("ROOMS_ANALYSIS_URL"),
        export_s=read.number("ROOMS_EXPORT_S", 0, 0, 86_400),
        retention_days=read.number("ROOMS_RETENTION_DAYS", 30, 0, 3650),
        journal_retention_days=read.number("ROOMS_JOURNAL_RETENTION_DAYS", 3650, 0, 36_500),
        usage_retention_days=read.number("ROOMS_USAGE_RETENTION_DAYS", 400, 0, 36_500),
        farm=read.text("ROOMS_FARM", "rooms"),
        client=read.text("ROOMS_CLIENT", "default"),
        allow_targets=read.networks("ROOMS_ALLOW_TARGETS"),
        refuse_ports=read.ports("ROOMS_REFUSE_PORTS", REFUSED_PORTS),
        resolver=read.choice("ROOMS_RESOLVER", "dns", "dns", "system"),
        organisation_lookups=read.number("ROOMS_ORGANISATION_LOOKUPS", 32, 1, 256),
        organisation_connections=read.number("ROOMS_ORGANISATION_CONNECTIONS", 0, 0, 65_536),
        endpoint_connections=read.number("ROOMS_ENDPOINT_CONNECTIONS", 0, 0, 65_536),
        secret_key=read.optional("ROOMS_SECRET_KEY"),
        unknown_secret_keys=read.choice("ROOMS_UNKNOWN_SECRET_KEYS", "refuse", "refuse", "hold"),
        max_payload_bytes=read.number(
            "ROOMS_MAX_PAYLOAD_BYTES", 256 * 1024, 1, _MAX_PAYLOAD_LIMIT_BYTES
        ),
        max_body_bytes=read.number("ROOMS_MAX_BODY_BYTES", 16 * 1024 * 1024, 1024, 1 << 30),
        max_batch=read.number("ROOMS_MAX_BATCH", 1000, 1, 10_000),
        max_schema_bytes=read.number("ROOMS_MAX_SCHEMA_BYTES", 256 * 1024, 1024, 16 * 1024 * 1024),
        max_room_schema_bytes=read.number(
            "ROOMS_MAX_ROOM_SCHEMA_BYTES", 16 * 1024 * 1024, 1024, 1 << 30
        ),
        validation_ms=read.number("ROOMS_VALIDATION_MS", 1000, 10, 60_000),
        validation_processes=read.number("ROOMS_VALIDATION_PROCESSES", 2, 1, 64),
        validation_memory_bytes=read.number(
            "ROOMS_VALIDATION_MEMORY_BYTES", 512 * 1024 * 1024, 1 << 26, 1 << 36
        ),
        max_handler_queues=read.number("ROOMS_MAX_HANDLER_QUEUES", 1000, 0, 1_000_000),
        max_rooms=read.number("ROOMS_MAX_ROOMS", 10_000, 1, 10_000_000),
        max_subscriptions=read.number("ROOMS_MAX_SUBSCRIPTIONS", 100_000, 1, 10_000_000),
        max_room_subscriptions=read.number("ROOMS_MAX_ROOM_SUBSCRIPTIONS", 20_000, 1, 1_000_000),
        lane_concurrency=read.number("ROOMS_LANE_CONCURRENCY", 32, 1, 1000),
        claim_ttl_s=read.number("ROOMS_CLAIM_TTL_S", 60, 35, 3600),
        sandbox_after_crashes=read.number("ROOMS_SANDBOX_AFTER_CRASHES", 3, 0, 1000),
        broker_lookahead_s=read.number("ROOMS_BROKER_LOOKAHEAD_S", 60, 1, 86_400),
        native_addresses=read.native_addresses("ROOMS_NATIVE_ADDRESSES"),
        rate_limit_per_s=read.number("ROOMS_RATE_LIMIT_PER_S", 0, 0, 1_000_000),
        guest_changes_per_s=read.number("ROOMS_GUEST_CHANGES_PER_S", 10, 0, 1_000_000),
        loop_stall_ms=read.number("ROOMS_LOOP_STALL_MS", 250, 0, 60_000),
        unknown_keys_per_s=read.number("ROOMS_UNKNOWN_KEYS_PER_S", 100, 0, 1_000_000),
        max_connections=read.number("ROOMS_MAX_CONNECTIONS", 8192, 2, 1_000_000),
        max_unauthenticated_connections=read.number(
            "ROOMS_MAX_UNAUTHENTICATED_CONNECTIONS", 2048, 1, 1_000_000
        ),
        max_connections_per_address=read.number(
            "ROOMS_MAX_CONNECTIONS_PER_ADDRESS", 512, 0, 1_000_000
        ),
        trusted_proxies=read.networks("ROOMS_TRUSTED_PROXIES"),
        trusted_headers=read.names("ROOMS_TRUSTED_HEADERS", PROXY_HEADERS),
        head_timeout_s=read.number("ROOMS_HEAD_TIMEOUT_S", 10, 1, 3600),
        idle_timeout_s=read.number("ROOMS_IDLE_TIMEOUT_S", 75, 1, 86_400),
        min_body_bytes_per_s=read.number("ROOMS_MIN_BODY_BYTES_PER_S", 1024, 0, 1 << 30),
        organisation_body_bytes=read.number(
            "ROOMS_ORGANISATION_BODY_BYTES", 256 * 1024 * 1024, 1024, 1 << 40
        ),
        organisation_queries=read.number("ROOMS_ORGANISATION_QUERIES", 8, 1, 20),
        query_timeout_s=read.number("ROOMS_QUERY_TIMEOUT_S", 30, 1, 3600),
        max_consumers=read.number("ROOMS_MAX_CONSUMERS", 2000, 1, 1_000_000),
        public_url=read.address_of_web("ROOMS_PUBLIC_URL", check_origin),
        frame_ancestors=read.origins("ROOMS_FRAME_ANCESTORS"),
        oidc_issuer=read.address_of_web("ROOMS_OIDC_ISSUER", check_address),
        oidc_client_id=read.optional("ROOMS_OIDC_CLIENT_ID"),
        oidc_client_secret=read.optional("ROOMS_OIDC_CLIENT_SECRET"),
        oidc_scopes=read.text("ROOMS_OIDC_SCOPES", "openid profile email"),
        oidc_groups_claim=read.text("ROOMS_OIDC_GROUPS_CLAIM", "groups"),
        oidc_roles=read.group_roles("ROOMS_OIDC_ROLES"),
        log_level=read.text("ROOMS_LOG_LEVEL", "INFO").upper(),
        start_wait_s=read.number("ROOMS_START_WAIT_S", 60, 0, 3600),
    )
    for name in ("farm", "client"):
        if not _IDENTIFIER.fullmatch(getattr(settings, name)):
            read.problems.append(f"ROOMS_{name.upper()} takes letters, digits, '-' and '_' only")
    parts = {
        "BROKER_URL": settings.broker_url,
        "ELECTION_URL": settings.election_url,
        "MAGAZINE_URL": settings.magazine_url,
    }
    for name, url in parts.items():
        if url and url != settings.database_url and scheme_of(url) == "postgresql":
            read.problems.append(
                f"{name}: PostgreSQL does this only in its own database;"
                " leave the variable out, or set it to the value of DATABASE_URL"
            )
    read.problems += _tls_problems(settings)
    read.problems += _oidc_problems(settings, environment)
    if settings.log_level not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
        read.problems.append("ROOMS_LOG_LEVEL is one of DEBUG, INFO, WARNING, ERROR")
    read.problems += [
        f"{old} is now {new}: rename the variable"
        for old, new in RENAMED.items()
        if environment.get(old)
    ]
    if read.problems:
        raise SettingsError(read.problems)
    return settings


def _tls_problems(settings: Settings) -> Iterator[str]:
    """Yield which settings of TLS need another one."""
    pair = (settings.tls_cert, settings.tls_key)
    if settings.tls_listen is None and settings.plain_port == "closed":
        yield "ROOMS_PLAIN_PORT=closed needs ROOMS_TLS_LISTEN: the API would be nowhere"
    if settings.tls_listen is None and any((*pair, settings.tls_client_ca)):
        yield "ROOMS_TLS_LISTEN is missing: without it the files of ROOMS_TLS_… are for nothing"
    if settings.tls_listen is not None and None in pair:
        yield "ROOMS_TLS_LISTEN needs ROOMS_TLS_CERT and ROOMS_TLS_KEY"
    if settings.tls_client_ca is None and settings.tls_client_crl is not None:
        yield "ROOMS_TLS_CLIENT_CRL needs ROOMS_TLS_CLIENT_CA"
    if settings.tls_client_ca is None and settings.tls_client_auth == "required":
        yield "ROOMS_TLS_CLIENT_AUTH=required needs ROOMS_TLS_CLIENT_CA"


def _oidc_problems(settings: Settings, environment: Mapping[str, str]) -> Iterator[str]:
    needed = ("ROOMS_PUBLIC_URL", "ROOMS_OIDC_CLIENT_ID", "ROOMS_OIDC_ROLES")
    if environment.get("ROOMS_OIDC_ISSUER"):
        missing = [name for name in needed if not environment.get(name)]
        if missing:
            yield f"ROOMS_OIDC_ISSUER needs {', '.join(missing)}"
        if "openid" not in settings.oidc_scopes.split():
            yield "ROOMS_OIDC_SCOPES: openid must be one of them"
    else:
        for name in sorted(environment):
            if name.startswith("ROOMS_OIDC_") and environment[name]:
                yield f"{name} needs ROOMS_OIDC_ISSUER"
