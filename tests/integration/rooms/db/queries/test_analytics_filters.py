"""Test that findings about a subscription or a room are found without reading all of the others.

Oracle: `EXPLAIN (ANALYZE)` of the statement, and the rows read by it.
"""

import uuid
from dataclasses import replace
from typing import Any, Final

import psycopg
import pytest
from sqlalchemy import event

from rooms.db.connection import open_engine, transaction
from rooms.db.queries.analytics import FindingFilter, findings_page
from rooms.domain.ids import KeyId, OrganisationId, RoomId, SubscriptionId
from rooms.domain.principal import Principal
from tests.integration.rooms.db.scenarios.test_console_plans import rows_read

_ROWS: Final = 20_000
_SUBSCRIPTIONS: Final = 1_000
_OWN: Final = OrganisationId(str(uuid.UUID(int=1)))
_WANTED: Final = 77
_SUBSCRIPTION: Final = SubscriptionId(str(uuid.UUID(int=_WANTED)))
_FILL: Final = """
INSERT INTO analysis_rows (organisation_id, finding, number, run_id, rooms, subscriptions, body)
SELECT %(own)s, 'rollups_daily', n, 1, ARRAY[n %% %(subscriptions)s],
    ARRAY[lpad(to_hex(n %% %(subscriptions)s), 32, '0')::uuid], '{"event_type": "paid"}'
FROM generate_series(0, %(rows)s - 1) n;
ANALYZE analysis_rows
"""
_ALL: Final = Principal(key_id=KeyId(_OWN), organisation_id=_OWN, scopes=frozenset())
_OF_ONE: Final = replace(
    _ALL, rooms=frozenset({RoomId(_WANTED)}), subscriptions=frozenset({_SUBSCRIPTION})
)


@pytest.mark.parametrize(
    ("principal", "wanted"),
    [
        (_ALL, FindingFilter(subscription=_SUBSCRIPTION)),
        (_ALL, FindingFilter(room=RoomId(_WANTED))),
        (_ALL, FindingFilter(subscription=SubscriptionId(str(uuid.UUID(int=10**9))))),
        (_OF_ONE, FindingFilter()),
    ],
    ids=["subscription", "room", "nothing", "restricted key"],
)
async def test_few_findings_of_others_are_read(
    database: str, principal: Principal, wanted: FindingFilter
) -> None:
    with psycopg.ClientCursor(psycopg.connect(database, autocommit=True)) as cursor:
        cursor.execute(
            _FILL.encode(), {"own": _OWN, "rows": _ROWS, "subscriptions": _SUBSCRIPTIONS}
        )
        cursor.connection.close()
    seen: list[tuple[str, Any]] = []

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        seen.append((statement, parameters))

    engine = open_engine(database, size=1)
    event.listen(engine.sync_engine, "before_cursor_execute", note)
    async with transaction(engine) as connection:
        seen.clear()
        found = await findings_page(
            connection, principal, "rollups_daily", wanted, after=-1, limit=51
        )
        ((statement, parameters),) = seen
        explained = await connection.exec_driver_sql(
            f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {statement}", parameters
        )
        (plan,) = explained.scalar_one()
    await engine.dispose()
    every = list(range(_WANTED, _ROWS, _SUBSCRIPTIONS))
    known = {_SUBSCRIPTION, None} >= {wanted.subscription}
    assert [number for number, _ in found] == (every if known else [])
    assert sum(rows_read(plan["Plan"], "analysis_rows")) <= len(every)
