"""`/health` and `/metrics`: for machines, without a key."""

from typing import Annotated, Final

from litestar import Response, get
from litestar.openapi.datastructures import ResponseSpec
from msgspec import Struct
from prometheus_client.registry import Collector

from rooms.metrics import CONTENT_TYPE
from rooms.rest.auth import Given
from rooms.rest.carriage import Reach
from rooms.rest.leadership import Absence
from rooms.rest.readiness import Report
from rooms.rest.store_health import magazines_gauge

_TAGS: Final = ["health"]


class Live(Struct, kw_only=True):
    """The process answers."""

    status: str


class Ready(Struct, kw_only=True):
    """`status`: ready, degraded (ready, but `degraded` names parts that are down) or unready.

    Without a leader no duty of upkeep moves to another process, and none is done where its store is away.
    """

    status: str
    parts: dict[str, str]
    degraded: list[str]
    leader_absent_seconds: float


@get("/health/live", sync_to_thread=False, tags=_TAGS, summary="Is the process alive?")
def live() -> Live:
    """Always 200."""
    return Live(status="live")


@get(
    "/health/ready",
    responses={503: ResponseSpec(Ready, generate_examples=False, description="Publishes cannot be taken")},
    tags=_TAGS,
    summary="Can publishes be taken?",
)
async def ready(services: Given) -> Response[Ready]:
    """503 until every part has been up once, and after that only while publishes cannot be taken."""
    report = await services.readiness.report()
    return Response(as_ready(report), status_code=200 if report.ready else 503)


def as_ready(report: Report) -> Ready:
    """A report as it reads everywhere."""
    status = "degraded" if report.degraded else "ready"
    return Ready(
        status=status if report.ready else "unready",
        parts={part: "up" if up else "down" for part, up in report.up.items()},
        degraded=report.degraded,
        leader_absent_seconds=report.leader_absent_s,
    )


@get("/metrics", media_type=CONTENT_TYPE, tags=_TAGS, summary="Metrics for Prometheus")
async def metrics(services: Given) -> Annotated[bytes, "exposition format"]:
    """Counters and histograms of every process, what waits in PostgreSQL (counted at most every 5 s), and who leads."""
    absence = Absence(await services.leadership.absent_s())
    others: list[Collector] = [await services.gauges.counts(), absence]
    if services.carriage is not None:
        others.append(Reach(up=await services.carriage.up()))
    if services.magazine_health is not None:
        others.append(magazines_gauge(up=await services.magazine_health.up()))
    return services.metrics.text(*others)


ROUTES: Final = [live, ready, metrics]
