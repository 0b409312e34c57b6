"""Checksums over what a file holds: a bit that has changed since is an error, and not another number."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

SEAL = "checksums"  # the entry of a checkpoint that holds one for each of others
_CHUNK = 1 << 24  # bytes
_MOST, _DEPTH = 1_000_000, 64  # values and levels of a checkpoint


def checksum(node: Any) -> int:
    """Return the CRC-32 of nested dicts, lists, tensors and plain values, whatever the order of a dict.

    Of anything else, and of a tensor that is not in one memory, only the type counts.

    Example:
        >>> checksum({"a": torch.ones(2), "b": 1}) == checksum({"b": 1, "a": torch.ones(2)})
        True
        >>> checksum([1]) == checksum([1.0])
        False
    """
    found = 0
    for part in _parts(node):
        found = zlib.crc32(part, found)
    return found


def _parts(node: Any) -> Iterator[Any]:
    if isinstance(node, Mapping):
        yield f"{{{len(node)}".encode()
        named = {f"{type(key).__name__} {key!r}": entry for key, entry in node.items()}
        for name in sorted(named):
            yield name.encode(errors="replace")
            yield from _parts(named[name])
    elif isinstance(node, list | tuple):
        yield f"[{len(node)}".encode()
        for entry in node:
            yield from _parts(entry)
    elif isinstance(node, Tensor):
        yield f"{node.dtype} {list(node.shape)}".encode()
        if is_plain(node):
            yield from pieces(node.reshape(-1))
    elif node is None or type(node) in (bool, int, float, str):
        yield f"{type(node).__name__} {node!r}".encode(errors="replace")
    else:
        yield f"a {type(node).__name__}".encode()


def pieces(rows: Any) -> Iterator[Any]:
    """Yield the bytes of rows, a bounded number at a time."""
    step = max(1, _CHUNK // max(1, rows[:1].nbytes))
    for start in range(0, len(rows), step):
        part = rows[start : start + step].detach().cpu().contiguous()
        # A single number keeps the stride of its column.
        yield part.as_strided([part.numel()], [1]).view(torch.uint8).numpy()


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has its numbers in one memory, as one that was read from a file must have."""
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized and not tensor.is_nested


def seal(checkpoint: dict[str, Any], *entries: str) -> None:
    """Add the checksums of these entries, as far as they are there, to a checkpoint that is being written."""
    sums = {name: checksum(checkpoint[name]) for name in entries if name in checkpoint}
    checkpoint[SEAL] = {**checkpoint.get(SEAL, {}), **sums}


def check_seal(checkpoint: Mapping[str, Any], where: str) -> None:
    """Refuse a checkpoint that is not as it was written; one without checksums is taken as it is.

    Raises:
        ValueError: An entry has another checksum, or a tensor that is no plain one.
    """
    for name in foreign_tensors(checkpoint):
        raise ValueError(f"{where} holds a tensor without numbers of its own, {name}; take another checkpoint")
    sums = checkpoint.get(SEAL, {})
    if not isinstance(sums, Mapping):
        raise ValueError(f"{where} has {SEAL!r} that are not ours; take another checkpoint")
    for name, written in sums.items():
        if checksum(checkpoint.get(name)) != written:
            raise ValueError(f"{where} is damaged: {name!r} is not as it was written; take another checkpoint")


def foreign_tensors(checkpoint: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of tensors that are sparse, quantized or without memory.

    Raises:
        ValueError: There are too many values, or levels: lists in a file may hold themselves.
    """
    left: list[tuple[str, Any, int]] = [("", checkpoint, 0)]
    seen = 0
    while left:
        name, node, depth = left.pop()
        seen += 1
        if seen > _MOST or depth > _DEPTH:
            raise ValueError(f"the checkpoint holds more than {_MOST} values, or more than {_DEPTH} levels")
        if isinstance(node, Tensor):
            if not is_plain(node):
                yield name
        elif isinstance(node, Mapping | list | tuple):
            entries = node.items() if isinstance(node, Mapping) else enumerate(node)
            left += ((f"{name}.{key}" if name else str(key), entry, depth + 1) for key, entry in entries)
