"""N-step returns, made when cells are read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning._compat import entries_of
from torchrl_lightning.entries import Path
from torchrl_lightning.kernels.compiled import jitted
from torchrl_lightning.kernels.returns import fold_rows
from torchrl_lightning.keys import REWARD
from torchrl_lightning.ranges import fraction, integer
from torchrl_lightning.replay.cells import Cells, Names
from torchrl_lightning.replay.episode_index import NO_INDEX_HINT, EpisodeIndex

KERNEL_DTYPES = (torch.float32, torch.float64)
Folded = tuple[Tensor, Tensor, Tensor, Tensor]
"""Cells of the last steps, discounted sums of rewards, numbers of steps, and their discounts."""


@dataclass(frozen=True)
class NStepReturns:
    r"""Fold each step that is read with those that follow it in its episode, \(n\) at most.

    With \(k \le n\) steps left in what is stored of the episode, the reward becomes
    \(\sum_{i<k} \gamma^i r_{t+i}\), and everything else under ``"next"``, flags too, that of the last of these steps.
    So a value is bootstrapped with \(\gamma^k\) from the observation after \(k\) steps, unless that is terminal. A
    batch has ``steps_to_next_obs`` \(k\) and ``gamma`` \(\gamma^k\), each of the batch's shape, as TorchRL's
    ``MultiStepTransform`` names them. Nothing that is derived is stored.

    Args:
        n_steps: most steps.
        gamma: discount of a step.

    Raises:
        ValueError: a number out of range.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl_lightning import ExperienceBuffer, RingStorage
        >>> buffer = ExperienceBuffer(storage=RingStorage(8), n_steps=3, gamma=0.5, batch_size=64)
        >>> done = torch.tensor([0, 0, 0, 1, 0, 0], dtype=torch.bool).unsqueeze(-1)
        >>> data = TensorDict({"t": torch.arange(6), "next": {"reward": torch.ones(6, 1), "done": done}}, [6])
        >>> _ = buffer.extend(data)
        >>> batch = buffer.sample()
        >>> batch["next", "reward"][batch["t"] == 0][0], batch["steps_to_next_obs"][batch["t"] == 3][0]
        (tensor([1.7500]), tensor(1))
    """

    n_steps: int
    gamma: float

    def __post_init__(self) -> None:
        integer(self.n_steps, "n_steps")
        fraction(self.gamma, "gamma")

    def gather(
        self, cells: Cells, episodes: EpisodeIndex | None, index: Tensor, names: Names, skip: Collection[Path]
    ) -> dict[str, Any]:
        """Read entries of the cells ``index``, as :meth:`Cells.gather` does, with folded steps."""
        place = cells.places.get(REWARD)
        if place is None:
            raise KeyError(f"n_steps={self.n_steps} needs the entry {REWARD!r}, which is not stored.")
        if episodes is None:
            raise ValueError(
                f"n_steps={self.n_steps} needs to know where episodes end, but nothing does: write the entry "
                '("next", "done") with the first data, into a RingWriter that tracks episodes. ' + NO_INDEX_HINT
            )
        last, reward, steps, gamma = self.fold(episodes, cells.leaves[place], index)
        entries = cells.gather(index, names, {*skip, REWARD}, last)
        entries_of(entries["next"])["reward"] = reward
        entries["steps_to_next_obs"], entries["gamma"] = steps, gamma
        return entries

    def fold(self, episodes: EpisodeIndex, reward: Tensor, index: Tensor) -> Folded:
        """Fold the steps in filled cells ``index``, ``[*B]``; ``reward`` is all that is stored, ``[cells, *F]``."""
        if not reward.is_cpu or reward.dtype not in KERNEL_DTYPES:
            return self.fold_by_steps(episodes, reward, index)
        rows, rewards = index.contiguous().numpy(), reward.numpy()
        # In their final shapes, because each view of a tensor costs as much as a tenth of this.
        last, steps = np.empty((2, *rows.shape), np.int64)
        gamma = np.empty(rows.shape, np.float32)
        total = np.empty(rows.shape + rewards.shape[1:], rewards.dtype)
        how = self.n_steps, self.gamma
        jitted(fold_rows)(rows, episodes.rings, episodes.arrays, how, rewards, last, total, steps, gamma)
        return torch.from_numpy(last), torch.from_numpy(total), torch.from_numpy(steps), torch.from_numpy(gamma)

    def fold_by_steps(self, episodes: EpisodeIndex, reward: Tensor, index: Tensor) -> Folded:
        """Fold as :meth:`fold` does, on any device and for any dtype of the rewards: one indexed read for each step."""
        shape, index = index.shape, index.reshape(-1)
        env, position = episodes.steps_of(index.cpu().numpy())
        _, end = episodes.bounds(torch.from_numpy(env), torch.from_numpy(position))
        left = np.minimum(end.numpy() - position + 1, self.n_steps)
        dtype = reward.dtype if reward.is_floating_point() else torch.float32
        total = torch.zeros((len(index), *reward.shape[1:]), dtype=dtype, device=reward.device)
        cells = index
        for step in range(int(left.max(initial=1))):
            following = episodes.cells_of(env, position + np.minimum(step, left - 1))
            cells = torch.from_numpy(following).to(index.device)
            going = torch.from_numpy(step < left).to(index.device)
            term = self.gamma**step * reward.index_select(0, cells)
            total += torch.where(going.view(-1, *[1] * (reward.ndim - 1)), term, 0).to(dtype)
        steps = torch.from_numpy(left).to(index.device)
        gamma = (self.gamma ** steps.double()).float()
        return cells.view(shape), total.view(shape + reward.shape[1:]), steps.view(shape), gamma.view(shape)


class FoldsSteps:
    """Give a buffer the length and the discount of the returns that its batches hold."""

    _returns: NStepReturns
    _n_step: NStepReturns | None
    """The returns, or None if batches hold single steps."""

    def set_returns(self, returns: NStepReturns) -> None:
        """Let batches hold these returns."""
        self._returns, self._n_step = returns, returns if returns.n_steps > 1 else None

    @property
    def n_steps(self) -> int:
        """Length of the returns that batches hold."""
        return self._returns.n_steps

    @property
    def gamma(self) -> float:
        """Discount of these returns."""
        return self._returns.gamma

    @gamma.setter
    def gamma(self, value: float) -> None:
        self.set_returns(NStepReturns(self.n_steps, value))
