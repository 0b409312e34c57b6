"""The buffers that a source of batches draws from, and their transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torchrl_lightning.datamodules.branched_replay import BranchedReplay
from torchrl_lightning.environments.goals import EnvironmentGoals
from torchrl_lightning.fitting import require_fit
from torchrl_lightning.protocols import SourceApi
from torchrl_lightning.replay import ExperienceBuffer
from torchrl_lightning.replay.episode_transform import tell, transforms_in


def buffers_of(source: Any, buffer: ExperienceBuffer) -> Sequence[ExperienceBuffer]:
    """Return the buffers that a source draws from, the one that is collected into first."""
    buffers = SourceApi.of(source).buffers
    return [buffer] if buffers is None else buffers


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


def check_first_fit(source: Any, steps: int | None, seed: int | None, spawn: Callable[[str], int]) -> None:
    """Validate what a source fits first; raise ValueError if it cannot.

    Args:
        source: The source; only a :class:`BranchedReplay` fits anything.
        steps: Steps of each environment by then, None if they are unknown.
        seed: The seed of the run, None if it is unknown.
        spawn: Returns the seed of a part of the run by its name.
    """
    if isinstance(source, BranchedReplay) and steps is not None and seed is not None:
        source.check_first_fit(steps, spawn("buffer"))
