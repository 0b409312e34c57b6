"""Read HDF5 files from other sources within a size limit, and reject links to other files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchrl_lightning._core.memory import check_free_memory
from torchrl_lightning._core.untrusted import check_regular


@contextmanager
def open_hdf5(path: Path) -> Iterator[Any]:
    """Open an HDF5 file for reading.

    Raises:
        ImportError: h5py is not installed.
        ValueError: The file is damaged, or a link in it points to another file.
    """
    try:
        import h5py
    except ImportError as error:
        raise ImportError("HDF5 files need h5py: pip install 'torchrl-lightning[d4rl]'.") from error

    def external_name(name: bytes, link: Any) -> str | None:
        entry = file[name] if link.type == h5py.h5l.TYPE_HARD else None
        if entry is None or (isinstance(entry, h5py.Dataset) and (entry.is_virtual or entry.external)):
            return name.decode(errors="replace")  # h5py stops if this returns a value other than None
        return None

    check_regular(path)
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise ValueError(f"{path} was refused: it is not a complete HDF5 file: {str(error).rstrip('.')}.") from error
    with file:
        if (name := file.id.links.visit(external_name, info=True)) is not None:
            raise ValueError(f"{path} was refused: its entry {name!r} is a link, or stored in another file.")
        yield file


def check_declared_size(entries: Iterable[Any], path: Path, limit: int) -> int:
    """Validate the declared sizes of data sets in a file before unpacking, and return the sum in bytes.

    The declared shape counts, even if the file stores fewer bytes. A data set counts as at least one chunk, because
    h5py unpacks whole chunks.

    Raises:
        ValueError: The data sets exceed the limit or the free memory.
    """
    total = 0
    for entry in entries:
        item_size = max(1, entry.dtype.itemsize)
        chunk_size = 0 if entry.chunks is None else math.prod(map(int, entry.chunks)) * item_size
        total += max(math.prod(map(int, entry.shape or ())) * item_size, chunk_size)
    if total > limit:
        raise ValueError(f"{path} was refused: its arrays have {total} bytes, more than the limit of {limit}.")
    check_free_memory(total, f"{path}", "free some memory, or read a part of it")
    return total
