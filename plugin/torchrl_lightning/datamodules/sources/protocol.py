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
from torchrl_lightning.replay.episode_transform import tell, transforms_in


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
    takes = "folder" in signature(make).parameters and "folder" not in bound
    return make(buffer, folder=folder) if takes else make(buffer)


def check_rows(source: Any, are_missed: bool) -> None:
    """Raise a ValueError if another process writes rows into the source that this process must normalise."""
    if are_missed:
        raise ValueError(
            "normalize_observation and normalize_reward need the rows, which this collector writes straight into "
            f"the {type(source).__name__}. Leave them out, or take collector=process."
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
    wanted = [name for name in vars(BatchSource) if not name.startswith("_")]
    if lacking := [name for name in wanted if getattr(source, name, None) is None]:
        raise TypeError(f"source= gave a {type(source).__name__}, which has no {', '.join(lacking)}.")
    abilities = SourceApi.of(source)
    if normalizes and abilities.prepare is not None:
        raise ValueError(
            f"{type(source).__name__} shows the module what is stored, but normalize_observation has it "
            "learn from other numbers; leave it out."
        )
    if not abilities.keeps_rows:
        return
    if has_data:
        raise ValueError(
            f"dataset= fills the buffer, but {type(source).__name__} keeps the rows elsewhere; leave one of them out."
        )
    if abilities.samples_per_insert is not None:
        raise ValueError("samples_per_insert says the same as frames_per_update of the DataModule; leave it out.")


def buffers_of(source: Any, buffer: ExperienceBuffer) -> Sequence[ExperienceBuffer]:
    """Return the buffers of a source; the buffer of collected steps is the first."""
    buffers = SourceApi.of(source).buffers
    return [buffer] if buffers is None else buffers


def set_goals(buffers: Sequence[ExperienceBuffer], goals: EnvironmentGoals) -> None:
    """Set the goal functions of an environment in the transforms of buffers."""
    for buffer in buffers:
        tell(buffer.transform, goals)


def check_transforms(buffers: Sequence[ExperienceBuffer], goals: EnvironmentGoals, specs: Any, learner: Any) -> None:
    """Validate the transforms of buffers; raise IncompatibleError if one does not fit the environment."""
    set_goals(buffers, goals)
    for buffer in buffers:
        for transform in transforms_in(buffer.transform):
            check_compatible(transform, specs, learner)


def check_first_fit(source: Any, steps: int | None, seed: int | None, spawn: Callable[[str], int]) -> None:
    """Validate the first model fit of a source; raise ValueError if its split would have an empty side.

    Args:
        source: The source; only a :class:`BranchedReplay` fits a model.
        steps: Steps of each environment before the fit; None if unknown.
        seed: The seed of the run; None if unknown.
        spawn: Returns the seed of a part of the run by its name.
    """
    if isinstance(source, BranchedReplay) and steps is not None and seed is not None:
        source.check_first_fit(steps, spawn("buffer"))
