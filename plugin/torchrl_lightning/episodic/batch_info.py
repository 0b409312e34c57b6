"""Origin of a sampled batch."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from tensordict import NonTensorData, TensorClass
from torch import Tensor

from torchrl_lightning._core.torchrl_compat import new_tensorclass, new_tensordict


class BatchInfo(TensorClass):
    """Origin of the windows of :meth:`EpisodicReplayBuffer.get_batch`, ``[B]``.

    Attributes:
        env_ids: the environment of each window.
        positions: the position of each window's first step.
        importance_weights: priority of the first step, divided by the mean nonzero priority; None without priorities.
        replay_buffer: the sampled buffer.
        discounted_return: the return of the first step; None if returns are not recorded.

    Examples:
        >>> import torch
        >>> info = BatchInfo(torch.tensor([0, 1]), torch.tensor([5, 7]), batch_size=[2])
        >>> info[1].positions.item(), info.importance_weights
        (7, None)

    An index selects rows, so a BatchInfo cannot be unpacked into its fields.
    """

    env_ids: Tensor
    positions: Tensor
    importance_weights: Tensor | None = None
    replay_buffer: Any = None
    discounted_return: Tensor | None = None

    def __iter__(self) -> NoReturn:
        """Raise TypeError: iteration would yield rows, but ALF's tuple yields fields."""
        fields = ", ".join(field.name for field in self.fields())
        raise TypeError(f"A BatchInfo cannot be unpacked. Read its fields {fields}; info[i] selects row i.")


def make_batch_info(buffer: Any, entries: dict[str, Any], batch_size: torch.Size) -> BatchInfo:
    """Build a BatchInfo without validation, much faster than the constructor."""
    # Wrap the buffer in the same way as the constructor.
    non_tensor_state = {"data": buffer, "_is_non_tensor": True, "_metadata": None}
    buffer_entry = new_tensorclass(NonTensorData, new_tensordict({}, batch_size), non_tensor_state)
    missing = dict.fromkeys(("importance_weights", "discounted_return") - entries.keys())
    return new_tensorclass(BatchInfo, new_tensordict({**entries, "replay_buffer": buffer_entry}, batch_size), missing)


def first_steps(windows: Tensor) -> Tensor:
    """Return the values of each window's first step, ``[B, ...]``, or ``[B]`` if a step has one number."""
    shape, stride = windows.shape, windows.stride()
    trailing = slice(2, 2 if shape[2:] == (1,) else None)
    return windows.as_strided(
        shape[:1] + shape[trailing], stride[:1] + stride[trailing]
    )  # a third faster than indexing
