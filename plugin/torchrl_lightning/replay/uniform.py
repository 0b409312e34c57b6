"""Uniform draws of stored cells, over unevenly filled rings too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_lightning._compat import SamplerHooks
from torchrl_lightning.parts import integers_below
from torchrl_lightning.ranges import Checked, boolean, integer
from torchrl_lightning.replay.rings import rings_in, uneven_rings
from torchrl_lightning.replay.steps import StepsMissing
from torchrl_lightning.state import GENERATOR, Attribute, Stated, flag


class UniformSampler(Stated, SamplerHooks, Sampler):
    """Draw stored cells uniformly.

    ``stratified`` gives every environment of a :class:`RingWriter` the same number of draws (one more for some, by
    chance, where they do not divide), however many steps it holds, and spreads them evenly over its steps: from each of
    as many equal stretches one, at a random offset. Every step of an environment is equally likely. With one
    environment or a TorchRL storage that is all one ring.

    Args:
        with_replacement: a cell may come twice in a batch; otherwise every cell of a batch is another one.
        stratified: draw evenly over environments and over the steps of each.
        generator: random generator; the buffer's takes its place.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> sampler = UniformSampler(with_replacement=False)
        >>> buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=3)
        >>> index = buffer.extend(TensorDict({"a": torch.arange(3)}, [3]))
        >>> sorted(buffer.sample()["a"].tolist())
        [0, 1, 2]
    """

    OWNER, VERSION = "uniform sampler", 1
    STATE = {"with_replacement": Attribute(flag), "stratified": Attribute(flag), "generator": GENERATOR}
    reads_rings = True
    with_replacement = Checked(boolean)
    stratified = Checked(boolean)

    def __init__(
        self, with_replacement: bool = True, *, stratified: bool = False, generator: torch.Generator | None = None
    ) -> None:
        self.with_replacement = with_replacement
        self.stratified = stratified
        self._own_rng = generator

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Draw cells.

        Args:
            storage: what the cells are in.
            batch_size: how many.

        Returns:
            Cells ``[B]`` (coordinates for a storage of several dimensions), and no further entries.

        Raises:
            StepsMissing: a ValueError, RuntimeError and AssertionError: nothing is stored, or without replacement fewer
                cells than asked for.
            ValueError: ``batch_size`` is not a size.
        """
        stored = len(storage)
        if type(batch_size) is not int or batch_size < 0:
            batch_size = integer(batch_size, "batch_size", 0)
        if not stored:
            raise StepsMissing(f"Cannot sample {batch_size} cells: 0 are stored. Extend the buffer first.")
        if batch_size > stored and not self.with_replacement:
            raise StepsMissing(
                f"Cannot sample {batch_size} different cells: {stored} are stored. "
                "Collect more first, ask for fewer, or sample with replacement."
            )
        if self.stratified:
            cells = self._stratified(storage, batch_size)
        else:
            if self.with_replacement:
                cells = integers_below(stored, batch_size, self.generator)
                cells = cells if cells.is_cpu else cells.cpu()
            else:
                cells = self._distinct(stored, batch_size)
            rings = uneven_rings(storage)
            if rings is not None:
                ends = rings.filled.cumsum(0)
                env = torch.searchsorted(ends, cells, right=True)
                cells = rings.cell(env, rings.oldest[env] + cells - (ends - rings.filled)[env])
        return (cells if storage.ndim == 1 else torch.unravel_index(cells, storage.shape)), {}

    def _distinct(self, stored: int, count: int) -> Tensor:
        """Draw different numbers below ``stored``."""
        rng = self.generator
        if 3 * count > stored:
            return torch.randperm(stored, generator=rng, device=rng.device)[:count].cpu()
        # Draws with replacement, less the repeated ones, are a uniform set of cells, because no cell is treated
        # otherwise than another; so is what remains of it when a random part is dropped.
        found = integers_below(stored, count, self.generator).cpu().unique()
        while len(found) < count:
            found = torch.cat([found, integers_below(stored, count, self.generator).cpu()]).unique()
        return found[torch.randperm(len(found), generator=rng, device=rng.device)[:count].cpu()]

    def _stratified(self, storage: Storage, count: int) -> Tensor:
        rings = rings_in(storage)
        if rings is None or (rings.num_envs == 1 and rings.is_even):
            return self._spread(torch.tensor([len(storage)]), torch.tensor([count]))[1]
        filled = rings.filled
        draws = self._shares(filled, count)
        env, rank = self._spread(filled, draws)
        return rings.cell(env, rings.oldest[env] + rank)

    def _shares(self, filled: Tensor, count: int) -> Tensor:
        draws = torch.zeros_like(filled)
        while count:
            # Those without replacement that have nothing left to give pass their share on to the others.
            open_envs = (filled > 0 if self.with_replacement else filled > draws).nonzero().squeeze(1)
            share, rest = divmod(count, len(open_envs))
            rng = self.generator
            order = torch.randperm(len(open_envs), generator=rng, device=rng.device).cpu()
            wanted = torch.full_like(open_envs, share)
            wanted[order[:rest]] += 1
            if not self.with_replacement:
                wanted = wanted.minimum(filled[open_envs] - draws[open_envs])
            draws[open_envs] += wanted
            count -= int(wanted.sum())
        return draws

    def _spread(self, filled: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Return owner and rank of each draw: one from each of ``draws[e]`` stretches of the ``filled[e]`` steps."""
        rng = self.generator
        env = torch.repeat_interleave(torch.arange(len(filled)), draws)
        number = torch.arange(len(env)) - (draws.cumsum(0) - draws)[env]
        steps, parts = filled[env], draws[env]
        begin = torch.div(number * steps, parts, rounding_mode="floor")
        end = torch.div((number + 1) * steps, parts, rounding_mode="floor").maximum(begin + 1)
        uniform = torch.rand((2, len(env)), dtype=torch.float64, generator=rng, device=rng.device).cpu()
        rank = begin + (uniform[0] * (end - begin)).long()
        # Stretches differ in length by one step; the offset, the same for a whole ring, makes all steps equal.
        offset = (uniform[1][(draws.cumsum(0) - draws)[env]] * steps).long()
        return env, (rank + offset) % steps

    def __repr__(self) -> str:
        return f"{type(self).__name__}(with_replacement={self.with_replacement}, stratified={self.stratified})"
