"""Write files atomically, and store a state in a folder as a JSON manifest and a binary file, without pickle."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning._core.checksums import iter_chunks
from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.file_limits import MANIFEST_BYTES, MANIFEST_VALUES
from torchrl_lightning._core.untrusted import json_values, printable, read_json

try:
    import fcntl
except ImportError:  # not on this system
    fcntl = None  # type: ignore[assignment]

MANIFEST = "state.json"
VERSION = 2
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
_ALIGNMENT = 64
_STREAMED_BYTES = 1 << 20  # bytes; a streaming reader reads larger tensors in slices
_BINARY_NAME = re.compile(r"state-[0-9a-f]{16}\.bin")
_TEMPORARY_NAME = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
_TENSOR, _TUPLE = "__tensor__", "__tuple__"


@contextlib.contextmanager
def replaced_files(*paths: Path) -> Iterator[list[BinaryIO]]:
    """Open a temporary file in the folder of each path, and rename it to the path after the block.

    If the block raises no error, all files are flushed and then renamed in the order of ``paths``. The temporary files
    are new and have unpredictable names, so that no symbolic link is followed. Leftovers of killed processes in the
    same folders are removed.
    """
    folders = {path.parent for path in paths}
    for folder in folders:
        remove_leftovers(folder)
    with contextlib.ExitStack() as siblings:
        temporary = [
            siblings.enter_context(temporary_sibling(path, partial(Path.touch, exist_ok=False))) for path in paths
        ]
        with contextlib.ExitStack() as open_files:
            files: list[BinaryIO] = [open_files.enter_context(path.open("r+b")) for path in temporary]
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        for path, target in zip(temporary, paths, strict=True):
            os.replace(path, target)
        for folder in folders:
            _sync_folder(folder)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files and folders that killed processes left in a folder.

    Files in use are locked by the process that writes them, and are not removed.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if _TEMPORARY_NAME.fullmatch(path.name) and (lock := _lock(path, False)) is not None:
            with lock:
                _remove(path)


@contextlib.contextmanager
def temporary_sibling(target: Path, create: Callable[[Path], None]) -> Iterator[Path]:
    """Create and lock a temporary file or folder next to the target; remove it after the block if it still exists."""
    while True:
        path = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
        create(path)
        if (lock := _lock(path, True)) is not None:  # otherwise another process removes it as a leftover
            break
    with lock:
        try:
            yield path
        finally:
            _remove(path)


def _lock(path: Path, if_unsupported: bool) -> contextlib.ExitStack | None:
    """Lock a temporary file or folder until the stack is closed or the process ends; return None if locking fails.

    If the system cannot lock files, ``if_unsupported`` decides whether the file counts as locked.
    """
    lock = contextlib.ExitStack()
    if fcntl is None:
        return lock if if_unsupported else None
    try:
        # Some filesystems cannot lock a file that is open for reading only.
        descriptor = os.open(path, (os.O_RDONLY if path.is_dir() else os.O_RDWR) | os.O_NOFOLLOW)
        lock.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.lstat()):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        if if_unsupported:
            return lock
    lock.close()
    return None


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    # A rename is durable only after a sync of the folder. Some platforms cannot open a folder.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_writable(folder: Path, name: str) -> None:
    """Validate that a folder is writable, or that it can be created.

    Args:
        folder: The folder.
        name: The name of the setting that contains the folder, for the message.

    Raises:
        UserError: The folder, or its nearest existing parent, is not writable.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise UserError(f"{name} must be a writable folder, got {folder} ({error}). Name another folder.") from error


class StateFilesMixin:
    """Mixin that writes the declared state of a part to a folder and reads it again."""

    def dumps(self: Any, path: str | Path) -> None:
        """Write the state to a folder in chunks, atomically and without pickle.

        Raises:
            OSError: The disk is full or not writable; an earlier state stays intact.
        """
        write_state_folder(Path(path), self.state_dict(copy=False))

    def loads(self: Any, path: str | Path) -> None:
        """Read the state from a folder.

        Raises:
            FileNotFoundError: The folder has no state.
            ValueError: The state is damaged, foreign, or does not fit; nothing is changed.
        """
        self.load_state_dict(read_state_folder(Path(path)))


