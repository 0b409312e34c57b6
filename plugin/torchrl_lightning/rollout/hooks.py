"""Hooks of a rollout buffer, which DataModules and the buffer call around each rollout."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey

from torchrl_lightning.environments.played import ReplaySource


class RolloutHooks:
    """Hooks around each rollout of a buffer; this base does nothing."""

    replay: ReplaySource | None = None
    """Source of the steps that a collector replays in some environments; None without one."""

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
        """Receive a rollout as it was collected, ``[N, T]``; the stored one may be normalised."""

    def note_estimated(self, rollout: TensorDictBase, value_key: NestedKey) -> None:
        """Receive the stored rollout ``[T, N]`` with its values and advantages, before an update."""

    def discard(self) -> None:
        """Forget the stored rollout, which the buffer discards."""

    def metrics(self, rollout: TensorDictBase | None) -> dict[str, float]:
        """Return metrics to log; ``rollout`` is the stored one, ``[T, N]``, or None."""
        return {}
