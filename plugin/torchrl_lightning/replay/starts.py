"""The steps that may be drawn: of every environment, those from which a whole window is stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning.replay.steps import Ints, steps_between

EVERYWHERE: tuple[Ints, Ints, int] = (np.empty(0, np.int64), np.empty(0, np.int64), 0)
"""What kernels get where every stored step may be drawn."""


class Starts:
    """Of every environment, the positions ``[begin, end)`` at which a draw may begin; none until they are known.

    Examples:
        >>> starts = Starts()
        >>> shut, opened = starts.move(np.array([0, 0]), np.array([2, 1]), 3)
        >>> opened.tolist()
        [0, 2, 1]
        >>> shut, opened = starts.move(np.array([1, 0]), np.array([4, 1]), 3)
        >>> shut.tolist(), opened.tolist()
        ([0], [4, 0])
        >>> starts.hold(torch.arange(6)).tolist()
        [True, True, True, False, True, False]
    """

    def __init__(self, begin: Ints = EVERYWHERE[0], end: Ints = EVERYWHERE[1], length: int = 1) -> None:
        self.begin, self.end, self.length = begin, end, length

    def state(self) -> dict[str, Any]:
        """Return them as a state holds them."""
        return {"begin": self.begin, "length": self.length, "end": self.end}

    def clear(self) -> None:
        """Forget them."""
        self.__init__()  # type: ignore[misc]

    @property
    def arrays(self) -> tuple[Ints, Ints, int]:
        """What kernels get."""
        return self.begin, self.end, self.length

    def move(self, begin: Ints, end: Ints, length: int) -> tuple[Tensor, Tensor] | None:
        """Set them, for rings of ``length`` cells; return the cells that cease, and that come to be such, if any."""
        if len(self.begin) == len(begin):
            old, until = self.begin, self.end
            if (old == begin).all() and (until == end).all():
                return None
        else:
            old = until = np.zeros_like(begin)
        self.begin, self.end, self.length = begin, end, length
        return (
            self._cells(old, np.minimum(until, begin), np.maximum(old, end), until),
            self._cells(begin, np.minimum(end, old), np.maximum(begin, until), end),
        )

    def _cells(self, *bounds: Ints) -> Tensor:
        """Return the cells of the steps between pairs of bounds, in ascending order of steps."""
        run, position, _ = steps_between(np.concatenate(bounds[::2]), np.concatenate(bounds[1::2]) - 1)
        width = len(self.begin)
        return torch.from_numpy(position % self.length * width + run % width)

    def hold(self, cells: Tensor) -> Tensor:
        """Return which cells are among them, as the kernels do."""
        if not len(self.begin):
            return torch.zeros_like(cells, dtype=torch.bool)
        begin, end = (torch.from_numpy(each).to(cells.device) for each in (self.begin, self.end))
        env = cells % len(begin)
        return (cells // len(begin) - begin[env]) % self.length < (end - begin)[env]
