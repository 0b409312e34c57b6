"""A custom sampler that draws a few steps uniformly and keeps the step with the largest reward.

Run, in this folder: torchrl-lightning-train --config-dir . '~experiment' data=tournament env=pendulum model=td3
    data.total_frames=20000
"""

from __future__ import annotations

from typing import Any

import torch

from torchrl_lightning import UniformSampler


class TournamentSampler(UniformSampler):
    """Draw the winners of tournaments between uniformly drawn steps.

    Args:
        contenders: Number of steps per tournament. 1 draws uniformly.
        generator: Random generator. The buffer replaces it with its own generator.

    Raises:
        ValueError: ``contenders`` is below 1.
    """

    def __init__(self, contenders: int = 2, *, generator: torch.Generator | None = None) -> None:
        super().__init__(generator=generator)
        if contenders < 1:
            raise ValueError(f"contenders must be at least 1, got {contenders}.")
        self.contenders = contenders

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Return the storage indices ``[B]`` of the winners and the info of the uniform sampler."""
        cells, info = super().sample(storage, batch_size * self.contenders)
        rewards = storage.get(cells)["next", "reward"].reshape(-1, self.contenders)
        winner = rewards.argmax(1, keepdim=True)
        return cells.reshape(-1, self.contenders).gather(1, winner).squeeze(1), info
