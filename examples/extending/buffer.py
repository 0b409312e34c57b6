"""A custom on-policy buffer that averages the GAE advantages of several lambdas.

Run, in this folder: torchrl-lightning-train --config-dir . '~experiment' data=mixed data.total_frames=50000
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from torchrl_lightning import VanillaOnPolicyBuffer, gae
from torchrl_lightning._core.settings import setting
from torchrl_lightning.rollout.estimates import Estimator, Steps


def all_fractions(values: Sequence[float], name: str) -> tuple[float, ...]:
    """Return the values as a tuple; raise ValueError if one is not between 0 and 1."""
    if not values or not all(0 <= value <= 1 for value in values):
        raise ValueError(f"{name} must be numbers between 0 and 1, got {values}.")
    return tuple(values)


@dataclass(frozen=True, kw_only=True)
class MixedGAE(Estimator):
    """Average the GAE estimates of several lambdas."""

    lambdas: tuple[float, ...]

    def advantages(self, steps: Steps, gamma: float, rollout: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean advantages and the mean value targets."""
        estimates = [gae(*steps, gamma, lmbda) for lmbda in self.lambdas]
        advantages, targets = (torch.stack(each).mean(0) for each in zip(*estimates, strict=True))
        return advantages, targets


class MixedGAEBuffer(VanillaOnPolicyBuffer):
    """On-policy buffer that averages GAE estimates of several lambdas.

    Args:
        lambdas: Values of ``gae_lambda`` (see :class:`~torchrl_lightning.GAEBuffer`).
        size: See :class:`~torchrl_lightning.VanillaOnPolicyBuffer` for this and all other arguments.
    """

    lambdas: Annotated[Sequence[float], all_fractions] = setting(default=(0.5, 0.9, 0.99))

    @property
    def estimator(self) -> MixedGAE:
        """Return an estimator with the current settings."""
        return MixedGAE(standardize=self.standardize_advantages, lambdas=tuple(self.lambdas))
