"""What may hang on a buffer of rollouts, beside what it stores, such as demonstrations."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey

from torchrl_lightning.environments.played import ReplaySource


class RolloutHooks:
    """What a buffer of rollouts asks what hangs on it; this base changes nothing."""

    replay: ReplaySource | None = None
    """What is replayed in some environments in the place of their own steps."""

    def attach(self, env: Any, num_envs: int) -> None:
        """Prepare for ``num_envs`` environments that are collected from.

        Args:
            env: an id, a factory or a ready environment, as a DataModule takes it.
            num_envs: how many are stepped side by side.
        """

    def wrap_env(self, env: Any) -> Any:
        """Return the environment to collect from."""
        return env

    def wrap_policy(self, policy: TensorDictModuleBase) -> TensorDictModuleBase:
        """Return the policy to collect with, in what :meth:`wrap_env` returned."""
        return policy

    def note_collected(self, rollout: TensorDictBase) -> None:
        """Take note of a rollout as it was collected, ``[N, T]``, where what is stored is normalised."""

    def note_estimated(self, rollout: TensorDictBase, value_key: NestedKey) -> None:
        """Take note of a stored rollout ``[T, N]`` that will be learned from, with values and advantages."""

    def discard(self) -> None:
        """Take note that the stored rollout is discarded."""

    def metrics(self, rollout: TensorDictBase | None) -> dict[str, float]:
        """Return metrics to log, where a rollout ``[T, N]`` or none is stored."""
        return {}
