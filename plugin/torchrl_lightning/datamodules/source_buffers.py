"""The buffers that a source of batches draws from, and their transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrl_lightning.environments.goals import EnvironmentGoals
from torchrl_lightning.fitting import require_fit
from torchrl_lightning.replay import ExperienceBuffer
from torchrl_lightning.replay.episode_transform import tell, transforms_in


def buffers_of(source: Any, buffer: ExperienceBuffer) -> Sequence[ExperienceBuffer]:
    """Return the buffers that a source draws from, the one that is collected into first."""
    buffers: Sequence[ExperienceBuffer] = getattr(source, "buffers", [buffer])
    return buffers


def set_goals(buffers: Sequence[ExperienceBuffer], goals: EnvironmentGoals) -> None:
    """Give the transforms of buffers the goal functions of an environment."""
    for buffer in buffers:
        tell(buffer.transform, goals)


def check_transforms(buffers: Sequence[ExperienceBuffer], goals: EnvironmentGoals, specs: Any, learner: Any) -> None:
    """Validate the transforms of buffers; raise MisfitError if one does not fit the environment of these goals."""
    set_goals(buffers, goals)
    for buffer in buffers:
        for transform in transforms_in(buffer.transform):
            require_fit(transform, specs, learner)
