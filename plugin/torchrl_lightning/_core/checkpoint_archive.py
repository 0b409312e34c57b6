"""Read the records of a ``torch.save`` file, a zip file without compression."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import Path
from typing import BinaryIO, cast

import torch

from torchrl_lightning._core.file_limits import DIRECTORY_BYTES, PICKLE_BYTES

_END, _END64, _LOCATOR64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")


class Archive:
    """A zip file with uncompressed records."""

    def __init__(self, file: BinaryIO, mapped_path: Path | None) -> None:
        self.file = file
        self.size = file.seek(0, os.SEEK_END)
        _check_directory(file, self.size)
        try:
            records = zipfile.ZipFile(file).infolist()
        except (zipfile.BadZipFile, NotImplementedError, struct.error, OverflowError) as error:
            raise ValueError(f"it is not a complete file of torch.save: {error}") from error
        for record in records:
            if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
                raise ValueError(
                    f"the record {record.filename[:80]!r} is compressed; torch.save does not compress records"
                )
            if record.flag_bits & 1:
                raise ValueError(f"the record {record.filename[:80]!r} is encrypted")
        self._records = {record.filename: record for record in records}
        if len(self._records) != len(records) or sum(record.file_size for record in records) > self.size:
            raise ValueError("it has records with the same name, or records that overlap")
        roots = [name.removesuffix("data.pkl") for name in self._records if name.count("/") == 1]
        valid_roots = [root for root in roots if f"{root}data.pkl" in self._records and root.endswith("/")]
        if len(valid_roots) != 1:
            raise ValueError(f"it must have one pickle (data.pkl) of torch.save, got {len(valid_roots)}")
        self._root = valid_roots[0]
        if f"{self._root}byteorder" in self._records and bytes(self.record("byteorder")) != b"little":
            raise ValueError("it was written on a machine with another byte order")
        self._mapped_storage = None
        if mapped_path is not None:
            self._mapped_storage = torch.UntypedStorage.from_file(str(mapped_path), False, self.size)

    def length(self, name: str) -> int:
        """Return the size of a record in bytes; raise ValueError for a missing record."""
        record = self._records.get(self._root + name)
        if record is None:
            raise ValueError(f"it lacks the record {name[:80]!r}")
        return record.file_size

    def record(self, name: str) -> bytes:
        """Return the bytes of a small record."""
        length = self.length(name)
        if length > PICKLE_BYTES:
            raise ValueError(f"the record {name!r} has {length} bytes, more than {PICKLE_BYTES}")
        self.file.seek(self._offset(name))
        data = self.file.read(length)
        if len(data) != length:
            raise ValueError(f"the record {name!r} is truncated")
        return data

    def storage(self, name: str) -> torch.UntypedStorage:
        """Return the storage of a tensor, read from the file or memory-mapped."""
        length, offset = self.length(name), self._offset(name)
        if offset + length > self.size:
            raise ValueError(f"the record {name[:80]!r} is truncated")
        if (
            self._mapped_storage is not None and length and offset % 16 == 0
        ):  # mapped tensors must be aligned; unaligned tensors are copied
            return cast(torch.UntypedStorage, self._mapped_storage[offset : offset + length])
        buffer = torch.empty(length, dtype=torch.uint8)
        self.file.seek(offset)
        view, filled = memoryview(buffer.numpy()), 0  # type: ignore[arg-type]
        while filled < length:
            count = cast(io.BufferedReader, self.file).readinto(view[filled:])
            if not count:
                raise ValueError(f"the record {name[:80]!r} is truncated")
            filled += count
        return buffer.untyped_storage()

    def _offset(self, name: str) -> int:
        """Return the offset of a record's data, after the local header."""
        header_offset = self._records[self._root + name].header_offset
        self.file.seek(header_offset)
        header = self.file.read(30)
        if len(header) != 30 or header[:4] != b"PK\3\4":
            raise ValueError(f"the record {name[:80]!r} has no header")
        return header_offset + 30 + sum(struct.unpack_from("<2H", header, 26))


def _check_directory(file: BinaryIO, size: int) -> None:
    """Validate the size of a zip file's directory, because zipfile builds one object for each record."""
    start = max(0, size - _END.size - _LOCATOR64.size - _END64.size)
    file.seek(start)
    tail = file.read()
    if len(tail) < _END.size or tail[-_END.size :][:4] != b"PK\5\6":
        raise ValueError("it is not a zip file, the format of torch.save")
    length = _END.unpack(tail[-_END.size :])[5]
    locator = tail[-_END.size - _LOCATOR64.size : -_END.size]
    if locator[:4] == b"PK\6\7":
        end = tail[: _END64.size]
        if len(tail) != _END.size + _LOCATOR64.size + _END64.size or end[:4] != b"PK\6\6":
            raise ValueError("the directory of its zip file is damaged")
        length = max(length % 0xFFFFFFFF, _END64.unpack(end)[8])
    if length > DIRECTORY_BYTES:
        raise ValueError(f"the directory of its zip file has {length} bytes, more than {DIRECTORY_BYTES}")
