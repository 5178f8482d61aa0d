"""The sandbox's process: does checks that may take too long, and may be ended at any time.

Run as `python -m rooms.publishing.sandbox_process MEMORY_BYTES`. Jobs come on standard input, outcomes go to standard output; it
ends when standard input does. The kernel ends it when a check has used its CPU time (SIGPROF), or its memory (an allocation
fails). CPU time and not the clock's, so that a machine under load refuses nothing that it accepts at other times.
"""

import functools
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from rooms.errors import FieldProblem, InvalidError
from rooms.publishing.filter import MessageFilter, Subject, kept_filter
from rooms.publishing.sandbox_frames import (
    HEADER,
    FilterCheck,
    Job,
    Outcome,
    SchemaCheck,
    SchemaCompile,
    packed,
    read_job,
)
from rooms.publishing.schemas import PayloadSchema

_NICE: Final = 5
_UNBOUNDED: Final = 1 << 40
"""The API has bounded a schema's bytes."""


@functools.lru_cache(maxsize=64)
def _schema(text: bytes) -> PayloadSchema:
    return PayloadSchema(msgspec.json.decode(text), field="event_type", max_bytes=_UNBOUNDED, compiled=True)


@functools.lru_cache(maxsize=256)
def _filter(expression: str) -> MessageFilter:
    return kept_filter(expression, clock_s=time.process_time)


class _Process:
    def __init__(self, jobs: BinaryIO, outcomes: int) -> None:
        self._jobs = jobs
        self._outcomes = outcomes

    def serve(self) -> None:
        """Do jobs until there are no more."""
        while len(header := self._jobs.read(HEADER.size)) == HEADER.size:
            (size,) = HEADER.unpack(header)
            job = read_job(self._jobs.read(size))
            self._do(job)

    def _do(self, job: Job) -> None:
        left_ms = job.cpu_ms
        for check, each_ms in zip(job.checks, job.each_ms, strict=True):
            begun = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, max(min(left_ms, each_ms), 1.0) / 1000)
            outcome = self._outcome(check)
            signal.setitimer(signal.ITIMER_PROF, 0)
            outcome.cpu_ms = (time.process_time() - begun) * 1000
            left_ms -= outcome.cpu_ms
            self._write(outcome)

    def _outcome(self, check: SchemaCheck | SchemaCompile | FilterCheck) -> Outcome:
        match check:
            case FilterCheck():
                return _filtered(check)
            case SchemaCompile():
                return _compiled(check)
            case SchemaCheck():
                return self._checked(check)

    def _checked(self, check: SchemaCheck) -> Outcome:
        try:
            schema = _schema(check.schema)
            value = msgspec.json.decode(check.payload)
            fits = schema.is_valid(value)
        except InvalidError as exc:
            return _problems(exc.problems)
        except (ValueError, RecursionError) as exc:
            return _problems([FieldProblem(check.at, f"cannot be validated: {str(exc)[:300]}")])
        if fits:
            return Outcome()
        # Listing what is wrong takes more than finding that something is.
        self._write(Outcome(final=False))
        return _problems(schema.listed(value, check.at))

    def _write(self, outcome: Outcome) -> None:
        left = memoryview(packed(outcome))
        while left:
            left = left[os.write(self._outcomes, left) :]


def _compiled(check: SchemaCompile) -> Outcome:
    try:
        PayloadSchema(msgspec.json.decode(check.schema), field=check.at, max_bytes=_UNBOUNDED, compiled=True)
    except InvalidError as exc:
        return _problems(exc.problems)
    return Outcome()


def _filtered(check: FilterCheck) -> Outcome:
    judgement = _filter(check.expression).judge(
        Subject(
            payload=check.payload,
            headers=check.headers,
            event_type=check.event_type,
            event_version=check.event_version,
            ordering_key=check.ordering_key,
            priority=check.priority,
        )
    )
    return Outcome(matches=judgement.matches, error=judgement.error)


def _problems(problems: list[FieldProblem] | tuple[FieldProblem, ...]) -> Outcome:
    return Outcome([(problem.field, problem.message) for problem in problems])


def _bound(memory_bytes: int) -> None:
    """Make this process the first to go, the last to run, and a bounded one."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with suppress(OSError):
        os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes, mapped + memory_bytes))


def main() -> None:
    """Serve; the API ends this process, not the signals that are meant for the API."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    outcomes = os.dup(1)
    os.dup2(2, 1)  # what else would be printed is no outcome
    _bound(int(sys.argv[1]))
    with suppress(BrokenPipeError):
        _Process(sys.stdin.buffer, outcomes).serve()


if __name__ == "__main__":
    main()
