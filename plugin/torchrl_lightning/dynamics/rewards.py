"""Rewards with a known equation, for plans in a learned model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from torchrl_lightning._core.state import state_error
from torchrl_lightning._core.trust import ConfigSafe
from torchrl_lightning._core.validators import finite, non_negative


class QuadraticReward(ConfigSafe):
    r"""Reward observations near a target: \(r = c - \sum_i w_i (s'_i - t_i)^2 - u \lVert a \rVert^2\).

    Use it if the environment gives the same reward in safe and in dangerous states. For example, each step of
    InvertedPendulum has reward 1 until the pole falls. A plan that drifts to the end of the rail then has the same
    return as one that stays in the middle. Checkpoints contain the numbers of this reward, and ``load_policy`` reads
    them.

    Args:
        weights: \(w\), a weight of each element of the observation.
        target: \(t\), the best value of each element; zeros for None.
        constant: \(c\), the reward at the target.
        action_weight: \(u\).

    Raises:
        ValueError: A weight is negative, a number is not finite, all weights are 0, or the lengths differ. A call
            raises the same error if an observation has another number of columns.

    Examples:
        >>> reward = QuadraticReward([1.0, 4.0], constant=1.0)
        >>> reward(torch.zeros(2, 2), torch.zeros(2, 1), torch.tensor([[0.0, 0.0], [0.5, 0.1]]))
        tensor([1.0000, 0.7100])
    """

    def __init__(
        self,
        weights: Sequence[float],
        target: Sequence[float] | None = None,
        constant: float = 0.0,
        action_weight: float = 0.0,
    ) -> None:
        self.weights = torch.tensor([non_negative(each, "weights") for each in weights], dtype=torch.float64)
        self.constant, self.action_weight = finite(constant, "constant"), non_negative(action_weight, "action_weight")
        if not (self.weights.any() or self.action_weight):
            raise ValueError(
                f"weights must contain a number above 0, got {list(weights)} with action_weight=0. Set one, or leave "
                "the reward out."
            )
        values = [0.0] * len(self.weights) if target is None else [finite(each, "target") for each in target]
        if len(values) != len(self.weights):
            raise ValueError(f"weights and target must have equal lengths, got {len(self.weights)} and {len(values)}.")
        self.target = torch.tensor(values, dtype=torch.float64)

    @property
    def state(self) -> dict[str, Any]:
        """The settings as plain numbers, for checkpoints."""
        return {
            "weights": self.weights.tolist(),
            "target": self.target.tolist(),
            "constant": self.constant,
            "action_weight": self.action_weight,
        }

    @classmethod
    def from_state(cls, state: Any) -> Self:
        """Build the reward of a checkpoint; raise a ValueError if the state is invalid."""
        try:
            return cls(**state)
        except TypeError as error:
            raise state_error(state, "reward", "settings of a QuadraticReward") from error

    def __call__(self, observation: Tensor, action: Tensor, next_observation: Tensor) -> Tensor:
        """Return the reward of each row ``[R]``."""
        if next_observation.shape[-1] != len(self.weights):
            raise ValueError(
                "weights of QuadraticReward must have a number for each element of an observation with "
                f"{next_observation.shape[-1]} numbers, got {len(self.weights)} numbers."
            )
        distance = next_observation - self.target.to(next_observation)
        costs = (self.weights.to(next_observation) * distance.square()).sum(-1)
        return self.constant - costs - self.action_weight * action.square().sum(-1)