class NoCheckpointerMixin(StateFilesMixin):
    """Mixin that rejects the hooks of TorchRL's checkpointers, because parts with their own files would ignore them."""

    def register_save_hook(self, hook: Any) -> None:
        """Raise TypeError, because the hook would be ignored."""
        raise TypeError(
            f"{type(self).__name__} writes its own files and ignores TorchRL's checkpointers and hooks. "
            "Override state_dict(), or use TorchRL's buffer and storage."
        )

    register_load_hook = register_save_hook


@dataclass(frozen=True)
class ChunkedTensor:
    """Scattered rows of a leaf, gathered in slices while they are written."""

    leaf: Tensor
    cells: Tensor

    def __len__(self) -> int:
        return len(self.cells)

    def __getitem__(self, rows: slice) -> Tensor:
        """Gather a slice of the rows."""
        return self.leaf.index_select(0, self.cells[rows].to(self.leaf.device))


def write_state_folder(folder: Path, state: Mapping[str, Any]) -> None:
    """Write nested dicts, lists, tensors (or :class:`ChunkedTensor`) and scalars to a folder, atomically.

    A new folder appears only when it is complete. In an existing folder, the manifest is replaced last, after the
    binary file is on the disk, so that an error leaves the old state intact.
    """
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        _write_into(folder, state)
        return
    remove_leftovers(folder.parent)
    with temporary_sibling(folder, Path.mkdir) as temporary:
        _write_into(temporary, state)
        temporary.rename(folder)
    _sync_folder(folder.parent)


def _write_into(folder: Path, state: Mapping[str, Any]) -> None:
    name = f"state-{secrets.token_hex(8)}.bin"
    with replaced_files(folder / name, folder / MANIFEST) as (file, manifest):
        content = {"file": name, "state": _encode(state, file, "state"), "size": file.tell()}
        envelope = {"version": VERSION, "crc32": _checksum(content), "content": content}
        encoded = json.dumps(envelope).encode()
        values = json_values(encoded)
        if len(encoded) > MANIFEST_BYTES or values > MANIFEST_VALUES:
            raise ValueError(
                f"the state of {folder} has {values:,} values in {len(encoded):,} bytes in addition to its tensors, "
                f"but at most {MANIFEST_VALUES:,} values in {MANIFEST_BYTES:,} bytes can be read again."
            )
        manifest.write(encoded)
    for old in folder.iterdir():  # including complete files that killed processes left
        if old.name != name and _BINARY_NAME.fullmatch(old.name):
            old.unlink(missing_ok=True)


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content).encode())


