"""Implement `rooms listen`: receive webhooks, verify and show them, and fail some on request."""

import json
import sys
from base64 import b64encode
from typing import TYPE_CHECKING, Any

import click

from rooms.cli.context import CliSession, Command, pass_session
from rooms.cli.errors import CliError
from rooms.cli.options import read_lines
from rooms.safe_text import terminal_safe

if TYPE_CHECKING:
    from rooms.cli.output import Output
    from rooms.cli.webhook_receiver import Webhook

_MAX_SHOWN_BYTES = 4096
# Headers that every request has.
_HIDDEN_HEADERS = {
    "host",
    "content-length",
    "connection",
    "accept",
    "accept-encoding",
    "user-agent",
}


@click.command(cls=Command)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=9000,
    show_default=True,
    help="Port to listen on; 0: any free port.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--secret",
    "secrets",
    multiple=True,
    help="Signing secret (whsec_…). Answers 401 if no signature fits; repeatable. Other users of "
    "this machine see it; --secret-file hides it.",
)
@click.option(
    "--secret-file",
    "secrets_of_file",
    metavar="FILE",
    callback=read_lines,
    help="File with a signing secret a line; - is standard input.",
)
@click.option(
    "--fail",
    type=click.IntRange(0),
    help="Fail the first N attempts of each webhook.  [all with --status, --hang]",
)
@click.option(
    "--status",
    type=click.IntRange(200, 599),
    help="Status of a failing attempt.  [503]",
)
@click.option("--hang", is_flag=True, help="Leave a failing attempt without an answer.")
@click.option("--delay-ms", type=click.IntRange(0), default=0, help="Delay before each answer.")
@click.option("--max", "most", type=click.IntRange(1), help="Stop after this many requests.")
@pass_session
def listen(
    session: CliSession,
    /,
    *,
    port: int,
    host: str,
    secrets: tuple[str, ...],
    secrets_of_file: tuple[str, ...],
    fail: int | None,
    status: int | None,
    hang: bool,
    delay_ms: int,
    most: int | None,
) -> None:
    """Receive webhooks on this machine and show them, until Ctrl-C. With --json, one per line.

    A service that `make run` started may call it. Other services need ROOMS_ALLOW_TARGETS.
    """
    from rooms.cli.webhook_receiver import FailurePlan, WebhookReceiver, parse_secret

    if hang and status is not None:
        raise click.UsageError("--status has no effect with --hang, which gives no answer")
    try:
        keys = tuple(parse_secret(secret) for secret in (*secrets, *secrets_of_file))
    except ValueError as exc:
        raise click.UsageError(f"--secret: {exc}") from exc
    if fail is None and not hang and status is None:
        fail = 0
    failure_plan = FailurePlan(
        keys=keys, failures=fail, status=status or 503, hang=hang, delay_ms=delay_ms
    )
    out = session.output()
    try:
        receiver = WebhookReceiver(
            (host, port),
            failure_plan,
            lambda webhook: _show_webhook(out, webhook),
            max_requests=most,
        )
    except OSError as exc:
        raise CliError(
            f"cannot listen on {host}:{port}: {exc.strerror}; choose another --port"
        ) from exc
    with receiver:
        out.note(f"listening on {receiver.url}")
        receiver.serve()


def _show_webhook(out: "Output", webhook: "Webhook") -> None:
    if out.as_json:
        out.json_line(json.dumps(_to_document(webhook), ensure_ascii=False))
        sys.stdout.flush()
        return
    answer = "no answer" if webhook.answered is None else str(webhook.answered)
    title = (
        f"{webhook.at:%H:%M:%S.%f}"[:-3]
        + f"  {webhook.identity or 'no webhook-id'}  call {webhook.attempt}  → {answer}"
    )
    out.heading(title)
    if webhook.signature_check is not None:
        good = webhook.signature_check.valid
        click.secho(
            terminal_safe(
                f"  signature {'valid' if good else f'INVALID: {webhook.signature_check.reason}'}"
            ),
            fg="green" if good else "red",
        )
    for name, value in webhook.headers.items():
        if name not in _HIDDEN_HEADERS:
            out.line(f"  {name}: {value}")
    out.content(_text(webhook.body))
    sys.stdout.flush()


def _text(body: bytes) -> str:
    shown = body[:_MAX_SHOWN_BYTES].decode("utf-8", "backslashreplace")
    return shown if len(body) <= _MAX_SHOWN_BYTES else f"{shown}… ({len(body)} bytes)"


def _to_document(webhook: "Webhook") -> dict[str, Any]:
    try:
        body: dict[str, Any] = {"body": webhook.body.decode()}
    except UnicodeDecodeError:
        body = {"body_base64": b64encode(webhook.body).decode("ascii")}
    return {
        "received_at": webhook.at.isoformat(),
        "webhook_id": webhook.identity,
        "attempt": webhook.attempt,
        "verified": None if webhook.signature_check is None else webhook.signature_check.valid,
        "reason": None
        if webhook.signature_check is None
        else webhook.signature_check.reason or None,
        "status": webhook.answered,
        "path": webhook.path,
        "headers": dict(webhook.headers),
        **body,
    }
