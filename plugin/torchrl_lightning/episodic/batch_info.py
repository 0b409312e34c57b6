"""Where a documented batch comes from."""

from __future__ import annotations

from typing import Any, NoReturn

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

    Examples:
        >>> import torch
        >>> info = BatchInfo(torch.tensor([0, 1]), torch.tensor([5, 7]), batch_size=[2])
        >>> info[1].positions.item(), info.importance_weights
        (7, None)

    Indices mean rows, so that it cannot be unpacked into its fields.
    """

    env_ids: Tensor
    positions: Tensor
    importance_weights: Tensor | None = None
    replay_buffer: Any = None
    discounted_return: Tensor | None = None

    def __iter__(self) -> NoReturn:
        """Refuse to be unpacked: iteration would give rows, where ALF's tuple gives fields."""
        fields = ", ".join(each.name for each in self.fields())
        raise TypeError(f"A BatchInfo is not unpacked: read its fields {fields}; info[i] is row i.")


def info_of(buffer: Any, entries: dict[str, Any], batch_size: torch.Size) -> BatchInfo:
    """Build what the constructor builds, from tensors that fit, in a small part of the time."""
    # The buffer is kept as the constructor keeps it.
    kept = {"data": buffer, "_is_non_tensor": True, "_metadata": None}
    where = new_tensorclass(NonTensorData, new_tensordict({}, batch_size), kept)
    absent = dict.fromkeys(("importance_weights", "discounted_return") - entries.keys())
    return new_tensorclass(BatchInfo, new_tensordict({**entries, "replay_buffer": where}, batch_size), absent)


def first_steps(windows: Tensor) -> Tensor:
    """Return what holds for the first step of each window, ``[B, ...]``, or ``[B]`` if that is one number."""
    shape, stride = windows.shape, windows.stride()
    rest = slice(2, 2 if shape[2:] == (1,) else None)
    return windows.as_strided(shape[:1] + shape[rest], stride[:1] + stride[rest])  # a third faster than an index
