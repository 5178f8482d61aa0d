"""Test who sees and changes deliveries of a shared room, and their log."""

from tests.integration.rooms.api.conftest import PAID, ROLES, SUBSCRIBERS, Shared, hidden_from


async def test_deliveries_name_others_only_to_owner_and_in_a_transparent_room(
    shared: Shared,
) -> None:
    message = await shared.publish("publisher", PAID)
    await shared.api.sql(
        "UPDATE deliveries SET last_status = 503, attempts = 2, attempt = 2,"
        " last_error = 'status: see /secret/path' WHERE subscription_id = %s RETURNING 1",
        shared.subscriptions["first"],
    )
    path = f"/messages/{message}/deliveries"
    for key in SUBSCRIBERS:
        body = await shared.read(path, key)
        assert [one["subscription_id"] for one in body["items"]] == [shared.subscriptions[key]]
        (one,) = body["items"]
        assert one == await shared.read(f"/deliveries/{one['id']}", key)
        for other in ROLES:
            if other != key:
                answer = await shared.api.call("GET", f"/deliveries/{one['id']}", other)
                assert answer.status_code == 404
                assert answer.json()["detail"] == f"there is no delivery {one['id']}"
    assert (await shared.read(path, "publisher")) == {"items": [], "next_cursor": None}

    owner = await shared.read(path, "admin")
    assert {one["subscription"] for one in owner["items"]} == {"of-admin", "of-first", "of-second"}
    hidden_from(owner, "secret")
    (first,) = [one for one in owner["items"] if one["subscription"] == "of-first"]
    assert (first["last_status"], first["last_error"], first["attempts"]) == (503, "status", 2)
    assert first["organisation_id"] == shared.organisations["first"]
    (mine,) = (await shared.read(path, "first"))["items"]
    assert mine["last_error"] == "status: see /secret/path"

    changed = await shared.api.call("PATCH", f"/rooms/{shared.room}", json={"transparent": True})
    assert changed.status_code == 200, changed.text
    named = await shared.read(path, "publisher")
    assert {one["subscription"] for one in named["items"]} == {"of-admin", "of-first", "of-second"}
    hidden_from(named, "secret", '": 503', "status:", shared.organisations["first"])
    assert {one["attempts"] for one in named["items"]} == {None}
    assert len((await shared.read(path, "first"))["items"]) == 1


async def test_the_log_shows_each_its_part(shared: Shared) -> None:
    await shared.key("publisher", "till", ["publish"], application="till-4")
    message = await shared.publish("till", PAID)
    await shared.api.sql(
        "INSERT INTO log_entries (room_id, message_id, writer_id, writer_seq, kind, subscription_id,"
        " delivery_id, generation, attempt, http_status, error_class, detail, answer_head,"
        " target_host) SELECT room_id, message_id, 99, 10 * row_number() OVER (), 'attempted',"
        " subscription_id, id, 0, 0, 503, 'status', 'secret detail', 'secret answer', 'host.example'"
        " FROM deliveries WHERE message_id = %s RETURNING 1",
        message,
    )
    path = f"/messages/{message}/journey"

    async def steps(key: str) -> list[tuple[str, str | None]]:
        names = {identity: name for name, identity in shared.subscriptions.items()}
        found = (await shared.read(path, key))["items"]
        return sorted((one["kind"], names.get(one["subscription_id"])) for one in found)

    assert await steps("admin") == sorted(
        [("published", None)]
        + [(kind, key) for kind in ("enqueued", "attempted") for key in shared.subscriptions],
        key=str,
    )
    assert await steps("publisher") == [("published", None)]
    for key in SUBSCRIBERS:
        assert await steps(key) == [("attempted", key), ("enqueued", key)]
        body = await shared.read(path, key)
        hidden_from(body, "till-4", *(shared.subscriptions.keys() - {key}))
        assert {one["writer"] for one in body["items"]} == {None}
        assert body["items"][-1]["answer"] == "secret answer"
    for key in ("admin", "publisher"):
        (published,) = [
            one for one in (await shared.read(path, key))["items"] if one["kind"] == "published"
        ]
        assert published["publisher_organisation"] == "publisher"
        assert published["application"] == "till-4"
        assert published["publisher_id"] is not None
        assert published["fanout"] == 3
    attempted = {
        one["subscription_id"]: one
        for one in (await shared.read(path, "admin"))["items"]
        if one["kind"] == "attempted"
    }
    own = attempted.pop(shared.subscriptions["admin"])
    assert (own["answer"], own["detail"]) == ("secret answer", "secret detail")
    for one in attempted.values():
        hidden_from(one, "secret")
        assert (one["http_status"], one["target_host"]) == (503, "host.example")


async def test_only_owner_and_publisher_withdraw_and_a_publisher_reads_counts(
    shared: Shared,
) -> None:
    path = f"/rooms/{shared.room}/messages"
    for key in (*SUBSCRIBERS, "stranger"):
        message = await shared.publish("publisher", PAID)
        for method, body in (("DELETE", None), ("PATCH", {"delay_ms": 60_000})):
            answer = await shared.api.call(method, f"/messages/{message}", key, json=body)
            assert answer.status_code == 404
            assert answer.json()["detail"] == f"there is no message {message}"
    message = await shared.publish("publisher", PAID)
    moved = await shared.api.call(
        "PATCH", f"/messages/{message}", "publisher", json={"delay_ms": 60_000}
    )
    assert moved.status_code == 200, moved.text
    assert (moved.json()["deliveries"], moved.json()["results"]) == ([], {"moved": 3})
    hidden_from(moved.json(), *shared.subscriptions.values())
    gone = await shared.api.call("DELETE", f"/messages/{message}", "publisher")
    assert gone.status_code == 200, gone.text
    assert (gone.json()["deliveries"], gone.json()["results"]) == ([], {"withdrawn": 3})
    again = await shared.api.call("DELETE", f"/messages/{message}", "publisher")
    assert again.status_code == 409
    hidden_from(again.json(), *shared.subscriptions.values())

    message = await shared.publish("publisher", PAID)
    owner = await shared.api.call("DELETE", f"/messages/{message}")
    assert {one["subscription_id"] for one in owner.json()["deliveries"]} == set(
        shared.subscriptions.values()
    )
    own = await shared.publish("admin")
    assert await shared.status("DELETE", f"/messages/{own}", "publisher") == 404
    assert len((await shared.read(path, "publisher"))["items"]) == 5


