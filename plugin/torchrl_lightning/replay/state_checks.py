"""Validation of saved states before anything changes: generators, samplers and prefetched batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning._core.state import (
    Stateful,
    bounded_integer,
    check_state,
    describe_value,
    generator,
    list_of,
    mapping,
    state_error,
    tensor,
    text,
)
from torchrl_lightning._core.tree import to_tensordict, tree_of
from torchrl_lightning._core.tree_checks import TorchRLState, check_tree
from torchrl_lightning._core.validators import optional


def sampler_state(sampler: Any, storage: Any) -> Any:
    """Return the object that has a sampler's state: the sampler, or a wrapper of a TorchRL sampler and its storage."""
    if isinstance(sampler, Stateful):
        return sampler
    name, cells = type(sampler).__name__, storage.max_size
    return TorchRLState(
        name, sampler, storage, lambda state, expected: _check_same_structure(state, expected, cells, name)
    )


def _check_same_structure(state: Any, expected: Any, cells: int, owner: str) -> None:
    if isinstance(expected, Mapping):
        if not isinstance(state, Mapping) or (set(state) != set(expected) and expected):
            description = sorted(map(str, state)) if isinstance(state, Mapping) else describe_value(state)
            raise ValueError(
                f"The {owner} state is foreign: it is {description}, expected {sorted(map(str, expected))}."
            )
        for key, value in expected.items():
            _check_same_structure(state[key], value, cells, f"{owner}'s {key}")
    elif isinstance(expected, Tensor | None) and isinstance(state, Tensor | None):
        if state is not None:  # cell numbers of any length, or a mask of cells
            dtype = torch.bool if state.dtype == torch.bool else torch.int64
            tensor(dtype if expected is None else expected.dtype, None, anywhere=True)(state, owner)
            if state.dtype == torch.int64:
                tensor(torch.int64, None, low=0, high=cells - 1, anywhere=True)(state, owner)
    elif isinstance(expected, int) and not isinstance(expected, bool):
        bounded_integer(min(expected, 0))(state, owner)
    elif type(state) is not type(expected):
        raise state_error(state, owner, describe_value(expected))


def device_and_state(value: Any, name: str) -> Mapping[str, Any]:
    """Validate the state and device of a buffer's generator."""
    mapping(value, name)
    device = value.get("device")
    if not isinstance(device, str):
        raise state_error(device, "the generator's 'device'", "the name of a device")
    generator(device)(value.get("state"), "the generator's 'state'")
    return value


def pack_batch(batch: TensorDictBase, info: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a state of a prefetched batch and of the entries that its sampler returned."""
    return {
        "batch": tree_of(batch),
        "batch_size": list(batch.batch_size),
        "names": list(batch.names) if any(batch.names) else None,
        "info": [[list(key) if isinstance(key, tuple) else key, value] for key, value in info.items()],
    }


def unpack_batch(packed: Any, name: str) -> tuple[TensorDictBase, dict[Any, Any]]:
    """Validate a state of :func:`pack_batch`, and build the batch from copies."""
    values = check_state(packed, _BATCH_SCHEMA, "prefetched batch")
    size, names = torch.Size(values["batch_size"]), values["names"]
    check_tree(values["batch"], size, "prefetched batch")
    if names is not None and len(names) != len(size):
        raise ValueError(f"The state is foreign: a prefetched batch {list(size)} has the dimension names {names}.")
    batch = to_tensordict(values["batch"], size).clone()
    if names is not None:
        batch.names = names
    return batch, dict(values["info"])


def _key_and_value(pair: Any, name: str) -> tuple[Any, Tensor]:
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[1], Tensor):
        raise state_error(pair, name, "a key and a tensor")
    key, value = tuple(pair[0]) if isinstance(pair[0], list) else pair[0], pair[1]
    if key == () or any(not isinstance(part, str) for part in (key if isinstance(key, tuple) else (key,))):
        raise state_error(key, f"a key of {name}", "a name")
    return key, value


_BATCH_SCHEMA = {
    "batch": mapping,
    "batch_size": list_of(bounded_integer()),
    "names": optional(list_of(optional(text))),
    "info": list_of(_key_and_value),
}
