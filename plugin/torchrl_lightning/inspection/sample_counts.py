"""Count the samples of each step, and record the ages of sampled steps."""

from __future__ import annotations

import numpy as np
from torch import Tensor

EVERY = 8  # a run counts one batch out of this number
AGE_BINS = 1024  # bins of the age histogram, over the length of a ring


class SampleCounter:
    """Sample counts and ages of the cells of rings with equal lengths.

    The count of a cell restarts at 0 when a new step overwrites the old one.

    Args:
        length: Number of cells per ring.
        num_envs: Number of rings.

    Examples:
        >>> import torch
        >>> counter = SampleCounter(length=4, num_envs=1)
        >>> counter.update(torch.tensor([3, 3, 0]), torch.tensor([4, 4, 4]))
        >>> counter.num_samples, counter.mean_age, counter.most
        (3, 1.0, 2)
    """

    def __init__(self, length: int, num_envs: int) -> None:
        self.length, self.num_envs = length, num_envs
        self.num_samples, self._age = 0, 0
        self.ages = np.zeros(AGE_BINS, np.int64)
        self.counts = np.zeros(length * num_envs, np.int64)
        self._steps = np.full(length * num_envs, -1)  # the position of the step that each count belongs to

    def update(self, index: Tensor, stamp: Tensor) -> None:
        """Count a batch.

        Args:
            index: Sampled cells, of any shape.
            stamp: The write position of each cell's ring, of the same shape.
        """
        cells, write_positions = index.cpu().numpy().ravel(), stamp.cpu().numpy().ravel()
        age = (write_positions - 1 - cells // self.num_envs) % self.length
        step = write_positions - 1 - age
        self.counts[cells[self._steps[cells] != step]] = 0
        self._steps[cells] = step
        np.add.at(self.counts, cells, 1)
        self.ages += np.bincount(age * AGE_BINS // self.length, minlength=AGE_BINS)
        self.num_samples += len(age)
        self._age += int(age.sum())

    @property
    def mean_age(self) -> float:
        """Mean age of the sampled steps; the age of a step is the number of newer steps of its environment."""
        return self._age / max(self.num_samples, 1)

    @property
    def most(self) -> int:
        """The largest sample count of a step."""
        return int(self.counts.max())
