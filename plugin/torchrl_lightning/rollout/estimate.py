"""Base of the advantage transforms: time dimension, values, several critics, and result keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.envs.transforms import Transform

from torchrl_lightning.entries import join, nested_key, next_key, path_of
from torchrl_lightning.estimators import standardize
from torchrl_lightning.ranges import fraction
from torchrl_lightning.rollout.values import fill_values, value_keys
from torchrl_lightning.rollout.writer import REWARD, check_flags, time_axis, time_major


class AdvantageTransform(Transform):
    """Base of the transforms that write advantages and value targets on a rollout.

    Call it to compute. In a replay buffer, append it with ``invert=True`` or set ``on_write=True`` to compute when a
    rollout is written; otherwise it computes on sampled sequences.

    Args:
        gamma: discount.
        critic: module that writes ``value_key``; may be ``None`` where the rollout holds all values. It is not part of
            the transform's ``state_dict``.
        time_dim: as in :class:`DiscountedReturns`, here and below.
    """

    episodic = True
    critic: TensorDictModuleBase | None

    def __init__(
        self,
        gamma: float = 0.99,
        critic: TensorDictModuleBase | None = None,
        *,
        time_dim: int | None = None,
        reward_key: NestedKey = REWARD,
        value_key: NestedKey = "state_value",
        advantage_key: NestedKey = "advantage",
        value_target_key: NestedKey = "value_target",
        recompute_values: bool = False,
        standardize_advantages: bool = False,
        on_write: bool = False,
    ) -> None:
        super().__init__(in_keys=[], out_keys=[])
        self.gamma = fraction(gamma, "gamma")
        self.critic = critic
        self.time_dim = time_dim
        self.reward_key, self.value_key = nested_key(reward_key), nested_key(value_key)
        self.advantage_key, self.value_target_key = nested_key(advantage_key), nested_key(value_target_key)
        self.recompute_values = recompute_values
        self.standardize_advantages = standardize_advantages
        self.on_write = on_write

    # TorchRL's PPO trainer config puts its critic into ``transform.module.value_network``, where its own GAE has it.
    @property
    def module(self) -> AdvantageTransform:
        """The transform itself, under the name that TorchRL's trainer configs use."""
        return self

    @property
    def value_network(self) -> TensorDictModuleBase | None:
        """The critic, under TorchRL's name."""
        return self.critic

    @value_network.setter
    def value_network(self, critic: TensorDictModuleBase | None) -> None:
        self.critic = critic

    # Critic and actor belong to the learner; registering them as submodules would save their weights with every buffer.
    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("critic", "actor", "value_network"):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute on a rollout; pass samples through when ``on_write``."""
        return tensordict if self.on_write else self.estimate(tensordict)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.estimate(tensordict) if self.on_write else tensordict

    # What append_transform(..., invert=True) runs when a rollout is written.
    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self.estimate(next_tensordict)

    def estimate(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write advantages and value targets on a rollout of any layout and return it."""
        axis = time_axis(tensordict, self.time_dim)
        check_flags(tensordict)
        rollout = time_major(tensordict, self.time_dim)
        before = dict(rollout.items(include_nested=True, leaves_only=True))
        self.fill(rollout)
        self.compute(rollout)
        if rollout is not tensordict:
            for key, value in rollout.items(include_nested=True, leaves_only=True):
                if before.get(key) is not value:
                    tensordict.set(key, value.squeeze(1) if tensordict.ndim == 1 else value.transpose(0, axis))
        return tensordict

    def fill(self, rollout: TensorDictBase) -> None:
        """Write the values that :meth:`compute` reads on a time-major rollout."""
        known: Callable[[NestedKey], bool] = lambda key: (  # noqa: E731
            not self.recompute_values and key in rollout.keys(include_nested=True)
        )
        fill_values(rollout, self.critic, {self.value_key: self.episodic}, known=known)

    def compute(self, rollout: TensorDictBase) -> None:
        """Write advantages and targets of every critic on a time-major rollout that holds all values."""
        for key in value_keys(rollout, None, self.value_key):
            suffix = path_of(key)[len(path_of(self.value_key)) :]
            value = rollout.get(key)
            reward = self.reward(rollout).to(value.dtype).expand_as(value)
            advantage, target = self.advantages(rollout, reward, value, rollout.get(next_key(key)))
            if self.standardize_advantages:
                advantage = standardize(advantage)
            rollout.set(join(self.advantage_key, suffix), advantage)
            rollout.set(join(self.value_target_key, suffix), target)

    def reward(self, rollout: TensorDictBase) -> Tensor:
        """Return the reward of the stream."""
        reward: Tensor = rollout.get(self.reward_key)
        return reward

    def advantages(
        self, rollout: TensorDictBase, reward: Tensor, value: Tensor, next_value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return advantage and value target of one critic."""
        raise NotImplementedError(f"{type(self).__name__} does not say how advantages are estimated.")
