"""Which targets a webhook may reach: names are resolved here, and only what is vetted here is dialled."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from delivery.addresses import Address, Network, refused_kind
from delivery.bulkhead import Bound
from delivery.errors import BlockedError, LookupsBusyError, TargetRefusedError, UnresolvableError
from delivery.lookups import LookupLimits, Lookups
from delivery.names import NameCache, Verdict
from delivery.resolver import DnsResolver, Resolver
from rooms.domain.ids import OrganisationId
from rooms.domain.refused_ports import REFUSED_PORTS
from rooms.domain.target import Target, ends_in_number

_log = logging.getLogger(__name__)

FIX = "ROOMS_ALLOW_TARGETS=<cidr>,… opens what is meant to be reached"
PORT_FIX = "ROOMS_REFUSE_PORTS lists the ports that are refused"

_FRESH_S: Final = 5.0
_STALE_S: Final = 300.0
_BACKOFF_S: Final = 30.0
_PATIENCE_S: Final = 0.5
_MAX_NAMES: Final = 10_000
_MAX_NAMES_OF_ONE: Final = 2_000
_MAX_ADDRESSES: Final = 32
_LOOPBACK_NAMES: Final = frozenset(
    {"localhost", "localhost.localdomain", "localhost6", "ip6-localhost", "ip6-loopback"}
)
_LOOPBACKS: Final = (IPv4Address("127.0.0.1"), IPv6Address("::1"))


class Guard:
    """Resolve targets and keep webhooks from what is not for the outside: addresses unless `allow` holds them, and ports.

    Vetted addresses are good for `fresh_s` of `clock` (seconds that never go back). After that the name is looked up
    again, and an attempt waits `patience_s` for it at most. While no answer comes, the old addresses are used, until they
    are `stale_s` old (RFC 8767). An answer that refuses them, or knows of none, counts at once. What fails is looked up
    again after `fresh_s`, then after twice that, and so on until `backoff_s` (RFC 9520).

    An allowed IPv4 network does not open IPv6 forms of its addresses: those need both forms allowed.
    """

    def __init__(
        self,
        allow: Sequence[Network] = (),
        *,
        refuse_ports: Collection[int] = REFUSED_PORTS,
        resolver: Resolver | None = None,
        clock: Callable[[], float] = time.monotonic,
        limits: LookupLimits | None = None,
        fresh_s: float = _FRESH_S,
        stale_s: float = _STALE_S,
        backoff_s: float = _BACKOFF_S,
        patience_s: float = _PATIENCE_S,
        max_names: int = _MAX_NAMES,
        max_names_per_organisation: int = _MAX_NAMES_OF_ONE,
        observe: Callable[[str], None] = lambda _outcome: None,
        waited: Callable[[Bound], None] = lambda _bound: None,
    ) -> None:
        """`observe` is called with the outcome of each look-up, `waited` with the bound where one had to wait."""
        self._allow = tuple(allow)
        self._refuse_ports = frozenset(refuse_ports)
        self._lookups = Lookups(resolver or DnsResolver(), limits or LookupLimits(), waited)
        self._clock = clock
        self._fresh_s = fresh_s
        self._stale_s = stale_s
        self._backoff_s = backoff_s
        self._patience_s = patience_s
        self._observe = observe
        self._names = NameCache(in_all=max_names, per_organisation=max_names_per_organisation)
        self._pending: dict[tuple[OrganisationId, str], asyncio.Task[Verdict]] = {}

    def known(self, host: str, organisation: OrganisationId) -> tuple[str, ...] | None:
        """Return the vetted addresses that need no look-up, if there are any. The port is not looked at."""
        names = self._names.names.get(organisation)
        verdict = None if names is None else names.get(host)
        if verdict is None or verdict.fresh_until <= self._clock():
            return None
        return verdict.addresses or None

    async def vet(self, host: str, port: int, organisation: OrganisationId) -> tuple[str, ...]:
        """Return the addresses to dial, best first, at least one. Raises BlockedError, UnresolvableError."""
        self._check_port(port)
        verdict = self._names.get(organisation, host)
        if verdict is None or verdict.fresh_until <= self._clock():
            verdict = await self._renewed(host, organisation, verdict)
        if verdict.refusal is not None:
            raise verdict.refusal(verdict.detail)
        return verdict.addresses

    def check_literal(self, target: Target) -> None:
        """Refuse at once what needs no look-up to refuse. Raises BlockedError naming the fix."""
        self._check_port(target.port)
        host = target.host.removesuffix(".")
        literal = _literal(host)
        if literal is not None:
            kind = self.refusal(literal)
            if kind is not None:
                raise BlockedError(f"{host} is {kind} address, which webhooks may not reach; {FIX}")
        elif (host in _LOOPBACK_NAMES or host.endswith(".localhost")) and all(
            self.refusal(address) for address in _LOOPBACKS
        ):
            raise BlockedError(f"{host} is a name of the machine itself, which webhooks may not reach; {FIX}")

    def refusal(self, address: Address) -> str | None:
        """Return the kind (with its article) of an address that may not be reached; None where it may."""
        return refused_kind(address, self._allow)

    @property
    def busy(self) -> int:
        """How many organisations have a look-up under way, or waiting."""
        return self._lookups.organisations

    def _check_port(self, port: int) -> None:
        if port in self._refuse_ports:
            raise BlockedError(f"port {port} is not for webhooks; {PORT_FIX}")

    async def _renewed(self, host: str, organisation: OrganisationId, old: Verdict | None) -> Verdict:
        # One look-up of a name at a time for each organisation: none waits in the queue of another.
        key = (organisation, host)
        task = self._pending.get(key)
        if task is None:
            task = self._pending[key] = asyncio.create_task(self._look_up(host, organisation))
            task.add_done_callback(lambda _: self._pending.pop(key, None))
        if old is None or not old.addresses or old.usable_until <= self._clock():
            return await asyncio.shield(task)
        await asyncio.wait((task,), timeout=self._patience_s)
        if task.done():
            return task.result()
        self._observe("stale")
        # Nothing else waits for this look-up: when it ends, it says what counts.
        old.fresh_until = old.usable_until
        return old

    async def _look_up(self, host: str, organisation: OrganisationId) -> Verdict:
        now = self._clock
        old = self._names.get(organisation, host)
        try:
            literal = _literal(host)
            found = (str(literal),) if literal else await self._lookups.run(host, organisation)
        except BlockedError as exc:
            return self._refused(host, organisation, BlockedError, str(exc))
        except LookupsBusyError as exc:
            # This says nothing about the name, so it is not remembered.
            self._observe("busy")
            if old is not None and old.addresses and now() < old.usable_until:
                old.fresh_until = min(now() + self._fresh_s, old.usable_until)
                return old
            return Verdict(refusal=UnresolvableError, detail=f"{host}: {exc}", fresh_until=0.0, usable_until=0.0)
        except Exception as exc:  # noqa: BLE001 - whatever a resolver raises is about one name
            if not isinstance(exc, OSError):
                _log.exception("the resolver failed at %s", host)
            why = "no answer in time" if isinstance(exc, TimeoutError) else exc
            return self._failed(host, organisation, f"{host} cannot be resolved: {why}")
        return self._vetted(host, organisation, found)

    def _vetted(self, host: str, organisation: OrganisationId, found: Sequence[str]) -> Verdict:
        addresses: list[str] = []
        kinds: dict[str, None] = {}
        for text in found[:_MAX_ADDRESSES]:
            with suppress(ValueError):
                address = ip_address(text)
                refused = self.refusal(address)
                if refused is None:
                    addresses.append(str(address))
                else:
                    kinds[refused] = None
        if kinds and not addresses:
            # The addresses themselves stay unsaid: a tenant could read internal names out of its log.
            why = f"only {' or '.join(kinds)} address, which webhooks may not reach; {FIX}"
            return self._refused(host, organisation, BlockedError, f"{host} has {why}")
        if not addresses:
            return self._refused(host, organisation, UnresolvableError, f"{host} has no address")
        self._observe("answered")
        now = self._clock()
        verdict = Verdict(addresses=tuple(addresses), fresh_until=now + self._fresh_s, usable_until=now + self._stale_s)
        self._names.put(organisation, host, verdict)
        return verdict

    def _refused(
        self, host: str, organisation: OrganisationId, refusal: type[TargetRefusedError], detail: str
    ) -> Verdict:
        self._observe("refused" if refusal is BlockedError else "absent")
        return self._without(host, organisation, refusal, detail)

    def _failed(self, host: str, organisation: OrganisationId, detail: str) -> Verdict:
        self._observe("failed")
        old = self._names.get(organisation, host)
        now = self._clock()
        if old is None or not old.addresses or old.usable_until <= now:
            return self._without(host, organisation, UnresolvableError, detail)
        old.failures += 1
        old.fresh_until = min(now + self._wait_s(old.failures), old.usable_until)
        return old

    def _without(
        self, host: str, organisation: OrganisationId, refusal: type[TargetRefusedError], detail: str
    ) -> Verdict:
        old = self._names.get(organisation, host)
        failures = 1 if old is None else old.failures + 1
        until = self._clock() + self._wait_s(failures)
        verdict = Verdict(refusal=refusal, detail=detail, fresh_until=until, usable_until=until, failures=failures)
        self._names.put(organisation, host, verdict)
        return verdict

    def _wait_s(self, failures: int) -> float:
        return min(self._fresh_s * 2.0 ** min(failures - 1, 10), self._backoff_s)


def _literal(host: str) -> Address | None:
    """Return the address that `host` is; None where it is a name. Raises BlockedError for what could be read as either."""
    bare = host.removesuffix(".")
    try:
        return ip_address(bare)
    except ValueError:
        if ends_in_number(bare) or ":" in bare or "%" in bare:
            raise BlockedError(
                f"{host} is no plain IP address: write four decimal numbers, or IPv6 without zone"
            ) from None
    return None
