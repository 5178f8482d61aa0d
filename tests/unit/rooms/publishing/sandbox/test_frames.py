"""Test jobs of the sandbox: each part is in a job once, and jobs are bounded."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import pytest

from rooms.publishing.sandbox.frames import (
    HEADER,
    MAX_JOB_BYTES,
    MAX_JOB_CHECKS,
    Check,
    CheckJob,
    CompileTask,
    FilterCheck,
    FilterMessage,
    FilterTask,
    SchemaCheck,
    SchemaCompile,
    SchemaTask,
    decode_job,
    encode_frame,
    make_job,
)

SCHEMA: Final = b"s" * (256 * 1024)
OVERHEAD: Final = 64
"""Most bytes of a check beside its parts."""


def message(payload: bytes, headers: dict[str, str] | None = None) -> FilterMessage:
    return FilterMessage(payload, headers or {}, "e", 1, None, 4)


def sent(checks: Sequence[Check], start: int = 0) -> tuple[CheckJob, int]:
    """Return a job as the sandbox receives it, and the size of its frame."""
    frame = encode_frame(make_job(checks, start, cpu_ms=1_000, filter_ms=250))
    assert HEADER.unpack(frame[: HEADER.size]) == (len(frame) - HEADER.size,)
    return decode_job(frame[HEADER.size :]), len(frame)


def all_sent(checks: Sequence[Check]) -> list[tuple[CheckJob, int]]:
    """Return the jobs that these checks take."""
    jobs: list[tuple[CheckJob, int]] = []
    done = 0
    while done < len(checks):
        jobs.append(sent(checks, done))
        done += len(jobs[-1][0].tasks)
    return jobs


def test_the_sandbox_gets_every_check_as_it_was_asked() -> None:
    first, second = message(b"1", {"a": "b"}), message(b"2")
    job, _ = sent(
        [
            SchemaCheck(b"s", b"p", "messages[0].payload"),
            SchemaCompile(b"t", "schema"),
            FilterCheck("f", first),
            FilterCheck("g", second),
            FilterCheck("g", first),
        ]
    )
    assert (job.cpu_ms, job.filter_ms) == (1_000, 250)
    assert (job.texts, job.expressions) == ([b"s", b"p", b"t"], ["f", "g"])
    assert job.messages == [first, second]
    assert job.tasks == [
        SchemaTask(0, 1, "messages[0].payload"),
        CompileTask(2, "schema"),
        FilterTask(0, 0),
        FilterTask(1, 1),
        FilterTask(1, 0),
    ]


def test_a_thousand_checks_by_one_schema_contain_it_once() -> None:
    payloads = [b"%d" % number for number in range(1_000)]
    ((job, size),) = all_sent(
        [SchemaCheck(SCHEMA, payload, "messages[0].payload") for payload in payloads]
    )
    assert len(job.tasks) == len(payloads)
    assert size < len(SCHEMA) + sum(map(len, payloads)) + OVERHEAD * len(payloads)


def test_many_filters_of_a_message_contain_it_once() -> None:
    large = message(b"p" * 250_000, {"h": "v" * 20_000})
    ((job, size),) = all_sent([FilterCheck(f"payload.a == {n}", large) for n in range(200)])
    assert len(job.tasks) == 200
    assert size < 270_000 + OVERHEAD * 200


@pytest.mark.parametrize(
    "checks",
    [
        [SchemaCheck(SCHEMA, b"%d" % n, "payload") for n in range(2_500)],
        [SchemaCheck(SCHEMA, b"p" * 100_000 + b"%d" % n, "payload") for n in range(200)],
        [
            FilterCheck(f"payload.a == {n}", one)
            for one in [message(b"p" * 250_000) for _ in range(64)]
            for n in range(20)
        ],
        [FilterCheck("f", message(b"1", {"h": "v" * 20_000})) for _ in range(500)],
    ],
    ids=["many", "payloads", "messages", "headers"],
)
def test_jobs_are_bounded(checks: list[Check]) -> None:
    jobs = all_sent(checks)
    assert sum(len(job.tasks) for job, _ in jobs) == len(checks)
    assert len(jobs) > 1
    for job, size in jobs:
        assert len(job.tasks) <= MAX_JOB_CHECKS
        assert size < MAX_JOB_BYTES + 2 * len(SCHEMA) + OVERHEAD * len(job.tasks)
    for (first, size), _ in pairwise(jobs):
        assert len(first.tasks) == MAX_JOB_CHECKS or size > MAX_JOB_BYTES - 2 * len(SCHEMA)


def test_what_is_larger_than_a_job_has_one_of_its_own() -> None:
    payloads = [b"p" * (MAX_JOB_BYTES + n) for n in range(3)]
    jobs = all_sent([SchemaCheck(SCHEMA, payload, "payload") for payload in payloads])
    assert [len(job.tasks) for job, _ in jobs] == [1, 1, 1]
