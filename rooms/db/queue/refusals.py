"""Decide which deliveries of another organisation's subscription may not be sent again."""

from rooms.db.operational.messages import IS_OPERATIONAL
from rooms.db.statement_parts import has_live_grant, matches_patterns
from rooms.domain.state_machine import Reason, State


def is_not_granted(delivery: str, subscription: str) -> str:
    """Return the condition that a guest's delivery may not be sent again, as SQL, beside `m`.

    It was cancelled because no grant covered it, or it was never sent and the owner approved
    nothing; and no grant covers what the subscription takes of it now. What it took formerly is
    cancelled if the grant for it ends before it is delivered; else it is not.
    """
    taken = f"""ARRAY (
        SELECT e.value->>'name' FROM jsonb_array_elements({subscription}.event_types) e
    ) || {subscription}.former_types"""  # noqa: S608 - constants of this package
    takes = f"{subscription}.event_types IS NULL OR {matches_patterns('m.event_type', taken)}"
    was_never_sent = f"{delivery}.attempts = 0 AND {subscription}.approved_at IS NULL"
    return f"""((
            {delivery}.state = '{State.CANCELLED}' AND {delivery}.reason = '{Reason.NOT_GRANTED}'
            OR {was_never_sent}
        ) AND NOT ({IS_OPERATIONAL})
        AND NOT ({has_live_grant(subscription, "m.event_type")} AND ({takes})))"""
