"""What the settings say about webhook targets."""

from delivery.target_policy import TargetPolicy
from rooms.settings import Settings


def target_policy(settings: Settings) -> TargetPolicy:
    """Return the policy that the API and the worker hold to, so that what one accepts the other calls."""
    return TargetPolicy(
        allow=settings.allow_targets,
        refuse_ports=settings.refuse_ports,
        system_resolver=settings.resolver == "system",
        organisation_lookups=settings.organisation_lookups,
    )
