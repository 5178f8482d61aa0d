"""Mirrors: while a part is copied, triggers on it write whatever changes there into the copy too, in the same transaction.

So the copy is right for every snapshot, also for that of a statement which waits for the lock while one takes the other's
place. A mirror is a function for each partition, named after it, with a trigger of its own.

A transaction whose snapshot does not show what the copier has written meanwhile fails at ON CONFLICT and is begun again
by its writer (`isolated`); that is why also a deletion inserts first.
"""

from collections.abc import Sequence
from typing import Final

from rooms.storage.spans import TABLES

KEYS: Final = {
    "messages": ("room_id", "id"),
    "deliveries": ("room_id", "id"),
    "log_entries": ("room_id", "message_id", "writer_id", "writer_seq"),
}
SUFFIX: Final = "_mirror"

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
# A delivery that is unfinished again needs its message and its journey, which nobody else copies any more.
_FOLLOW: Final = """
    INSERT INTO {to} ({columns}) SELECT {columns} FROM {source} WHERE room_id = NEW.room_id AND {key} = NEW.message_id
        FOR KEY SHARE ON CONFLICT DO NOTHING;
"""
_TRIGGER: Final = """
CREATE TRIGGER {name} AFTER INSERT OR UPDATE OR DELETE ON {source} FOR EACH ROW EXECUTE FUNCTION {name}()
"""


def mirror_of(
    table: str, names: dict[str, str], to: dict[str, str], columns: dict[str, Sequence[str]]
) -> tuple[str, str]:
    """The function and the trigger that mirror a partition of `table`.

    `names`, `to`: the partition and the copy of each table; `columns` of each.
    """

    def listed(prefix: str = "") -> str:
        return ", ".join(f"{prefix}{column}" for column in columns[table])

    keys = KEYS[table]
    others = [column for column in columns[table] if column not in keys]
    more = "".join(
        _FOLLOW.format(to=to[other], source=names[other], columns=", ".join(columns[other]), key=TABLES[other])
        for other in TABLES
        if table == "deliveries" and other != table
    )
    name = f"{names[table]}{SUFFIX}"
    function = _FUNCTION.format(
        name=name,
        to=to[table],
        columns=listed(),
        old=listed("OLD."),
        new=listed("NEW."),
        keys=", ".join(keys),
        first=keys[0],
        is_old=" AND ".join(f"{key} = OLD.{key}" for key in keys),
        update=", ".join(f"{column} = excluded.{column}" for column in others),
        more=more,
    )
    return function, _TRIGGER.format(name=name, source=names[table])
