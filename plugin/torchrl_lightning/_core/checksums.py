"""Checksums of a checkpoint's entries, so that a changed bit raises an error instead of changing a number."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torchrl_lightning._core.file_limits import (
    CHECKPOINT_DEPTH,
    CHECKPOINT_TEXT,
    CHECKPOINT_VALUES,
    ELEMENTS_LEAST,
    ELEMENTS_PER_BYTE,
)

CHECKSUMS_KEY = "checksums"  # checkpoint entry with the checksums of other entries
_CHUNK = 1 << 24  # bytes
_Path = tuple[Any, Any] | None  # the path of the parent, and the key in the parent


def checksum(node: Any) -> int:
    """Return the CRC-32 of nested dicts, lists, tensors and plain values; the order of dict keys does not matter.

    Objects of other types contribute only their type. Tensors that are not dense contribute only their dtype and shape.

    Examples:
        >>> checksum({"a": torch.ones(2), "b": 1}) == checksum({"b": 1, "a": torch.ones(2)})
        True
        >>> checksum([1]) == checksum([1.0])
        False
    """
    crc = 0
    for data in _node_bytes(node):
        crc = zlib.crc32(data, crc)
    return crc


def _node_bytes(node: Any) -> Iterator[Any]:
    if isinstance(node, Mapping):
        yield f"{{{len(node)}".encode()
        named = {f"{type(key).__name__} {key!r}": entry for key, entry in node.items()}
        for name in sorted(named):
            yield name.encode(errors="replace")
            yield from _node_bytes(named[name])
    elif isinstance(node, list | tuple):
        yield f"[{len(node)}".encode()
        for entry in node:
            yield from _node_bytes(entry)
    elif isinstance(node, Tensor):
        yield f"{node.dtype} {list(node.shape)}".encode()
        if is_dense_tensor(node):
            yield from _tensor_bytes(node)
    elif node is None or type(node) in (bool, int, float, str):
        yield f"{type(node).__name__} {node!r}".encode(errors="replace")
    else:
        yield f"a {type(node).__name__}".encode()


def _tensor_bytes(tensor: Tensor) -> Iterator[Any]:
    """Yield the bytes of a tensor in the order of its elements; copy a bounded number of bytes at a time."""
    if tensor.is_contiguous() or tensor.nbytes <= _CHUNK:
        yield from iter_chunks(tensor.reshape(-1))
        return
    step = _CHUNK // (tensor.nbytes // len(tensor))
    for part in tensor.split(step) if step else tensor:
        yield from _tensor_bytes(part)


def iter_chunks(rows: Any) -> Iterator[Any]:
    """Yield the bytes of rows in chunks of bounded size."""
    step = max(1, _CHUNK // max(1, rows[:1].nbytes))
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step].detach().cpu().contiguous()
        # A column with a single number may have any stride, but a view as bytes needs stride 1.
        yield chunk.as_strided([chunk.numel()], [1]).view(torch.uint8).numpy()


def is_dense_tensor(tensor: Tensor) -> bool:
    """Return whether a tensor is strided and not meta, quantized or nested; tensors from files must be dense."""
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized and not tensor.is_nested


def copy_expanded_tensors(node: Any) -> Any:
    """Return a node of a checkpoint with copies of expanded tensors, because readers reject repeated memory.

    Examples:
        >>> copy_expanded_tensors({"a": torch.zeros(1).expand(3)})["a"].stride()
        (1,)
    """
    if isinstance(node, Tensor):
        return node.contiguous() if is_dense_tensor(node) and _is_expanded(node) else node
    if isinstance(node, Mapping):
        changed = {
            key: copied_entry
            for key, entry in node.items()
            if (copied_entry := copy_expanded_tensors(entry)) is not entry
        }
        if not changed or not isinstance(node, dict):
            return node
        copied_mapping = copy.copy(node)
        copied_mapping.update(changed)
        return copied_mapping
    if type(node) in (list, tuple):
        entries = [copy_expanded_tensors(entry) for entry in node]
        is_same = all(copied_entry is entry for copied_entry, entry in zip(entries, node, strict=True))
        return node if is_same else type(node)(entries)
    return node


def add_checksums(checkpoint: dict[str, Any], *entries: str) -> None:
    """Add the checksums of these entries to a checkpoint; skip missing entries."""
    sums = {name: checksum(checkpoint[name]) for name in entries if name in checkpoint}
    checkpoint[CHECKSUMS_KEY] = {**checkpoint.get(CHECKSUMS_KEY, {}), **sums}


def verify_checksums(checkpoint: Mapping[str, Any], where: str) -> None:
    """Validate a checkpoint against its checksums, if it has any.

    Raises:
        ValueError: The checksum of an entry differs, a tensor is not dense, or a tensor repeats its memory.
    """
    for name in invalid_tensors(checkpoint):
        raise ValueError(f"{where} has a tensor without numbers of its own, {name}; use another checkpoint")
    sums = checkpoint.get(CHECKSUMS_KEY, {})
    if not isinstance(sums, Mapping):
        raise ValueError(
            f"{where} must have a dict of checksums as 'checksums', got a {type(sums).__name__}; use another checkpoint"
        )
    for name, expected in sums.items():
        if checksum(checkpoint.get(name)) != expected:
            raise ValueError(
                f"{where} is damaged: {name!r} has another checksum than when it was written; use another checkpoint"
            )


def invalid_tensors(checkpoint: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of tensors that are not dense or that repeat their memory.

    Raises:
        ValueError: The checkpoint has too many values, levels or characters; a list that contains itself has too many
            levels. Or its tensors share memory and together have many times the bytes of this memory.
    """
    pending: list[tuple[_Path, Any, int]] = [(None, checkpoint, 0)]
    count, characters, elements, storage_bytes = 0, 0, 0, dict[int, int]()
    while pending:
        path, node, depth = pending.pop()
        children = len(node) if isinstance(node, Mapping | list | tuple) else 0
        count += 1
        if count + len(pending) + children > CHECKPOINT_VALUES or depth > CHECKPOINT_DEPTH:
            raise ValueError(
                f"the checkpoint has more than {CHECKPOINT_VALUES} values, or more than {CHECKPOINT_DEPTH} levels"
            )
        if isinstance(node, Tensor):
            if not is_dense_tensor(node) or _is_expanded(node):
                yield _dotted_name(path)
                continue
            elements += node.nbytes
            storage = node.untyped_storage()
            storage_bytes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(node, str):
            characters += len(node)
        elif isinstance(node, Mapping | list | tuple):
            entries = node.items() if isinstance(node, Mapping) else enumerate(node)
            pending += (((path, key), entry, depth + 1) for key, entry in entries)
            characters += sum(len(key) for key in node if isinstance(key, str)) if isinstance(node, Mapping) else 0
        if characters > CHECKPOINT_TEXT:
            raise ValueError(f"the strings of the checkpoint have more than {CHECKPOINT_TEXT} characters")
    if elements > max(ELEMENTS_LEAST, ELEMENTS_PER_BYTE * sum(storage_bytes.values())):
        raise ValueError(
            f"the tensors of the checkpoint have more than {ELEMENTS_PER_BYTE} times the bytes of their memory"
        )


def _is_expanded(tensor: Tensor) -> bool:
    return any(step == 0 and length > 1 for length, step in zip(tensor.shape, tensor.stride(), strict=True))


def _dotted_name(path: _Path) -> str:
    names: list[str] = []
    while path is not None:
        path, key = path
        names.append(str(key)[:200])
    return ".".join(reversed(names))
