"""Transitions with Velora's names, and the mapping between these names and this package's keys."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorClass, TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.torchrl_compat import new_tensordict
from torchrl_lightning.velora.buffer_files import NAMES

HIDDEN, PREVIOUS = ("next", "recurrent_state"), "recurrent_state"
KEYS: list[NestedKey] = ["observation", "action", *(("next", key) for key in ("reward", "observation", "terminated"))]
COLUMNS: dict[str, NestedKey] = dict(zip(NAMES, [*KEYS, HIDDEN], strict=True))  # key for each documented name


class BatchExperience(TensorClass):
    """A batch of transitions with Velora's names; all entries are float32 ``[B, features]``.

    Attributes:
        states: observations.
        actions: actions in these states.
        rewards: rewards of the actions, ``[B, 1]``.
        next_states: the true successors.
        dones: 1 if the successor is terminal, else 0, ``[B, 1]``.
        hiddens: recurrent states *after* acting; use them with ``next_states``.
        previous_hiddens: recurrent states before acting; use them with ``states``; ``None`` if not stored.

    Examples:
        >>> import torch
        >>> one = torch.zeros(5, 1)
        >>> batch = BatchExperience(one, one, one, one, one, one, batch_size=[5])
        >>> batch[:2].states.shape, batch.previous_hiddens
        (torch.Size([2, 1]), None)
    """

    states: Tensor
    actions: Tensor
    rewards: Tensor
    next_states: Tensor
    dones: Tensor
    hiddens: Tensor
    previous_hiddens: Tensor | None = None


def make_transitions(columns: Mapping[str, Tensor]) -> TensorDict:
    """Build transitions ``[n]`` with this package's keys from Velora's columns ``[n, features]`` and ``truncated``."""
    terminated, truncated = (_to_flags(columns[name], name) for name in ("dones", "truncated"))
    size = terminated.shape[:1]
    next_step = {
        "observation": columns["next_states"],
        "reward": columns["rewards"],
        "done": terminated | truncated,
        "terminated": terminated,
        "truncated": truncated,
        "recurrent_state": columns["hiddens"],
    }
    data = {"observation": columns["states"], "action": columns["actions"], "next": new_tensordict(next_step, size)}
    if "previous_hiddens" in columns:
        data[PREVIOUS] = columns["previous_hiddens"]
    return new_tensordict(data, size)


def features_of(data: TensorDictBase, key: NestedKey) -> int | None:
    """Return the number of elements per row of an entry, summed over its leaves; ``None`` if the entry is missing."""
    leaves = _leaves(data, key)
    return sum(int(leaf.shape[data.ndim :].numel()) for leaf in leaves) if leaves else None


def flatten_entry(data: TensorDictBase, key: NestedKey) -> Tensor:
    """Return an entry of transitions ``[B]`` as float32 ``[B, features]``, with its leaves concatenated."""
    leaves = _leaves(data, key)
    if not leaves:
        raise KeyError(f"The transitions have no entry {key!r}. Use draw to sample all stored entries.")
    columns = [leaf.flatten(1).float() if leaf.ndim > 1 else leaf.unsqueeze(1).float() for leaf in leaves]
    return columns[0] if len(columns) == 1 else torch.cat(columns, -1)


def _leaves(data: TensorDictBase, key: NestedKey) -> list[Tensor]:
    entry = data.get(key, None)
    if entry is None:
        return []
    return list(entry.values(True, True)) if isinstance(entry, TensorDictBase) else [entry]


def _to_flags(column: Tensor, name: str) -> Tensor:
    flags = column != 0
    if not torch.equal(flags.to(column.dtype), column):
        raise ValueError(f"{name} must be 0 or 1, got other values; nothing was written.")
    return flags
