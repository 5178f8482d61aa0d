"""Operational events from outside: what happens to deliveries of a room arrives at its owner, signed."""

import json

from standardwebhooks import Webhook

from tests.support.room import Place
from tests.support.service import Service
from tests.support.webhook_sink import Sink


def test_a_signed_webhook_reports_a_sidelined_delivery_and_a_completed_message(
    service: Service, sink: Sink
) -> None:
    place = Place.open(
        service,
        sink,
        operational_events=["rooms.delivery.sidelined", "rooms.message.completed"],
    )
    ops = place.push("ops", operational=True)
    good = place.push("good")
    bad = place.push("bad", terminal_statuses=[400])
    sink.script(bad.path, 400)
    message = place.publish({"id": 1})["message_id"]
    arrivals = sink.wait(ops.path, 2)
    for arrival in arrivals:
        assert Webhook(ops.secret).verify(arrival.body, dict(arrival.headers)) is not None
    reported = {body["type"]: body for body in (json.loads(one.body) for one in arrivals)}
    assert {arrival.headers["rooms-event-type"] for arrival in arrivals} == set(reported)
    sidelined, completed = reported["rooms.delivery.sidelined"], reported["rooms.message.completed"]
    assert (sidelined["total"], sidelined["events"][0]["subscription_id"]) == (1, bad.id)
    assert sidelined["events"][0]["reason"] == "terminal_status"
    assert completed["events"][0]["message_id"] == message
    assert completed["events"][0]["deliveries"] == {"delivered": 1, "sidelined": 1}
    assert len(sink.wait(good.path)) == 1
