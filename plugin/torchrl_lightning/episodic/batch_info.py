"""Where a documented batch comes from."""

from __future__ import annotations

__all__ = ["BatchInfo"]

from typing import Any

import torch
from tensordict import NonTensorData, TensorClass
from torch import Tensor

from torchrl_lightning._compat import new_tensorclass, new_tensordict


class BatchInfo(TensorClass):
    """What :meth:`EpisodicReplayBuffer.get_batch` tells of its windows, ``[B]``.

    Attributes:
        env_ids: the environment of each window.
        positions: the position of its first step.
        importance_weights: priority of that step over the mean priority that is not zero; None without priorities.
        replay_buffer: the buffer that it was drawn from.
        discounted_return: the return of its first step; None where returns are not recorded.

    Example:
        >>> import torch
        >>> info = BatchInfo(torch.tensor([0, 1]), torch.tensor([5, 7]), batch_size=[2])
        >>> info[1].positions.item(), info.importance_weights
        (7, None)
    """

    env_ids: Tensor
    positions: Tensor
    importance_weights: Tensor | None = None
    replay_buffer: Any = None
    discounted_return: Tensor | None = None


def info_of(buffer: Any, entries: dict[str, Any], batch_size: torch.Size) -> BatchInfo:
    """Build what the constructor builds, from tensors that fit, in a small part of the time."""
    # The buffer is kept as the constructor keeps it.
    kept = {"data": buffer, "_is_non_tensor": True, "_metadata": None}
    where = new_tensorclass(NonTensorData, new_tensordict({}, batch_size), kept)
    absent = dict.fromkeys(("importance_weights", "discounted_return") - entries.keys())
    return new_tensorclass(BatchInfo, new_tensordict({**entries, "replay_buffer": where}, batch_size), absent)
