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
_COPY_ENDS = (PartialStepVectorEnv, WorkerVectorEnv, EnvPoolVectorEnv, BatchVectorEnv)  # classes of this package
_SUSPECT_ENDS = 3  # warn after this number of consecutive last observations that equal the first of the next episode
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
        self.actions = ActionFormat.of_space(space)
        self._unchecked = {"reset", "step"}
        self._takes_one_seed = False  # True after the environment rejected a list of seeds
        self._resets_parts = False  # True after a reset of some environments left the others unchanged
        self.can_rest = isinstance(env, PartialStepVectorEnv)
        self._idle = self.actions.to_environment(np.zeros((1, *self.actions.spec_shape)), clip=True)[0]
        self._copies_ends = isinstance(env.unwrapped, _COPY_ENDS)
        self._suspect_ends = 0
        if not self._copies_ends:
            self._guard_calls()

    @property
    def resets(self) -> Array | None:
        """Mask ``[N]`` of the environments that the last step reset, in mode ``NEXT_STEP``; None in other modes."""
        return self.env.resets if self.mode is AutoresetMode.NEXT_STEP else None  # type: ignore[attr-defined]

    def reset(self, seeds: list[int] | None) -> list[Array]:
        """Start an episode in every environment.

        If the environment rejects a list of seeds, it gets the first seed.
        """
        position.environment = None
        try:
            observation = self._reset(seeds)
        except (Exception, SystemExit) as error:
            self._blame(error, "reset", "after a reset ")
            raise
        self._check_first("reset", observation)
        return self.leaves(observation)

    def step(self, action: Array, resting: Array | None = None) -> tuple[list[Array], Array, Array, Array, Any]:
        """Step all environments except ``resting``; return observations, rewards, terminated, truncated and info.

        Actions have the format of ``actions.to_environment``. If environments cannot rest, they take an arbitrary valid
        action; ignore their results.
        """
        position.environment = None
        try:
            if resting is not None and self.can_rest:
                observation, reward, terminated, truncated, info = self.env.step_some(action, resting)  # type: ignore[attr-defined]
            else:
                if resting is not None:
                    action = action.copy()
                    action[resting] = self._idle
                observation, reward, terminated, truncated, info = self.env.step(action)
        except (Exception, SystemExit) as error:
            self._blame(error, "step")
            raise
        if self._unchecked:
            self._check_info("step", info)
            self._check_first("step", observation)
        return self.leaves(observation), reward, terminated, truncated, info

    def finish(
        self,
        done: Array,
        leaves: list[Array],
        info: dict[str, Any],
        resting: Array | None = None,
        before: Sequence[Array] = (),
    ) -> tuple[list[Array], list[Final]]:
        """Return the observations for the next action, and the true last observation of each ended episode.

        ``done`` is ``[N]``. Environments in ``resting`` report nothing. ``before`` are the observations before the
        step. The stepper logs a warning if the last observations seem to be the observations after the reset.

        Raises:
            RuntimeError: The environment does not report the last observations, or cannot reset single environments.
            EnvironmentFault: The last observations do not fit the space, or share memory with the next ones.
        """
        own = done if resting is None else done & ~resting
        if self.mode is AutoresetMode.NEXT_STEP:
            return leaves, []  # the leaves are the last observations; the next step is a reset
        if self.mode is AutoresetMode.DISABLED:
            finals = _rows(leaves, own)  # copy before the reset overwrites the memory
            return self.restart(done, leaves), finals
        if not own.any():
            return leaves, []
        final = entry_of(info, "final_obs")
        if final is None:
            raise RuntimeError(
                f"{self.env} ended episodes {np.flatnonzero(done).tolist()} without info['final_obs']; "
                "AutoresetMode.SAME_STEP promises the last observation there."
            )
        if isinstance(final, dict) or (isinstance(final, np.ndarray) and final.dtype.kind != "O"):  # one batch for all
            reported = [self.leaves(final)]
            finals = _rows(reported[0], own)
        else:
            ended = np.flatnonzero(own).tolist()
            for i in ended:  # separate observations: no concatenation has checked their shapes
                check_observation(self.env.single_observation_space, final[i], f"environment {i}")
            finals = [(i, self.leaves(final[i])) for i in ended]
            reported = [values for _, values in finals]
        if not self._copies_ends:
            self._check_finals(reported, finals, leaves, before)
        return leaves, finals

    def _guard_calls(self) -> None:
        """Guard the calls of the single environments of a ready vector environment, if it has a list ``envs``."""
        envs = getattr(self.env.unwrapped, "envs", None)
        for index, env in enumerate(envs if isinstance(envs, list | tuple) else ()):
            if isinstance(env, gymnasium.Env):
                copy_beneath_wrappers(env)
                guard_calls(env, index)

    def _check_finals(
        self, reported: list[list[Array]], finals: list[Final], leaves: list[Array], before: Sequence[Array]
    ) -> None:
        """Check that last observations are not the observations after the reset."""
        if any(np.shares_memory(last, leaf) for values in reported for last, leaf in zip(values, leaves, strict=True)):
            raise EnvironmentFault(
                f"{self.env} returned info['final_obs'] in the memory of the next observations, expected memory of its "
                "own, because a reset overwrites it. Copy the last observations before the reset."
            )
        for where, values in finals:
            for row in range(len(where)) if isinstance(where, np.ndarray) else (None,):
                index = where if row is None else where[row]  # type: ignore[index]
                last = [np.asarray(value if row is None else value[row]) for value in values]
                is_next = all(map(_is_equal, last, (leaf[index] for leaf in leaves)))
                has_moved = not all(map(_is_equal, last, (leaf[index] for leaf in before)))
                self._suspect_ends = self._suspect_ends + 1 if is_next and has_moved else 0
                if self._suspect_ends == _SUSPECT_ENDS and self.env not in _WARNED:
                    _WARNED.add(self.env)
                    logger.warning(_SUSPECT, self.env, _SUSPECT_ENDS)

    def successes(self, info: dict[str, Any]) -> Array | None:
        """Return the mask ``[N]`` of successes at the episode ends of this step; None if no environment reports it.

        If an environment reports several values, all must be true.
        """
        final = entry_of(info, "final_info") if self.mode is AutoresetMode.SAME_STEP else info
        if isinstance(final, list | tuple | np.ndarray):  # one dict or None for each environment
            told = [success_of(each) if isinstance(each, Mapping) else None for each in final]
            if all(each is None for each in told):
                return None
            return np.array([each is not None and bool(np.asarray(each, dtype=bool).all()) for each in told])
        found = success_of(final) if isinstance(final, Mapping) else None
        if found is None:
            return None
        reached = np.asarray(found, dtype=bool).reshape(self.env.num_envs, -1)
        return np.asarray(reached.all(1))

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

    def restart(self, ended: Array, leaves: list[Array]) -> list[Array]:
        """Reset the environments of the mask ``ended`` (``[N]``), and return the new observations of all.

        ``leaves`` are the current observations. Raise RuntimeError if the environment cannot reset only these.
        """
        # One successful check is enough; later resets skip the comparison.
        others = [] if self._resets_parts else [leaf[~ended] for leaf in leaves]
        position.environment = None
        try:
            observation, _ = self.env.reset(options={"reset_mask": ended.copy()})
        except EnvironmentFault:
            raise
        except Exception as error:
            if isinstance(self.env.unwrapped, SyncVectorEnv | AsyncVectorEnv):
                self._blame(error, "reset")
            raise RuntimeError(_NO_PARTIAL_RESET.format(env=self.env)) from error
        fresh = self.leaves(observation)
        for before, after in zip(others, fresh, strict=False):
            if not np.array_equal(before, after[~ended], equal_nan=before.dtype.kind == "f"):
                raise RuntimeError(_NO_PARTIAL_RESET.format(env=self.env))
        self._resets_parts = self._resets_parts or not ended.all()
        return fresh

    def leaves(self, observation: Any) -> list[Array]:
        """Return the arrays of an observation in the order of ``keys``."""
        return [reduce(lambda tree, name: tree[name], path, observation) for path in self._paths]

    def close(self) -> None:
        """Close the environment; terminate its processes if they hang in a step."""
        if self.env.closed:
            return
        processes = isinstance(self.env.unwrapped, AsyncVectorEnv)
        try:
            with env_errors("close", f"{self.env}"):
                self.env.close(**({"timeout": 5.0} if processes else {}))
        except (EOFError, OSError, TimeoutError):
            if not processes:
                raise
            self.env.close(terminate=True)

    def _check_first(self, call: str, observation: Any) -> None:
        if call in self._unchecked:
            check_observation(self.env.observation_space, observation, f"{self.env}")
            self._unchecked.remove(call)

    def _check_info(self, call: str, info: Any) -> None:
        """Raise EnvironmentFault unless info is a dict, or a list with one dict for each environment."""
        many = self.env.num_envs
        is_list = (
            isinstance(info, list | tuple) and len(info) == many and all(isinstance(each, Mapping) for each in info)
        )
        if not is_list and not isinstance(info, Mapping):
            came = f"{type(info).__name__} {info!r:.60}"
            raise EnvironmentFault(
                f"{self.env} returned info as {came} from {call}, expected a dict, or a list of {many} dicts. Mend its "
                f"{call}, or leave out the wrapper that changes info."
            )

    def _blame(self, error: BaseException, call: str, when: str = "") -> None:
        """Find the environment that caused an error, for example by an observation that cannot be concatenated."""
        env = self.env.unwrapped
        places = extract_tb(error.__traceback__)
        if isinstance(env, SyncVectorEnv) and any("concatenate" in place.name for place in places):
            for index, observation in enumerate(env_observations(env)):
                check_observation(env.single_observation_space, observation, f"{when}environment {index}")
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
    if not any(name in each for each in info):
        return None
    entries = np.empty(len(info), dtype=object)
    for index, each in enumerate(info):
        entries[index] = each.get(name)
    return entries


def success_of(info: Mapping[str, Any]) -> Any:
    """Return the success value in an environment's info, or None if it is missing."""
    return next((info[name] for name in _SUCCESS if name in info), None)


def _is_equal(one: Array, other: Array) -> bool:
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f" and other.dtype.kind == "f")


def _rows(leaves: list[Array], done: Array) -> list[Final]:
    where = np.flatnonzero(done)
    return [(where, [leaf[where] for leaf in leaves])] if len(where) else []


_SUSPECT = (
    "%s returned the first observation of the next episode as the last one of an episode (final_obs), %d times in "
    "succession. Its environments probably reuse one array: return a copy from their step, or let make_vector_env "
    "build it from a factory. If an episode of this environment ends where the next one begins, ignore this."
)
_NO_PARTIAL_RESET = (
    "{env} cannot reset only some environments (env.reset(options={{'reset_mask': mask}})), as a replay "
    "and AutoresetMode.DISABLED need. Build it by make_vector_env from an id or a factory; without a replay, "
    "autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP does."
)
