"""What the analysis has found, as it stands on the wire."""

from datetime import date, datetime

from msgspec import Struct


class CauseOut(Struct, kw_only=True):
    """A value that sets the failures apart: its share inside and outside of them, log-odds, and how sure that is."""

    attribute: str
    value: str
    inside: float
    outside: float
    log_odds: float
    z: float


class IncidentOut(Struct, kw_only=True):
    """When which subscriptions failed together. `shared`: others took part too, so that its totals are not told."""

    incident: int
    kind: str
    began: datetime
    ended: datetime
    subscriptions: list[str]
    shared: bool
    failures: int | None
    attempts: int | None
    causes: list[CauseOut]


class IncidentPage(Struct, kw_only=True):
    """Incidents, the latest first. `analysed_at`: as of when; null: nothing was analysed yet."""

    items: list[IncidentOut]
    next_cursor: str | None
    analysed_at: datetime | None


class BooksOut(Struct, kw_only=True):
    """The books of a room and an hour of publish: what there should be against what became of it."""

    hour: datetime
    room_id: int
    messages: int
    fanout: int
    missing: int
    excess: int
    unanchored: int
    enqueued: int
    never_enqueued: int
    enqueued_twice: int
    delivered: int
    acked: int
    handed_over: int
    expired: int
    cancelled: int
    dropped: int
    purged: int
    sidelined: int
    held: int
    in_flight: int
    waiting: int
    lost: int
    duplicates: int
    residual_fanout: int
    residual_outcome: int


class ReconciliationPage(Struct, kw_only=True):
    """The books, the latest hour first."""

    items: list[BooksOut]
    next_cursor: str | None
    analysed_at: datetime | None


class CofailureOut(Struct, kw_only=True):
    """Two subscriptions that share bad minutes; `significant` where chance alone would hardly do so."""

    first_id: str
    second_id: str
    bad_first: int
    bad_second: int
    bad_both: int
    jaccard: float | None
    lift: float | None
    phi: float | None
    pearson: float | None
    p: float
    q: float
    significant: bool


class CofailurePage(Struct, kw_only=True):
    """Pairs, the surest first."""

    items: list[CofailureOut]
    next_cursor: str | None
    analysed_at: datetime | None


class PolicyOut(Struct, kw_only=True):
    """First wait, its growth, and how many redeliveries."""

    delay_ms: float | None
    multiplier: float | None
    redeliveries: int | None


class EffectOut(Struct, kw_only=True):
    """What a policy gives: share delivered, attempts a delivery, waits of those delivered."""

    delivered: float | None
    attempts: float | None
    mean_wait_s: float | None
    p95_wait_s: float | None


class FrontOut(Struct, kw_only=True):
    """A policy that no other one beats."""

    policy: PolicyOut
    expected: EffectOut


class HazardOut(Struct, kw_only=True):
    """How often the attempt of this number succeeds."""

    attempt: int
    attempts: int
    successes: int
    hazard: float | None
    mean_delay_ms: float | None


class AdviceOut(Struct, kw_only=True):
    """How retries should be set. Nothing is recommended unless the replay gives what was measured (`reproduced`)."""

    subscription_id: str
    deliveries: int
    hopeless: float | None
    deployed: PolicyOut | None
    measured: EffectOut | None
    replayed: EffectOut | None
    reproduced: bool | None
    recommended: PolicyOut | None
    expected: EffectOut | None
    tested: EffectOut | None
    tested_deployed: EffectOut | None
    held_up: bool | None
    front: list[FrontOut]
    hazards: list[HazardOut]
    analysed_at: datetime


class RollupOut(Struct, kw_only=True):
    """Counts and percentiles (ms) of an hour (`hour`) or a day (`day`); percentiles are null without values."""

    hour: datetime | None = None
    day: date | None = None
    room_id: int
    subscription_id: str | None
    event_type: str | None
    target_host: str | None
    published: int
    enqueued: int
    attempts: int
    failures: int
    unanswered: int
    retries: int
    delivered: int
    leased: int
    acked: int
    came_back: int
    held: int
    sidelined: int
    shoveled: int
    expired: int
    cancelled: int
    dropped: int
    latency_p50_ms: float | None
    latency_p95_ms: float | None
    latency_p99_ms: float | None
    end_to_end_p50_ms: float | None
    end_to_end_p95_ms: float | None
    end_to_end_p99_ms: float | None


class RollupPage(Struct, kw_only=True):
    """Rollups, the latest first."""

    items: list[RollupOut]
    next_cursor: str | None
    analysed_at: datetime | None
