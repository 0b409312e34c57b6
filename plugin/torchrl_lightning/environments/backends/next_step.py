"""Track the rows that are resets instead of steps, in vector environments of mode ``NEXT_STEP``."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from torchrl_lightning.environments.replay_source import Array


class ResetTrackingVectorEnv(VectorWrapper[Any, Any, Any, Any, Array]):
    """A vector environment in mode ``NEXT_STEP`` with a mask of the copies that were reset in the last step.

    A reset ignores the action and returns reward 0. A rollout must keep the row of a reset; a replay buffer can omit
    it.

    Attributes:
        resets: Mask of the copies that the last step has reset, ``[N]`` bool.

    Examples:
        >>> import gymnasium
        >>> env = ResetTrackingVectorEnv(gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point"))
        >>> _ = env.reset(seed=0)
        >>> while not env.resets.any():
        ...     _, reward, *_ = env.step(np.array([1, 1]))
        >>> env.resets.tolist(), reward.tolist()
        ([True, True], [0.0, 0.0])
    """

    def __init__(self, env: VectorEnv[Any, Any, Array]) -> None:
        super().__init__(env)
        self.resets: Array = np.zeros(env.num_envs, dtype=bool)
        self._ended = self.resets

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every copy."""
        self.resets = self._ended = np.zeros(self.num_envs, dtype=bool)
        return super().reset(**kwargs)

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Step or reset every copy."""
        returned = super().step(actions)
        self.resets, self._ended = self._ended, returned[2] | returned[3]
        return returned


def tracks_resets(env: Any) -> bool:
    """Return whether an environment has the attribute ``resets`` of :class:`ResetTrackingVectorEnv`."""
    return hasattr(env, "resets")


def with_reset_tracking(env: Any) -> Any:
    """Wrap vector environments of mode ``NEXT_STEP`` in :class:`ResetTrackingVectorEnv`; return others unchanged."""
    is_next_step = isinstance(env, VectorEnv) and env.metadata.get("autoreset_mode") in (
        AutoresetMode.NEXT_STEP,
        AutoresetMode.NEXT_STEP.value,
    )
    return ResetTrackingVectorEnv(env) if is_next_step else env
