"""Vector environments that reset at the next step: which rows of a step are no steps but resets."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from torchrl_lightning.environments.played import Array


class KnownResets(VectorWrapper[Any, Any, Any, Any, Array]):
    """A vector environment in mode ``NEXT_STEP`` that tells which copies its last step has reset.

    There the action was ignored and the reward is 0: a row that a rollout cannot leave out, and a replay buffer can.

    Attributes:
        resets: Where the last step was a reset, ``[N]`` bool.

    Examples:
        >>> import gymnasium
        >>> env = KnownResets(gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point"))
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


def tells_resets(env: Any) -> bool:
    """Return whether some rows of an environment are resets, as :class:`KnownResets` tells."""
    return hasattr(env, "resets")


def with_known_resets(env: Any) -> Any:
    """Return a ready vector environment in mode ``NEXT_STEP`` as one that tells its resets; anything else as it is."""
    is_such = isinstance(env, VectorEnv) and env.metadata.get("autoreset_mode") in (
        AutoresetMode.NEXT_STEP,
        AutoresetMode.NEXT_STEP.value,
    )
    return KnownResets(env) if is_such else env
