"""Track the environment of each rollout row across workers, and find cut episodes."""

from __future__ import annotations

import logging
from itertools import pairwise

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning._core.keys import DONE, ENV_IDS, IS_INIT, TRAJ_IDS

logger = logging.getLogger(__name__)


class EnvIdTracker:
    """Add environment numbers to the rows of a collector's rollouts.

    Rollouts of a collector without workers always contain the same environments in the same order and are not changed.
    With several workers, ``("collector", "env_ids")`` has the environment of each row. TorchRL's collectors may omit
    this entry. The numbers are then derived from ``("collector", "traj_ids")``. Every trajectory keeps one number from
    its beginning to its end. If both entries are missing, every number is -1 (unknown).
    """

    def __init__(self, num_workers: int) -> None:
        self._has_workers = num_workers > 1
        self._open_ids: dict[int, int] = {}  # unfinished trajectories and their numbers
        self._free_ids: set[int] = set()  # numbers of ended trajectories
        self._count = 0
        self._has_warned = False

    def with_env_ids(self, rollout: TensorDictBase) -> TensorDictBase:
        """Return a rollout ``[N, T]``; with several workers, add ``("collector", "env_ids")`` ``[N, T]``."""
        if not self._has_workers or rollout.get(ENV_IDS, None) is not None:
            return rollout
        trajectories = rollout.get(TRAJ_IDS, None)
        if trajectories is None:
            if not self._has_warned:
                logger.warning(
                    "returns of training episodes are not logged, because the rollouts have no %r, so the environment "
                    "of each row is unknown. Set track_traj_ids=True in the collector.",
                    TRAJ_IDS,
                )
            self._has_warned = True
            ids = [-1] * rollout.shape[0]
        else:
            ended = rollout["next", "done"].flatten(2).any(-1)
            ids = self._assign_ids(trajectories.reshape(rollout.shape), ended)
        rollout = rollout.copy()  # a collector may have locked its memory
        rollout[ENV_IDS] = torch.tensor(ids, device=rollout.device)[:, None].repeat(1, rollout.shape[1])
        return rollout

    def _assign_ids(self, trajectories: Tensor, ended: Tensor) -> list[int]:
        if ((trajectories[:, 1:] != trajectories[:, :-1]) & ~ended[:, :-1]).any():
            raise ValueError(
                f"{TRAJ_IDS!r} must not change within a row before the episode ends: the collector concatenates the "
                'steps of several workers in one row. Set cat_results="stack" in the collector.'
            )
        open_ids = [self._open_ids.pop(trajectory, None) for trajectory in trajectories[:, 0].tolist()]
        ids = [self._new_id(row) if env_id is None else env_id for row, env_id in enumerate(open_ids)]
        for env_id, trajectory, is_over in zip(ids, trajectories[:, -1].tolist(), ended[:, -1].tolist(), strict=True):
            if is_over:
                self._free_ids.add(env_id)
            else:
                self._open_ids[trajectory] = env_id
        return ids

    def _new_id(self, row: int) -> int:
        if self._free_ids:
            env_id = row if row in self._free_ids else min(self._free_ids)
            self._free_ids.remove(env_id)
            return env_id
        self._count += 1
        return self._count - 1


def id_changes(rollout: TensorDictBase, time_dim: int, last: Tensor | None = None) -> Tensor | None:
    """Return a mask of the steps at which the trajectory id changes.

    Args:
        rollout: two-dimensional, time and environments in either order.
        time_dim: the dimension of time.
        last: trajectory ids of the last steps before the rollout, one for each environment; None if unknown.

    Returns:
        Flags with the rollout's shape; None without ``("collector", "traj_ids")``.
    """
    ids: Tensor | None = rollout.get(TRAJ_IDS, None)
    return None if ids is None else changed_ids(ids.reshape(*rollout.shape, -1)[..., 0], time_dim, last)


