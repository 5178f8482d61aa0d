"""Define the bodies of the analysis's findings."""

from datetime import date, datetime

from msgspec import Struct


class SetAsideResponse(Struct, kw_only=True):
    """Count segments of the log that the analysis has not read; hour null: unknown.

    `reason`: damaged, foreign, future, empty, unsealed, renamed or gone.
    """

    hour: datetime | None
    reason: str
    segments: int


class AnalysisPage(Struct, kw_only=True):
    """Describe the analysis of a page. `analysed_at`: when; null: nothing was analysed yet.

    `incomplete`: segments of the log were set aside (`set_aside`), and are counted as no loss.
    """

    next_cursor: str | None
    analysed_at: datetime | None
    incomplete: bool
    set_aside: list[SetAsideResponse]


class RootCauseResponse(Struct, kw_only=True):
    """Describe a value that is typical of the failures: its share inside and outside of them.

    `divergence` (nats) orders the values: how much more the failures have it than other attempts
    of the same minutes. `log_odds` compares the two shares; `z` measures how sure that is. All are
    null in a shared incident, as they would give the totals of other organisations. Beside other
    organisations all but `inside` are null in every incident, as they count their attempts.
    """

    attribute: str
    value: str
    inside: float | None
    outside: float | None
    divergence: float | None = None
    log_odds: float | None
    z: float | None


class ChangeResponse(Struct, kw_only=True):
    """Describe a first use right before an incident.

    `attribute`: event_version, worker_version (version of Rooms), worker (a process) or
    policy_version (settings of a subscription).
    """

    at: datetime
    attribute: str
    value: str
    subscription_id: str | None = None


class IncidentResponse(Struct, kw_only=True):
    """Describe a time in which subscriptions failed together.

    `subscriptions`: the first hundred by id, of `subscriptions_total`. `shared`: those of other
    organisations failed too, so totals are left out. `began` and `ended` are estimates; the ranges
    around them hold 90 % of the time. `open`: nothing has succeeded since, or, if it is chronic, no
    longer than usual. `late`: deliveries whose first attempt failed. `earlier`: similar incidents
    before it. Fields are null in results of an older version.
    """

    incident: int
    kind: str
    began: datetime
    began_from: datetime | None = None
    began_to: datetime | None = None
    ended: datetime
    ended_from: datetime | None = None
    ended_to: datetime | None = None
    open: bool = False
    subscriptions: list[str]
    subscriptions_total: int | None = None
    shared: bool
    failures: int | None
    attempts: int | None
    late: int | None = None
    sidelined: int | None = None
    earlier: int | None = None
    causes: list[RootCauseResponse]
    changes: list[ChangeResponse] = []


class IncidentPage(AnalysisPage, kw_only=True):
    """List incidents, the latest first."""

    items: list[IncidentResponse]


class ReconciliationResponse(Struct, kw_only=True):
    """Compare what was published in a room in one hour with what became of it.

    `stuck`: far beyond its time. `never_enqueued`: its beginning is a hole of the log. `unknown`
    and `unread`: what would decide may be in segments that were set aside.
    """

    hour: datetime
    room_id: int
    messages: int
    fanout: int
    missing: int
    unread: int = 0
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
    stuck: int = 0
    unknown: int = 0
    lost: int
    duplicates: int
    residual_fanout: int
    residual_outcome: int


class ReconciliationPage(AnalysisPage, kw_only=True):
    """List reconciliations, the latest hour first."""

    items: list[ReconciliationResponse]


class AgeResponse(Struct, kw_only=True):
    """Count the open deliveries of a subscription with one outcome, and name the oldest.

    `outcome`: lost, stuck (far beyond its time), unknown, in_flight, held, waiting or sidelined.
    `oldest_since`: since when the oldest is so; one that waits: since it was due. Its age in
    seconds is that at the end of the log. subscription_id is null where the log names none. In a
    room of others, a subscriber sees what is lost, stuck, in_flight or sidelined; while it is
    suspended the last two.
    """

    room_id: int
    subscription_id: str | None
    outcome: str
    deliveries: int
    oldest_since: datetime | None
    oldest_age_s: float | None
    oldest_delivery_id: str


