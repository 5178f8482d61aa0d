"""Serve `/health` and `/metrics`, for machines, without a key."""

from typing import Annotated, Final

from litestar import Response, get
from litestar.openapi.datastructures import ResponseSpec
from msgspec import Struct
from prometheus_client.registry import Collector

from rooms.api.auth import ServicesDep
from rooms.api.readiness import BrokerUpGauge, LeaderAbsentGauge, ReadinessReport, magazines_gauge
from rooms.metrics import CONTENT_TYPE

_TAGS: Final = ["health"]


class LiveResponse(Struct, kw_only=True):
    """Confirm that the process answers."""

    status: str


class ReadyResponse(Struct, kw_only=True):
    """Describe `status`: ready, degraded (ready, but some parts are down) or unready.

    `degraded` names these parts. Without a leader no maintenance task moves to another process;
    tasks whose store is down do not run.
    """

    status: str
    parts: dict[str, str]
    degraded: list[str]
    leader_absent_seconds: float


@get("/health/live", sync_to_thread=False, tags=_TAGS, summary="Is the process alive?")
def live() -> LiveResponse:
    """Answer 200 always."""
    return LiveResponse(status="live")


@get(
    "/health/ready",
    responses={
        503: ResponseSpec(
            ReadyResponse, generate_examples=False, description="Publishes cannot be taken"
        )
    },
    tags=_TAGS,
    summary="Can publishes be taken?",
)
async def ready(services: ServicesDep) -> Response[ReadyResponse]:
    """Answer 503 until every part was up once; after that only while publishing is impossible."""
    report = await services.readiness.report()
    return Response(to_ready_response(report), status_code=200 if report.ready else 503)


def to_ready_response(report: ReadinessReport) -> ReadyResponse:
    """Return a report as the API shows it."""
    status = "degraded" if report.degraded else "ready"
    return ReadyResponse(
        status=status if report.ready else "unready",
        parts={part: "up" if up else "down" for part, up in report.up.items()},
        degraded=report.degraded,
        leader_absent_seconds=report.leader_absent_s,
    )


@get("/metrics", media_type=CONTENT_TYPE, tags=_TAGS, summary="Metrics for Prometheus")
async def metrics(services: ServicesDep) -> Annotated[bytes, "exposition format"]:
    """Return counters of every process, queue depths (at most 5 s old), and the leader."""
    absence = LeaderAbsentGauge(await services.leader_health.absent_s())
    others: list[Collector] = [await services.gauges.counts(), absence]
    if services.broker_health is not None:
        others.append(BrokerUpGauge(up=await services.broker_health.up()))
    if services.magazine_health is not None:
        others.append(magazines_gauge(up=await services.magazine_health.up()))
    return services.metrics.render(*others)


ROUTES: Final = [live, ready, metrics]
