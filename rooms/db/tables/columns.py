"""Share one `metadata` between all tables, and make their columns, one function a type."""

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Text,
    Uuid,
    func,
)
from sqlalchemy.dialects.postgresql import ENUM
from sqlalchemy.types import UserDefinedType

from rooms.domain.state_machine import State

metadata: Final = MetaData()
DELIVERY_STATE: Final = ENUM(
    *(state.value for state in State), name="delivery_state", metadata=metadata
)


class Xid8(UserDefinedType[int]):
    """Declare a transaction id of 64 bits."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        """Return PostgreSQL's name of the type."""
        return "xid8"


def id_column(name: str, *, null: bool = False) -> Column[str]:
    """Make a column for an id, which is text in Python."""
    return Column(name, Uuid(as_uuid=False), nullable=null)


def room_column() -> Column[int]:
    """Make the column for the room that a row belongs to."""
    return Column("room_id", Integer, nullable=False)


def text_column(name: str, *, null: bool = False, default: str | None = None) -> Column[str]:
    """Make a text column."""
    return Column(name, Text, nullable=null, server_default=default)


def int_column(name: str, *, null: bool = False, default: str | None = None) -> Column[int]:
    """Make a column of 32 bits."""
    return Column(name, Integer, nullable=null, server_default=default)


def small_column(name: str, *, null: bool = False, default: str | None = None) -> Column[int]:
    """Make a column of 16 bits."""
    return Column(name, SmallInteger, nullable=null, server_default=default)


def big_column(name: str, *, null: bool = False, default: str | None = None) -> Column[int]:
    """Make a column of 64 bits."""
    return Column(name, BigInteger, nullable=null, server_default=default)


def flag_column(name: str) -> Column[bool]:
    """Make a boolean column, false by default."""
    return Column(name, Boolean, nullable=False, server_default="false")


def bytes_column(name: str, *, null: bool = False) -> Column[bytes]:
    """Make a column for bytes."""
    return Column(name, LargeBinary, nullable=null)


def time_column(name: str) -> Column[Any]:
    """Make a column for a time, by default the time of the insert."""
    return Column(name, DateTime(timezone=True), nullable=False, server_default=func.now())


def time_or_null(name: str) -> Column[Any]:
    """Make a column for a time or null."""
    return Column(name, DateTime(timezone=True), nullable=True)
