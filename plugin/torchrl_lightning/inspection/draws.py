"""How often steps are drawn, and how old they are then."""

from __future__ import annotations

import numpy as np
from torch import Tensor

EVERY = 8  # batches, of which a run counts one
PARTS = 1024  # of the length of a ring, in which ages are counted


class Draws:
    """Counts of what batches held, over the cells of evenly long rings.

    A step that overwrites another one begins at 0.

    Args:
        length: Cells of each environment's ring.
        num_envs: Number of rings.

    Examples:
        >>> import torch
        >>> draws = Draws(length=4, num_envs=1)
        >>> draws.note(torch.tensor([3, 3, 0]), torch.tensor([4, 4, 4]))
        >>> draws.number, draws.mean_age, draws.most
        (3, 1.0, 2)
    """

    def __init__(self, length: int, num_envs: int) -> None:
        self.length, self.num_envs = length, num_envs
        self.number, self._age = 0, 0
        self.ages = np.zeros(PARTS, np.int64)
        self.counts = np.zeros(length * num_envs, np.int64)
        self._steps = np.full(length * num_envs, -1)  # of its environment, that each count is of

    def note(self, index: Tensor, stamp: Tensor) -> None:
        """Count a batch.

        Args:
            index: Its cells, of any shape.
            stamp: How far the ring of each was written, of the same shape.
        """
        cells, written = index.cpu().numpy().ravel(), stamp.cpu().numpy().ravel()
        age = (written - 1 - cells // self.num_envs) % self.length
        step = written - 1 - age
        self.counts[cells[self._steps[cells] != step]] = 0
        self._steps[cells] = step
        np.add.at(self.counts, cells, 1)
        self.ages += np.bincount(age * PARTS // self.length, minlength=PARTS)
        self.number += len(age)
        self._age += int(age.sum())

    @property
    def mean_age(self) -> float:
        """How many steps of its environment were written behind a step when it was drawn, on average."""
        return self._age / max(self.number, 1)

    @property
    def most(self) -> int:
        """How often that step was drawn that was drawn most."""
        return int(self.counts.max())
