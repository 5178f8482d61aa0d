"""Run Schemathesis on the live OpenAPI document: no 500, nothing undocumented, all answers valid."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import schemathesis
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import positive_data_acceptance

from delivery.pull.requests import MAX_WAIT_MS
from rooms.evidence.jose import generate_key
from tests.support.room import EVENT_TYPE, Place
from tests.support.service import Service
from tests.support.webhook_sink import Sink

EXAMPLES = 5
TIMEOUT_S = 540
LONGEST_CALL_S = 60
"""A poll may wait for half of that."""
MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
ENDS_THE_RUN = ("revoke_key", "rotate_key", "change_key")
# Streams of new resources would never end; `tests/integration/rooms/api/test_streams.py` tests them, and
# `test_streams_refusals.py` those that never begin.
NEVER_END = ("stream", "streams")
# It would start Spark beside these tests; `test_checks.py` tests it.
COSTLY = ("start_analysis",)


class Furniture:
    """Keep resources for the path parameters, and replace those that a call has deleted."""

    def __init__(self, service: Service, sink: Sink) -> None:
        self._service = service
        self._sink = sink
        self._made: dict[str, str] = {}
        self._turn = 0
        # A revoked key stays, so one is enough.
        signing = {"name": "one", "jwk": generate_key("EdDSA").public.to_jwk()}
        self._kid: str = service.post("/signing-keys", signing)["kid"]

    def names(self, *, spoilt: bool) -> dict[str, str]:
        """Return a value for each path parameter; `spoilt`: this call deletes what they name."""
        made = self._made or self._furnish()
        self._made = {} if spoilt else made
        return made

    def _furnish(self) -> dict[str, str]:
        self._turn += 1
        place = Place.open(self._service, self._sink, delivery_attempts=0)
        hook, queue = place.push(), place.queue()
        self._sink.script(hook.path, 500)
        message = place.publish({"id": 1}, id="named")["message_id"]
        gone = self._service.call("DELETE", f"/subscriptions/{place.queue('gone')}")
        handled = self._service.post("/queues", {"name": f"handled-{self._turn}"})["name"]
        grant = {"organisation_id": "*", "kind": "publish"}
        return {
            "room_id": str(place.id),
            "name": EVENT_TYPE,
            "version": "1",
            "subscription_id": queue if self._turn % 2 else hook.id,
            "message_id": message,
            "caller_id": "named",
            "delivery_id": place.await_state(message, hook.id, "sidelined")["id"],
            "job_id": gone.json()["job_id"],
            "magazine": handled if self._turn % 2 else f"subscription-{hook.id}_SIDELINE",
            "queue": handled,
            "key_id": self._service.post("/keys", {"name": "one", "scopes": ["subscribe"]})["id"],
            "session_id": str(uuid4()),  # sessions begin in the console only
            "kid": self._kid,
            "organisation_id": self._service.post("/organisations", {"name": f"m{self._turn}"})[
                "id"
            ],
            "grant_id": self._service.post(f"/rooms/{place.id}/grants", grant)["id"],
        }


def means_its_path(case: schemathesis.Case[Any]) -> bool:
    """Return whether the case gets something else than the path wrong on purpose."""
    assert case.meta is not None
    found = [info for location, info in case.meta.components.items() if location.name == "PATH"]
    return all(info.mode.is_positive for info in found)


def test_no_response_is_undocumented(service: Service, tmp_path: Path) -> None:
    """Run each phase: examples, systematic coverage, random data, and calls that use others' answers.

    Whether valid data is accepted depends on the room's contents, so only that is not checked. Keys
    are neither revoked nor rotated nor changed, as the run's own might be among them; the next test
    does that.
    """
    run = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "schemathesis.cli",
                "run",
                f"{service.url}/schema/openapi.json",
            ),
            *("--header", f"Authorization: Bearer {service.key}", "--max-examples", str(EXAMPLES)),
            *("--request-timeout", str(LONGEST_CALL_S)),
            *("--generation-deterministic", "--no-shrink", "--no-color"),
            *(
                "--exclude-checks",
                "positive_data_acceptance",
            ),
            *(
                part
                for name in (*ENDS_THE_RUN, *NEVER_END, *COSTLY)
                for part in ("--exclude-operation-id", name)
            ),
            *("--suppress-health-check", "all", "--warnings", "off", "--continue-on-failure"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2000:]
    assert "No issues found" in run.stdout


def hasten(case: schemathesis.Case[Any]) -> None:
    """Shorten long polls."""
    body = case.body
    if (
        isinstance(body, dict)
        and isinstance(wait_ms := body.get("wait_ms"), int)
        and 0 < wait_ms <= MAX_WAIT_MS
    ):
        body["wait_ms"] = 1


def probe(
    operation: schemathesis.APIOperation[Any, Any, Any, Any],
    call: Callable[[schemathesis.Case[Any]], None],
) -> str | None:
    """Call with the same few cases in every run; return what failed."""
    cases = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in MODES))
    steady = settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    try:
        steady(given(case=cases)(lambda case: call(case)))()  # noqa: PLW0108 - given() needs a function of its own
    except (AssertionError, BaseExceptionGroup) as failure:
        return f"{operation.label}: {failure!r}"
    return None


def test_existing_resources_answer_as_documented(service: Service, sink: Sink) -> None:
    """Call with ids of existing resources, which random data never meets, and valid and invalid bodies."""
    furniture = Furniture(service, sink)
    seen: Counter[int] = Counter()

    def call(case: schemathesis.Case[Any]) -> None:
        assume(means_its_path(case))
        names = furniture.names(spoilt=case.method.upper() == "DELETE")
        case.path_parameters = {name: names[name] for name in case.path_parameters}
        hasten(case)
        case.headers["Authorization"] = f"Bearer {service.key}"
        answer = case.call_and_validate(excluded_checks=[positive_data_acceptance])
        seen[answer.status_code] += 1

    document = schemathesis.openapi.from_url(f"{service.url}/schema/openapi.json")
    operations = [found.ok() for found in document.get_all_operations() if isinstance(found, Ok)]
    wanted = [one for one in operations if "{" in one.path and not one.path.endswith("/stream")]
    failures = [probe(operation, call) for operation in wanted]
    assert "\n".join(filter(None, failures)) == ""
    assert seen[200] > 10 * EXAMPLES, seen
    assert seen[202] >= EXAMPLES // 2, seen
    assert seen[500] == 0, seen
