"""Ranks of a distributed run, and exchange of values between them."""

from __future__ import annotations

import pickle
import re
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")
_SMALL, _HEADER = 8192, 8  # bytes of the first operation, and bytes of the value's size in front of the value
_LOST = re.compile(r"(closed|reset) by peer|gloo/.*Broken pipe|ncclRemoteError|remote process exited", re.IGNORECASE)


def is_distributed() -> bool:
    """Return whether a process group is initialised."""
    return dist.is_available() and dist.is_initialized()


def this_rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Return the number of processes; 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


def broadcast_from_rank_zero(value: Value) -> Value:
    """Return the value of rank 0 on all ranks; without a process group, return the argument."""
    if not is_distributed():
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def all_gather(value: Value) -> list[Value]:
    """Return the values of all ranks, ordered by rank; a list of one value without a process group.

    A small value, such as a row of metrics, needs one collective operation on the CPU, and other values need two.
    """
    if not is_distributed():
        return [value]
    if dist.get_backend() != dist.Backend.GLOO:  # the tensors must be on the backend's device
        values: list[Any] = [None] * world_size()
        dist.all_gather_object(values, value)
        return values
    data = bytearray(pickle.dumps(value))
    start = bytearray(len(data).to_bytes(_HEADER, "little")) + data[: _SMALL - _HEADER]
    rows = _gather_bytes(start, _SMALL)
    sizes = [int.from_bytes(row[:_HEADER], "little") for row in rows]
    rows = [row[_HEADER:] for row in rows] if max(sizes) <= _SMALL - _HEADER else _gather_bytes(data, max(sizes))
    return [pickle.loads(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def _gather_bytes(data: bytearray, size: int) -> list[bytes]:
    """Return the bytes of all ranks, padded to ``size``."""
    padded = torch.zeros(size, dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
    rows = [torch.empty_like(padded) for _ in range(world_size())]
    dist.all_gather(rows, padded)
    return [row.numpy().tobytes() for row in rows]


def is_lost_rank(error: BaseException) -> bool:
    """Return whether an error of a collective operation means that another rank has ended."""
    return world_size() > 1 and isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


def state_of_rank(states: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """Return the state of ``rank``; raise ValueError if the saved run had another number of ranks."""
    if len(states) != world_size:
        raise ValueError(
            f"the checkpoint has the experience state of {len(states)} rank(s), but this run has {world_size}. "
            f"Resume with {len(states)} device(s), or start a new run from its weights: init_from=CHECKPOINT in a "
            "command, build(specs).load_state_dict(...) of the module in a script."
        )
    return states[rank]
