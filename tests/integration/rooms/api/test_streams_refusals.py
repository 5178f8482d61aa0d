"""Test refused streams: every parameter beyond its bounds, and the documented refusals."""

from urllib.parse import urlencode

import pytest

from delivery.pull.requests import LIST_PARAMETERS, NUMBER_PARAMETERS
from tests.integration.rooms.api.conftest import Api

ONE = "/subscriptions/{queue}/stream"
SEVERAL = "/stream"
WRONG = [
    *(
        (name, [str(wrong)])
        for name, (low, high) in NUMBER_PARAMETERS.items()
        for wrong in (low - 1, high + 1, "", "1.5", "x")
    ),
    *((name, [str(low), str(low)]) for name, (low, _) in NUMBER_PARAMETERS.items()),
    *((name, ["a:b"] * (most + 1)) for name, most in LIST_PARAMETERS.items()),
    ("header", ["tenant"]),
    ("header", [":7"]),
    ("payload", ["sku"]),
    ("payload", ["sku:\0"]),
    ("browse", ["maybe"]),
    ("browse", ["true", "true"]),
    ("nonsense", ["1"]),
]


@pytest.fixture
async def queue(api: Api) -> str:
    room = await api.room()
    return str((await api.subscription(room["id"], type="PULL"))["id"])


async def test_a_parameter_that_is_wrong_is_named(api: Api, queue: str) -> None:
    """Parameters of a stream of one subscription, some also of a stream of several."""
    for name, values in WRONG:
        query = [(name, value) for value in values]
        several = query if name == "subscription" else [("subscription", queue), *query]
        for path, asked in ((ONE, query), (SEVERAL, several)):
            answer = await api.call("GET", f"{path.format(queue=queue)}?{urlencode(asked)}")
            assert answer.status_code == 422, (path, asked, answer.text)
            assert {error["field"] for error in answer.json()["errors"]} == {name}, (path, asked)


async def test_each_refusal_is_documented_as_a_problem(api: Api, queue: str) -> None:
    room = await api.room("others")
    hook = (await api.subscription(room["id"]))["id"]
    gone = f"{queue[:8]}-0000-7000-8000-000000000000"
    document = (await api.http.get("/schema/openapi.json")).json()
    refused = {
        ONE: [
            (ONE, None, 401),
            (ONE, "publish", 403),
            (ONE, "stranger", 404),
            (ONE.format(queue=gone), "admin", 404),
            (ONE.format(queue=hook), "admin", 409),
            (f"{ONE}?credit=x", "admin", 422),
        ],
        SEVERAL: [
            (f"{SEVERAL}?subscription={queue}", None, 401),
            (f"{SEVERAL}?subscription={queue}", "publish", 403),
            (f"{SEVERAL}?subscription={queue}", "stranger", 404),
            (f"{SEVERAL}?subscription={queue}&subscription={gone}", "admin", 404),
            (f"{SEVERAL}?subscription={queue}&subscription={hook}", "admin", 409),
            (SEVERAL, "admin", 422),
        ],
    }
    for path, cases in refused.items():
        responses = document["paths"][f"/v1{path.format(queue='{subscription_id}')}"]["get"][
            "responses"
        ]
        for asked, key, status in cases:
            answer = await api.call("GET", asked.format(queue=queue), key)
            assert answer.status_code == status, (asked, answer.text)
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["status"] == status
            assert answer.headers["content-type"] in responses[str(status)]["content"]
