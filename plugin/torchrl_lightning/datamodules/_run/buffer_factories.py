"""Types of buffer factories; LightningCLI reads the runtime arguments from their signatures."""

from __future__ import annotations

from typing import Protocol

from torchrl_lightning.replay import ExperienceBuffer
from torchrl_lightning.rollout import RolloutBuffer


class ReplayBufferFactory(Protocol):
    """A factory of replay buffers."""

    def __call__(self, *, num_envs: int) -> ExperienceBuffer:
        """Build the buffer."""
        ...


class RolloutBufferFactory(Protocol):
    """A factory of rollout buffers."""

    def __call__(self, *, size: int) -> RolloutBuffer:
        """Build the buffer."""
        ...
