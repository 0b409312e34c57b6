"""The on-policy buffer with generalised advantage estimation."""

from __future__ import annotations

from torchrl_lightning._core.settings import Fraction, setting
from torchrl_lightning.rollout.estimates import GAE, Estimator
from torchrl_lightning.rollout.vanilla import VanillaOnPolicyBuffer


class GAEBuffer(VanillaOnPolicyBuffer):
    """On-policy buffer with GAE (Schulman et al. 2016, arXiv:1506.02438).

    ``δ[t] = r[t] + γ (1 - term[t]) V'[t] - V[t]``; ``A[t] = δ[t] + γ λ (1 - done[t]) A[t+1]``; the target is ``A + V``.

    Args:
        size: see :class:`VanillaOnPolicyBuffer`, as for ``device``, ``actor``, ``algorithm`` and ``envs``.
        gae_lambda: λ.
        gamma: see :class:`VanillaOnPolicyBuffer`, which also documents the remaining arguments.

    Examples:
        >>> buffer = GAEBuffer(128, gae_lambda=0.9)
        >>> buffer.used_capacity, buffer.gae_lambda
        (0, 0.9)
    """

    mutable_settings = (*VanillaOnPolicyBuffer.mutable_settings, "gae_lambda")

    gae_lambda: Fraction = setting(default=0.95, kw_only=False)

    @property
    def estimator(self) -> Estimator:
        """GAE estimator with the current settings."""
        return GAE(standardize=self.standardize_advantages, lmbda=self.gae_lambda)
