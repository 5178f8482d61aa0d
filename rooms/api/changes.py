"""Write changes into the journal: each in the transaction of its change.

A handler that changes something takes the argument `change`, and opens its transaction by
`change.transaction()`. A transaction of several requests appends the `change.new_entry()` of each
at its end, and calls `change.on_committed()` after it (`rooms.api.subscription_creation`). What is
done to deliveries is written by `services.writer`, which has transactions of its own, and a handler
queue's sideline by its store. There the handler calls `change.record()` after it. If the process
dies between the two, the change is without its entry; of a delivery, the delivery log has it. If
the entry cannot be written, it is written later instead of a failure.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
from litestar import Request
from litestar.di import NamedDependency
from litestar.exceptions import HTTPException
from litestar.params import SkipValidation
from litestar.status_codes import HTTP_500_INTERNAL_SERVER_ERROR
from litestar.types import Scope as AsgiScope
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.api.auth import CHANGES_NOTHING, DATA_PLANE, Caller, ServicesDep
from rooms.api.deps import ApiServices
from rooms.db.connection import transaction, without_share
from rooms.db.journal import append, bounded, has_entry
from rooms.domain.ids import OrganisationId
from rooms.domain.journal import ActorKind, JournalEntry, Outcome
from rooms.domain.principal import Principal
from rooms.domain.push_url import PushUrl
from rooms.errors import OtherMemberError, RoomsError, TransientError
from rooms.publishing.number_bounds import decode_json
from rooms.token_buckets import TokenBuckets

_log = logging.getLogger(__name__)

REQUEST_ID: Final = b"x-request-id"
MAX_REQUEST_ID: Final = 128
REFUSALS_PER_S: Final = 10
"""Refused attempts of one organisation that are written each second; more are only counted."""
_MAX_PENDING: Final = 100
_MAX_REASON: Final = 500
_READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_HIDDEN: Final = "***"
_SECRET_NAMES: Final = frozenset({"password", "secret", "key", "payload", "headers"})
_URL_NAMES: Final = frozenset({"push_url", "operational_url"})
_MAX_DEPTH: Final = 8
_COMMITTED: Final = "committed_change"
"""The state of a request whose change was committed: its entry as long as it is not written, then
None.
"""
_LAST_ENTRY: Final = "last_entry"
"""The state of a request: the entry of its last transaction, which may be committed."""


def shown(value: Any, depth: int = 0) -> Any:
    """Return a request's body without what is secret: payloads, header values, paths of URLs."""
    if depth > _MAX_DEPTH:
        return _HIDDEN
    match value:
        case dict():
            return {name: _shown_field(str(name), one, depth) for name, one in value.items()}
        case list():
            return [shown(one, depth + 1) for one in value]
        case _:
            return value


def _shown_field(name: str, value: Any, depth: int) -> Any:
    if value is None:
        return None
    if name == "headers" and isinstance(value, dict):
        return dict.fromkeys(value, _HIDDEN)
    if name in _SECRET_NAMES:
        return _HIDDEN
    if name in _URL_NAMES:
        try:
            target = PushUrl.parse(str(value))
        except ValueError:
            return _HIDDEN
        return f"{target.scheme}://{target.authority}"
    return shown(value, depth + 1)


class Change:
    """Describe one changing request to the journal."""

    def __init__(
        self,
        request: Request[Any, Principal, Any],
        body: bytes,
        services: ApiServices,
        principal: Principal,
    ) -> None:
        self._request = request
        self._body = body
        self._services = services
        self._principal = principal
        self.before: Any = None
        """The object as it was, as a handler shows it: without secrets."""
        self.after: Any = None
        """The object as it is; None: the request's body."""
        self.object: str = request.url.path
        self.is_dry_run = False
        """Nothing is changed, so nothing is written."""
        self.organisation: OrganisationId | None = None
        """The organisation whose journal it is; None: the caller's."""
        self.keys_of: OrganisationId | None = None
        """The organisation whose keys are changed, or what they may do.

        This process looks them up again at once, others within a second. Other changes forget no
        key: an organisation may make hundreds of them a second while it publishes.
        """

    @asynccontextmanager
    async def transaction(self, *, is_whole: bool = True) -> AsyncIterator[AsyncConnection]:
        """Run one transaction; its last statements before the commit write the entry.

        `is_whole` false: a part of the action follows the commit, and is noted, too, if it fails.
        """
        async with transaction(self._services.engine) as connection:
            yield connection
            if not self.is_dry_run:
                await append(connection, self.new_entry())
        if is_whole and not self.is_dry_run:
            self.on_committed()
        else:
            self._state.pop(_LAST_ENTRY, None)

    async def record(self, failure: BaseException | None = None) -> None:
        """Write the entry of a change that was committed, waiting for no share of connections.

        `failure`: only a part of it was, `after`; the rest failed so.
        StorageUnavailableError, StorageRefusedError: it will be written once more.
        """
        self._state[_COMMITTED] = entry = self.new_entry(failure)
        with without_share():
            async with transaction(self._services.engine) as connection:
                await append(connection, entry)
        self.on_committed()

    def on_committed(self) -> None:
        """Record that the entry is committed: what fails later is not the change."""
        self._state[_COMMITTED] = None
        if self.keys_of is not None:
            self._services.keys.forget_organisation(self.keys_of)

    @property
    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._request.scope["state"]
        return state

    def new_entry(self, failure: BaseException | None = None) -> JournalEntry:
        """Make the entry of a transaction, as of now, to be looked up if the commit is in doubt."""
        after = self.after
        if after is None:
            try:
                after = shown(decode_json(self._body)) if self._body else None
            except msgspec.DecodeError:
                after = None
        self._state[_LAST_ENTRY] = entry = make_entry(
            self._services,
            self._principal,
            self._request.scope,
            action=self._request.route_handler.handler_name,
            object_path=self.object,
            organisation=self.organisation,
            before=self.before,
            after=after,
            outcome=Outcome.SUCCEEDED if failure is None else Outcome.FAILED,
            reason=None if failure is None else _reason_of(failure),
        )
        return entry


