"""N-step returns, computed when cells are read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning._core.keys import REWARD
from torchrl_lightning._core.torchrl_compat import entries_of
from torchrl_lightning._core.tree import Path
from torchrl_lightning._core.validators import fraction, integer
from torchrl_lightning.kernels.compiled import jitted
from torchrl_lightning.kernels.n_step_returns import n_step_returns
from torchrl_lightning.replay.cells import Cells, Names
from torchrl_lightning.replay.episode_index import NO_INDEX_HINT, EpisodeIndex

KERNEL_DTYPES = (torch.float32, torch.float64)
FoldedSteps = tuple[Tensor, Tensor, Tensor, Tensor]
"""Cells of the last steps, discounted sums of rewards, numbers of steps, and discounts."""


@dataclass(frozen=True)
class NStepReturns:
    r"""Combine (fold) each sampled step with the following steps of its episode, up to \(n\) steps in total.

    Let \(k \le n\) be the number of folded steps; \(k\) is less than \(n\) if the stored episode ends earlier. The
    reward becomes \(\sum_{i<k} \gamma^i r_{t+i}\). All other entries under ``"next"``, including flags, are copied from
    the last folded step. So a loss bootstraps with \(\gamma^k\) from the observation after \(k\) steps, unless that
    observation is terminal. A batch has ``steps_to_next_obs`` \(k\) and ``gamma`` \(\gamma^k\), each of the batch's
    shape, with the names of TorchRL's ``MultiStepTransform``. The buffer stores only single steps.

    Args:
        n_steps: maximum number of steps.
        gamma: discount per step.

    Raises:
        ValueError: a number is out of range.

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
        reward_leaf = cells.leaf_index.get(REWARD)
        if reward_leaf is None:
            raise KeyError(f"n_steps={self.n_steps} needs the entry {REWARD!r}, which is not stored.")
        if episodes is None:
            raise ValueError(
                f"n_steps={self.n_steps} needs an episode index, which the writer does not have. Write the entry "
                '("next", "done") with the first data, with a RingWriter that tracks episodes. ' + NO_INDEX_HINT
            )
        last, reward, steps, gamma = self.fold(episodes, cells.leaves[reward_leaf], index)
        entries = cells.gather(index, names, {*skip, REWARD}, last)
        entries_of(entries["next"])["reward"] = reward
        entries["steps_to_next_obs"], entries["gamma"] = steps, gamma
        return entries

    def fold(self, episodes: EpisodeIndex, reward: Tensor, index: Tensor) -> FoldedSteps:
        """Fold the steps in filled cells ``index``, ``[*B]``; ``reward`` has all stored rewards, ``[cells, *F]``."""
        if not reward.is_cpu or reward.dtype not in KERNEL_DTYPES:
            return self.fold_by_steps(episodes, reward, index)
        rows, rewards = index.contiguous().numpy(), reward.numpy()
        # Allocate the final shapes, because one view of a tensor takes a tenth of this method's time.
        last, steps = np.empty((2, *rows.shape), np.int64)
        gamma = np.empty(rows.shape, np.float32)
        total = np.empty(rows.shape + rewards.shape[1:], rewards.dtype)
        options = self.n_steps, self.gamma
        jitted(n_step_returns)(rows, episodes.rings, episodes.arrays, options, rewards, last, total, steps, gamma)
        return torch.from_numpy(last), torch.from_numpy(total), torch.from_numpy(steps), torch.from_numpy(gamma)

    def fold_by_steps(self, episodes: EpisodeIndex, reward: Tensor, index: Tensor) -> FoldedSteps:
        """Fold like :meth:`fold`, on any device and for any reward dtype, with one indexed read per step."""
        shape, index = index.shape, index.reshape(-1)
        env, position = episodes.steps_of(index.cpu().numpy())
        _, end = episodes.bounds(torch.from_numpy(env), torch.from_numpy(position))
        lengths = np.minimum(end.numpy() - position + 1, self.n_steps)
        dtype = reward.dtype if reward.is_floating_point() else torch.float32
        total = torch.zeros((len(index), *reward.shape[1:]), dtype=dtype, device=reward.device)
        cells = index
        for step in range(int(lengths.max(initial=1))):
            step_cells = episodes.cells_of(env, position + np.minimum(step, lengths - 1))
            cells = torch.from_numpy(step_cells).to(index.device)
            is_folded = torch.from_numpy(step < lengths).to(index.device)
            reward_term = self.gamma**step * reward.index_select(0, cells)
            total += torch.where(is_folded.view(-1, *[1] * (reward.ndim - 1)), reward_term, 0).to(dtype)
        steps = torch.from_numpy(lengths).to(index.device)
        gamma = (self.gamma ** steps.double()).float()
        return cells.view(shape), total.view(shape + reward.shape[1:]), steps.view(shape), gamma.view(shape)


class NStepMixin:
    """Mixin that stores length and discount of a buffer's n-step returns."""

    _returns: NStepReturns
    _n_step: NStepReturns | None
    """The returns, or None if batches contain single steps."""

    def set_returns(self, returns: NStepReturns) -> None:
        """Set the n-step returns of batches."""
        self._returns, self._n_step = returns, returns if returns.n_steps > 1 else None

    @property
    def n_steps(self) -> int:
        """Length of the returns in a batch."""
        return self._returns.n_steps

    @property
    def gamma(self) -> float:
        """Discount of the returns in a batch."""
        return self._returns.gamma

    @gamma.setter
    def gamma(self, value: float) -> None:
        self.set_returns(NStepReturns(self.n_steps, value))