async def test_a_subscriber_resends_nothing_that_was_withdrawn_or_is_not_due(
    shared: Shared,
) -> None:
    async def resend(key: str, message: str) -> tuple[int, str]:
        ((delivery,),) = await shared.api.sql(
            "SELECT id::text FROM deliveries WHERE message_id = %s AND subscription_id = %s",
            message,
            shared.subscriptions[key],
        )
        answer = await shared.api.call("POST", f"/deliveries/{delivery}/redeliver", key)
        return answer.status_code, answer.json().get("detail", "")

    async def is_shown(message: str) -> bool:
        return "payload" in await shared.read(f"/messages/{message}", "first")

    withdrawn = await shared.publish("publisher", PAID)
    assert await shared.status("DELETE", f"/messages/{withdrawn}", "publisher") == 200
    assert await resend("first", withdrawn) == (409, "it was withdrawn, and is sent no more")
    later = await shared.publish("publisher", PAID, delay_ms=3_600_000)
    await shared.api.sql(
        "UPDATE deliveries SET state = 'cancelled', reason = 'cleared', due_at = NULL"
        " WHERE message_id = %s RETURNING 1",
        later,
    )
    await shared.api.sql("DELETE FROM outbox WHERE message_id = %s RETURNING 1", later)
    assert (await resend("first", later))[0] == 404, "it is not due, so it is not there"
    assert not await is_shown(withdrawn)
    assert await shared.status("GET", f"/messages/{later}", "first") == 404
    assert (await resend("admin", withdrawn))[0] == 200, "the room's messages are its owner's"
    cleared = await shared.publish("publisher", PAID)
    await shared.api.sql(
        "UPDATE deliveries SET state = 'cancelled', reason = 'cleared', due_at = NULL"
        " WHERE message_id = %s RETURNING 1",
        cleared,
    )
    await shared.api.sql("DELETE FROM outbox WHERE message_id = %s RETURNING 1", cleared)
    assert (await resend("first", cleared))[0] == 200
    assert await is_shown(cleared)


async def test_a_publisher_without_its_grant_reads_its_messages_and_changes_none(
    shared: Shared,
) -> None:
    message = await shared.publish("publisher", PAID)
    grants = (await shared.read(f"/rooms/{shared.room}/grants", "admin", kind="publish"))["items"]
    for grant in grants:
        revoked = await shared.api.call("DELETE", f"/rooms/{shared.room}/grants/{grant['id']}")
        assert revoked.status_code in {200, 204}, revoked.text
    assert await shared.listed("publisher") == [message]
    assert (await shared.read(f"/messages/{message}", "publisher"))["fanout"] == 3
    assert await shared.status("DELETE", f"/messages/{message}", "publisher") == 404


async def test_ids_of_others_stand_nowhere_for_a_subscription(shared: Shared) -> None:
    await shared.publish("admin", PAID)
    for key in ROLES:
        for owner, identity in shared.subscriptions.items():
            if key == owner:
                continue
            other = identity[:14] + "0000" + identity[18:]
            for method, path, more in (
                ("GET", "deliveries", {}),
                ("GET", "sideline", {}),
                ("GET", "sideline/schedule", {}),
                ("GET", "lane", {}),
                ("GET", "ordering-keys", {}),
                ("GET", "stream", {}),
                ("POST", "sideline/shovel", {}),
                ("POST", "sideline/purge", {}),
                ("POST", "pause", {}),
                ("POST", "resume", {}),
                ("POST", "test", {}),
                ("POST", "pull", {}),
                ("POST", "ack", {"json": {"ack_ids": ["x"]}}),
                ("POST", "replay", {"json": {"since": "2020-01-01T00:00:00Z"}}),
                ("POST", "rotate-secret", {}),
                ("POST", "ordering-keys/skip", {"json": {"ordering_key": "k"}}),
                ("PUT", "sideline/schedule", {"json": {"interval_s": 60}}),
                ("DELETE", "sideline/schedule", {}),
            ):
                answer = await shared.api.call(
                    method, f"/subscriptions/{identity}/{path}", key, **more
                )
                missing = await shared.api.call(
                    method, f"/subscriptions/{other}/{path}", key, **more
                )
                assert answer.status_code == missing.status_code == 404, (key, owner, path)
                assert answer.json()["detail"].replace(identity, other) == missing.json()["detail"]
    deliveries = await shared.api.sql("SELECT id::text, subscription_id::text FROM deliveries")
    whose = {identity: key for key, identity in shared.subscriptions.items()}
    for delivery, subscription in deliveries:
        for key in ROLES:
            if key != whose[subscription]:
                answer = await shared.api.call("POST", f"/deliveries/{delivery}/redeliver", key)
                assert answer.status_code == 404
                assert answer.json()["detail"] == f"there is no delivery {delivery}"
