"""Recorded steps that stand in for those of environments which rest meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from gymnasium.spaces import Box, MultiBinary, MultiDiscrete
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import concatenate, iterate
from numpy.typing import NDArray

from torchrl_lightning._compat import env_observations, info_adder, vector_arrays
from torchrl_lightning.environments.copies import copied
from torchrl_lightning.environments.faults import GuardedCall, blaming, check_returned, position

if TYPE_CHECKING:
    from tensordict.utils import NestedKey  # a process that only steps an environment needs no torch

Array = NDArray[Any]


class ReplayedRows(NamedTuple):
    """One step of the ``M`` environments that replay it, in their order; shapes are those of spaces or of specs.

    Attributes:
        mask: Which environments replay, ``[N]`` bool.
        observation: What the policy sees, ``[M, *F]`` for each observation key.
        action: What is stored as the action, ``[M, *A]``.
        next_observation: What followed, ``[M, *F]`` each; at an end the last observation of the episode.
        reward: ``[M]``.
        terminated: ``[M]`` bool.
        truncated: ``[M]`` bool.
        serial: The numbers of what is replayed, ``[M]``, -1 for none.
        log_prob: What is stored as the log-probability of the actions, where the policy writes one
            (``action_log_prob``); None for that of the policy, which must have ``get_dist`` then.
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
    """Where replayed steps come from, such as demonstrations.

    A replay begins where an episode begins, and lasts until the replayed episode ends. The environment rests meanwhile,
    and its own episode, which had just begun, follows; one that cannot rest is stepped unseen, and reset at the end.
    """

    def __call__(self, starts: Array) -> ReplayedRows | None:
        """Choose what is replayed in the step that comes, before the policy acts.

        Args:
            starts: Where an episode begins, ``[N]`` bool; what was replayed there before is over (also where the
                collector has reset all environments).

        Returns:
            The replayed rows; None if every environment makes the step itself.
        """
        ...

    @property
    def playing(self) -> Array:
        """Where steps are left to replay, ``[N]`` bool: there a restored collector goes on."""
        ...


class FollowedReplaySource(ReplaySource, Protocol):
    """A source of which worker processes have copies, which follow what it replays from."""

    def for_worker(self, seed: int) -> ReplaySource:
        """Return a copy that begins anew, with draws of its own; it is pickled, and understands :meth:`follow`."""
        ...

    def contents(self) -> Any:
        """Return what is replayed from; equal (``==``) as long as nothing of it has changed."""
        ...

    def news(self, since: Any) -> Any:
        """Return what a copy that has these :meth:`contents` must be told to have those of now; it is pickled."""
        ...

    def follow(self, news: Any) -> None:
        """Take over what the original has become."""
        ...


class ResumableVectorEnv(SyncVectorEnv):
    """A ``SyncVectorEnv`` in mode ``SAME_STEP`` that can leave some of its environments as they are in a step.

    It returns what Gymnasium's does, and refuses of a first step, and of the last of each episode, what it would cast.
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
        """Step every environment, and reset those whose episodes end."""
        shown, rewards, terminated, truncated = vector_arrays(self)
        checks = self._checks
        infos: dict[str, Any] = {}
        each = _zero_dimensional(actions) if self._takes_scalar_array else iterate(self.action_space, actions)
        for i, (env, action) in enumerate(zip(self.envs, each, strict=True)):
            position.environment = i
            returned = env.step(action)
            if checks:
                self._check(returned, "step", i)
            shown[i], rewards[i], ends, is_cut, info = returned
            terminated[i], truncated[i] = ends, is_cut
            if ends or is_cut:
                if not checks:
                    self._check(returned, "step", i)
                # The reset may change the memory of both.
                infos = info_adder(self)(infos, {"final_obs": copied(shown[i]), "final_info": copied(info)}, i)
                shown[i], info = env.reset()
            if info:
                infos = info_adder(self)(infos, info, i)
        self._checks = False
        self._concatenate(shown)
        return self._observations, rewards.copy(), terminated.copy(), truncated.copy(), infos

    def step_some(self, actions: Array, resting: Array) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Step the environments that do not rest; the others show the same observation again, without reward.

        Of info there are only the last observations of episodes, ``final_obs``.
        """
        shown, final = env_observations(self), [None] * self.num_envs
        rewards = np.zeros(self.num_envs)
        terminated, truncated = np.zeros((2, self.num_envs), dtype=bool)
        for i in np.flatnonzero(~resting).tolist():
            env, position.environment = self.envs[i], i
            returned = env.step(actions[i, ...] if self._takes_scalar_array else actions[i])
            shown[i], rewards[i], terminated[i], truncated[i], _ = returned
            if terminated[i] or truncated[i]:
                self._check(returned, "step", i)
                final[i] = copied(shown[i])
                shown[i], _ = env.reset()
        self._concatenate(shown)
        return self._observations, rewards, terminated, truncated, {"final_obs": final}

    def _concatenate(self, shown: Sequence[Any]) -> None:
        if self._flat is None:
            self._observations = concatenate(self.single_observation_space, shown, self._observations)
        else:  # Gymnasium's function takes four times as long for small observations
            np.concatenate(shown, out=self._flat)

    @cached_property
    def _flat(self) -> Array | None:
        """The memory of the observations, ``[N * F, ...]``; None unless one observation is an array ``[F, ...]``."""
        space, memory = self.single_observation_space, self._observations
        if not isinstance(space, Box | MultiBinary | MultiDiscrete) or not space.shape or not memory.flags.c_contiguous:
            return None
        return memory.reshape(-1, *space.shape[1:])

    def _check(self, returned: Any, call: str, index: int) -> None:
        check_returned(self.single_observation_space, returned, call, f"environment {index}")

    def close_extras(self, **kwargs: Any) -> None:
        """Close every environment, also behind one that fails to."""
        faults = []
        for i, env in enumerate(self.envs):
            try:
                with blaming("close", index=i):
                    env.close()
            except Exception as fault:
                faults.append(fault)
        if faults:
            raise faults[0]


def _zero_dimensional(actions: Array) -> list[Array]:
    """Return actions ``[N]`` of a scalar Box as the arrays that it contains, which NumPy's numbers are not."""
    return [actions[i, ...] for i in range(len(actions))]


class Playing:
    """Follows which of ``num_envs`` environments replay steps of a source; ``where`` are their numbers, ``[M]``."""

    def __init__(self, source: ReplaySource, num_envs: int) -> None:
        self._source = source
        self._resting = self._none = np.zeros(num_envs, dtype=bool)
        self.where: Array = np.flatnonzero(self._none)

    def resume(self) -> Array:
        """Return where a restored source goes on, ``[N]``."""
        self._resting = np.array(self._source.playing, dtype=bool)
        return self._resting

    def next_rows(self, starts: Array) -> ReplayedRows | None:
        """Ask for the rows of the next step; a ValueError if a replay begins or ends in the midst of an episode."""
        rows = self._source(starts.copy())
        if self._resting is self._none if rows is None else rows.mask is self._resting:
            return rows  # as at the step before
        mask = self._none if rows is None else np.asarray(rows.mask, dtype=bool)
        wrong = ~starts & (mask != self._resting)
        if wrong.any():
            raise ValueError(
                f"The replay of environments {np.flatnonzero(wrong).tolist()} begins or stops within an episode; begin "
                "it where an episode begins (starts), and go on until it terminates or is truncated."
            )
        self.where = np.flatnonzero(mask)
        self._resting = mask if len(self.where) else self._none
        return None if self._resting is self._none else rows
