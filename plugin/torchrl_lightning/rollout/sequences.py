"""Whole environments ``[B, T]`` from a time-major rollout, for recurrent modules."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._compat import new_tensordict
from torchrl_lightning.entries import next_key

NAMES = (None, "time")


def sequences(
    rollout: TensorDictBase, envs: Tensor | None = None, recurrent_keys: Collection[NestedKey] = ("recurrent_state",)
) -> TensorDict:
    """Read environments ``envs`` of ``[T, N]`` as ``[B, T]`` named ``(None, "time")``.

    Only the first step of a recurrent state is used; it is expanded over ``T``, with zeros where an episode starts,
    because TorchRL's ``GRUModule`` and ``LSTMModule`` split a row at ``is_init`` and read the state at each split.

    Args:
        rollout: time-major ``[T, N]``.
        envs: environment indices ``[B]``; all of them when ``None``.
        recurrent_keys: root keys of recurrent states.
    """
    envs = torch.arange(rollout.shape[1], device=_device(rollout)) if envs is None else envs
    batch = torch.Size([envs.shape[0], rollout.shape[0]])

    def read(node: TensorDictBase) -> TensorDict:
        entries: dict[str, Any] = {
            key: read(value) if isinstance(value, TensorDictBase) else value.transpose(0, 1).index_select(0, envs)
            for key, value in node.items()
        }
        return new_tensordict(entries, batch, NAMES)

    def first(value: Tensor, start: Tensor | None) -> Tensor:
        state = value[0].index_select(0, envs).unsqueeze(1).expand(batch[0], batch[1], *value.shape[2:])
        if start is None or not bool(start.any()):
            return state
        return state.masked_fill(start.reshape(*batch, *[1] * (value.ndim - 2)), 0)

    present = [key for key in recurrent_keys if key in rollout.keys(include_nested=True)]
    out = read(rollout.exclude(*present, *(next_key(key) for key in present)) if present else rollout)
    start = out.get("is_init", None)
    for key in present:
        value = rollout.get(key)
        if isinstance(value, TensorDictBase):
            leaves = {name: first(leaf, start) for name, leaf in value.items()}
            out.set(key, new_tensordict(leaves, batch, NAMES))
        else:
            out.set(key, first(value, start))
    return out


def _device(rollout: TensorDictBase) -> torch.device | None:
    for value in rollout.values(include_nested=True, leaves_only=True):
        return torch.device(value.device)
    return None
