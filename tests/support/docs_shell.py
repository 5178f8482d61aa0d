"""Run the commands of a documentation page in one bash, block by block, as CONTRIBUTING.md says."""

import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from rooms.domain.push_url import REFUSED_PORTS
from rooms.local.services import free_port
from tests.support.markdown import Block, blocks
from tests.support.polling import PATIENCE_S, until
from tests.support.service import Service, environment_of

SHELL: Final = frozenset({"sh", "bash", "console"})
"""Languages of blocks that are run."""
_MARK: Final = "BLOCK-DONE"
# The shell goes on after a command that failed, as a person's does; the failure is reported.
_STRICT: Final = """set -o pipefail
trap 'echo FAILED: $BASH_COMMAND' ERR
eventually() {
  local end=$((SECONDS + 30))
  until "$@" >/dev/null 2>&1; do [ $SECONDS -lt $end ] || { "$@"; return; }; sleep 0.2; done
}
"""
_PORTS: Final = ("9000", "9001", "9002")


def _free_webhook_port() -> int:
    """Return a free port to which webhooks may be sent, unlike those of databases."""
    return next(port for port in iter(free_port, None) if port not in REFUSED_PORTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Hold one thing to do with a page: a block to run or a file to write."""

    line: int
    commands: str = ""
    file: str = ""
    text: str = ""
    shows: str = ""


class PageError(Exception):
    """A page's block breaks the convention of CONTRIBUTING.md."""


def steps(source: str) -> list[Step]:
    """Return what the page's blocks ask for, in their order. PageError names a block that breaks the convention."""
    found: list[Step] = []
    comments: list[Block] = []
    for block in blocks(source):
        if block.language is not None:
            found += _steps_of(block, {mark: text for mark, text in map(_mark, comments) if mark})
            comments = []
            continue
        mark, text = _mark(block)
        if mark == "run":
            found.append(Step(line=block.line, commands=text))
        elif mark == "shows":
            if not found or not found[-1].commands:
                raise PageError(f"line {block.line}: no command stands before what it shows")
            last = found.pop()
            found.append(Step(line=last.line, commands=last.commands, shows=text))
        elif mark == "not run" and text.endswith("; whole page"):
            return []
        else:
            comments.append(block)
    return found


def has_commands(source: str) -> bool:
    """Return whether the page has something to run, or breaks the convention."""
    try:
        return bool(steps(source))
    except PageError:
        return True


def _mark(comment: Block) -> tuple[str, str]:
    mark, colon, text = comment.text.partition(":")
    return (
        (mark.strip(), text.strip())
        if colon and mark.strip() in {"run", "shows", "file", "not run"}
        else ("", "")
    )


def _steps_of(block: Block, marks: Mapping[str, str]) -> list[Step]:
    if not block.language:
        raise PageError(
            f"line {block.line}: the block names no language; output and diagrams are `text`"
        )
    if "not run" in marks:
        if len(marks["not run"].split()) < 2:
            raise PageError(f"line {block.line}: `not run` needs its reason in words")
        return []
    if block.language == "python":
        compile(block.text, f"line {block.line}", "exec")
    if "file" in marks:
        return [Step(line=block.line, file=marks["file"], text=block.text)]
    if block.language in SHELL:
        return [Step(line=block.line, commands=_commands(block))]
    return []


def _commands(block: Block) -> str:
    """Return the commands of a block; of a `console` block those behind `$ `, with what continues them."""
    if block.language != "console":
        return block.text
    found: list[str] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append(line[2:])
        elif found and found[-1].endswith("\\"):
            found.append(line.removeprefix("> "))
    return "\n".join(found) + "\n"


@dataclass
class DocsShell:
    """Feed one bash block by block."""

    process: subprocess.Popen[str]
    service: Service
    folder: Path
    substitutes: Mapping[str, str]
    shown: list[str] = field(default_factory=list)

    def do(self, step: Step) -> str:
        """Write the step's file or run its commands, and return what the shell shows. AssertionError: a command failed."""
        if step.file:
            path = self.folder / step.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._replaced(step.text))
            return ""
        commands = self._replaced(step.commands)
        shown = self.run(commands)
        for port in re.findall(r"rooms listen .*--port (\d+)", commands):
            until(partial(_answers, int(port)), "the receiver")
        assert not step.shows or re.search(self._replaced(step.shows), shown, re.MULTILINE), (
            f"line {step.line} does not show {step.shows!r}:\n{shown}"
        )
        return shown

    def run(self, commands: str) -> str:
        """Run commands and return what the shell shows until they are done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{commands}\necho {_MARK}\n")
        self.process.stdin.flush()
        lines: list[str] = []
        for line in self.process.stdout:
            # A background command may have left its own line open.
            if line.rstrip().endswith(_MARK):
                break
            lines.append(line)
        shown = "".join(lines)
        self.shown.append(shown)
        assert "FAILED:" not in shown, f"{commands}\n{''.join(self.shown)}"
        return shown

    def value(self, name: str) -> str:
        """Return a variable that a block has set."""
        (line,) = re.findall(rf"^{name}=(.*)$", self.run(f'echo "{name}=${name}"'), re.MULTILINE)
        return str(line)

    def _replaced(self, text: str) -> str:
        # All at once: an inserted value may look like a key.
        return re.sub(
            "|".join(map(re.escape, self.substitutes)),
            lambda found: self.substitutes[found[0]],
            text,
        )


@contextmanager
def docs_shell(service: Service, folder: Path) -> Iterator[DocsShell]:
    """Open a shell in an empty folder, with `rooms` and `python3` on its PATH and `service` as its service."""
    bash = shutil.which("bash")
    assert bash is not None
    commands, page = folder / "bin", folder / "page"
    for made in (commands, page):
        made.mkdir()
    for name, run in (
        ("rooms", f'"{sys.executable}" -m rooms'),
        ("python3", f'"{sys.executable}"'),
    ):
        script = commands / name
        script.write_text(f'#!/bin/sh\nexec {run} "$@"\n')
        script.chmod(0o755)
    environment = environment_of(service.data, service.port)
    environment["PATH"] = f"{commands}:{environment['PATH']}"
    process = subprocess.Popen(
        [bash, "--noprofile", "--norc"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=page,
        env=environment,
    )
    substitutes = {
        "$PWD/.venv/bin": str(commands),
        "127.0.0.1:8080": f"127.0.0.1:{service.port}",
        ".rooms/": f"{service.data}/",
        **{port: str(_free_webhook_port()) for port in _PORTS},
    }
    shell = DocsShell(process=process, service=service, folder=page, substitutes=substitutes)
    shell.run(_STRICT)
    try:
        yield shell
    finally:
        with suppress(BrokenPipeError):
            assert process.stdin is not None
            process.stdin.write("trap - ERR; kill $(jobs -p) 2>/dev/null; wait; exit 0\n")
            process.stdin.flush()
        process.communicate(timeout=PATIENCE_S)


def _answers(port: int) -> bool:
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    return False
