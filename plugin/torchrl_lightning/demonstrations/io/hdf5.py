"""Read HDF5 files from other sources, without links to other files and within a size limit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchrl_lightning._core.memory import check_free_memory
from torchrl_lightning._core.untrusted import check_regular


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open an HDF5 file for reading.

    Raises:
        ImportError: h5py is not installed.
        ValueError: The file is damaged, or a link in it points to another file.
    """
    try:
        import h5py
    except ImportError as error:
        raise ImportError("HDF5 files need h5py: pip install 'torchrl-lightning[d4rl]'.") from error

    def led_away(name: bytes, link: Any) -> str | None:
        part = file[name] if link.type == h5py.h5l.TYPE_HARD else None
        if part is None or (isinstance(part, h5py.Dataset) and (part.is_virtual or part.external)):
            return name.decode(errors="replace")  # a result ends the visit
        return None

    check_regular(path)
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise ValueError(f"{path} was refused: it is no whole HDF5 file: {str(error).rstrip('.')}.") from error
    with file:
        if (name := file.id.links.visit(led_away, info=True)) is not None:
            raise ValueError(f"{path} was refused: {name!r} in it is a link, or kept in another file.")
        yield file


def check_declared(entries: Iterable[Any], path: Path, limit: int) -> int:
    """Validate the declared bytes of data sets in a file before unpacking; return their sum.

    The declared shape counts, even if the file stores less. At least one chunk counts, because h5py unpacks it whole.

    Raises:
        ValueError: The data sets exceed the limit or the free memory.
    """
    size = 0
    for entry in entries:
        item = max(1, entry.dtype.itemsize)
        chunk = 0 if entry.chunks is None else math.prod(map(int, entry.chunks)) * item
        size += max(math.prod(map(int, entry.shape or ())) * item, chunk)
    if size > limit:
        raise ValueError(f"{path} was refused: its arrays have {size} bytes, more than the limit of {limit}.")
    check_free_memory(size, f"{path}", "free some memory, or take a part of it")
    return size
