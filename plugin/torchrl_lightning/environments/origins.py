"""Which environment each row of a rollout is from, where several workers collect, and where its episode is cut."""

from __future__ import annotations

import logging
from itertools import pairwise

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning.keys import DONE, ENV_IDS, IS_INIT, TRAJ_IDS

logger = logging.getLogger(__name__)


class RowOrigins:
    """Number the environments behind the rows of a collector's rollouts.

    Rollouts of a collector without workers hold the same environments in the same order, and are left as they are. With
    several workers each rollout states in ``("collector", "env_ids")`` whose rows it holds. Where TorchRL's collectors
    do not, rows are numbered by ``("collector", "traj_ids")``, so that every trajectory keeps one number from its
    beginning to its end. Without those either, every number is -1, which means unknown.
    """

    def __init__(self, num_workers: int) -> None:
        self._has_workers = num_workers > 1
        self._open: dict[int, int] = {}  # trajectories that go on, and their numbers
        self._free: set[int] = set()  # numbers whose trajectory has ended
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
    """Return which steps have another trajectory id than the step before them.

    Args:
        rollout: two-dimensional, of time and environments.
        time_dim: which dimension is time.
        last: ids of the steps before the rollout, one for each environment; unknown if None.

    Returns:
        Flags of the rollout's shape, or None if it has no ``("collector", "traj_ids")``.
    """
    ids: Tensor | None = rollout.get(TRAJ_IDS, None)
    return None if ids is None else changed_ids(ids.reshape(*rollout.shape, -1)[..., 0], time_dim, last)


def changed_ids(ids: Tensor, time_dim: int, last: Tensor | None = None) -> Tensor:
    """Return which ids differ from the one before them; arguments as of :func:`id_changes`."""
    before = ids.select(time_dim, 0) if last is None else last.to(ids.device)
    return torch.cat([before.unsqueeze(time_dim), ids], time_dim).diff(dim=time_dim) != 0


class Trajectories:
    """Find trajectories that a collector cuts without an end flag: by ids of trajectories, or by ``is_init``."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # id of each environment

    def split(self, rollout: TensorDictBase, rings: Tensor | None) -> list[tuple[int, int, list[int]]]:
        """Split a rollout before the steps that begin other trajectories without a flag.

        Args:
            rollout: ``[N, T]``.
            rings: whose rows these are, ``[N]``; None for all environments in order.

        Returns:
            First step and end of each part, and the environments whose trajectories are cut before it.
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
    """Look up whose steps a rollout holds, ``[N]``; None if it holds those of all environments in order."""
    stated: Tensor | None = rollout.get(ENV_IDS, None)
    return None if stated is None else stated.select(time_dim, 0).cpu()


def ring_ids(rollout: TensorDictBase, num_envs: int) -> Tensor | None:
    """Return which of ``num_envs`` rings the rows of a rollout ``[N, T]`` belong to; None for all of them in order.

    Raises:
        ValueError: nobody says whose rows they are, or there are more environments.
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


def cut_off(rollout: TensorDictBase) -> None:
    """Mark the last step of each environment as truncated where its episode goes on but will not be seen any more."""
    following = rollout["next"]
    open_ended = ~following["done"][:, -1]
    for name in ("truncated", "done"):
        flag = following.get(name, None)
        if flag is not None:
            flag[:, -1] |= open_ended
