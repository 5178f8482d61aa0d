"""The log of filters that fail: it names the failure, and nothing of a message."""

import logging

import pytest

from rooms.domain.ids import SubscriptionId
from rooms.metrics import Metrics
from rooms.publishing.cel_filter import FilterInput, MessageFilter
from rooms.publishing.outcome_metrics import PublishMetrics

SECRET = "personal-number-19121212"


@pytest.mark.parametrize(
    ("expression", "logged"),
    [
        ("payload[payload.name] == 1", "Key not found in map"),
        ("headers[headers['x-name']] == ''", "Key not found in map"),
        ("int(payload.name) == 1", "cannot convert string to int"),
    ],
)
def test_a_filter_that_fails_is_logged_without_values_of_the_message(
    expression: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    message = FilterInput(
        payload=b'{"name": "%b"}' % SECRET.encode(),
        headers={"X-Name": SECRET},
        event_type="person.born",
        event_version=1,
        ordering_key=None,
        priority=4,
    )
    error = MessageFilter(expression).evaluate(message).error or ""
    with caplog.at_level(logging.WARNING):
        PublishMetrics(Metrics()).record_filter_error(SubscriptionId("s"), error)
    assert logged in caplog.text
    assert SECRET not in caplog.text
