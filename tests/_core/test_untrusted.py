from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_lightning._core.untrusted import check_regular, open_regular, printable, read_json, read_regular


@pytest.fixture
def irregular_paths(tmp_path):
    """Yield a folder with all kinds of paths that are not regular files."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "terminal").symlink_to("/dev/tty")
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as unix_socket:
        unix_socket.bind(str(tmp_path / "socket"))
        yield tmp_path


@pytest.mark.parametrize("name", ["fifo", "folder", "device", "terminal", "link", "socket"])
def test_irregular_file_raises_quickly_with_one_line(irregular_paths, name):
    for read in (check_regular, open_regular, lambda path: read_regular(path, 10)):
        with pytest.raises(OSError, match=r"must be a regular file") as raised:
            read(irregular_paths / name)
        assert "\n" not in str(raised.value)


def test_regular_file_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    check_regular(path)
    assert read_regular(path, 5) == b"12345"
    with pytest.raises(ValueError, match="at most 4 bytes, got 5"):
        read_regular(path, 4)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none", 4)


def test_endless_file_is_read_up_to_its_limit():
    # Files of /proc have size 0, but return any number of bytes.
    with pytest.raises(ValueError, match="at most 3 bytes, got more"):
        read_regular(Path("/proc/self/status"), 3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text", "plain text"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("a\nb\r\tc\x00", r"a\nb\r\tc\x00"),
        ("\u202eabc\u2066", r"\u202eabc\u2066"),
        ("\x9b31m", r"\x9b31m"),
        ("\ud800", r"\ud800"),
        ("Größe", "Größe"),
        ("x" * 400, "x" * 297 + "..."),
        (3.5, "3.5"),
    ],
)
def test_text_is_printed_as_one_line_without_control_characters(text, expected):
    assert printable(text) == expected


@given(st.text())
def test_any_text_becomes_printable_and_encodable(text):
    line = printable(text)
    assert line.isprintable()
    line.encode()


def test_json_is_read_within_its_limits(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, 2, "\u00fc"]}', encoding="utf-8")
    assert read_json(path, 100, 10) == {"a": [1, 2, "\u00fc"]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" + b"1," * 100 + b"1]", "must hold at most 50 values, got 101"),
        (b" " * 100_001, "must have at most 100,000 bytes"),
        (b"\xff", "codec"),
        (b"{", "Expecting"),
        (None, "must be a regular file, but is a FIFO"),
    ],
)
def test_json_beyond_its_limits_raises_with_one_line(tmp_path, content, message):
    path = tmp_path / "a.json"
    os.mkfifo(path) if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        read_json(path, 100_000, 50)
    assert str(raised.value).isprintable()


def test_json_of_many_levels_raises_with_one_line(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"[" * 100_000 + b"]" * 100_000)
    with pytest.raises(ValueError, match="must be JSON of few levels"):
        read_json(path, 1_000_000, 1_000_000)
