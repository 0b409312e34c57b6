"""One interface to vector environments with any autoreset mode."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import reduce
from traceback import extract_tb
from typing import Any
from weakref import WeakSet

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from torchrl_lightning._core.torchrl_compat import env_observations
from torchrl_lightning.environments.actions import ActionFormat
from torchrl_lightning.environments.backends.envpool_env import EnvPoolVectorEnv
from torchrl_lightning.environments.backends.torchrl_batch import BatchVectorEnv
from torchrl_lightning.environments.backends.vector_env import autoreset_mode
from torchrl_lightning.environments.copies import copy_beneath_wrappers
from torchrl_lightning.environments.env_errors import (
    EnvironmentFault,
    check_observation,
    env_errors,
    guard_calls,
    position,
    reraise_as_env_error,
)
from torchrl_lightning.environments.replay_source import Array, PartialStepVectorEnv
from torchrl_lightning.environments.specs import observation_leaves
from torchrl_lightning.environments.workers.worker_env import WorkerVectorEnv

logger = logging.getLogger(__name__)

Final = tuple[int | Array, list[Array]]  # index or indices of environments, and the leaves of their last observations
_SUCCESS = ("is_success", "success")
_COPYING_CLASSES = (PartialStepVectorEnv, WorkerVectorEnv, EnvPoolVectorEnv, BatchVectorEnv)  # classes of this package
_SUSPECT_LIMIT = 3  # warn after this number of consecutive last observations that equal the next first observation
_WARNED: WeakSet[VectorEnv[Any, Any, Any]] = WeakSet()


class VectorStepper:
    """Step a vector environment, and separate last observations from observations after a reset.

    Observations are lists of arrays ``[N, *space]``, in the order of ``keys``. The arrays may be the environment's own
    memory: copy them before the next call. A value outside its space raises an
    :class:`~torchrl_lightning.environments.env_errors.EnvironmentFault`.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        self.env = env
        self.mode = autoreset_mode(env)
        leaves = observation_leaves(env.single_observation_space)
        self.keys = [key for _, key, _ in leaves]
        self.spaces = [space for _, _, space in leaves]
        self._paths = [path for path, _, _ in leaves]
        space = env.single_action_space
        self.action_shape = (env.num_envs, *(space.shape or ()))
        self.actions = ActionFormat.from_space(space)
        self._unchecked = {"reset", "step"}
        self._takes_one_seed = False  # True after the environment rejected a list of seeds
        self._can_reset_some = False  # True after a reset of some environments left the others unchanged
        self.can_pause = isinstance(env, PartialStepVectorEnv)
        self._idle_action = self.actions.to_environment(np.zeros((1, *self.actions.spec_shape)), clip=True)[0]
        self._copies_final_steps = isinstance(env.unwrapped, _COPYING_CLASSES)
        self._suspect_count = 0
        if not self._copies_final_steps:
            self._guard_calls()

    @property
    def resets(self) -> Array | None:
        """Mask ``[N]`` of the environments that the last step reset, in mode ``NEXT_STEP``; None in other modes."""
        return self.env.resets if self.mode is AutoresetMode.NEXT_STEP else None  # type: ignore[attr-defined]

    def reset(self, seeds: list[int] | None) -> list[Array]:
        """Start an episode in every environment.

        An environment that rejects a list of seeds gets only the first seed.
        """
        position.environment = None
        try:
            observation = self._reset(seeds)
        except (Exception, SystemExit) as error:
            self._raise_env_error(error, "reset", "after a reset ")
            raise
        self._check_first("reset", observation)
        return self.leaves(observation)

    def step(self, action: Array, paused: Array | None = None) -> tuple[list[Array], Array, Array, Array, Any]:
        """Step all environments except ``paused``; return observations, rewards, terminated, truncated and info.

        Actions have the format of ``actions.to_environment``. If the vector environment cannot pause environments, the
        paused ones take an arbitrary valid action; ignore their results.
        """
        position.environment = None
        try:
            if paused is not None and self.can_pause:
                observation, reward, terminated, truncated, info = self.env.step_some(action, paused)  # type: ignore[attr-defined]
            else:
                if paused is not None:
                    action = action.copy()
                    action[paused] = self._idle_action
                observation, reward, terminated, truncated, info = self.env.step(action)
        except (Exception, SystemExit) as error:
            self._raise_env_error(error, "step")
            raise
        if self._unchecked:
            self._check_info("step", info)
            self._check_first("step", observation)
        return self.leaves(observation), reward, terminated, truncated, info

    def finish_episodes(
        self,
        done: Array,
        leaves: list[Array],
        info: dict[str, Any],
        paused: Array | None = None,
        previous: Sequence[Array] = (),
    ) -> tuple[list[Array], list[Final]]:
        """Return the observations for the next action, and the true last observation of each ended episode.

        ``done`` is ``[N]``. Ends of episodes in ``paused`` environments are ignored. ``previous`` are the observations
        before the step. The stepper logs a warning if the last observations seem to be the observations after the
        reset.

        Raises:
            RuntimeError: The environment does not report the last observations, or cannot reset single environments.
            EnvironmentFault: The last observations do not fit the space, or share memory with the next observations.
        """
        ended = done if paused is None else done & ~paused
        if self.mode is AutoresetMode.NEXT_STEP:
            return leaves, []  # the leaves are the last observations; the next step is a reset
        if self.mode is AutoresetMode.DISABLED:
            finals = _select_rows(leaves, ended)  # copy before the reset overwrites the memory
            return self.reset_some(done, leaves), finals
        if not ended.any():
            return leaves, []
        final = entry_of(info, "final_obs")
        if final is None:
            raise RuntimeError(
                f"{self.env} ended episodes {np.flatnonzero(done).tolist()} without info['final_obs']: in "
                "AutoresetMode.SAME_STEP, it must contain their last observations."
            )
        if isinstance(final, dict) or (isinstance(final, np.ndarray) and final.dtype.kind != "O"):  # batched
            reported = [self.leaves(final)]
            finals = _select_rows(reported[0], ended)
        else:
            indices = np.flatnonzero(ended).tolist()
            for i in indices:  # separate observations: no concatenation has checked their shapes
                check_observation(self.env.single_observation_space, final[i], f"environment {i}")
            finals = [(i, self.leaves(final[i])) for i in indices]
            reported = [values for _, values in finals]
        if not self._copies_final_steps:
            self._check_finals(reported, finals, leaves, previous)
        return leaves, finals

    def _guard_calls(self) -> None:
        """Guard each environment in the list ``envs`` of the vector environment, if this list exists."""
        envs = getattr(self.env.unwrapped, "envs", None)
        for index, env in enumerate(envs if isinstance(envs, list | tuple) else ()):
            if isinstance(env, gymnasium.Env):
                copy_beneath_wrappers(env)
                guard_calls(env, index)

    def _check_finals(
        self, reported: list[list[Array]], finals: list[Final], leaves: list[Array], previous: Sequence[Array]
    ) -> None:
        """Check that last observations are not the observations after the reset."""
        if any(np.shares_memory(last, leaf) for values in reported for last, leaf in zip(values, leaves, strict=True)):
            raise EnvironmentFault(
                f"{self.env} returned info['final_obs'] in the memory of the next observations, expected separate "
                "memory, because a reset overwrites it. Copy the last observations before the reset."
            )
        for envs, values in finals:
            for row in range(len(envs)) if isinstance(envs, np.ndarray) else (None,):
                index = envs if row is None else envs[row]  # type: ignore[index]
                last = [np.asarray(value if row is None else value[row]) for value in values]
                is_next = all(map(_is_equal, last, (leaf[index] for leaf in leaves)))
                has_changed = not all(map(_is_equal, last, (leaf[index] for leaf in previous)))
                self._suspect_count = self._suspect_count + 1 if is_next and has_changed else 0
                if self._suspect_count == _SUSPECT_LIMIT and self.env not in _WARNED:
                    _WARNED.add(self.env)
                    logger.warning(_SUSPECT, self.env, _SUSPECT_LIMIT)

    def successes(self, info: dict[str, Any]) -> Array | None:
        """Return the mask ``[N]`` of successes at the episode ends of this step; None if no environment reports it.

        An environment that reports several values is successful only if all are true.
        """
        final = entry_of(info, "final_info") if self.mode is AutoresetMode.SAME_STEP else info
        if isinstance(final, list | tuple | np.ndarray):  # one dict or None for each environment
            values = [success_of(env_info) if isinstance(env_info, Mapping) else None for env_info in final]
            if all(value is None for value in values):
                return None
            return np.array([value is not None and bool(np.asarray(value, dtype=bool).all()) for value in values])
        success = success_of(final) if isinstance(final, Mapping) else None
        if success is None:
            return None
        success_rows = np.asarray(success, dtype=bool).reshape(self.env.num_envs, -1)
        return np.asarray(success_rows.all(1))

    def _reset(self, seeds: list[int] | None) -> Any:
        env: Any = self.env
        if seeds is not None and not self._takes_one_seed:
            try:
                return self._observation(env.reset(seed=seeds))
            except (TypeError, ValueError, gymnasium.error.Error):
                if isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv):
                    raise
                self._takes_one_seed = True
        return self._observation(env.reset(seed=None if seeds is None else seeds[0]))

    def _observation(self, returned: tuple[Any, Any]) -> Any:
        """Return the observation of a reset; check the info of the first reset."""
        if "reset" in self._unchecked:
            self._check_info("reset", returned[1])
        return returned[0]

    def reset_some(self, ended: Array, leaves: list[Array]) -> list[Array]:
        """Reset the environments where ``ended`` ``[N]`` is true, and return the new observations of all environments.

        ``leaves`` are the current observations. Raise RuntimeError if a reset of single environments is not supported.
        """
        # One successful check is enough; later resets skip the comparison.
        unaffected = [] if self._can_reset_some else [leaf[~ended] for leaf in leaves]
        position.environment = None
        try:
            observation, _ = self.env.reset(options={"reset_mask": ended.copy()})
        except EnvironmentFault:
            raise
        except Exception as error:
            if isinstance(self.env.unwrapped, SyncVectorEnv | AsyncVectorEnv):
                self._raise_env_error(error, "reset")
            raise RuntimeError(_NO_PARTIAL_RESET.format(env=self.env)) from error
        initial = self.leaves(observation)
        for before, after in zip(unaffected, initial, strict=False):
            if not np.array_equal(before, after[~ended], equal_nan=before.dtype.kind == "f"):
                raise RuntimeError(_NO_PARTIAL_RESET.format(env=self.env))
        self._can_reset_some = self._can_reset_some or not ended.all()
        return initial

    def leaves(self, observation: Any) -> list[Array]:
        """Return the arrays of an observation in the order of ``keys``."""
        return [reduce(lambda tree, name: tree[name], path, observation) for path in self._paths]

    def close(self) -> None:
        """Close the environment; terminate its processes if they hang in a step."""
        if self.env.closed:
            return
        has_processes = isinstance(self.env.unwrapped, AsyncVectorEnv)
        try:
            with env_errors("close", f"{self.env}"):
                self.env.close(**({"timeout": 5.0} if has_processes else {}))
        except (EOFError, OSError, TimeoutError):
            if not has_processes:
                raise
            self.env.close(terminate=True)

    def _check_first(self, call: str, observation: Any) -> None:
        if call in self._unchecked:
            check_observation(self.env.observation_space, observation, f"{self.env}")
            self._unchecked.remove(call)

    def _check_info(self, call: str, info: Any) -> None:
        """Raise EnvironmentFault unless info is a dict, or a list with one dict for each environment."""
        num_envs = self.env.num_envs
        is_list = (
            isinstance(info, list | tuple)
            and len(info) == num_envs
            and all(isinstance(entry, Mapping) for entry in info)
        )
        if not is_list and not isinstance(info, Mapping):
            description = f"{type(info).__name__} {info!r:.60}"
            raise EnvironmentFault(
                f"{self.env} returned info as {description} from {call}, expected a dict, or a list of "
                f"{num_envs} dicts. Fix its {call}, or remove the wrapper that changes info."
            )

    def _raise_env_error(self, error: BaseException, call: str, prefix: str = "") -> None:
        """Find the environment that caused an error, for example by an observation that cannot be concatenated."""
        env = self.env.unwrapped
        frames = extract_tb(error.__traceback__)
        if isinstance(env, SyncVectorEnv) and any("concatenate" in frame.name for frame in frames):
            for index, observation in enumerate(env_observations(env)):
                check_observation(env.single_observation_space, observation, f"{prefix}environment {index}")
        reraise_as_env_error(error, call, f"{self.env}")


