"""Read times as people type them: in their own time zone, unless they name another one."""

from datetime import datetime

from rooms.console.page import Page


def typed_time(page: Page, text: str | None) -> str | None:
    """Return a typed time for the API; what is none is passed on, and the API refuses it."""
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=page.format.zone)
    return moment.isoformat()
