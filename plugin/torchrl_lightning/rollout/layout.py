"""Layout of rollouts: the time dimension."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_lightning._compat import new_tensordict


def time_axis(data: TensorDictBase, time_dim: int | None) -> int:
    """Find the time dimension: the explicit one, else the one named ``"time"``; never a guess.

    Raises:
        ValueError: ``time_dim`` is out of range, or there is neither an explicit nor a named dimension.
    """
    if time_dim is not None:
        if not -data.ndim <= time_dim < data.ndim:
            raise ValueError(f"time_dim={time_dim} does not exist in batch size {list(data.shape)}.")
        return time_dim % data.ndim
    if "time" in data.names:
        return int(data.names.index("time"))
    raise ValueError(
        f"Cannot tell which dimension of batch size {list(data.shape)} is time (names {data.names}). "
        'Name it, e.g. rollout.names = [None, "time"], or pass time_dim=.'
    )


def time_major(data: TensorDictBase, time_dim: int | None) -> TensorDictBase:
    """View ``data`` as ``[T, N]``; a single time dimension ``[T]`` becomes ``[T, 1]``.

    Raises:
        ValueError: time is unknown, or there are more than two batch dimensions.
    """
    axis = time_axis(data, time_dim)
    if data.ndim == 1:
        return data.unsqueeze(1)
    if data.ndim != 2:
        raise ValueError(f"Expected a rollout [N, T] or [T, N], got batch size {list(data.shape)}.")
    if axis == 0:
        return data
    return _turned(data) if isinstance(data, TensorDict) else data.transpose(0, 1)


def _turned(data: TensorDict) -> TensorDict:
    # TensorDict.transpose takes four times as long, and a rollout is turned for each write.
    entries = {
        key: _turned(value) if isinstance(value, TensorDict) else value.transpose(0, 1) for key, value in data.items()
    }
    return new_tensordict(entries, torch.Size([data.shape[1], data.shape[0]]), [*reversed(data.names)])