def _encode(value: Any, file: BinaryIO, path: str) -> Any:
    if isinstance(value, Tensor | ChunkedTensor):
        return {_TENSOR: _write_tensor(value, file, path)}
    if isinstance(value, Mapping):
        if invalid := [key for key in value if not isinstance(key, str) or key in (_TENSOR, _TUPLE)]:
            raise TypeError(f"{path} has the key {invalid[0]!r}; keys must be strings.")
        return {key: _encode(entry, file, f"{path}[{key!r}]") for key, entry in value.items()}
    if isinstance(value, tuple):
        return {_TUPLE: [_encode(entry, file, path) for entry in value]}
    if isinstance(value, list):
        return [_encode(entry, file, path) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{path} is a {type(value).__name__}; a state has only tensors and scalars.")


def _write_tensor(value: Tensor | ChunkedTensor, file: BinaryIO, path: str) -> dict[str, Any]:
    rows = value.unsqueeze(0) if isinstance(value, Tensor) and not value.ndim else value
    first = rows[:1]
    if first.dtype not in DTYPES.values():
        raise TypeError(f"{path} has dtype {first.dtype}, which cannot be stored in a file.")
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
    offset, checksum = file.tell(), 0
    for data in iter_chunks(rows):
        file.write(data)
        checksum = zlib.crc32(data, checksum)
    return {
        "dtype": str(first.dtype).removeprefix("torch."),
        "shape": [len(rows), *first.shape[1:]] if rows is value else [],
        "offset": offset,
        "crc32": checksum,
    }


@dataclass(frozen=True)
class MappedTensor:
    """A tensor in a file, read in slices."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: torch.Size

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Tensor:
        """Read a contiguous slice of the rows."""
        start, stop, _ = rows.indices(len(self))
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        with self.file.open("rb") as file:
            file.seek(self.offset + start * row_bytes)
            data = bytearray(file.read(max(stop - start, 0) * row_bytes))
        flat = torch.frombuffer(data, dtype=self.dtype) if data else torch.empty(0, dtype=self.dtype)
        return flat.view(-1, *self.shape[1:]) if row_bytes else flat.new_empty(max(stop - start, 0), *self.shape[1:])


def read_state_folder(folder: Path, *, streamed: bool = False) -> dict[str, Any]:
    """Read and validate a state that :func:`write_state_folder` wrote; tensors are mapped from the file, not loaded.

    With ``streamed``, large tensors are read as :class:`MappedTensor`, which keeps no pages in memory.
    """
    folder = folder.absolute()
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise FileNotFoundError(f"{folder} has no saved state: {MANIFEST} is missing.")
    try:
        if manifest.is_symlink():
            raise ValueError(f"{MANIFEST} must not be a link")
        # A string with characters outside ASCII could take four times its bytes in memory.
        envelope = read_json(manifest, MANIFEST_BYTES, MANIFEST_VALUES, "ascii")
        if envelope["version"] != VERSION:
            raise ValueError(f"it has version {envelope['version']!r}, this release reads {VERSION}")
        content = envelope["content"]
        if _checksum(content) != envelope["crc32"]:
            raise ValueError(f"{MANIFEST} was changed after it was written")
        if not isinstance(content.get("file"), str) or not _BINARY_NAME.fullmatch(content["file"]):
            raise ValueError("the name of the data file is invalid")
        file = folder / content["file"]
        if file.is_symlink():
            raise ValueError(f"{file.name} must not be a link")
        if not file.is_file() or file.stat().st_size != content.get("size"):
            raise ValueError(f"{file.name} is missing or truncated")
        data = np.memmap(file, np.uint8, "c") if content["size"] else np.empty(0, np.uint8)
        state = _Reader(data, file if streamed else None).decode(content.get("state"))
        if not isinstance(state, dict):
            raise ValueError("the state is not a dict")
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:  # a manifest may contain any value
        reason = printable(" ".join(str(error).split()))
        raise ValueError(f"The saved state in {printable(folder)} is damaged or foreign: {reason}.") from error
    return state


class _Reader:
    def __init__(self, data: np.ndarray[Any, np.dtype[np.uint8]], streamed_file: Path | None) -> None:
        self.data, self.streamed = data, streamed_file
        self.remaining_bytes = len(
            data
        )  # no byte is read twice, so a hostile manifest cannot request more than the file has

    def decode(self, value: Any) -> Any:
        if isinstance(value, dict):
            if _TENSOR in value:
                return self._tensor(value[_TENSOR])
            if _TUPLE in value:
                return tuple(self.decode(entry) for entry in value[_TUPLE])
            return {key: self.decode(entry) for key, entry in value.items()}
        return [self.decode(entry) for entry in value] if isinstance(value, list) else value

    def _tensor(self, header: dict[str, Any]) -> Tensor | MappedTensor:
        dtype, shape, offset = DTYPES[header["dtype"]], header["shape"], header["offset"]
        if not all(type(number) is int and 0 <= number < 1 << 62 for number in [*shape, offset]):
            raise ValueError("a shape or an offset is not a natural number")
        size = math.prod(shape) * dtype.itemsize
        self.remaining_bytes -= size
        if offset + size > len(self.data) or self.remaining_bytes < 0:
            raise ValueError("a tensor reaches beyond the data file")
        if not size:
            return torch.empty(shape, dtype=dtype)
        if self.streamed is not None and size > _STREAMED_BYTES:
            rows = MappedTensor(self.streamed, offset, dtype, torch.Size(shape))
            if reduce(lambda crc, chunk: zlib.crc32(chunk, crc), iter_chunks(rows), 0) != header["crc32"]:
                raise ValueError("a checksum does not match")
            return rows
        data: Any = self.data[offset : offset + size]
        if zlib.crc32(data) != header["crc32"]:
            raise ValueError("a checksum does not match")
        return torch.from_numpy(data).view(dtype).reshape(shape)
