"""An on-policy buffer of your own: its advantages are the mean of those of GAE with several lambdas.

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
    """Return the values of a setting; refuse those that are no fractions."""
    if not values or not all(0 <= value <= 1 for value in values):
        raise ValueError(f"{name} must be numbers between 0 and 1, got {values}.")
    return tuple(values)


@dataclass(frozen=True, kw_only=True)
class MixedGAE(Estimator):
    """The mean of several estimates."""

    lambdas: tuple[float, ...]

    def advantages(self, steps: Steps, gamma: float, rollout: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return advantages and value targets."""
        estimates = [gae(*steps, gamma, lmbda) for lmbda in self.lambdas]
        advantages, targets = (torch.stack(each).mean(0) for each in zip(*estimates, strict=True))
        return advantages, targets


class MixedGAEBuffer(VanillaOnPolicyBuffer):
    """On-policy buffer with the mean of several estimates by GAE.

    Args:
        lambdas: as ``gae_lambda`` of :class:`~torchrl_lightning.GAEBuffer`.
        size: as in :class:`~torchrl_lightning.VanillaOnPolicyBuffer`, like everything that is not named here.
    """

    lambdas: Annotated[Sequence[float], all_fractions] = setting(default=(0.5, 0.9, 0.99))

    @property
    def estimator(self) -> MixedGAE:
        """The mean, with the present settings."""
        return MixedGAE(standardize=self.standardize_advantages, lambdas=tuple(self.lambdas))
