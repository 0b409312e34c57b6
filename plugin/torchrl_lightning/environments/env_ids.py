"""Track the environment of each rollout row across workers, and the cuts of episodes."""

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
    With several workers, ``("collector", "env_ids")`` has the environment of each row. TorchRL's collectors may not
    write it; then the numbers are derived from ``("collector", "traj_ids")``: every trajectory keeps one number from
    its beginning to its end. If both are missing, every number is -1 (unknown).
    """

    def __init__(self, num_workers: int) -> None:
        self._has_workers = num_workers > 1
        self._open: dict[int, int] = {}  # unfinished trajectories and their numbers
        self._free: set[int] = set()  # numbers of ended trajectories
        self._count = 0
        self._has_warned = False

    def numbered(self, rollout: TensorDictBase) -> TensorDictBase:
        """Return a rollout ``[N, T]`` with ``("collector", "env_ids")`` ``[N, T]``, if it needs them."""
        if not self._has_workers or rollout.get(ENV_IDS, None) is not None:
            return rollout
        trajectories = rollout.get(TRAJ_IDS, None)
        if trajectories is None:
            if not self._has_warned:
                logger.warning(
                    "the collector's workers do not say whose rows they deliver (no %r): returns of training episodes "
                    "are not reported. Leave track_traj_ids on.",
                    TRAJ_IDS,
                )
            self._has_warned = True
            numbers = [-1] * rollout.shape[0]
        else:
            ended = rollout["next", "done"].flatten(2).any(-1)
            numbers = self._numbers(trajectories.reshape(rollout.shape), ended)
        rollout = rollout.copy()  # a collector may have locked its memory
        rollout[ENV_IDS] = torch.tensor(numbers, device=rollout.device)[:, None].repeat(1, rollout.shape[1])
        return rollout

    def _numbers(self, trajectories: Tensor, ended: Tensor) -> list[int]:
        if ((trajectories[:, 1:] != trajectories[:, :-1]) & ~ended[:, :-1]).any():
            raise ValueError(
                f"{TRAJ_IDS!r} changes within a row where no episode ended: the collector joins the steps of several "
                'workers in one row. Let it stack them (cat_results="stack").'
            )
        known = [self._open.pop(trajectory, None) for trajectory in trajectories[:, 0].tolist()]
        numbers = [self._new_number(row) if number is None else number for row, number in enumerate(known)]
        for number, trajectory, is_over in zip(
            numbers, trajectories[:, -1].tolist(), ended[:, -1].tolist(), strict=True
        ):
            if is_over:
                self._free.add(number)
            else:
                self._open[trajectory] = number
        return numbers

    def _new_number(self, row: int) -> int:
        if self._free:
            number = row if row in self._free else min(self._free)
            self._free.remove(number)
            return number
        self._count += 1
        return self._count - 1


def id_changes(rollout: TensorDictBase, time_dim: int, last: Tensor | None = None) -> Tensor | None:
    """Return a mask of the steps with another trajectory id than the previous step.

    Args:
        rollout: two-dimensional, time and environments in either order.
        time_dim: the dimension of time.
        last: ids of the steps before the rollout, one for each environment; unknown if None.

    Returns:
        Flags with the rollout's shape; None without ``("collector", "traj_ids")``.
    """
    ids: Tensor | None = rollout.get(TRAJ_IDS, None)
    return None if ids is None else changed_ids(ids.reshape(*rollout.shape, -1)[..., 0], time_dim, last)


def changed_ids(ids: Tensor, time_dim: int, last: Tensor | None = None) -> Tensor:
    """Return a mask of the ids that differ from the previous id; arguments as in :func:`id_changes`."""
    before = ids.select(time_dim, 0) if last is None else last.to(ids.device)
    return torch.cat([before.unsqueeze(time_dim), ids], time_dim).diff(dim=time_dim) != 0


class Trajectories:
    """Find trajectories that a collector cuts without an end flag, by trajectory ids or ``is_init``."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # last trajectory id of each environment

    def split(self, rollout: TensorDictBase, rings: Tensor | None) -> list[tuple[int, int, list[int]]]:
        """Split a rollout before each step that begins a trajectory without an end flag before it.

        Args:
            rollout: ``[N, T]``.
            rings: the environments of the rows, ``[N]``; None for all environments in order.

        Returns:
            Begin and end of each part, and the environments with a trajectory that is cut before the part.
        """
        (width, length), stated = rollout.shape, rollout.get(TRAJ_IDS, None)
        env = list(range(width)) if rings is None else rings.tolist()
        changed = torch.zeros(rollout.shape, dtype=torch.bool)
        if stated is not None:
            ids = stated.reshape(*rollout.shape, -1)[..., 0].cpu()
            first = ids[:, 0].tolist()
            known = torch.tensor([self._last.get(ring, number) for ring, number in zip(env, first, strict=True)])
            changes = id_changes(rollout, 1, known)
            assert changes is not None
            changed = changes.cpu()
            self._last.update(zip(env, ids[:, -1].tolist(), strict=True))
        starts = rollout.get(IS_INIT, None)
        if starts is not None:
            changed = changed | starts.reshape(*rollout.shape, -1).bool().any(-1).cpu()
        done = rollout.get(DONE, None)
        if done is not None:
            changed[:, 1:] &= ~done.reshape(*rollout.shape, -1).any(-1)[:, :-1].cpu()
        begins = sorted({0, *changed.any(0).nonzero().flatten().tolist()})
        return [
            (begin, end, [ring for ring, cut in zip(env, changed[:, begin].tolist(), strict=True) if cut])
            for begin, end in pairwise([*begins, length])
        ]


def env_ids(rollout: TensorDictBase, time_dim: int = 1) -> Tensor | None:
    """Return the environment of each row of a rollout, ``[N]``; None (all in order) without ``env_ids``."""
    stated: Tensor | None = rollout.get(ENV_IDS, None)
    return None if stated is None else stated.select(time_dim, 0).cpu()


def ring_ids(rollout: TensorDictBase, num_envs: int) -> Tensor | None:
    """Return the ring of each row of a rollout ``[N, T]``, out of ``num_envs``; None for all rings in order.

    Raises:
        ValueError: the environment of a row is unknown, or its number is not below ``num_envs``.
    """
    ids = env_ids(rollout)
    if ids is None or torch.equal(ids, torch.arange(num_envs)):
        return None
    if int(ids.min()) < 0:
        raise ValueError(
            "the collector's workers do not say whose rows they deliver, so that their steps would be joined to "
            f"each other's episodes. Let the rollouts have {ENV_IDS!r} or {TRAJ_IDS!r}."
        )
    if int(ids.max()) >= num_envs:
        raise ValueError(
            f"the collector delivers rows of environment {int(ids.max())}, but num_envs={num_envs}. Give the "
            "DataModule the number of all environments: those of one worker times the number of workers."
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
