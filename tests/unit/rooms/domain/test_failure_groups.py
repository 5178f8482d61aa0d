"""Test how failing subscriptions are grouped by their endpoint and its answer."""

from typing import Any

from rooms.domain.failure_groups import group_failures, summarize


def failing(identity: str, **fields: Any) -> dict[str, Any]:
    """Return a subscription as `/v1/status` lists it."""
    return {
        "subscription_id": identity,
        "condition": "failing",
        "host": "one.test",
        "authority": "one.test:9001",
        "last_status": None,
        "last_error": "connect: refused",
        **fields,
    }


def grouped(*subscriptions: dict[str, Any]) -> list[str]:
    """Return the ids of each group, joined."""
    groups = group_failures(subscriptions)
    return ["".join(str(one["subscription_id"]) for one in group) for group in groups]


def test_two_causes_are_two_groups() -> None:
    answered = {"last_status": 500, "last_error": "status: busy"}
    mixed = [failing(one, **({} if one in "ace" else answered)) for one in "abcdef"]
    assert grouped(*mixed) == ["ace", "bdf"]


def test_a_port_is_an_endpoint_of_its_own() -> None:
    other = [failing(one, authority="one.test:9002") for one in "xyz"]
    assert grouped(*map(failing, "abc"), *other) == ["abc", "xyz"]


def test_kinds_of_errors_are_grouped_whatever_their_details() -> None:
    late = [failing(one, last_error=f"timeout: {one} s") for one in "123"]
    assert grouped(*late, failing("a")) == ["123", "a"]


def test_few_alike_are_not_grouped() -> None:
    assert grouped(failing("a"), failing("b")) == ["a", "b"]


def test_those_that_do_not_fail_or_have_no_endpoint_are_not_grouped() -> None:
    pulled = [failing(one, host=None, authority=None) for one in "abc"]
    paused = [failing(one, condition="paused") for one in "def"]
    unknown = [failing(one, last_error=None) for one in "ghi"]
    assert grouped(*pulled, *paused, *unknown) == list("abcdefghi")


def test_a_service_without_ports_is_grouped_by_host() -> None:
    old = [failing(one) for one in "abc"]
    for one in old:
        del one["authority"]
    assert grouped(*old) == ["abc"]


def test_a_group_has_the_first_failure_the_last_success_and_all_counts() -> None:
    def counted(hour: int, delivered: str | None) -> dict[str, Any]:
        return failing(
            f"{hour}",
            since=f"2026-01-31T0{hour}:00:00Z",
            last_delivered_at=delivered,
            held={"paused": 1, f"{hour}": 2},
            **dict.fromkeys(("due", "retrying", "waiting", "sidelined"), hour),
        )

    found = summarize([counted(3, "2026-01-01T00:00:00Z"), counted(2, None), counted(4, None)])
    assert (found["subscription_id"], found["since"]) == ("3", "2026-01-31T02:00:00Z")
    assert found["last_delivered_at"] == "2026-01-01T00:00:00Z"
    assert sum(found["held"].values()) == 9
    assert {found[name] for name in ("due", "retrying", "waiting", "sidelined")} == {9}
    alone = summarize([counted(1, None)])
    assert alone == counted(1, None)