class AgePage(AnalysisPage, kw_only=True):
    """List open deliveries: what needs a decision first, then the oldest."""

    items: list[AgeResponse]


class CofailureResponse(Struct, kw_only=True):
    """Describe two subscriptions that fail in the same minutes; `significant`: not by chance.

    `q`, which decides that, is `p` corrected by the number of all pairs. It is null beside other
    organisations, as it would give the number of their failing subscriptions.
    """

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
    q: float | None
    significant: bool


class CofailurePage(AnalysisPage, kw_only=True):
    """List pairs, the most certain first."""

    items: list[CofailureResponse]


class RetryPolicyResponse(Struct, kw_only=True):
    """Hold a retry policy: the first wait, its growth, and the number of redeliveries.

    `max_delay_ms`: the longest wait; null: no limit. `jitter`: share by which a wait varies.
    """

    delay_ms: float | None
    multiplier: float | None
    redeliveries: int | None
    max_delay_ms: float | None = None
    jitter: float | None = None


class PolicyEffectResponse(Struct, kw_only=True):
    """Describe a policy: share delivered, attempts a delivery, waits until delivery."""

    delivered: float | None
    attempts: float | None
    mean_wait_s: float | None
    p95_wait_s: float | None


class IntervalResponse(Struct, kw_only=True):
    """Hold a 90 % interval."""

    low: float
    high: float


class PolicyEffectRangeResponse(Struct, kw_only=True):
    """Hold the 90 % intervals of what a policy promises."""

    delivered: IntervalResponse
    attempts: IntervalResponse
    mean_wait_s: IntervalResponse


class ParetoPolicyResponse(Struct, kw_only=True):
    """Describe a policy that no other policy beats in both success and cost."""

    policy: RetryPolicyResponse
    expected: PolicyEffectResponse


class AttemptSuccessRateResponse(Struct, kw_only=True):
    """Describe how often the attempt of this number succeeds."""

    attempt: int
    attempts: int
    successes: int
    hazard: float | None
    mean_delay_ms: float | None


class SubscriptionRetryAdvice(Struct, kw_only=True):
    """Describe how retries should be set.

    Nothing is recommended unless the replay reproduces what was measured (`reproduced`), and a
    policy is surely better. `held_up`: false if a policy chosen on the first part of the log did
    not keep its promise on the rest; do not apply the advice then.
    """

    subscription_id: str
    deliveries: int
    hopeless: float | None
    deployed: RetryPolicyResponse | None
    measured: PolicyEffectResponse | None
    replayed: PolicyEffectResponse | None
    reproduced: bool | None
    recommended: RetryPolicyResponse | None
    expected: PolicyEffectResponse | None
    expected_range: PolicyEffectRangeResponse | None = None
    tested: PolicyEffectResponse | None
    tested_deployed: PolicyEffectResponse | None
    held_up: bool | None
    front: list[ParetoPolicyResponse]
    hazards: list[AttemptSuccessRateResponse]


class RetryAdviceResponse(SubscriptionRetryAdvice, kw_only=True):
    """Describe how retries should be set, and when that was computed."""

    analysed_at: datetime
    incomplete: bool


class RetryAdvicePage(AnalysisPage, kw_only=True):
    """List advice, one a subscription."""

    items: list[SubscriptionRetryAdvice]


class RollupResponse(Struct, kw_only=True):
    """Describe counts and percentiles (ms) of an `hour` or a `day`; null without values.

    For the subscriber in a room of others, `enqueued`, `held`, `expired` and `cancelled` are 0.
    """

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


class RollupPage(AnalysisPage, kw_only=True):
    """List rollups, the latest first."""

    items: list[RollupResponse]
