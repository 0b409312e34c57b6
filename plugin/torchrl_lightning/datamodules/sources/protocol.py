"""Sources of replay batches: their protocol, checks and buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Protocol

from tensordict import TensorDictBase
from tensordict.utils import NestedKey

from torchrl_lightning._core.errors import check_compatible
from torchrl_lightning._core.protocols import SourceApi
from torchrl_lightning.datamodules._run.discounts import check_discount
from torchrl_lightning.datamodules.sources.branched_replay import BranchedReplay
from torchrl_lightning.environments.goals import EnvironmentGoals
from torchrl_lightning.replay import ExperienceBuffer
from torchrl_lightning.replay.episode_transform import iter_transforms, set_goal_functions


class BatchSource(Protocol):
    """A source of replay batches: one buffer, or a mixture of several."""

    def draw(self, batch_size: int) -> TensorDictBase:
        """Return a batch."""

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Update the stored priorities with the priorities that a loss wrote into a batch."""

    def write_back(self, batch: TensorDictBase, keys: Sequence[NestedKey]) -> Any:
        """Store rewritten entries of a batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state."""


def build_source(make: Callable[..., Any], buffer: Any, folder: Path) -> Any:
    """Build a source over a buffer; pass a folder if the factory has an unbound parameter ``folder``."""
    bound = make.keywords if isinstance(make, partial) else {}
    has_folder = "folder" in signature(make).parameters and "folder" not in bound
    return make(buffer, folder=folder) if has_folder else make(buffer)


def check_rows(source: Any, needs_rows: bool) -> None:
    """Raise a ValueError if another process writes the rows, but this process must normalise them."""
    if needs_rows:
        raise ValueError(
            "normalize_observation and normalize_reward must be False if the collector writes rows directly into a "
            f"{type(source).__name__}. Leave them out, or set collector=process."
        )


def check_source(source: Any, learner: Any, *, normalizes: bool, has_data: bool) -> None:
    """Validate a source of batches.

    Args:
        source: The result of the ``source=`` factory.
        learner: The LightningModule, or None.
        normalizes: Whether observations are normalised when batches are drawn.
        has_data: Whether a data set fills the buffer.

    Raises:
        TypeError: The source is not a :class:`BatchSource`.
        ValueError: The source does not fit the other arguments.
    """
    check_discount(source, learner)
    required = [name for name in vars(BatchSource) if not name.startswith("_")]
    if missing := [name for name in required if getattr(source, name, None) is None]:
        raise TypeError(
            f"source= must build a source with the methods {', '.join(required)}, got a {type(source).__name__} "
            f"without {', '.join(missing)}."
        )
    api = SourceApi.of(source)
    if normalizes and api.prepare is not None:
        raise ValueError(
            f"normalize_observation must be False with {type(source).__name__}, which passes raw stored steps to the "
            "module. Leave it out."
        )
    if not api.stores_rows:
        return
    if has_data:
        raise ValueError(
            f"dataset must be None with {type(source).__name__}, which stores the rows outside of the buffer. Leave "
            "one of them out."
        )
    if api.samples_per_insert is not None:
        raise ValueError(
            "samples_per_insert must be None, because frames_per_update of the DataModule sets the ratio. Leave it out."
        )


def buffers_of(source: Any, buffer: ExperienceBuffer) -> Sequence[ExperienceBuffer]:
    """Return the buffers of a source; the buffer of collected steps is the first."""
    buffers = SourceApi.of(source).buffers
    return [buffer] if buffers is None else buffers


def set_goals(buffers: Sequence[ExperienceBuffer], goals: EnvironmentGoals) -> None:
    """Set the goal functions of an environment in the transforms of buffers."""
    for buffer in buffers:
        set_goal_functions(buffer.transform, goals)


def check_transforms(buffers: Sequence[ExperienceBuffer], goals: EnvironmentGoals, specs: Any, learner: Any) -> None:
    """Validate the transforms of buffers; raise IncompatibleError if one does not fit the environment."""
    set_goals(buffers, goals)
    for buffer in buffers:
        for transform in iter_transforms(buffer.transform):
            check_compatible(transform, specs, learner)


def check_first_fit(source: Any, steps: int | None, seed: int | None, spawn: Callable[[str], int]) -> None:
    """Validate the first model fit of a source; raise ValueError if its split would have an empty side.

    Args:
        source: The source; only a :class:`BranchedReplay` fits a model.
        steps: Steps of each environment before the fit; None if unknown.
        seed: The seed of the run; None if unknown.
        spawn: A function that returns the seed for the name of a part of the run.
    """
    if isinstance(source, BranchedReplay) and steps is not None and seed is not None:
        source.check_first_fit(steps, spawn("buffer"))
