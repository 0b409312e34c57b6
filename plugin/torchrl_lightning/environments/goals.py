"""Goal functions of an environment, ``compute_reward`` and ``compute_terminated``, from a separate copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self, SupportsFloat

import gymnasium as gym
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper
from torchrl.envs import EnvBase, GymWrapper

from torchrl_lightning.environments.backends.vector_env import NoGymnasiumEnvironmentError, SingleEnv
from torchrl_lightning.environments.specs import unwrap_transforms
from torchrl_lightning.environments.workers.threads import close_environment

GoalFunction = Callable[[Any, Any, Any], Any]
"""A function such as ``compute_reward``, with the achieved goals, the desired goals and the step's info."""
_ENV_TYPES = (gym.Env, VectorEnv, EnvBase)


class EnvironmentGoals:
    """Look up the goal functions of an environment through its wrappers.

    The first look-up builds a separate environment from an id or a factory, so that stepped environments do not
    change. Pickling stores the source, but not the environment that was built from it.

    Args:
        source: an environment id, a factory of one Gymnasium or TorchRL environment, or a ready environment.

    Examples:
        >>> EnvironmentGoals("CartPole-v1").find("compute_reward") is None
        True
    """

    def __init__(self, source: Any, env: gym.Env[Any, Any] | None = None) -> None:
        self._source = source
        self._env: Any = env
        self._owns_env = env is None  # True if the environment is built here

    @classmethod
    def of(cls, method: GoalFunction) -> Self | None:
        """Return the goals of the environment that a method is bound to; None for other functions."""
        owner = getattr(method, "__self__", None)
        if not isinstance(owner, gym.Env):
            return None
        return cls(owner if owner.spec is None else partial(gym.make, owner.spec), owner)

    def find(self, name: str) -> GoalFunction | None:
        """Return the outermost method of this name; None if no wrapper or environment has it."""
        if self._env is None:
            self._env, self._owns_env = _single(self._source), not isinstance(self._source, _ENV_TYPES)
            if self._owns_env and isinstance(self._env, gym.Env):
                self._env.reset(seed=0)  # some environments have a goal only after a reset
        try:
            method: GoalFunction = (
                self._env.get_wrapper_attr(name) if isinstance(self._env, gym.Env) else getattr(self._env, name)
            )
        except AttributeError:
            return None
        return method

    def close(self) -> None:
        """Close the environment that was built here; the next look-up builds another one."""
        env, self._env = self._env, None
        if env is not None and self._owns_env:
            close_environment(env)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_env": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def _single(source: Any) -> Any:
    """Return one environment of a source: a wrapped Gymnasium environment, or the innermost TorchRL environment."""
    env = source
    if not isinstance(source, _ENV_TYPES):
        try:
            return SingleEnv(source, {}, ())()
        except NoGymnasiumEnvironmentError as error:
            env = error.env
    if isinstance(env, EnvBase):
        with unwrap_transforms(env) as (base, _):
            return base._env if isinstance(base, GymWrapper) else base
    while isinstance(env, VectorWrapper):
        env = env.env
    return env.envs[0] if isinstance(env, SyncVectorEnv) else env


class GoalReward(gym.Wrapper[Any, Any, Any, Any]):
    """Return reward 1 for a step that terminates the episode, and 0 for all other steps, including truncations.

    This suits environments that terminate only at their goal, such as ``MountainCar-v0``.

    Examples:
        >>> env = GoalReward(gym.make("MountainCar-v0"))
        >>> _ = env.reset(seed=0)
        >>> env.step(0)[1]
        0.0
    """

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step the environment, and replace its reward."""
        observation, _, terminated, truncated, info = self.env.step(action)
        return observation, float(terminated), terminated, truncated, info
