"""Test clients, EventItems and templates of push URLs."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.domain.govstack import ClientId, check_template, event_item, push_url
from rooms.domain.push_url import MAX_URL

CLIENT = ClientId(member_id="EE/GOV/1", application="app")
PART = st.from_regex(r"[A-Za-z0-9_.\-]{1,64}", fullmatch=True)


@given(st.tuples(PART, PART, PART, PART))
def test_a_client_reads_as_it_is_written(parts: tuple[str, str, str, str]) -> None:
    text = "/".join(parts)
    client = ClientId.parse(text)
    assert str(client) == text
    assert tuple(client.parts().values()) == parts


@pytest.mark.parametrize(
    "text", ["", "a/b/c", "a/b/c/d/e", "a//c/d", "a/b/c/", "a/b/c/d ", "a/b/c/d\n"]
)
def test_other_texts_are_no_client(text: str) -> None:
    with pytest.raises(ValueError, match="instance/class/code/application"):
        ClientId.parse(text)


def test_an_event_item_keeps_the_bytes_of_its_payload() -> None:
    payload = b'{ "n" : 1.0 }'
    found = event_item("id", "type", payload, publisher=CLIENT, sequence=3)
    assert found.endswith(b',"event":%b}' % payload)
    assert json.loads(found) == {
        "id": "id",
        "sequence": 3,
        "publisherId": {
            "instanceId": "EE",
            "memberClass": "GOV",
            "memberCode": "1",
            "applicationCode": "app",
        },
        "eventType": "type",
        "event": {"n": 1},
    }
    assert json.loads(event_item("id", "type", None, publisher=None)) == {
        "id": "id",
        "eventType": "type",
    }


def test_a_template_is_filled_with_all_parts() -> None:
    template = "https://ss/{instanceId}/{memberClass}/{memberCode}/{applicationCode}?t={eventType}"
    check_template(template)
    assert push_url(template, CLIENT, "order.made") == "https://ss/EE/GOV/1/app?t=order.made"
    check_template("https://ss/plain")


@pytest.mark.parametrize(
    "template",
    [
        "",
        "https://{memberCode}.example.com/",
        "https://ss:{memberCode}/",
        "{instanceId}://ss/",
        "https://ss/{unknown}",
        "https://ss/{eventType",
        "https://ss/eventType}",
        "https://ss/{{eventType}}",
        "https://ss/{}",
        "ftp://ss/{eventType}",
        "https://ss/{eventType}#x",
        "https://user@ss/{eventType}",
        "https://ss/" + "x" * MAX_URL,
        "https://ss/" + "{eventType}" * 20,
    ],
)
def test_a_wrong_template_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match=r"URL|template|placeholders|host|white|port"):
        check_template(template)


@pytest.mark.parametrize("part", [".", ".."])
def test_no_part_moves_up_the_path(part: str) -> None:
    with pytest.raises(ValueError, match="no path has"):
        push_url(
            "https://ss/a/{applicationCode}", ClientId(member_id="a/b/c", application=part), "x"
        )
    with pytest.raises(ValueError, match="no path has"):
        push_url("https://ss/a/{eventType}", CLIENT, part)
