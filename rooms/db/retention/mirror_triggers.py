"""Mirror changes of a partition into its copy by triggers, while it is copied.

Each change and its mirror are one transaction. So the copy is right for every snapshot, also for
that of a statement which waits for the lock while the copy takes the partition's place. A mirror is
a function for each partition, named after it, with its own trigger.

A transaction whose snapshot does not show what the copy statement has written meanwhile fails at ON
CONFLICT and is started again by its writer (`isolated`). That is why even a deletion inserts first.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Sequence
from typing import Final

from rooms.db.retention.partitions import PARTITIONED_TABLES

PRIMARY_KEYS: Final = {
    "messages": ("room_id", "id"),
    "deliveries": ("room_id", "id"),
    "log_entries": ("room_id", "message_id", "writer_id", "writer_seq"),
}
FUNCTION_SUFFIX: Final = "_mirror"

_FUNCTION: Final = """
CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $mirror$
BEGIN
    IF TG_OP = 'DELETE' THEN
        INSERT INTO {to} ({columns}) VALUES ({old}) ON CONFLICT ({keys}) DO UPDATE SET {first} = excluded.{first};
        DELETE FROM {to} WHERE {is_old};
        RETURN NULL;
    END IF;
    INSERT INTO {to} ({columns}) VALUES ({new}) ON CONFLICT ({keys}) DO UPDATE SET {update};
    {more}
    RETURN NULL;
END
$mirror$
"""
# A delivery that is unfinished again needs its message and its log, which no other statement copies
# any more.
_COPY_RELATED: Final = """
    INSERT INTO {to} ({columns}) SELECT {columns} FROM {source} WHERE room_id = NEW.room_id AND {key} = NEW.message_id
        FOR KEY SHARE ON CONFLICT DO NOTHING;
"""
_TRIGGER: Final = """
CREATE TRIGGER {name} AFTER INSERT OR UPDATE OR DELETE ON {source} FOR EACH ROW EXECUTE FUNCTION {name}()
"""


def mirror_trigger(
    table: str,
    partitions: dict[str, str],
    copies: dict[str, str],
    columns: dict[str, Sequence[str]],
) -> tuple[str, str]:
    """Return the function and the trigger that mirror a partition of `table`.

    `partitions` and `copies`: the partition and the copy of each table; `columns`: those of each
    table.
    """

    def listed(prefix: str = "") -> str:
        return ", ".join(f"{prefix}{column}" for column in columns[table])

    keys = PRIMARY_KEYS[table]
    others = [column for column in columns[table] if column not in keys]
    more = "".join(
        _COPY_RELATED.format(
            to=copies[other],
            source=partitions[other],
            columns=", ".join(columns[other]),
            key=PARTITIONED_TABLES[other],
        )
        for other in PARTITIONED_TABLES
        if table == "deliveries" and other != table
    )
    name = f"{partitions[table]}{FUNCTION_SUFFIX}"
    function = _FUNCTION.format(
        name=name,
        to=copies[table],
        columns=listed(),
        old=listed("OLD."),
        new=listed("NEW."),
        keys=", ".join(keys),
        first=keys[0],
        is_old=" AND ".join(f"{key} = OLD.{key}" for key in keys),
        update=", ".join(f"{column} = excluded.{column}" for column in others),
        more=more,
    )
    return function, _TRIGGER.format(name=name, source=partitions[table])
