"""Open untrusted files, and print untrusted strings. This module imports nothing heavy."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from torchrl_lightning._core.errors import UserError

TEXT_LIMIT = 300
"""Maximum number of printed characters of a string from a file."""
MESSAGE_LIMIT = 3000
"""Maximum number of characters of an error message, which may contain several of these strings."""
_FILE_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class FileKindError(UserError, OSError):
    """A path does not name a regular file."""


def check_regular(path: str | Path) -> None:
    """Validate that a path names a regular file; raise FileKindError if reading it could block or never end.

    Raises:
        FileNotFoundError: The file does not exist.
    """
    _check_kind(path, os.stat(path).st_mode)


def open_regular(path: str | Path, limit: int | None = None) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        path: The file. Links are followed.
        limit: The maximum number of bytes; None for any number.

    Raises:
        OSError: The file cannot be opened, or is a FIFO, a socket, a folder or a device.
        ValueError: The file has more than ``limit`` bytes.
    """
    check_regular(path)
    # A FIFO may have replaced the file; without O_NONBLOCK, opening a FIFO would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        status = os.fstat(descriptor)
        _check_kind(path, status.st_mode)
        if limit is not None and status.st_size > limit:
            raise UserError(
                f"{printable(path)} must have at most {limit:,} bytes, got {status.st_size:,}. Name another file."
            )
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | Path, limit: int) -> bytes:
    """Read a regular file that has at most ``limit`` bytes; arguments and errors as in :func:`open_regular`."""
    with open_regular(path, limit) as file:
        data = file.read(limit + 1)  # the file may have grown
    if len(data) > limit:
        raise UserError(f"{printable(path)} must have at most {limit:,} bytes, got more. Name another file.")
    return data


def read_json(path: str | Path, limit: int, values: int, encoding: str = "utf-8") -> Any:
    """Read a JSON file, and count its values before they take memory.

    Args:
        path: The file.
        limit: The maximum number of bytes.
        values: The maximum number of values.
        encoding: The encoding of the file; an ASCII string takes no more memory than its bytes.

    Raises:
        OSError: The file cannot be opened, or is a FIFO, a socket, a folder or a device.
        ValueError: The file exceeds a limit, or is not JSON.
    """
    data = read_regular(path, limit)
    if (count := json_values(data)) > values:
        raise UserError(f"{printable(path)} must hold at most {values:,} values, got {count:,}. Name another file.")
    try:
        return json.loads(data.decode(encoding))
    except RecursionError as error:
        raise UserError(f"{printable(path)} must be JSON of few levels, got too many. Name another file.") from error


def json_values(data: bytes) -> int:
    """Return an upper bound of the number of values in a JSON text, without parsing it."""
    return sum(data.count(delimiter) for delimiter in (b",", b"[", b"{", b":"))


def _check_kind(path: str | Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _FILE_KINDS.get(stat.S_IFMT(mode), "of another kind")
        raise FileKindError(f"{printable(path)} must be a regular file, but is {kind}. Name a regular file.")


def printable(text: object, limit: int | None = TEXT_LIMIT) -> str:
    r"""Return a text as one printable line; escape control and bidirectional characters.

    Examples:
        >>> print(printable("red: \x1b[31m, newline: \n, right to left: \u202e"))
        red: \x1b[31m, newline: \n, right to left: \u202e
    """
    line = _cut(str(text), limit)
    if line.isprintable():
        return line
    escaped = (
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in line
    )
    return _cut("".join(escaped), limit)


@contextmanager
def printable_errors() -> Iterator[None]:
    """Make the message of a ValueError one printable line, because it may contain names from a file."""
    try:
        yield
    except ValueError as error:
        message = error.args[0] if len(error.args) == 1 else None
        if isinstance(message, str):
            error.args = (printable(message, MESSAGE_LIMIT),)
        raise


def _cut(text: str, limit: int | None) -> str:
    return text if limit is None or len(text) <= limit else f"{text[: limit - 3]}..."