def changed_ids(ids: Tensor, time_dim: int, last: Tensor | None = None) -> Tensor:
    """Return a mask of the ids that differ from the previous id; arguments as in :func:`id_changes`."""
    before = ids.select(time_dim, 0) if last is None else last.to(ids.device)
    return torch.cat([before.unsqueeze(time_dim), ids], time_dim).diff(dim=time_dim) != 0


class TrajectorySplitter:
    """Use trajectory ids or ``is_init`` to find trajectories that a collector cut without an end flag."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # last trajectory id of each environment

    def split(self, rollout: TensorDictBase, rings: Tensor | None) -> list[tuple[int, int, list[int]]]:
        """Split a rollout before each trajectory that follows a step without an end flag.

        Args:
            rollout: ``[N, T]``.
            rings: the environments of the rows, ``[N]``; None for all environments in order.

        Returns:
            ``(begin, end, environments)`` of each part. ``environments`` lists the environments with a trajectory that
            is cut before the part.
        """
        (width, length), traj_ids = rollout.shape, rollout.get(TRAJ_IDS, None)
        envs = list(range(width)) if rings is None else rings.tolist()
        changed = torch.zeros(rollout.shape, dtype=torch.bool)
        if traj_ids is not None:
            traj_ids = traj_ids.reshape(*rollout.shape, -1)[..., 0].cpu()
            first = traj_ids[:, 0].tolist()
            previous = torch.tensor([self._last.get(ring, traj_id) for ring, traj_id in zip(envs, first, strict=True)])
            changes = id_changes(rollout, 1, previous)
            assert changes is not None
            changed = changes.cpu()
            self._last.update(zip(envs, traj_ids[:, -1].tolist(), strict=True))
        starts = rollout.get(IS_INIT, None)
        if starts is not None:
            changed = changed | starts.reshape(*rollout.shape, -1).bool().any(-1).cpu()
        done = rollout.get(DONE, None)
        if done is not None:
            changed[:, 1:] &= ~done.reshape(*rollout.shape, -1).any(-1)[:, :-1].cpu()
        bounds = sorted({0, *changed.any(0).nonzero().flatten().tolist()})
        return [
            (start, end, [ring for ring, is_cut in zip(envs, changed[:, start].tolist(), strict=True) if is_cut])
            for start, end in pairwise([*bounds, length])
        ]


def env_ids(rollout: TensorDictBase, time_dim: int = 1) -> Tensor | None:
    """Return the environment of each row of a rollout, ``[N]``; None without ``env_ids``: all are in order."""
    ids: Tensor | None = rollout.get(ENV_IDS, None)
    return None if ids is None else ids.select(time_dim, 0).cpu()


def ring_ids(rollout: TensorDictBase, num_envs: int) -> Tensor | None:
    """Return the ring of each row of a rollout ``[N, T]``, a number below ``num_envs``; None means all in order.

    Raises:
        ValueError: the environment of a row is unknown, or its number is not below ``num_envs``.
    """
    ids = env_ids(rollout)
    if ids is None or torch.equal(ids, torch.arange(num_envs)):
        return None
    if int(ids.min()) < 0:
        raise ValueError(
            f"rollouts of several workers must have the entry {ENV_IDS!r} or {TRAJ_IDS!r}, got neither: steps of "
            "different environments would be joined in one episode. Set track_traj_ids=True in the collector."
        )
    if int(ids.max()) >= num_envs:
        raise ValueError(
            f"num_envs must be the number of all environments, got {num_envs}, but the collector returned rows of "
            f"environment {int(ids.max())}. Multiply the environments of one worker by the number of workers."
        )
    return ids


def mark_truncated(rollout: TensorDictBase) -> None:
    """Mark the last step of each unfinished episode as truncated, because its next steps will not be collected."""
    following = rollout["next"]
    open_ended = ~following["done"][:, -1]
    for name in ("truncated", "done"):
        flag = following.get(name, None)
        if flag is not None:
            flag[:, -1] |= open_ended
