"""Functions that order the rows of several environments time-major."""

from __future__ import annotations

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.keys import TRAJ_IDS
from torchrl_lightning._core.tree import entry_of, to_tensordict, tree_of

MASK = "collector", "mask"
"""The entry of TorchRL's ``split_trajectories`` that is False in padded rows."""


def time_major(
    data: TensorDictBase, num_envs: int, time_dim: int | None, default_time_dim: int | None = None
) -> TensorDictBase:
    """Return the rows of ``num_envs`` environments, flat and time-major; raise ValueError for ambiguous data.

    Args:
        data: ``[num_envs]``, one step of each environment; ``[n]`` for one environment; or a rollout with one time
            dimension, for example ``[N, T]`` or ``[*nested_batch_size, T]``.
        num_envs: number of environments in the data.
        time_dim: the time dimension; None reads the dimension named ``"time"``.
        default_time_dim: the time dimension of a rollout without this name. If it is given, the trajectories that
            TorchRL's ``split_trajectories`` has split and padded are joined again.
    """
    if data.ndim == 1 and time_dim is None:
        if num_envs == 1 or data.shape[0] == num_envs:
            return data
        raise ValueError(
            f"data must have {num_envs} rows, one step per environment, got {data.shape[0]} rows. For several steps, "
            f'pass [T, {num_envs}] or [{num_envs}, T] with a dimension named "time" or with time_dim=. For a collector '
            "that calls extend itself, build the buffer with num_envs= of the collector's environments."
        )
    axis = time_axis(data, time_dim, default_time_dim)
    if data.ndim == 1:
        return time_major(data, num_envs, None)
    if default_time_dim is not None and isinstance(data, LazyStackedTensorDict):
        data = to_tensordict(tree_of(data), data.shape, data.device)
    if data.ndim == 2:
        data = data if axis % 2 == 0 else data.transpose(0, 1)
    else:
        dims = list(range(data.ndim))
        data = data.permute(dims.pop(axis), *dims).flatten(1, -1)
    if default_time_dim is not None and (mask := entry_of(data, MASK)) is not None:
        data = _join_trajectories(data.exclude(MASK), mask, num_envs)
    if data.shape[1] != num_envs:
        raise ValueError(
            f"The rollout must have {num_envs} environments, got {data.shape[1]}. Build the buffer with num_envs= of "
            "all environments, or pass env_ids=."
        )
    return data.reshape(-1)


def time_axis(data: TensorDictBase, time_dim: int | None, default_time_dim: int | None) -> int:
    """Return the time dimension of a rollout; raise ValueError if it is unknown."""
    names = data.names
    axis = time_dim if time_dim is not None else names.index("time") if "time" in names else default_time_dim
    if axis is None or not -data.ndim <= axis < data.ndim:
        raise ValueError(
            f"data must be [n] or a rollout with one time dimension, got batch size {list(data.shape)}, names {names} "
            f'and time_dim={axis}. Pass time_dim=, or name the dimension, e.g. data.names = [None, "time"]. For a '
            "collector that calls extend itself, as TorchRL's with replay_buffer=, build the buffer with time_dim=-1."
        )
    return axis


def count_envs(data: TensorDictBase, time_dim: int | None, default_time_dim: int | None) -> tuple[int, int]:
    """Return the numbers of environments and steps in a rollout."""
    steps = data.shape[time_axis(data, time_dim, default_time_dim)]
    return data.numel() // steps, steps


def may_be_one_env(data: TensorDictBase, done_key: NestedKey) -> bool:
    """Return whether rows ``[n]`` may be successive steps of one environment, by the ids of their trajectories."""
    ids, done = entry_of(data, TRAJ_IDS), entry_of(data, done_key)
    if ids is None:
        return False
    changes = ids.reshape(len(data), -1)[:, 0].diff() != 0
    return not changes.any() or (done is not None and bool(done.reshape(len(data), -1)[:-1].any(1)[changes].all()))


def _join_trajectories(data: TensorDictBase, mask: Tensor, num_envs: int) -> TensorDictBase:
    """Return the rollout ``[T, num_envs]`` of padded trajectories, ``[T_max, trajectories]`` in order of environments.

    Args:
        data: the trajectories.
        mask: False for padded rows, with the same shape.
        num_envs: number of environments.

    Raises:
        ValueError: the trajectories are not those of ``num_envs`` environments with the same number of steps.
    """
    mask = mask.reshape(data.shape)
    if bool(mask.all()) and data.shape[1] == num_envs:
        return data
    lengths = mask.sum(0)
    steps, rest = divmod(int(lengths.sum()), num_envs)
    ends = steps * torch.arange(1, num_envs + 1, device=lengths.device)
    if rest or not steps or not torch.isin(ends, lengths.cumsum(0)).all() or bool((mask[1:] > mask[:-1]).any()):
        raise ValueError(
            f"The trajectories must be those of {num_envs} environments with the same number of steps, in order of "
            f'environments, got {lengths.tolist()} steps with ("collector", "mask"). Collect with split_trajs=False, '
            "or write each environment with env_ids=."
        )
    return data.transpose(0, 1)[mask.transpose(0, 1)].view(num_envs, steps).transpose(0, 1)