def entry_of(info: Any, name: str) -> Any:
    """Return an entry of a vector environment's info, or None if it is missing.

    Args:
        info: One dict of arrays, or a list with one dict for each environment, as
            :class:`gymnasium.wrappers.vector.DictInfoToList` returns it.
        name: Name of the entry. For a list, the result is an object array ``[N]`` with None for missing values.

    Examples:
        >>> entry_of([{"final_obs": 3}, {}], "final_obs")
        array([3, None], dtype=object)
    """
    if isinstance(info, Mapping):
        return info.get(name)
    if not any(name in env_info for env_info in info):
        return None
    entries = np.empty(len(info), dtype=object)
    for index, env_info in enumerate(info):
        entries[index] = env_info.get(name)
    return entries


def success_of(info: Mapping[str, Any]) -> Any:
    """Return the success value in an environment's info, or None if it is missing."""
    return next((info[name] for name in _SUCCESS if name in info), None)


def _is_equal(first: Array, second: Array) -> bool:
    return np.array_equal(first, second, equal_nan=first.dtype.kind == "f" and second.dtype.kind == "f")


def _select_rows(leaves: list[Array], mask: Array) -> list[Final]:
    indices = np.flatnonzero(mask)
    return [(indices, [leaf[indices] for leaf in leaves])] if len(indices) else []


_SUSPECT = (
    "%s returned the first observation of the next episode as the last one of an episode (final_obs), %d times in "
    "succession. Its environments probably reuse one array: return a copy from their step, or let make_vector_env "
    "build it from a factory. If an episode of this environment ends where the next one begins, ignore this."
)
_NO_PARTIAL_RESET = (
    "{env} cannot reset only some environments (env.reset(options={{'reset_mask': mask}})), as a replay "
    "and AutoresetMode.DISABLED need. Build it by make_vector_env from an id or a factory, or, without a replay, with "
    "autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP."
)
