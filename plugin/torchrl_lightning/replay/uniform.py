"""Uniform sampling of stored cells, also from unevenly filled rings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_lightning._core.mixins import integers_below
from torchrl_lightning._core.state import GENERATOR, Attribute, Stateful, flag
from torchrl_lightning._core.torchrl_compat import SamplerHooks
from torchrl_lightning._core.validators import Checked, boolean, integer
from torchrl_lightning.replay.positions import MissingStepsError
from torchrl_lightning.replay.rings import rings_of, uneven_rings


class UniformSampler(Stateful, SamplerHooks, Sampler):
    """Sample stored cells uniformly.

    ``stratified`` draws the same number of steps from every environment of a :class:`RingWriter`, no matter how many
    steps each environment has stored. If the batch size is not divisible by the number of environments, random
    environments get one more step. The sampler splits the steps of an environment into equal intervals with a random
    offset and draws one step from each. Every step of an environment is equally likely. A TorchRL storage counts as one
    environment.

    Args:
        with_replacement: allow a cell to occur twice in a batch.
        stratified: draw evenly over the environments and over the steps of each environment.
        generator: random generator; a buffer replaces it by the buffer's generator.

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
    supports_uneven_rings = True
    with_replacement = Checked(boolean)
    stratified = Checked(boolean)

    def __init__(
        self, with_replacement: bool = True, *, stratified: bool = False, generator: torch.Generator | None = None
    ) -> None:
        self.with_replacement = with_replacement
        self.stratified = stratified
        self._generator = generator

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Sample cells.

        Args:
            storage: the storage of the cells.
            batch_size: number of cells.

        Returns:
            Cells ``[B]`` (coordinates for a storage with several dimensions), and an empty dict.

        Raises:
            MissingStepsError: the storage is empty, or has fewer than ``batch_size`` cells without replacement. The
                error is also a ValueError, RuntimeError and AssertionError.
            ValueError: ``batch_size`` is not a non-negative integer.
        """
        stored = len(storage)
        if type(batch_size) is not int or batch_size < 0:
            batch_size = integer(batch_size, "batch_size", 0)
        if not stored:
            raise MissingStepsError(f"Cannot sample {batch_size} cells: 0 are stored. Extend the buffer first.")
        if batch_size > stored and not self.with_replacement:
            raise MissingStepsError(
                f"Cannot sample {batch_size} different cells: {stored} are stored. "
                "Collect more steps first, lower the batch size, or sample with replacement."
            )
        if self.stratified:
            cells = self._sample_stratified(storage, batch_size)
        else:
            if self.with_replacement:
                cells = integers_below(stored, batch_size, self.generator)
                cells = cells if cells.is_cpu else cells.cpu()
            else:
                cells = self._sample_distinct(stored, batch_size)
            rings = uneven_rings(storage)
            if rings is not None:
                ends = rings.filled.cumsum(0)
                env = torch.searchsorted(ends, cells, right=True)
                cells = rings.cell(env, rings.oldest[env] + cells - (ends - rings.filled)[env])
        return (cells if storage.ndim == 1 else torch.unravel_index(cells, storage.shape)), {}

    def _sample_distinct(self, stored: int, count: int) -> Tensor:
        """Draw distinct numbers below ``stored``."""
        rng = self.generator
        if 3 * count > stored:
            return torch.randperm(stored, generator=rng, device=rng.device)[:count].cpu()
        # Without their duplicates, draws with replacement are a uniform random set, because all cells are equally
        # likely. A random subset of that set is also uniform.
        cells = integers_below(stored, count, self.generator).cpu().unique()
        while len(cells) < count:
            cells = torch.cat([cells, integers_below(stored, count, self.generator).cpu()]).unique()
        return cells[torch.randperm(len(cells), generator=rng, device=rng.device)[:count].cpu()]

    def _sample_stratified(self, storage: Storage, count: int) -> Tensor:
        rings = rings_of(storage)
        if rings is None or (rings.num_envs == 1 and rings.is_uniformly_filled):
            return self._sample_strata(torch.tensor([len(storage)]), torch.tensor([count]))[1]
        filled = rings.filled
        draws = self._draws_per_env(filled, count)
        env, rank = self._sample_strata(filled, draws)
        return rings.cell(env, rings.oldest[env] + rank)

    def _draws_per_env(self, filled: Tensor, count: int) -> Tensor:
        draws = torch.zeros_like(filled)
        while count:
            # Without replacement, the other environments take the remaining draws of an exhausted environment.
            open_envs = (filled > 0 if self.with_replacement else filled > draws).nonzero().squeeze(1)
            share, remainder = divmod(count, len(open_envs))
            rng = self.generator
            order = torch.randperm(len(open_envs), generator=rng, device=rng.device).cpu()
            added = torch.full_like(open_envs, share)
            added[order[:remainder]] += 1
            if not self.with_replacement:
                added = added.minimum(filled[open_envs] - draws[open_envs])
            draws[open_envs] += added
            count -= int(added.sum())
        return draws

    def _sample_strata(self, filled: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Return environment and rank of each draw.

        The ``filled[e]`` steps of an environment are split into ``draws[e]`` intervals with one draw each.
        """
        rng = self.generator
        env = torch.repeat_interleave(torch.arange(len(filled)), draws)
        number = torch.arange(len(env)) - (draws.cumsum(0) - draws)[env]
        steps, strata = filled[env], draws[env]
        begin = torch.div(number * steps, strata, rounding_mode="floor")
        end = torch.div((number + 1) * steps, strata, rounding_mode="floor").maximum(begin + 1)
        uniform = torch.rand((2, len(env)), dtype=torch.float64, generator=rng, device=rng.device).cpu()
        rank = begin + (uniform[0] * (end - begin)).long()
        # Interval lengths differ by at most one step. One offset for the whole ring makes all steps equally likely.
        offset = (uniform[1][(draws.cumsum(0) - draws)[env]] * steps).long()
        return env, (rank + offset) % steps

    def __repr__(self) -> str:
        return f"{type(self).__name__}(with_replacement={self.with_replacement}, stratified={self.stratified})"
