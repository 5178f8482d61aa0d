"""Test reading files that an operator names, FIFOs and pipes among them."""

import os
import threading
from pathlib import Path

import pytest

from rooms.cli.errors import CliError
from rooms.cli.input_files import open_input, read_input


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooms.cli.input_files.WRITER_S", 0.01)


def test_a_file_may_have_as_many_bytes_as_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"four")
    assert read_input(str(path), 4) == b"four"
    with pytest.raises(CliError, match="x has more than 3 bytes"):
        read_input(str(path), 3)


@pytest.mark.parametrize("content", [b"", b"content"])
def test_process_substitution_is_read_though_its_writer_ended(content: bytes) -> None:
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    try:
        assert read_input(f"/dev/fd/{reader}", 100) == content
    finally:
        os.close(reader)


def test_a_writer_may_come_after_the_command(fifo: Path) -> None:
    writer = threading.Thread(target=fifo.write_bytes, args=(b"late",))
    writer.start()
    try:
        assert read_input(str(fifo), 100) == b"late"
    finally:
        writer.join()


@pytest.mark.usefixtures("impatient")
def test_a_writer_may_take_longer_than_the_wait_for_one(fifo: Path) -> None:
    writer = os.open(fifo, os.O_RDWR)
    with open_input(fifo) as file:
        os.write(writer, b"slow")
        os.close(writer)
        assert file.read() == b"slow"


@pytest.mark.usefixtures("impatient")
def test_a_fifo_without_a_writer_is_refused_and_closed(fifo: Path) -> None:
    with pytest.raises(CliError, match=r"cannot be read: it is a FIFO, and no process wrote to it"):
        read_input(str(fifo), 100)
    with pytest.raises(OSError, match="No such device"):  # so nothing has it open for reading
        os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
