"""Goal functions of an environment: its ``compute_reward`` and ``compute_terminated``, apart from running ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self, SupportsFloat

import gymnasium as gym
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper
from torchrl.envs import EnvBase, GymWrapper

from torchrl_lightning.environments.specs import layers
from torchrl_lightning.environments.threads import close_environment
from torchrl_lightning.environments.vector_env import NoGymnasiumEnvironmentError, SingleEnv

GoalFunction = Callable[[Any, Any, Any], Any]
"""As ``compute_reward`` of a goal environment: of achieved and desired goals, and the step's info."""
READY = (gym.Env, VectorEnv, EnvBase)


class EnvironmentGoals:
    """Look up an environment's functions of goals, through its wrappers.

    The environment is one of its own, built when a function is looked up first, so that nothing that is stepped
    changes. A copy, or what another process gets, takes along how it is made: no simulator is pickled.

    Args:
        source: an environment id, a factory of one environment, Gymnasium's or TorchRL's, or a ready one.

    Examples:
        >>> EnvironmentGoals("CartPole-v1").find("compute_reward") is None
        True
    """

    def __init__(self, source: Any, env: gym.Env[Any, Any] | None = None) -> None:
        self._source = source
        self._env: Any = env
        self._is_own = env is None  # built here

    @classmethod
    def of(cls, method: GoalFunction) -> Self | None:
        """Return the goals of the environment that a bound method belongs to; None if it belongs to none."""
        owner = getattr(method, "__self__", None)
        if not isinstance(owner, gym.Env):
            return None
        return cls(owner if owner.spec is None else partial(gym.make, owner.spec), owner)

    def find(self, name: str) -> GoalFunction | None:
        """Return the outermost method of this name; None where there is none."""
        if self._env is None:
            self._env, self._is_own = _single(self._source), not isinstance(self._source, READY)
            if self._is_own and isinstance(self._env, gym.Env):
                self._env.reset(seed=0)  # some know no goal before
        try:
            found: GoalFunction = (
                self._env.get_wrapper_attr(name) if isinstance(self._env, gym.Env) else getattr(self._env, name)
            )
        except AttributeError:
            return None
        return found

    def close(self) -> None:
        """Close what was built here; the next look builds it anew."""
        env, self._env = self._env, None
        if env is not None and self._is_own:
            close_environment(env)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_env": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def _single(source: Any) -> Any:
    """Return one environment of a source: Gymnasium's with its wrappers, or the innermost one of TorchRL's."""
    env = source
    if not isinstance(source, READY):
        try:
            return SingleEnv(source, {}, ())()
        except NoGymnasiumEnvironmentError as found:
            env = found.env
    if isinstance(env, EnvBase):
        with layers(env) as (base, _):
            return base._env if isinstance(base, GymWrapper) else base
    while isinstance(env, VectorWrapper):
        env = env.env
    return env.envs[0] if isinstance(env, SyncVectorEnv) else env


class GoalReward(gym.Wrapper[Any, Any, Any, Any]):
    """Give a reward of 1 for the step that terminates an episode and 0 for every other, also for one that truncates it.

    For environments that terminate at their goal and nowhere else, such as ``MountainCar-v0``.

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
