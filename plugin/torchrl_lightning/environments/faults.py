"""What an environment may not return: observations that its space does not allow, or numbers that are not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from torchrl_lightning.fitting import Fault


class EnvironmentFault(Fault):
    """An environment returned what it may not; the message is one line that names it and how to mend it."""


def check_observation(space: spaces.Space[Any], observation: Any, whose: str) -> None:
    """Refuse an observation of another shape than its space says, or of a dtype that the space's cannot hold.

    Floats of another precision are rounded, and integers of another size cast, as Gymnasium's vector environments do.

    Raises:
        EnvironmentFault: the message names the entry, what came and what was expected.

    Example:
        >>> check_observation(spaces.Box(0, 1, (2,)), [0.0, 1.0, 0.0], "environment 3")
        Traceback (most recent call last):
            ...
        torchrl_lightning.environments.faults.EnvironmentFault: environment 3 returned observation 'observation' of \
shape (3,) and dtype float64, expected shape (2,) and dtype float32 as its space says: fix observation_space or the \
wrapper that changes the observation.
    """
    misfit = _misfit(space, observation, "observation")
    if misfit is not None:
        raise EnvironmentFault(
            f"{whose} returned observation {misfit} as its space says: fix observation_space or the wrapper that "
            "changes the observation."
        )


def _misfit(space: spaces.Space[Any], value: Any, name: str) -> str | None:
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping):
            return f"{name!r} as {type(value).__name__}, expected a dict of {sorted(space.spaces)}"
        missing = sorted(set(space.spaces) - set(value))
        if missing:
            return f"{name!r} without {missing}, expected a dict of {sorted(space.spaces)}"
        return next(filter(None, (_misfit(entry, value[key], key) for key, entry in space.spaces.items())), None)
    try:
        came = np.asarray(value)
    except ValueError:  # rows of unequal lengths
        came = np.asarray(value, dtype=object)
    if came.shape == space.shape and (space.dtype is None or np.can_cast(came.dtype, space.dtype, "same_kind")):
        return None
    return (
        f"{name!r} of shape {came.shape} and dtype {came.dtype}, expected shape {space.shape} and dtype {space.dtype}"
    )


class CheckedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Check what an environment in another process returns at its first reset and step, and then stand aside.

    There Gymnasium would cast and broadcast it into shared memory.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], index: int) -> None:
        super().__init__(env)
        self._whose = f"environment {index}"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the first episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        check_observation(self.observation_space, observation, self._whose)
        self.reset = self.env.reset  # type: ignore[method-assign]
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Make the first step."""
        observation, *rest = self.env.step(action)
        check_observation(self.observation_space, observation, self._whose)
        self.step = self.env.step  # type: ignore[method-assign]
        return (observation, *rest)
