"""The on-policy buffer with generalised advantage estimation."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from torchrl_lightning.estimators import gae
from torchrl_lightning.rollout.advantages import GeneralizedAdvantages
from torchrl_lightning.rollout.estimate import AdvantageTransform, check_unit
from torchrl_lightning.rollout.vanilla import VanillaOnPolicyBuffer


class GAEBuffer(VanillaOnPolicyBuffer):
    """On-policy buffer with GAE (Schulman et al. 2016, arXiv:1506.02438).

    ``δ[t] = r[t] + γ (1 - term[t]) V'[t] - V[t]``; ``A[t] = δ[t] + γ λ (1 - done[t]) A[t+1]``; the target is ``A + V``.

    Args:
        *args: see :class:`VanillaOnPolicyBuffer`.
        gae_lambda: λ.
        **kwargs: see :class:`VanillaOnPolicyBuffer`.

    Example:
        >>> buffer = GAEBuffer(128, gae_lambda=0.9)
        >>> buffer.used_capacity, buffer.gae_lambda
        (0, 0.9)
    """

    parameters: ClassVar[tuple[str, ...]] = (*VanillaOnPolicyBuffer.parameters, "gae_lambda")

    def __init__(self, *args: Any, gae_lambda: float = 0.95, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gae_lambda = check_unit(gae_lambda, "gae_lambda")

    @property
    def used_capacity(self) -> int:
        """Steps up to which the storage is full; 0 when it is empty."""
        return self.step

    def estimator(self) -> AdvantageTransform:
        """GAE of the extrinsic stream."""
        return GeneralizedAdvantages(self.gamma, self.gae_lambda, **self._estimator_options())

    @property
    def intrinsic_lmbda(self) -> float:
        """λ of the intrinsic stream, the same as of the extrinsic one."""
        return self.gae_lambda

    @property
    def required_keys(self) -> list[Any]:
        """Entries that the policy must write."""
        return ["action"]

    def _returns(self, rewards: Tensor, values: Tensor, terminated: Tensor, done: Tensor, gamma: float) -> Tensor:
        return gae(rewards, values[:-1], values[1:], terminated, done, gamma, self.gae_lambda)[1]
