"""The layout of the steps of several environments in one flat array of cells."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from torchrl_lightning.kernels import rings as ring_kernels
from torchrl_lightning.kernels.compiled import jitted
from torchrl_lightning.replay.sharing import SharedArrays

Ints = NDArray[np.int64]


def integers_below(high: int, count: int, generator: torch.Generator | None) -> Tensor:
    """Draw what ``torch.randint(high, (count,))`` draws, on the generator's device; on the CPU in half the time."""
    try:
        return torch.from_numpy(np.empty(count, np.int64)).random_(0, high, generator=generator)
    except RuntimeError:  # a generator of another device; asking for it first would cost as much as the draw
        device = None if generator is None else generator.device
        return torch.randint(high, (count,), generator=generator, device=device)


def uniform(count: int, generator: torch.Generator, dtype: Any = np.float64) -> NDArray[Any]:
    """Draw what ``torch.rand(count)`` draws on the generator's device; on the CPU in half the time."""
    shares: NDArray[Any] = np.empty(count, dtype)
    tensor = torch.from_numpy(shares)
    try:
        tensor.uniform_(generator=generator)
    except RuntimeError:  # as above
        tensor.copy_(torch.rand(count, dtype=tensor.dtype, generator=generator, device=generator.device))
    return shares


class Rings(SharedArrays):
    """One ring per environment: ``cell = (position % length) * num_envs + env``.

    Args:
        num_envs: number of rings.
        length: number of cells of each.

    Example:
        >>> rings = Rings(2, 4)
        >>> rings.cell(torch.tensor([0, 1]), torch.tensor([5, 5])).tolist()
        [2, 3]
    """

    ARRAYS: ClassVar[tuple[str, ...]] = ("_positions", "_floor")

    def __init__(self, num_envs: int, length: int = 0) -> None:
        self.num_envs = num_envs
        self.length = length
        self._positions: Ints = np.zeros(num_envs, np.int64)
        self._floor: Ints = np.zeros(num_envs, np.int64)  # nothing is stored below
        self._aligned = True  # whether all positions are the same
        self._even = True
        self._ids: Ints = np.arange(num_envs)

    @classmethod
    def at(cls, length: int, positions: Tensor, floor: Tensor | None = None) -> Rings:
        """Build rings whose next positions are ``positions``, ``[num_envs]``."""
        rings = Rings(len(positions), length)
        rings._positions[:] = positions.cpu().numpy()
        if floor is not None:
            rings._floor[:] = floor.cpu().numpy()
        rings._refresh()
        return rings

    @property
    def positions(self) -> Tensor:
        """Next position of every environment, ``[num_envs]`` int64; a live view that must not be written to."""
        return torch.from_numpy(self._positions)

    @property
    def oldest(self) -> Tensor:
        """Position of the oldest stored step of every environment, ``[num_envs]``."""
        return torch.from_numpy(self._oldest())

    @property
    def arrays(self) -> tuple[Ints, Ints]:
        """Next position of every environment, and below which one nothing is stored, each ``[num_envs]``; live."""
        return self._positions, self._floor

    @property
    def filled(self) -> Tensor:
        """Number of stored steps of every environment, ``[num_envs]``."""
        return torch.from_numpy(self._positions - self._oldest())

    @property
    def is_even(self) -> bool:
        """Whether all rings are equally filled, so that the first ``len(storage)`` cells are the filled ones."""
        if self._memory is not None:
            self._refresh()
        return self._even

    def _oldest(self) -> Ints:
        return np.maximum(self._positions - self.length, self._floor)

    def cell(self, env_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the cells of steps: ``(position % length) * num_envs + env``."""
        return positions % self.length * self.num_envs + env_ids

    def env_of(self, index: Tensor) -> Tensor:
        """Return the environments that cells belong to."""
        return index % self.num_envs

    def position_of(self, index: Tensor) -> Tensor:
        """Return the positions of the steps in cells; below ``oldest`` (or negative) where a cell holds nothing."""
        if self._memory is not None:
            self._refresh()
        slot = torch.div(index, self.num_envs, rounding_mode="floor")
        newest = int(self._positions[0]) - 1 if self._aligned else self.positions[index % self.num_envs] - 1
        return newest - (newest - slot) % self.length

    def is_filled(self, index: Tensor) -> Tensor:
        """Return whether cells hold a step."""
        index = index.cpu()
        inside = (index >= 0) & (index < self.length * self.num_envs)
        index = index.clamp(0, self.length * self.num_envs - 1)
        return inside & (self.position_of(index) >= self.oldest[index % self.num_envs])

    def filled_cells(self) -> Tensor:
        """Return all cells that hold a step, in ascending order."""
        if self._even:
            return torch.arange(int((self._positions - self._oldest()).sum()))
        cells = torch.arange(self.length * self.num_envs)
        return cells[self.is_filled(cells)]

    def _refresh(self) -> None:
        first, oldest = self._positions[0], self._oldest()
        self._aligned = bool((self._positions == first).all())
        full = bool((self._positions - oldest == self.length).all())
        self._even = full or (self._aligned and not oldest.any())


class _Link:
    """A weak reference that a copy of its owner does not take along."""

    def __init__(self, rings: Rings | None = None) -> None:
        self.rings = (lambda: None) if rings is None else weakref.ref(rings)

    def __reduce__(self) -> Any:
        return _Link, ()


def lay_rings(storage: Storage, rings: Rings) -> None:
    """Let it be known that rings lie in a storage, ours or one of TorchRL's, which does not keep them alive."""
    storage.rings_link = _Link(rings)


def rings_in(storage: Storage) -> Rings | None:
    """Return the rings that lie in a storage, if there are any."""
    link = getattr(storage, "rings_link", None)
    return None if link is None else link.rings()


def uneven_rings(storage: Storage) -> Rings | None:
    """Return the rings in a storage, unless its filled cells are simply the first ``len(storage)`` ones."""
    rings = rings_in(storage)
    return None if rings is None or rings.is_even else rings


def steps_between(low: Ints, high: Ints) -> tuple[Ints, Ints, Ints]:
    """List the positions of several runs of steps, ``[low, high]`` each, one run after the other.

    Returns:
        Number of the run and position of each step, and where each run begins in them.
    """
    counts = np.maximum(high - low + 1, 0)
    starts = np.cumsum(counts) - counts
    run = np.repeat(np.arange(len(counts)), counts)
    return run, np.arange(len(run)) - (starts - low)[run], starts


def steps_of(cells: Ints, length: int, positions: Ints) -> tuple[Ints, Ints]:
    """Return environments and positions of the steps in cells of rings, of their shape; see ``Rings.position_of``."""
    env, position = np.empty(cells.shape, np.int64), np.empty(cells.shape, np.int64)
    jitted(ring_kernels.steps_of)(cells.ravel(), length, positions, env.reshape(-1), position.reshape(-1))
    return env, position


def check_steps(env: Ints, position: Ints, oldest: Ints, positions: Ints) -> None:
    """Refuse steps that are not stored, of rings that hold ``[oldest, positions)``; the error names the first."""
    if env.size and (env.min() < 0 or env.max() >= len(positions)):
        raise IndexError(f"Environment ids must lie in [0, {len(positions)}), got {env.min()} to {env.max()}.")
    wrong = (position < oldest[env]) | (position >= positions[env])
    if wrong.any():
        e, p = int(env[wrong][0]), int(position[wrong][0])
        raise IndexError(
            f"Step {p} of environment {e} is not stored; it holds steps [{int(oldest[e])}, {int(positions[e])})."
        )


def stored_cells(storage: Storage) -> Tensor:
    """Return all cells that hold something, in ascending order: ``O(capacity)``."""
    rings = uneven_rings(storage)
    return torch.arange(len(storage)) if rings is None else rings.filled_cells()
