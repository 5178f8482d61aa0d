"""Rotate the secret key while everything runs: nothing is lost, and no call has a wrong signature or header.

Also what a dump, the logs and the list of processes show, and a process with another key.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url
from standardwebhooks.webhooks import Webhook

from rooms.db.connection import psycopg_url
from rooms.db.secret_rotation import receipt_key_purpose
from rooms.db.secrets import KEY_FILE, Cipher, key_id, read_secret_keys
from rooms.evidence.jose import ed25519_key, read_jws
from rooms.evidence.receipt import TYPE
from rooms.local.postgres import find_binaries
from rooms.local.services import free_port
from tests.support.polling import until
from tests.support.process_group import Crew, Process, assembled
from tests.support.room import Hook, Place
from tests.support.service import ROOT
from tests.support.webhook_sink import Reply, Sink

HEADER = "Bearer s3cret-of-{}"
VISIBLE = "X-Team=no-secret-of-the-team"
MANY = 3000
LIMIT_S = 60.0


def rooms(
    crew: Crew, *arguments: str, settings: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command beside the processes of the crew, as 45 s after those that were killed."""
    age_the_dead(crew)
    return subprocess.run(
        [sys.executable, "-m", "rooms", *arguments],
        cwd=ROOT,
        env={**crew._environment(free_port()), **(settings or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def age_the_dead(crew: Crew) -> None:
    """Let each process on record that has died be one that was seen a minute ago.

    A rotation waits until such a process counts as ended; those that run confirm their rows.
    """
    for name, pid in crew.rows("SELECT name, pid FROM processes WHERE NOT stopped"):
        if not is_running(pid):
            crew.rows(
                "UPDATE processes SET seen_at = now() - interval '1 min' WHERE name = %s"
                " RETURNING 1",
                name,
            )


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def subscribe(place: Place, name: str) -> Hook:
    return place.push(name, headers={"Authorization": HEADER.format(name)})


def keys(crew: Crew) -> list[str]:
    """Return the names of the keys in the file, the one that seals first."""
    return [key_id(key) for key in read_secret_keys(None, crew.folder)]


def sealed_by(crew: Crew) -> set[str]:
    rows = crew.rows(
        "SELECT DISTINCT encode(substring(x from 4 for 8), 'hex') FROM subscriptions"
        " CROSS JOIN LATERAL (VALUES (secret), (previous_secret), (sealed_headers)) AS v (x)"
        " WHERE x IS NOT NULL UNION"
        " SELECT encode(substring(encrypted_key from 4 for 8), 'hex') FROM receipt_keys"
        " WHERE encrypted_key IS NOT NULL"
    )
    return {row[0] for row in rows}


def receipt_kid(crew: Crew, message: str) -> str:
    """Return the key that signed a new receipt of the message."""
    jws = crew.get(f"/messages/{message}/receipt")["receipt"]
    return read_jws(jws, TYPE).header.kid


def await_all(crew: Crew, place: Place, count: int) -> None:
    def delivered() -> bool:
        found = crew.rows(
            "SELECT state::text, count(*) FROM deliveries WHERE room_id = %s GROUP BY 1", place.id
        )
        return dict(found) == {"delivered": count}

    until(delivered, f"{count} deliveries", within_s=90)


def check_calls(sink: Sink, hooks: Mapping[str, Hook], count: int) -> None:
    """Every message came to every hook, with its own header, and signed with its own secret."""
    for name, hook in hooks.items():
        arrivals = sink.arrivals(hook.path)
        assert len({arrival.webhook_id for arrival in arrivals}) == count
        for arrival in arrivals:
            assert arrival.headers["authorization"] == HEADER.format(name)
            Webhook(hook.secret).verify(arrival.body, dict(arrival.headers))


@contextmanager
def publishing(place: Place) -> Iterator[list[str]]:
    """Publish without a pause within the block; yield the ids of what was accepted."""
    accepted: list[str] = []
    stop = threading.Event()

    def publish() -> None:
        while not stop.is_set():
            accepted.append(str(place.publish(len(accepted))["message_id"]))

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield accepted
    finally:
        stop.set()
        thread.join()


def test_a_rotation_under_load_loses_nothing(crew: Crew, place: Place, sink: Sink) -> None:
    """The file is replaced, all is sealed again, and the old key goes, while messages are delivered."""
    hooks = {name: subscribe(place, name) for name in ("a", "b", "c")}
    crew.start("worker")
    crew.start("worker")
    kid = receipt_kid(crew, str(place.publish("receipt")["message_id"]))
    (before,) = keys(crew)
    new = before
    with publishing(place) as accepted:
        until(lambda: len(sink.arrivals(hooks["a"].path)) > 20, "calls under way")
        cursor = crew.get(f"{place.at}/subscriptions", limit=1)["next_cursor"]
        for rotation in range(2):
            answer = rooms(crew, "secret-key", "rotate")
            assert answer.returncode == 0, answer.stderr
            assert "nothing is left" in answer.stdout
            new = keys(crew)[0]
            hooks[f"later-{rotation}"] = late = subscribe(place, f"later-{rotation}")
            until(lambda late=late: len(sink.arrivals(late.path)) > 5, "calls of a new one")  # type: ignore[misc]
            assert sealed_by(crew) == {new}
        page = crew.get(f"{place.at}/subscriptions", limit=1, cursor=cursor)
        assert len(page["items"]) == 1
        assert rooms(crew, "secret-key", "prune").returncode == 0
        assert keys(crew) == [new]
        assert new != before
        refused = crew.call("GET", f"{place.at}/subscriptions?limit=1&cursor={cursor}")
        assert refused.status_code == 422
        assert refused.json()["errors"][0]["field"] == "cursor"
        seen = len(accepted)
        until(lambda: len(accepted) > seen + 20, "messages after the end of the old key")
        assert receipt_kid(crew, accepted[-1]) == kid, "the key of receipts is the same"
    count = len(accepted) + 1
    firsts = {name: hooks[name] for name in ("a", "b", "c")}
    until(
        lambda: all(
            len({one.webhook_id for one in sink.arrivals(hook.path)}) == count
            for hook in firsts.values()
        ),
        "every message at every hook",
        within_s=90,
    )
    check_calls(sink, firsts, count)
    for name in ("later-0", "later-1"):
        arrivals = sink.arrivals(hooks[name].path)
        check_calls(sink, {name: hooks[name]}, len({one.webhook_id for one in arrivals}))
    status = rooms(crew, "--json", "secret-key", "status")
    assert f'"key": "{new}", "role": "seals"' in status.stdout


def test_a_rotation_that_is_killed_is_continued(crew: Crew, place: Place, sink: Sink) -> None:
    hook = subscribe(place, "killed")
    crew.rows(
        "INSERT INTO subscriptions (room_id, id, name, type, organisation_id, push_url, secret)"
        " SELECT s.room_id, gen_random_uuid(), 'copy-' || n, 'PUSH', s.organisation_id, s.push_url, s.secret"
        " FROM subscriptions s, generate_series(1, %s) AS n WHERE s.id = %s RETURNING 1",
        MANY,
        hook.id,
    )
    (before,) = keys(crew)
    age_the_dead(crew)
    log = crew.folder / "rotate.log"
    with log.open("wb") as writing:
        process = subprocess.Popen(
            [sys.executable, "-m", "rooms", "secret-key", "rotate"],
            cwd=ROOT,
            env=dict(crew._environment(free_port())),
            stdout=writing,
            stderr=writing,
        )
    until(lambda: len(sealed_by(crew)) == 2, "the rotation to be under way")
    process.send_signal(signal.SIGKILL)
    assert process.wait(LIMIT_S) == -signal.SIGKILL, log.read_text()
    assert len(sealed_by(crew)) == 2, "it was killed in the middle"
    interrupted = keys(crew)
    assert interrupted[1:] == [before]
    crew.start("worker")
    crew.rows("UPDATE subscriptions SET status = 'paused' WHERE name LIKE 'copy-%%' RETURNING 1")
    place.publish(1)
    until(lambda: sink.arrivals(hook.path), "a call between the two runs")
    answer = rooms(crew, "secret-key", "rotate")
    assert answer.returncode == 0, answer.stderr
    assert "continuing" in answer.stderr
    assert keys(crew) == interrupted
    assert sealed_by(crew) == {interrupted[0]}
    place.publish(2)
    until(lambda: len(sink.arrivals(hook.path)) == 2, "a call after it")
    check_calls(sink, {"killed": hook}, 2)
    crew.rows("DELETE FROM subscriptions WHERE name LIKE 'copy-%%' RETURNING 1")
    assert rooms(crew, "secret-key", "prune").returncode == 0


def test_keys_in_the_environment_are_rotated_process_by_process(
    database: str, tmp_path: Path, sink: Sink
) -> None:
    old, new = (b64encode(bytes([number]) * 32).decode() for number in (1, 2))
    with assembled(tmp_path, database, environment={"ROOMS_SECRET_KEY": old}) as (crew, api):
        apis = [api]
        place = Place.open(crew, sink, delivery_delay_ms=50)
        hooks = {name: subscribe(place, name) for name in ("a", "b")}
        refused = rooms(crew, "secret-key", "rotate")
        assert refused.returncode == 1
        assert "OLD,NEW" in refused.stderr
        workers = [crew.start("worker")]
        with publishing(place) as accepted:
            for value in (f"{old},{new}", f"{new},{old}"):
                crew.broker = {"ROOMS_SECRET_KEY": value}
                workers.append(crew.start("worker"))
                # Both: one that is stopped while it starts ends by the signal.
                until(lambda: str(backends(crew)).count("rooms endpoints") == 2, "two workers")
                stop(workers[-2])
                apis.append(crew.start("serve"))
                crew.http.base_url = apis[-1].url
                stop(apis[-2])
                before = len(sink.arrivals(hooks["a"].path))
                until(
                    lambda before=before: len(sink.arrivals(hooks["a"].path)) > before + 10,  # type: ignore[misc]
                    "calls by the next worker",
                )
            answer = rooms(crew, "--json", "secret-key", "rotate")
            assert answer.returncode == 0, answer.stderr
            assert '"left": 0' in answer.stdout
        assert sealed_by(crew) == {key_id(bytes([2]) * 32)}
        crew.broker = {"ROOMS_SECRET_KEY": new}
        crew.start("worker")
        workers[-1].kill()
        place.publish("last")
        await_all(crew, place, 2 * (len(accepted) + 1))
        check_calls(sink, hooks, len(accepted) + 1)


def stop(process: Process) -> None:
    """Let a process end its work, as for a restart."""
    process.process.terminate()
    assert process.process.wait(LIMIT_S) == 0, process.reported()


def backends(crew: Crew) -> list[Any]:
    return crew.rows("SELECT application_name FROM pg_stat_activity")


@pytest.mark.parametrize("command", ["serve", "worker", "standalone"])
def test_a_process_with_another_key_ends_with_one_line(
    crew: Crew, place: Place, command: str
) -> None:
    subscribe(place, "wrong")
    wrong = bytes(range(32))
    answer = rooms(crew, command, settings={"ROOMS_SECRET_KEY": b64encode(wrong).decode()})
    assert answer.returncode == 1
    last = answer.stderr.strip().splitlines()[-1]
    assert "not there" in last
    assert keys(crew)[0] in last
    assert key_id(wrong) in last
    assert "Traceback" not in answer.stderr
    assert b64encode(wrong).decode() not in answer.stderr


@contextmanager
def watching_arguments() -> Iterator[set[bytes]]:
    """Look at the list of processes again and again; yield the arguments that were seen."""
    seen: set[bytes] = set()
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            for entry in Path("/proc").iterdir():
                if entry.name.isdecimal():
                    with suppress(OSError):
                        seen.add((entry / "cmdline").read_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def subscribe_by_command(crew: Crew, place: Place, name: str) -> Hook:
    """Create a webhook with a secret header in a file, and one without a secret as an argument."""
    path = f"/{place.id}/{name}"
    file = crew.folder / "headers"
    file.write_text(f"Authorization={HEADER.format(name)}\n")
    with watching_arguments() as seen:
        answer = rooms(
            crew, "--json", "subscription", "create", place.made["name"], name,
            "--push-url", place.sink.url(path), "--headers-file", str(file), "--header", VISIBLE,
            settings={
                "ROOMS_URL": str(crew.http.base_url),
                "ROOMS_API_KEY": crew.http.headers["authorization"].removeprefix("Bearer "),
            },
        )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    arguments = b"".join(seen)
    assert VISIBLE.encode() in arguments, "the command was seen; this is why there is a file"
    assert HEADER.format(name).encode() not in arguments
    made = json.loads(answer.stdout)
    return Hook(id=made["id"], path=path, secret=made["secret"], destination=made["destination"])


def other_secrets(crew: Crew, place: Place) -> list[str]:
    """Create an API key, links and a receipt; return what each keeps secret."""
    key = crew.post("/keys", {"name": "dumped", "scopes": ["view"]})["key"]
    sign_in = crew.post("/sign-in-links", {"name": "ada", "roles": ["owner"]})
    own = crew.get("/whoami")["organisation"]["id"]
    portal = crew.post("/portal-links", {"name": "ada", "organisation_id": own})
    kid = receipt_kid(crew, str(place.publish(0)["message_id"]))
    ((sealed,),) = crew.rows("SELECT encrypted_key FROM receipt_keys WHERE kid = %s", kid)
    cipher = Cipher(*read_secret_keys(None, crew.folder))
    seed = cipher.decrypt(bytes(sealed), receipt_key_purpose(kid))
    return [
        key,
        *(made["path"].partition("token=")[2] for made in (sign_in, portal)),
        *(seed.hex(), ed25519_key(seed).to_jwk()["d"]),
    ]


def test_no_secret_is_in_a_dump_a_log_or_the_list_of_processes(
    crew: Crew, place: Place, sink: Sink
) -> None:
    hook = subscribe_by_command(crew, place, "dumped")
    other = Place.open(crew, sink)
    old = other.push("old")
    crew.rows(
        'UPDATE subscriptions SET headers = \'{"X-Old": "s3cret-of-before"}\' WHERE id = %s'
        " RETURNING 1",
        old.id,
    )
    rotated = crew.post(f"/subscriptions/{hook.id}/rotate-secret", {})["secret"]
    sink.behave(
        hook.path,
        lambda call: Reply(status=500, body=b"heard " + call.headers["authorization"].encode()),
    )
    crew.start("worker")
    others = other_secrets(crew, other)
    other.publish(1)
    place.publish(1)
    with watching_arguments() as arguments:
        until(lambda: sink.arrivals(old.path) and len(sink.arrivals(hook.path)) > 1, "calls")
        assert sink.arrivals(old.path)[0].headers["x-old"] == "s3cret-of-before"
        assert rooms(crew, "secret-key", "rotate").returncode == 0
    dump = dumped(crew.database_url)
    assert hook.id.encode() in dump
    assert b"heard ***".hex().encode() in dump or b"heard ***" in dump
    logs = b"".join(log.read_bytes() for log in crew.folder.glob("*.log"))
    assert any(b"secret-key" in one for one in arguments)
    secrets = [
        HEADER.format("dumped"), "s3cret-of-before", hook.secret.removeprefix("whsec_"),
        rotated.removeprefix("whsec_"), old.secret.removeprefix("whsec_"),
        *(crew.folder / KEY_FILE).read_text().split(), *others,
    ]  # fmt: skip
    assert all(len(secret) > 8 for secret in secrets)
    for secret in secrets:
        for text in (secret.encode(), secret.encode().hex().encode()):
            assert text not in dump
            assert text not in logs
            assert not any(text in one for one in arguments)


def dumped(url: str) -> bytes:
    """Return what pg_dump writes."""
    address = make_url(psycopg_url(url)).render_as_string(hide_password=False)
    return subprocess.run(
        [str(find_binaries().postgres.with_name("pg_dump")), "--inserts", address],
        capture_output=True,
        check=True,
        timeout=LIMIT_S,
    ).stdout
