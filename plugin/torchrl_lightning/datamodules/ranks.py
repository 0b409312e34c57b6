"""States of the processes of a distributed run."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


def of_first_rank(value: Value) -> Value:
    """Return the value of rank 0 on all ranks; the value itself without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def gather_states(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the states of all ranks, ordered by rank; a list of one without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return [state]
    states: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(states, state)
    return states


def state_of_rank(states: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """Return the state of ``rank``; a ValueError if the run had another number of ranks."""
    if len(states) != world_size:
        raise ValueError(
            f"the checkpoint holds the experience state of {len(states)} rank(s), but this run has {world_size}. "
            f"Resume with {len(states)} device(s), or load the weights alone."
        )
    return states[rank]
