"""Share the entries of a cache between tenants: the one with the most entries loses its oldest."""

from collections import defaultdict
from typing import Generic, TypeVar

_K = TypeVar("_K")


class CacheShares(Generic[_K]):
    """Know whose entries a cache has, and since when, each step in constant time."""

    def __init__(self) -> None:
        self._tenants: dict[_K, str] = {}
        self._keys: dict[str, dict[_K, None]] = {}
        """Of each tenant, the oldest first."""
        self._by_count: defaultdict[int, dict[str, None]] = defaultdict(dict)
        """The tenants with so many entries."""
        self._most = 0

    def add(self, key: _K, tenant: str) -> None:
        """Count an entry as the tenant's newest, and as no other's."""
        self.discard(key)
        keys = self._keys.setdefault(tenant, {})
        self._move(tenant, len(keys), len(keys) + 1)
        keys[key] = None
        self._tenants[key] = tenant
        self._most = max(self._most, len(keys))

    def discard(self, key: _K) -> None:
        """Forget an entry, if there is one."""
        tenant = self._tenants.pop(key, None)
        if tenant is None:
            return
        keys = self._keys[tenant]
        self._move(tenant, len(keys), len(keys) - 1)
        del keys[key]
        if not keys:
            del self._keys[tenant]
        if self._most and self._most not in self._by_count:
            self._most -= 1

    def keys_of(self, tenant: str) -> list[_K]:
        """Return the entries of a tenant, the oldest first."""
        return list(self._keys.get(tenant, ()))

    def displaced(self) -> _K:
        """Return the oldest entry of the tenant with the most entries; there must be one."""
        return next(iter(self._keys[next(iter(self._by_count[self._most]))]))

    def clear(self) -> None:
        """Forget all entries."""
        self._tenants.clear()
        self._keys.clear()
        self._by_count.clear()
        self._most = 0

    def _move(self, tenant: str, before: int, after: int) -> None:
        if before:
            del self._by_count[before][tenant]
            if not self._by_count[before]:
                del self._by_count[before]
        if after:
            self._by_count[after][tenant] = None
