"""Vector environment in mode ``SAME_STEP`` for EnvPool, which steps all copies together in C++."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from torchrl_lightning._core.suggestions import did_you_mean
from torchrl_lightning.environments.copies import copied
from torchrl_lightning.environments.env_errors import env_errors
from torchrl_lightning.environments.recipe import EnvironmentRecipe
from torchrl_lightning.environments.replay_source import Array

_SUPPORTED_SETTINGS = ("id", "env_kwargs", "time_limit", "vectorization", "demonstrations_of")
_RESERVED_ARGUMENTS = {
    "seed": "seeds come from the run",
    "num_envs": "the argument num_envs sets the number",
    "env_type": "the environments must have Gymnasium's interface",
}


class EnvPoolVectorEnv(VectorEnv[Any, Any, Any]):
    """Copies of an EnvPool environment in mode ``SAME_STEP``; a reset can be limited to some copies.

    EnvPool accepts seeds only when it makes the copies. The first full reset makes them, and each full reset with
    seeds makes them again. If an episode terminates exactly at its time limit, EnvPool reports only the truncation.

    Args:
        task: EnvPool's id.
        num_envs: number of copies.
        kwargs: arguments for EnvPool; ``num_threads`` defaults to 1.

    Raises:
        ImportError: EnvPool is not installed.
        ValueError: EnvPool does not know the id or an argument, or the environment has several players.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, task: str, num_envs: int, kwargs: Mapping[str, Any]) -> None:
        self.task, self.num_envs = task, num_envs
        self._kwargs = {"num_threads": 1, **kwargs, "num_envs": num_envs}
        spec = _pool_spec(task, self._kwargs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about rounded bounds
            self.single_observation_space, self.single_action_space = spec.observation_space, spec.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._pool: Any = None
        self._observation: Any = None

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in all copies; without a seed, ``options["reset_mask"]`` selects the copies."""
        mask = None if options is None else options.get("reset_mask")
        if mask is not None and self._pool is not None:
            if seed is not None:
                raise ValueError(
                    f"seed must be None in a reset of some copies, because EnvPool seeds all together, got {seed}."
                )
            self._observation = self._reset_copies(self._observation, np.flatnonzero(mask))
            return self._observation, {}
        if self._pool is None or seed is not None:
            self._make(seed)
        with warnings.catch_warnings(), env_errors("reset"):
            warnings.simplefilter("ignore")  # a first reset also warns about rounded bounds
            self._observation = self._pool.reset()[0]
        return self._observation, {}

    def step(self, actions: Array) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Step every copy and reset ended ones; ``final_obs`` holds the observations before the reset."""
        with env_errors("step"):
            observation, rewards, terminated, truncated, _ = self._pool.step(actions)
        info = {}
        ended = np.flatnonzero(terminated | truncated)
        if len(ended):
            # The reset may overwrite the memory of these arrays.
            rewards, terminated, truncated = rewards.copy(), terminated.copy(), truncated.copy()
            info["final_obs"] = copied(observation)
            observation = self._reset_copies(observation, ended)
        self._observation = observation
        return observation, rewards, terminated, truncated, info

    def close_extras(self, **kwargs: Any) -> None:
        """Close the copies."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _make(self, seed: int | Sequence[int] | None) -> None:
        import envpool

        self.close_extras()
        if isinstance(seed, int):
            seed = [seed + index for index in range(self.num_envs)]  # as Gymnasium's vector environments do
        seeds = np.random.SeedSequence().generate_state(self.num_envs) >> 1 if seed is None else seed
        with warnings.catch_warnings(), env_errors("make"):
            warnings.simplefilter("ignore")
            self._pool = envpool.make(
                self.task, env_type="gymnasium", seed=[int(value) for value in seeds], **self._kwargs
            )

    def _reset_copies(self, observation: Any, ended: Array) -> Any:
        observation = copied(observation)
        with env_errors("reset"):
            initial = self._pool.reset(ended.astype(np.int32))[0]
        _set_rows(observation, ended, initial)
        return observation


def envpool_task(env: object, env_kwargs: Mapping[str, Any], wrappers: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    """Return EnvPool's id and arguments; raise ValueError for settings that EnvPool does not support.

    Examples:
        >>> envpool_task(EnvironmentRecipe("CartPole-v1", time_limit=9), {}, ())
        ('CartPole-v1', {'max_episode_steps': 9})
    """
    unsupported = ["wrappers"] if wrappers else []
    kwargs = dict(env_kwargs)
    if isinstance(env, EnvironmentRecipe):
        unsupported += [name for name in env.settings() if name not in _SUPPORTED_SETTINGS]
        kwargs = {**env.env_kwargs, **kwargs}
        if env.time_limit is not None:
            kwargs["max_episode_steps"] = env.time_limit
        env = env.id
    if not isinstance(env, str):
        raise ValueError(f"vectorization='envpool' needs an EnvPool id, got {env!r}. Use vectorization='sync'.")
    if unsupported:
        raise ValueError(
            f"vectorization='envpool' does not support {', '.join(unsupported)}, because EnvPool steps {env!r} in C++. "
            f"Remove {'it' if len(unsupported) == 1 else 'them'}, or use vectorization='sync'."
        )
    for name, reason in _RESERVED_ARGUMENTS.items():
        if name in kwargs:
            raise ValueError(
                f"env_kwargs must not contain {name} for EnvPool, got {name}={kwargs[name]!r}: {reason}. Remove it."
            )
    return env, kwargs


def check_envpool(env: object, env_kwargs: Mapping[str, Any] | None = None, wrappers: Sequence[Any] = ()) -> None:
    """Validate arguments for EnvPool without making the environment; raise the errors of :class:`EnvPoolVectorEnv`."""
    task, kwargs = envpool_task(env, env_kwargs or {}, wrappers)
    _pool_spec(task, kwargs)


def _pool_spec(task: str, kwargs: Mapping[str, Any]) -> Any:
    try:
        import envpool
    except ImportError as error:
        raise ImportError(
            f"vectorization='envpool' needs a package that is not installed: {error}. Install the extra 'envpool': "
            "pip install 'torchrl-lightning[envpool]'."
        ) from error
    known = envpool.list_all_envs()
    if task not in known:
        raise ValueError(
            f"EnvPool does not know the environment {task!r}{did_you_mean(task, known)} envpool.list_all_envs() "
            "lists all ids; vectorization='sync' uses Gymnasium's environments."
        )
    try:
        spec = envpool.make_spec(task, **kwargs)
    except TypeError as error:
        raise ValueError(f"EnvPool's {task!r} does not accept env_kwargs={dict(kwargs)}: {error}.") from error
    if spec.config.max_num_players != 1:
        raise ValueError(f"EnvPool's {task!r} must have one player, got {spec.config.max_num_players}.")
    return spec


def _set_rows(observation: Any, rows: Array, values: Any) -> None:
    if isinstance(observation, Mapping):
        for name, value in observation.items():
            _set_rows(value, rows, values[name])
    else:
        observation[rows] = values