ChangeDep = NamedDependency[SkipValidation[Change]]
"""The argument `change` of a handler that changes something."""


async def provide_change(
    request: Request[Any, Principal, Any],
    services: ServicesDep,
    principal: Caller,
) -> Change:
    """Return the change that a request makes.

    Its body is read before anything is changed, as that fails where the client is gone.
    """
    body = await request.body() if _has_body(request) else b""
    return Change(request, body, services, principal)


def _has_body(request: Request[Any, Principal, Any]) -> bool:
    headers = request.headers
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def make_entry(
    services: ApiServices,
    principal: Principal,
    scope: Mapping[str, Any],
    *,
    action: str,
    object_path: str,
    organisation: OrganisationId | None = None,
    before: Any = None,
    after: Any = None,
    outcome: Outcome = Outcome.SUCCEEDED,
    reason: str | None = None,
) -> JournalEntry:
    """Return an entry about a request."""
    client = scope.get("client")
    request_id = next(
        (value for name, value in scope["headers"] if name == REQUEST_ID), b""
    ).decode("latin-1")
    return JournalEntry(
        id=services.ids.generate_global(services.clock.now_ms()),
        organisation_id=organisation or principal.organisation_id,
        at=services.clock.now(),
        actor_kind=ActorKind.PERSON if principal.is_session else ActorKind.KEY,
        actor_id=principal.key_id,
        actor_name=principal.key_name,
        actor_organisation_id=principal.organisation_id,
        application=principal.application,
        source=client[0] if client else None,
        request_id=_clean(request_id[:MAX_REQUEST_ID]) or str(uuid.uuid4()),
        action=action,
        object=_clean(object_path[:_MAX_REASON]),
        before=None if before is None else bounded(before),
        after=None if after is None else bounded(after),
        outcome=outcome,
        reason=None if reason is None else _clean(reason[:_MAX_REASON]),
    )


def payload_read(
    services: ApiServices,
    principal: Principal,
    scope: Mapping[str, Any],
    *,
    object_path: str | None = None,
) -> JournalEntry:
    """Return an entry about a person who reads payloads; `object_path`: None is the request's."""
    path = str(scope["path"]) if object_path is None else object_path
    return make_entry(services, principal, scope, action="read_payload", object_path=path)


def _clean(text: str) -> str:
    return "".join(char if char.isprintable() else "�" for char in text)


class RefusalJournal:
    """Write refused attempts at changes, without delaying their answers.

    It is bounded: in attempts a second of each organisation, and in entries that wait. What is
    beyond is counted (`rooms_journal_dropped_total`).
    """

    def __init__(self) -> None:
        self._buckets: TokenBuckets[str] = TokenBuckets(REFUSALS_PER_S, time.monotonic)
        self._pending: set[asyncio.Task[None]] = set()

    async def after_exception(self, error: Exception, scope: AsgiScope) -> None:
        """Note an error of a request that would have changed something (a hook of Litestar).

        An attempt to act as another member is noted whatever the request would have done. A change
        that was committed is noted as such, and only once.
        """
        principal = scope.get("auth")
        handler: Any = scope.get("route_handler")
        if not isinstance(principal, Principal) or handler is None:
            return
        changes = scope.get("method") not in _READS and not (
            handler.opt.get(DATA_PLANE) or handler.opt.get(CHANGES_NOTHING)
        )
        if not changes and not isinstance(error, OtherMemberError):
            return
        services: ApiServices = scope["litestar_app"].state.services
        state = scope["state"]
        committed: JournalEntry | None = state.get(_COMMITTED)
        if committed is None and _COMMITTED in state:
            return
        is_full = len(self._pending) >= _MAX_PENDING
        if is_full or not (committed or self._buckets.take(principal.organisation_id)):
            services.metrics.journal_dropped.inc()
            return
        entry = committed or make_entry(
            services,
            principal,
            dict(scope),
            action=handler.handler_name,
            object_path=scope["path"],
            outcome=_outcome_of(error),
            reason=_reason_of(error),
        )
        task = asyncio.create_task(_write(services, entry, unless=state.get(_LAST_ENTRY)))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def close(self) -> None:
        """Wait for the entries that are being written."""
        await asyncio.gather(*self._pending, return_exceptions=True)


async def _write(
    services: ApiServices, entry: JournalEntry, *, unless: JournalEntry | None
) -> None:
    """Write an entry, unless another one is there, whose commit was in doubt."""
    try:
        with without_share():
            async with transaction(services.engine) as connection:
                if unless is None or not await has_entry(connection, unless):
                    await append(connection, entry)
    except RoomsError as exc:
        services.metrics.journal_dropped.inc()
        _log.warning("%s (%s) is not in the journal: %s", entry.action, entry.outcome, exc)


def _reason_of(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _outcome_of(error: Exception) -> Outcome:
    match error:
        case HTTPException():
            refused = error.status_code < HTTP_500_INTERNAL_SERVER_ERROR
        case _:
            refused = isinstance(error, RoomsError) and not isinstance(error, TransientError)
    return Outcome.REFUSED if refused else Outcome.FAILED
