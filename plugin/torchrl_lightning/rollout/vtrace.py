"""The on-policy buffer that corrects for stale actors with V-trace."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning.rollout.advantages import VTraceAdvantages, log_probs
from torchrl_lightning.rollout.estimate import AdvantageTransform, check_unit
from torchrl_lightning.rollout.layout import nested_key
from torchrl_lightning.rollout.values import current_log_prob, require
from torchrl_lightning.rollout.vanilla import VanillaOnPolicyBuffer

POLICY_VERSION = ("collector", "policy_version")


class VTraceBuffer(VanillaOnPolicyBuffer):
    """On-policy buffer with V-trace targets (Espeholt et al. 2018, arXiv:1802.01561).

    The rollout keeps the log-probabilities of the policy that acted, so :meth:`compute_vtrace` may run again after each
    epoch: log-probabilities and values come from the current actor and critic, the behaviour stays what it was.

    Args:
        *args: see :class:`VanillaOnPolicyBuffer`.
        lmbda: λ.
        clip_rho_thres: ρ̄.
        clip_c_thres: c̄.
        clip_pg_rho_thres: ρ̄ of the policy-gradient term; as ρ̄ when ``None``.
        log_prob_key: behaviour log-probabilities.
        action_key: the action.
        **kwargs: see :class:`VanillaOnPolicyBuffer`.

    Example:
        >>> buffer = VTraceBuffer(64, lmbda=0.9, clip_rho_thres=2.0)
        >>> buffer.required_keys
        ['action', 'action_log_prob']
    """

    parameters: ClassVar[tuple[str, ...]] = (
        *VanillaOnPolicyBuffer.parameters,
        "lmbda",
        "clip_rho_thres",
        "clip_c_thres",
        "clip_pg_rho_thres",
    )

    def __init__(
        self,
        *args: Any,
        lmbda: float = 1.0,
        clip_rho_thres: float = 1.0,
        clip_c_thres: float = 1.0,
        clip_pg_rho_thres: float | None = None,
        log_prob_key: NestedKey = "action_log_prob",
        action_key: NestedKey = "action",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.lmbda = check_unit(lmbda, "lmbda")
        self.clip_rho_thres, self.clip_c_thres, self.clip_pg_rho_thres = clip_rho_thres, clip_c_thres, clip_pg_rho_thres
        self.log_prob_key, self.action_key = nested_key(log_prob_key), nested_key(action_key)
        self.current_log_prob_key: NestedKey = "current_action_log_prob"
        self.policy_version: int | None = None

    def estimator(self) -> AdvantageTransform:
        """V-trace of the extrinsic stream."""
        return VTraceAdvantages(
            self.gamma, self.lmbda, **self._clips, **self._log_prob_options, **self._estimator_options()
        )

    @property
    def _clips(self) -> dict[str, Any]:
        return {
            "rho_clip": self.clip_rho_thres,
            "c_clip": self.clip_c_thres,
            "pg_rho_clip": self.clip_pg_rho_thres,
        }

    @property
    def _log_prob_options(self) -> dict[str, Any]:
        return {"log_prob_key": self.log_prob_key, "current_log_prob_key": self.current_log_prob_key}

    @property
    def intrinsic_lmbda(self) -> float:
        """λ of the intrinsic stream, the same as of the extrinsic one."""
        return self.lmbda

    @property
    def result_keys(self) -> list[NestedKey]:
        """Entries that the estimates write."""
        return [*super().result_keys, self.current_log_prob_key]

    @property
    def required_keys(self) -> list[NestedKey]:
        """Entries that the policy must write."""
        return [self.action_key, self.log_prob_key]

    def before_gradients(self) -> None:
        """Evaluate the current policy and write V-trace targets and advantages over the filled steps.

        Raises:
            RuntimeError: nothing is stored, or the actor or the critic is missing.
            KeyError: the behaviour policy's log-probabilities are missing.
        """
        self.compute_vtrace(self.clip_rho_thres, self.clip_c_thres)

    def before_epoch(self) -> None:
        """Hook for a DataModule: corrects for the updates of the pass before."""
        self.compute_vtrace(self.clip_rho_thres, self.clip_c_thres)

    def get_updated_action_log_probs(self) -> Tensor:
        """Log-probabilities of the stored actions under the current actor, ``[T, N]``; values are updated too."""
        rollout = self.rollout
        actor = require(self.actor, "actor", "to evaluate the stored actions")
        if self.bootstrap or self.has_intrinsic:
            require(
                self.critic if self.critic is not None else self.intrinsic_critic,
                "critic",
                "to evaluate the stored states",
            )
        log_prob = current_log_prob(rollout, actor, self.action_key, self.recurrent_keys)
        self.fill_values(recompute=True, unroll=True)
        rollout.set(self.current_log_prob_key, log_prob)
        return log_prob

    def compute_vtrace(self, clip_rho_thres: float = 1.0, clip_c_thres: float = 1.0) -> None:
        """Write V-trace targets and advantages for the current policy.

        Args:
            clip_rho_thres: ρ̄.
            clip_c_thres: c̄.
        """
        if self.log_prob_key not in self.rollout.keys(include_nested=True):
            log_probs(self.rollout, self.current_log_prob_key, self.log_prob_key, torch.empty(0))
        self.clip_rho_thres, self.clip_c_thres = clip_rho_thres, clip_c_thres
        self.get_updated_action_log_probs()
        self.intrinsic.log_prob_keys = (self.current_log_prob_key, self.log_prob_key)
        self.intrinsic.clips = self._clips
        self.estimate()

    def metrics(self) -> dict[str, float]:
        """Mean ``|ρ - 1|``, and the policy lag where versions are known."""
        if not self.storage.num_steps:
            return {}
        rollout, figures = self.rollout, {}
        current = rollout.get(self.current_log_prob_key, None)
        if current is not None:
            ratio = (current - rollout.get(self.log_prob_key)).exp()
            figures["mean_abs_rho_minus_1"] = float((ratio - 1).abs().mean())
        version = rollout.get(POLICY_VERSION, None)
        if version is not None and self.policy_version is not None:
            figures["policy_lag"] = self.policy_version - float(version.double().mean())
        return figures
