"""Run prepared statements on one connection, without the driver's adaptation of values.

Adaptation costs more than the rest of a small statement, so what runs many times a second is run
here. It relies on `psycopg.generators`, which is public but not documented.
"""

from collections.abc import Sequence
from typing import cast

import psycopg
from psycopg import generators
from psycopg.pq import ExecStatus, Format
from psycopg.pq.abc import PGresult

from rooms.db.connection import Connection


class PreparedStatements:
    """Prepare each statement at its first use, and run it with binary values.

    One statement runs at a time: callers that share the connection take turns themselves.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._names: dict[str, bytes] = {}

    async def run(self, statement: str, values: Sequence[bytes]) -> PGresult:
        """Return the result, with values in their binary form.

        Placeholders are `$1`, `$2`, …; each value is in the binary form of its type. Errors are
        psycopg's.
        """
        pgconn = self._connection.pgconn
        name = self._names.get(statement)
        if name is None:
            name = f"packed_{len(self._names)}".encode()
            pgconn.send_prepare(name, statement.encode())
            await self._result()
            self._names[statement] = name
        pgconn.send_query_prepared(
            name, values, [Format.BINARY] * len(values), result_format=Format.BINARY
        )
        return await self._result()

    async def _result(self) -> PGresult:
        results = await self._connection.wait(generators.execute(self._connection.pgconn))
        # The rows come before the commit does, so an error may still follow them.
        for result in results:
            if result.status not in {ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK}:
                raise psycopg.errors.error_from_result(result)
        return cast("PGresult", results[0])
