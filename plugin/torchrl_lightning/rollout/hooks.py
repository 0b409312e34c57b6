"""Hooks that DataModules and a rollout buffer call around each rollout."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey

from torchrl_lightning.environments.replay_source import ReplaySource


class RolloutHooks:
    """Hooks around each rollout of a buffer; this base class does nothing."""

    replay: ReplaySource | None = None
    """Source of the steps that a collector replays in some environments, or None."""

    def attach(self, env: Any, num_envs: int) -> None:
        """Prepare to collect from ``num_envs`` environments.

        Args:
            env: an environment id, a factory, or an environment, as in a DataModule.
            num_envs: number of parallel environments.
        """

    def wrap_env(self, env: Any) -> Any:
        """Return the wrapped environment for collection."""
        return env

    def wrap_policy(self, policy: TensorDictModuleBase) -> TensorDictModuleBase:
        """Return the policy, wrapped for the environment from :meth:`wrap_env`."""
        return policy

    def on_collected(self, rollout: TensorDictBase) -> None:
        """Receive the collected rollout ``[N, T]`` before normalisation."""

    def on_estimated(self, rollout: TensorDictBase, value_key: NestedKey) -> None:
        """Receive the stored rollout ``[T, N]`` with its values and advantages, before an update."""

    def discard(self) -> None:
        """Discard data about the stored rollout; the buffer's ``empty`` calls this method."""

    def metrics(self, rollout: TensorDictBase | None) -> dict[str, float]:
        """Return metrics to log; ``rollout`` is the stored rollout ``[T, N]`` or None."""
        return {}
