"""Return texts of the catalogue for the codes of the API, such as states and actions.

An action of the journal is the name of the handler of the request. Entries of GovStack's interfaces
have the names of their own handlers, and may also be about reading, which is refused to other
members.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from rooms.api.readiness import PARTS
from rooms.api.search import SearchField, SearchKind
from rooms.db.catalog.subscription_states import SubscriptionAction
from rooms.domain.attempt import ErrorClass
from rooms.domain.job import JobKind, JobState
from rooms.domain.journal import ActorKind, Outcome
from rooms.domain.sharing import OrganisationStatus, ReapprovalField
from rooms.domain.state_machine import LogKind, Reason, State, SubscriptionStatus
from rooms.domain.throttle import CircuitState

ACTION_LABELS: Final[Mapping[str, str]] = {
    "acknowledge_content": "acknowledge",
    "acknowledge_event": "acknowledge",
    "add_manager": "create organisation",
    "add_publisher": "add publisher",
    "add_room_version": "add version of event type",
    "add_version": "add version of event type",
    "approve_subscription": "approve subscription",
    "cancel_job": "cancel job",
    "cancel_subscription": "terminate subscription",
    "change_buckets": "change shards of the cluster",
    "change_key": "change key",
    "change_member_room": "change room",
    "change_organisation": "change organisation",
    "change_organisation_quotas": "change quotas of organisation",
    "change_publisher": "change publisher",
    "change_push_template": "change template of webhooks",
    "change_queue": "change queue",
    "change_room": "change room",
    "change_room_quotas": "change quotas of room",
    "change_subscription": "change subscription",
    "clear_room": "clear room",
    "clear_subscription": "clear subscription",
    "create_event_type": "create event type",
    "create_grant": "create grant",
    "create_key": "create key",
    "create_member_room": "create room",
    "create_organisation": "create organisation",
    "create_organisation_key": "create key of organisation",
    "create_portal_link": "create link to portal",
    "create_queue": "create queue",
    "create_room": "create room",
    "create_room_event_type": "create event type",
    "create_room_subscription": "create subscription",
    "create_sign_in_link": "create link to sign in",
    "create_signing_key": "create signing key",
    "create_subscription": "create subscription",
    "decide_room_subscription": "decide about subscription",
    "delete_event_type": "delete event type",
    "delete_member_room": "delete room",
    "delete_organisation": "delete organisation",
    "delete_queue": "delete queue",
    "delete_room": "delete room",
    "delete_room_event_type": "delete event type",
    "delete_room_version": "delete version of event type",
    "delete_subscription": "delete subscription",
    "delete_version": "delete version of event type",
    "end_schedule": "end schedule of sideline",
    "end_session": "end session",
    "end_sessions": "end all sessions of a person",
    "export_event_types": "export event types",
    "export_event_types_as_manager": "export event types",
    "export_managers": "export organisations",
    "export_members": "export organisations",
    "export_members_as_manager": "export organisations",
    "list_event_types": "list event types",
    "list_managers": "list organisations",
    "list_member_rooms": "list rooms",
    "list_members": "list organisations",
    "list_members_as_manager": "list organisations",
    "list_publishers": "list publishers",
    "list_room_event_types": "list event types",
    "list_room_events": "list messages",
    "list_room_subscriptions": "list subscriptions",
    "list_room_versions": "list versions of event type",
    "list_subscriptions": "list subscriptions",
    "move_message": "move message to another time",
    "move_named_message": "move message to another time",
    "pause": "pause subscription",
    "ping": "test endpoint",
    "publish_content": "publish",
    "publish_event": "publish",
    "pull_content": "pull",
    "pull_event": "pull",
    "purge": "purge sideline",
    "purge_queue_sideline": "purge failed messages of queue",
    "read_event": "read message",
    "read_event_type": "read event type",
    "read_member_room": "read room",
    "read_payload": "read payload",
    "read_room_event": "read message",
    "read_room_queue": "read queue",
    "read_room_subscription": "read subscription",
    "read_subscription": "read subscription",
    "recover": "resend to the broker",
    "redeliver": "redeliver",
    "reinstate_subscription": "reinstate subscription",
    "reject_subscription": "reject subscription",
    "remove_manager": "delete organisation",
    "remove_publisher": "remove publisher",
    "remove_push_template": "remove template of webhooks",
    "replay": "replay",
    "restore_message": "restore message",
    "restore_room": "restore room",
    "resume": "resume subscription",
    "resume_organisation": "resume organisation",
    "retry_waiting": "retry now",
    "revoke_grant": "revoke grant",
    "revoke_key": "revoke key",
    "revoke_signing_key": "revoke signing key",
    "rewrite_room_version": "rewrite version of event type",
    "rewrite_version": "rewrite version of event type",
    "rotate_key": "rotate key",
    "rotate_password": "rotate native password",
    "rotate_receipt_key": "rotate receipt key",
    "rotate_secret": "rotate secret",
    "set_schedule": "set schedule of sideline",
    "shovel": "shovel sideline",
    "sign_in": "sign in",
    "sign_out": "sign out",
    "skip_head": "skip head of ordering key",
    "skip_to_now": "skip to now",
    "start_analysis": "analyse the log",
    "start_doctor": "check stores",
    "start_preview": "preview retention",
    "stop_event": "withdraw message",
    "suspend_organisation": "suspend organisation",
    "suspend_subscription": "suspend subscription",
    "sweep": "sweep magazine",
    "terminate_room_subscription": "terminate subscription",
    "terminate_subscription": "terminate subscription",
    "withdraw_message": "withdraw message",
    "withdraw_named_message": "withdraw message",
    "withdraw_proposal": "withdraw proposed change",
}
"""The text in the catalogue, by the action."""
_ENUMS: Final = (
    *(State, Reason, LogKind, SubscriptionStatus, SubscriptionAction, OrganisationStatus),
    *(JobKind, JobState, CircuitState, ErrorClass, Outcome, ActorKind, SearchKind, SearchField),
    ReapprovalField,
)
_ERRORS: Final = frozenset(one.value for one in ErrorClass)
_WORDS: Final[Mapping[str, str]] = {
    Reason.ORDER: "waits for its turn",
    LogKind.PULL_ACKED: "acknowledged",
    JobKind.ANALYSE_LOG: "analyse the log",
    JobKind.CANCEL_UNGRANTED: "cancel what no grant covers",
    ErrorClass.DNS: "unknown host",
    ErrorClass.BLOCKED: "address not allowed",
    ErrorClass.CONNECT: "no connection",
    ErrorClass.TLS: "no secure connection",
    ErrorClass.TIMEOUT: "no answer in time",
    ErrorClass.PROTOCOL: "no HTTP",
    ErrorClass.TOO_LARGE: "answer too large",
    ErrorClass.STATUS: "status",
    ErrorClass.REDIRECT: "redirected",
    SearchField.CALLER_ID: "id of the publisher",
    ReapprovalField.PUSH_URL: "address of the webhook",
}
"""Words for codes that say less than words can."""
_FIELDS: Final = (
    *("since", "until", "days", "rate_per_s", "concurrency", "max_shovels", "repair", "queue"),
    *("moved", "shard", "load_pointer", "fire_pointer", "sweep_pointer", "epoch", "loaded"),
    *("fired", "reloaded", "sent_again", "retried"),
    *("reason", "error", "delivery_id", "target"),
)
"""Names in the arguments and results of jobs, in the shards of magazines, and of filters."""
_ANALYSED: Final[Mapping[str, str]] = {
    "room_id": "room",
    "target_host": "host",
    "network": "network",
    "event_type": "event type",
    "event_version": "version of the event type",
    "worker": "worker",
    "worker_host": "machine of the worker",
    "worker_version": "version of the worker",
    "error_class": "error",
    "http_status": "HTTP status",
    "policy_version": "version of the settings",
    "shared": "shared",
    "single": "single",
    "chronic": "chronic",
}
"""Attributes of attempts that the analysis compares, and kinds of incidents."""
LABELS: Final[Mapping[str, str]] = {
    code: _WORDS.get(code, code.replace("_", " "))
    for code in (
        *(str(one.value) for kind in _ENUMS for one in kind),
        *(*PARTS, "relay", "up", "down"),
        *_FIELDS,
    )
} | {**_ANALYSED, **ACTION_LABELS}
"""The text in the catalogue, by the code of the API."""


def label_of(code: str) -> str:
    """Return the text of a code; of an unknown one, the code with spaces."""
    return LABELS.get(code, code.replace("_", " "))


def last_answer(observed: Mapping[str, Any], translate: Callable[[str], str]) -> str:
    """Return what an endpoint answered last, as `HTTP 503`, or why there was no answer."""
    status, error = observed["last_status"], observed["last_error"] or ""
    named = f"HTTP {status}" if status else ""
    code, _, detail = error.partition(": ")
    if code == ErrorClass.STATUS:
        error = detail
    elif code in _ERRORS:
        words = translate(label_of(code))
        error = f"{words}: {detail}" if detail and detail != label_of(code) else words
    return (error or named) if error.startswith(named) or not error else f"{named} {error}"
