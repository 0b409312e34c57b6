"""Replay recorded steps in some environments of a vector environment; these environments pause meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from gymnasium.spaces import Box, MultiBinary, MultiDiscrete
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import concatenate, iterate
from numpy.typing import NDArray

from torchrl_lightning._core.torchrl_compat import env_observations, info_adder, vector_arrays
from torchrl_lightning.environments.copies import copied
from torchrl_lightning.environments.env_errors import GuardedCall, check_returned, env_errors, position

if TYPE_CHECKING:
    from tensordict.utils import NestedKey  # a process that only steps an environment does not need torch

Array = NDArray[Any]


class ReplayedRows(NamedTuple):
    """One step of the ``M`` replaying environments, in ascending order, with the shapes of the spaces or specs.

    Attributes:
        mask: True for environments that replay, ``[N]`` bool.
        observation: Input of the policy, ``[M, *F]`` for each observation key.
        action: The stored action, ``[M, *A]``.
        next_observation: The next observation, ``[M, *F]`` for each key; at the end of an episode its last observation.
        reward: ``[M]``.
        terminated: ``[M]`` bool.
        truncated: ``[M]`` bool.
        serial: The numbers of the replayed recordings, ``[M]``; -1 for a row without a number.
        log_prob: The stored log-probability of the actions, if the policy writes ``action_log_prob``. If it is None,
            the policy's ``get_dist`` computes it.
    """

    mask: Array
    observation: Mapping[NestedKey, Array]
    action: Array
    next_observation: Mapping[NestedKey, Array]
    reward: Array
    terminated: Array
    truncated: Array
    serial: Array | int = -1
    log_prob: float | None = None


class ReplaySource(Protocol):
    """A source of replayed steps, such as demonstrations.

    A replay begins at the start of an episode and lasts until the replayed episode ends. The environment pauses
    meanwhile, and its own new episode follows. An environment that cannot pause is stepped, but its steps are not
    stored, and it is reset at the end of the replay.
    """

    def __call__(self, starts: Array) -> ReplayedRows | None:
        """Return the replayed rows of the next step, before the policy acts.

        Args:
            starts: True for environments that begin an episode, ``[N]`` bool. Earlier replays in these environments
                have ended by themselves or by a reset.

        Returns:
            The replayed rows; None if no environment replays.
        """
        ...

    @property
    def playing(self) -> Array:
        """True for environments with steps left to replay, ``[N]`` bool; a restored collector continues them."""
        ...


class SyncedReplaySource(ReplaySource, Protocol):
    """A source with copies in worker processes; the copies receive updates of its recordings."""

    def for_worker(self, seed: int) -> ReplaySource:
        """Return a picklable copy without running replays; ``seed`` sets its random draws."""
        ...

    def snapshot(self) -> Any:
        """Return a snapshot of the recordings; snapshots are equal (``==``) as long as the recordings do not change."""
        ...

    def delta(self, since: Any) -> Any:
        """Return a picklable update from an earlier :meth:`snapshot` to the current recordings."""
        ...

    def apply_delta(self, delta: Any) -> None:
        """Apply an update from the original source."""
        ...


class PartialStepVectorEnv(SyncVectorEnv):
    """A ``SyncVectorEnv`` in mode ``SAME_STEP`` that can step only some of its environments.

    It returns the same values as Gymnasium's class. It validates the first step, and the last step of each episode,
    because wrong values would be cast silently.
    """

    _checks = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for i, env in enumerate(self.envs):
            env.reset = GuardedCall(env, "reset", i)  # type: ignore[method-assign]

    @cached_property
    def _takes_scalar_array(self) -> bool:
        space = self.single_action_space
        return isinstance(space, Box) and not space.shape

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Step every environment, and reset ended ones."""
        observations, rewards, terminated, truncated = vector_arrays(self)
        checks = self._checks
        infos: dict[str, Any] = {}
        env_actions = _zero_dimensional(actions) if self._takes_scalar_array else iterate(self.action_space, actions)
        for i, (env, action) in enumerate(zip(self.envs, env_actions, strict=True)):
            position.environment = i
            returned = env.step(action)
            if checks:
                self._check(returned, "step", i)
            observations[i], rewards[i], ends, is_cut, info = returned
            terminated[i], truncated[i] = ends, is_cut
            if ends or is_cut:
                if not checks:
                    self._check(returned, "step", i)
                # The reset may overwrite the memory of the observation and info.
                infos = info_adder(self)(infos, {"final_obs": copied(observations[i]), "final_info": copied(info)}, i)
                observations[i], info = env.reset()
            if info:
                infos = info_adder(self)(infos, info, i)
        self._checks = False
        self._concatenate(observations)
        return self._observations, rewards.copy(), terminated.copy(), truncated.copy(), infos

    def step_some(self, actions: Array, paused: Array) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Step all environments except ``paused`` ones, which return their last observation again and reward 0.

        Info contains only ``final_obs``, the last observations of episodes.
        """
        observations, final = env_observations(self), [None] * self.num_envs
        rewards = np.zeros(self.num_envs)
        terminated, truncated = np.zeros((2, self.num_envs), dtype=bool)
        for i in np.flatnonzero(~paused).tolist():
            env, position.environment = self.envs[i], i
            returned = env.step(actions[i, ...] if self._takes_scalar_array else actions[i])
            observations[i], rewards[i], terminated[i], truncated[i], _ = returned
            if terminated[i] or truncated[i]:
                self._check(returned, "step", i)
                final[i] = copied(observations[i])
                observations[i], _ = env.reset()
        self._concatenate(observations)
        return self._observations, rewards, terminated, truncated, {"final_obs": final}

    def _concatenate(self, observations: Sequence[Any]) -> None:
        if self._flat is None:
            self._observations = concatenate(self.single_observation_space, observations, self._observations)
        else:  # Gymnasium's function takes four times as long for small observations
            np.concatenate(observations, out=self._flat)

    @cached_property
    def _flat(self) -> Array | None:
        """The memory of the observations, ``[N * F, ...]``; None if an observation is not an array ``[F, ...]``."""
        space, memory = self.single_observation_space, self._observations
        if not isinstance(space, Box | MultiBinary | MultiDiscrete) or not space.shape or not memory.flags.c_contiguous:
            return None
        return memory.reshape(-1, *space.shape[1:])

    def _check(self, returned: Any, call: str, index: int) -> None:
        check_returned(self.single_observation_space, returned, call, f"environment {index}")

    def close_extras(self, **kwargs: Any) -> None:
        """Close every environment, even if an environment fails to close."""
        errors = []
        for i, env in enumerate(self.envs):
            try:
                with env_errors("close", index=i):
                    env.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def _zero_dimensional(actions: Array) -> list[Array]:
    """Return actions ``[N]`` of a scalar Box as zero-dimensional arrays; a Box rejects NumPy scalars."""
    return [actions[i, ...] for i in range(len(actions))]


class ReplayTracker:
    """Track which of ``num_envs`` environments replay steps of a source; ``indices`` ``[M]`` lists them."""

    def __init__(self, source: ReplaySource, num_envs: int) -> None:
        self._source = source
        self._paused = self._none = np.zeros(num_envs, dtype=bool)
        self.indices: Array = np.flatnonzero(self._none)

    def resume(self) -> Array:
        """Return a mask ``[N]`` of the environments that continue a replay of the restored source."""
        self._paused = np.array(self._source.playing, dtype=bool)
        return self._paused

    def next_rows(self, starts: Array) -> ReplayedRows | None:
        """Return the replayed rows of the next step; raise ValueError if a replay begins or ends within an episode."""
        rows = self._source(starts.copy())
        if self._paused is self._none if rows is None else rows.mask is self._paused:
            return rows  # the same environments as at the previous step
        mask = self._none if rows is None else np.asarray(rows.mask, dtype=bool)
        interrupted = ~starts & (mask != self._paused)
        if interrupted.any():
            raise ValueError(
                f"The replay of environments {np.flatnonzero(interrupted).tolist()} begins or stops within an episode. "
                "Begin it only if starts is true, and continue until the episode terminates or is truncated."
            )
        self.indices = np.flatnonzero(mask)
        self._paused = mask if len(self.indices) else self._none
        return None if self._paused is self._none else rows
