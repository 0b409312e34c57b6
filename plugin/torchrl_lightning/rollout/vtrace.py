"""The on-policy buffer with V-trace, which corrects for data of an older policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.keys import ACTION, LOG_PROB
from torchrl_lightning._core.settings import Fraction
from torchrl_lightning._core.tree import Key
from torchrl_lightning._core.validators import positive
from torchrl_lightning.rollout.estimates import VTrace
from torchrl_lightning.rollout.vanilla import VanillaOnPolicyBuffer


def _threshold(value: float, name: str) -> float:
    return positive(value, name, "use float('inf') to disable clipping")


Threshold = Annotated[float, _threshold]


class VTraceBuffer(VanillaOnPolicyBuffer):
    """On-policy buffer with V-trace targets (Espeholt et al. 2018, arXiv:1802.01561).

    The rollout keeps the behaviour policy's log-probabilities, so :meth:`compute_vtrace` can run again after each epoch
    with log-probabilities and values of the current actor and critic.

    Args:
        size: see :class:`VanillaOnPolicyBuffer`, as for ``device``, ``actor``, ``algorithm`` and ``envs``.
        lmbda: λ.
        clip_rho_thres: ρ̄.
        clip_c_thres: c̄.
        clip_pg_rho_thres: ρ̄ of the policy-gradient term; ``None`` uses ``clip_rho_thres``.
        log_prob_key: key of the behaviour policy's log-probabilities.
        action_key: key of the actions.
        gamma: see :class:`VanillaOnPolicyBuffer`, which also documents the remaining arguments.

    Examples:
        >>> buffer = VTraceBuffer(64, lmbda=0.9, clip_rho_thres=2.0)
        >>> buffer.required_keys
        ['action', 'action_log_prob']
    """

    mutable_settings = (
        *VanillaOnPolicyBuffer.mutable_settings,
        "lmbda",
        "clip_rho_thres",
        "clip_c_thres",
        "clip_pg_rho_thres",
    )

    lmbda: Fraction = 1.0
    clip_rho_thres: Threshold = 1.0
    clip_c_thres: Threshold = 1.0
    clip_pg_rho_thres: Threshold | None = None
    log_prob_key: Key = LOG_PROB
    action_key: Key = ACTION

    @property
    def estimator(self) -> VTrace:
        """V-trace estimator with the current settings."""
        return VTrace(
            standardize=self.standardize_advantages,
            lmbda=self.lmbda,
            rho_clip=self.clip_rho_thres,
            c_clip=self.clip_c_thres,
            pg_rho_clip=self.clip_pg_rho_thres,
            log_prob_key=self.log_prob_key,
            action_key=self.action_key,
        )

    @property
    def _documented_keys(self) -> Mapping[str, NestedKey]:
        """The configured key of each documented name."""
        return {**super()._documented_keys, "LogProbability": self.log_prob_key, "Action": self.action_key}

    def get_updated_action_log_probs(self) -> Tensor:
        """Update the values, and return the current actor's log-probabilities ``[T, N]`` of the stored actions."""
        estimator = self.estimator
        self._write_inputs(estimator)
        log_prob: Tensor = self.rollout.get(estimator.current_log_prob_key)
        return log_prob

    def compute_vtrace(self, clip_rho_thres: float | None = None, clip_c_thres: float | None = None) -> None:
        """Write V-trace targets and advantages for the current policy.

        Args:
            clip_rho_thres: ρ̄ of this call; ``None`` uses the configured value.
            clip_c_thres: c̄ of this call; ``None`` uses the configured value.

        Raises:
            ValueError: a threshold is not above 0.
        """
        estimator = self.estimator
        if clip_rho_thres is not None:
            estimator = replace(estimator, rho_clip=_threshold(clip_rho_thres, "clip_rho_thres"))
        if clip_c_thres is not None:
            estimator = replace(estimator, c_clip=_threshold(clip_c_thres, "clip_c_thres"))
        self._write_estimates(estimator)
