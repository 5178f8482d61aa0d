"""Run checks that may take too long, in a process that may be killed at any time.

Start it as `python -m rooms.publishing.sandbox MEMORY_BYTES`. Jobs arrive on standard input, and
outcomes go to standard output. The process ends with its standard input.

The kernel ends the process when a check has used its CPU time (SIGPROF), or its memory (an
allocation fails). CPU time is limited, not elapsed time, so that load changes no result.
"""

import functools
import os
import resource
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from rooms.errors import FieldProblem, InvalidError
from rooms.publishing.cel_filter import FilterInput, MessageFilter, load_filter
from rooms.publishing.json_schema import PayloadSchema
from rooms.publishing.number_bounds import decode_json
from rooms.publishing.sandbox.frames import (
    CHECK_FAILED,
    HEADER,
    CheckJob,
    CheckOutcome,
    CompileTask,
    FilterMessage,
    FilterTask,
    SchemaTask,
    Task,
    decode_job,
    encode_frame,
)

_NICE: Final = 5
_NO_LIMIT: Final = 1 << 40
"""The API process bounds the size of schemas."""


@functools.lru_cache(maxsize=64)
def _load_schema(text: bytes) -> PayloadSchema:
    return PayloadSchema(
        msgspec.json.decode(text), field="event_type", max_bytes=_NO_LIMIT, compiled=True
    )


@functools.lru_cache(maxsize=256)
def _cached_filter(expression: str) -> MessageFilter:
    return load_filter(expression, clock_s=time.process_time)


class _CheckServer:
    def __init__(self, jobs: BinaryIO, outcomes: int) -> None:
        self._jobs = jobs
        self._outcomes = outcomes

    def serve(self) -> None:
        """Run jobs until standard input ends."""
        while len(header := self._jobs.read(HEADER.size)) == HEADER.size:
            (size,) = HEADER.unpack(header)
            try:
                self._run_job(decode_job(self._jobs.read(size)))
            except BrokenPipeError:
                raise
            except Exception:  # noqa: BLE001 - the status says so; there may be no memory for more
                with suppress(Exception):
                    traceback.print_exc()
                # An exit that finds no memory to end in order would have another status.
                os._exit(CHECK_FAILED)

    def _run_job(self, job: CheckJob) -> None:
        left_ms = job.cpu_ms
        for task in job.tasks:
            begun = time.process_time()
            limit_ms = min(left_ms, job.filter_ms) if isinstance(task, FilterTask) else left_ms
            signal.setitimer(signal.ITIMER_PROF, max(limit_ms, 1.0) / 1000)
            outcome = self._run_task(job, task)
            signal.setitimer(signal.ITIMER_PROF, 0)
            outcome.cpu_ms = (time.process_time() - begun) * 1000
            left_ms -= outcome.cpu_ms
            self._write(outcome)

    def _run_task(self, job: CheckJob, task: Task) -> CheckOutcome:
        match task:
            case FilterTask(expression, message):
                return _evaluate_filter(job.expressions[expression], job.messages[message])
            case CompileTask(schema, at):
                return _compile_schema(job.texts[schema], at)
            case SchemaTask(schema, payload, at):
                return self._check_payload(job.texts[schema], job.texts[payload], at)

    def _check_payload(self, schema_text: bytes, payload: bytes, at: str) -> CheckOutcome:
        try:
            schema = _load_schema(schema_text)
            value = decode_json(payload)
            fits = schema.is_valid(value)
        except InvalidError as exc:
            return _problems_outcome(exc.problems)
        except (ValueError, RecursionError) as exc:
            return _problems_outcome([FieldProblem(at, f"cannot be validated: {str(exc)[:300]}")])
        if fits:
            return CheckOutcome()
        # Listing the problems takes longer than finding that there is one.
        self._write(CheckOutcome(final=False))
        return _problems_outcome(schema.list_problems(value, len(payload), at))

    def _write(self, outcome: CheckOutcome) -> None:
        left = memoryview(encode_frame(outcome))
        while left:
            left = left[os.write(self._outcomes, left) :]


def _compile_schema(text: bytes, at: str) -> CheckOutcome:
    try:
        PayloadSchema(msgspec.json.decode(text), field=at, max_bytes=_NO_LIMIT, compiled=True)
    except InvalidError as exc:
        return _problems_outcome(exc.problems)
    return CheckOutcome()


def _evaluate_filter(expression: str, message: FilterMessage) -> CheckOutcome:
    # Each check decodes the message: what the library has decoded grows with each evaluation.
    found = _cached_filter(expression).evaluate(
        FilterInput(
            payload=message.payload,
            headers=message.headers,
            event_type=message.event_type,
            event_version=message.event_version,
            ordering_key=message.ordering_key,
            priority=message.priority,
        )
    )
    return CheckOutcome(matches=found.matches, error=found.error)


def _problems_outcome(problems: list[FieldProblem] | tuple[FieldProblem, ...]) -> CheckOutcome:
    return CheckOutcome([(problem.field, problem.message, problem.bound) for problem in problems])


def _limit_resources(memory_bytes: int) -> None:
    """Limit memory, lower the priority, and let the kernel kill this process first."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with suppress(OSError):
        os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes, mapped + memory_bytes))


def main() -> None:
    """Serve jobs, and ignore signals that are meant for the API process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    outcomes = os.dup(1)
    os.dup2(2, 1)  # Other output must not mix with outcomes.
    _limit_resources(int(sys.argv[1]))
    with suppress(BrokenPipeError):
        _CheckServer(sys.stdin.buffer, outcomes).serve()


if __name__ == "__main__":
    main()
