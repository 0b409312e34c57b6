"""The on-policy buffer that corrects for stale actors with V-trace."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal

import torch
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning.entries import nested_key
from torchrl_lightning.keys import POLICY_VERSION
from torchrl_lightning.parts import passed_on
from torchrl_lightning.ranges import Check, fraction, optional, positive
from torchrl_lightning.rollout.advantages import VTraceAdvantages, check_behaviour
from torchrl_lightning.rollout.values import RECURRENT_KEYS, current_log_prob, require
from torchrl_lightning.rollout.vanilla import VanillaOnPolicyBuffer


def _threshold(value: float, name: str) -> float:
    return positive(value, name, "float('inf') clips nothing")


class VTraceBuffer(VanillaOnPolicyBuffer):
    """On-policy buffer with V-trace targets (Espeholt et al. 2018, arXiv:1802.01561).

    The rollout keeps the log-probabilities of the policy that acted, so :meth:`compute_vtrace` may run again after each
    epoch: log-probabilities and values come from the current actor and critic, the behaviour policy's are kept.

    Args:
        size: as in :class:`VanillaOnPolicyBuffer`, here and in the next four.
        lmbda: λ.
        clip_rho_thres: ρ̄.
        clip_c_thres: c̄.
        clip_pg_rho_thres: ρ̄ of the policy-gradient term; as ρ̄ when ``None``.
        log_prob_key: behaviour log-probabilities.
        action_key: the action.
        gamma: as in :class:`VanillaOnPolicyBuffer`, here and below.

    Example:
        >>> buffer = VTraceBuffer(64, lmbda=0.9, clip_rho_thres=2.0)
        >>> buffer.required_keys
        ['action', 'action_log_prob']
    """

    parameters: ClassVar[Mapping[str, Check]] = {
        **VanillaOnPolicyBuffer.parameters,
        "lmbda": fraction,
        "clip_rho_thres": _threshold,
        "clip_c_thres": _threshold,
        "clip_pg_rho_thres": optional(_threshold),
    }

    def __init__(
        self,
        size: int,
        device: torch.device | str = "cpu",
        actor: Any = None,
        algorithm: Any = None,
        envs: Any = None,
        *,
        lmbda: float = 1.0,
        clip_rho_thres: float = 1.0,
        clip_c_thres: float = 1.0,
        clip_pg_rho_thres: float | None = None,
        log_prob_key: NestedKey = "action_log_prob",
        action_key: NestedKey = "action",
        gamma: float | None = None,
        critic: TensorDictModuleBase | None = None,
        intrinsic_critic: TensorDictModuleBase | None = None,
        gamma_intrinsic: float | None = None,
        normalize_intrinsic: bool = True,
        intrinsic_direction: Literal["forward", "backward"] = "forward",
        standardize_advantages: bool = True,
        recompute_values: bool = False,
        bootstrap: bool = True,
        value_key: NestedKey = "state_value",
        advantage_key: NestedKey = "advantage",
        value_target_key: NestedKey = "value_target",
        frame_stack: int | None = None,
        num_envs: int | None = None,
        time_dim: int | None = None,
        recurrent: bool | None = None,
        recurrent_keys: tuple[NestedKey, ...] = RECURRENT_KEYS,
        batch_keys: Collection[NestedKey] | None = None,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
        transform: Any = None,
    ) -> None:
        super().__init__(**passed_on(VanillaOnPolicyBuffer, locals()))
        self.lmbda = fraction(lmbda, "lmbda")
        self.clip_rho_thres = _threshold(clip_rho_thres, "clip_rho_thres")
        self.clip_c_thres = _threshold(clip_c_thres, "clip_c_thres")
        self.clip_pg_rho_thres = optional(_threshold)(clip_pg_rho_thres, "clip_pg_rho_thres")
        self.log_prob_key, self.action_key = nested_key(log_prob_key), nested_key(action_key)
        self.current_log_prob_key: NestedKey = "current_action_log_prob"
        self.policy_version: int | None = None

    def estimator(self) -> VTraceAdvantages:
        """Return V-trace of the extrinsic stream."""
        return VTraceAdvantages(
            self.gamma,
            self.lmbda,
            rho_clip=self.clip_rho_thres,
            c_clip=self.clip_c_thres,
            pg_rho_clip=self.clip_pg_rho_thres,
            log_prob_key=self.log_prob_key,
            current_log_prob_key=self.current_log_prob_key,
            **self._estimator_options(),
        )

    @property
    def documented_keys(self) -> Mapping[str, NestedKey]:
        """The keys of the documented names, as they are configured."""
        return {**super().documented_keys, "LogProbability": self.log_prob_key, "Action": self.action_key}

    @property
    def required_keys(self) -> list[NestedKey]:
        """Entries that the policy must write."""
        return [self.action_key, self.log_prob_key]

    def write_estimates(self) -> None:
        """Evaluate the current policy and write V-trace targets and advantages over the filled steps.

        Raises:
            RuntimeError: nothing is stored, or the actor or the critic is missing.
            KeyError: the behaviour policy's log-probabilities are missing.
        """
        self.compute_vtrace()

    def before_epoch(self) -> None:
        """Correct for the updates of the previous pass; a hook for DataModules."""
        self.compute_vtrace()

    def get_updated_action_log_probs(self) -> Tensor:
        """Return log-probabilities of the stored actions under the current actor, ``[T, N]``; update values too."""
        rollout = self.rollout
        actor = require(self.actor, "actor", "to evaluate the stored actions")
        if self.bootstrap or self.has_intrinsic:
            critic = self.intrinsic_critic if self.critic is None else self.critic
            require(critic, "critic", "to evaluate the stored states")
        log_prob = current_log_prob(rollout, actor, self.action_key, self.recurrent_keys)
        self.fill_values(recompute=True, unroll=True)
        rollout.set(self.current_log_prob_key, log_prob)
        return log_prob

    def compute_vtrace(self, clip_rho_thres: float | None = None, clip_c_thres: float | None = None) -> None:
        """Write V-trace targets and advantages for the current policy.

        Args:
            clip_rho_thres: ρ̄ of this call; the configured one when ``None``.
            clip_c_thres: c̄ of this call; the configured one when ``None``.

        Raises:
            ValueError: a threshold is not above 0.
        """
        estimator, stream = self.estimator(), self.intrinsic
        if clip_rho_thres is not None:
            estimator.rho_clip = _threshold(clip_rho_thres, "clip_rho_thres")
        if clip_c_thres is not None:
            estimator.c_clip = _threshold(clip_c_thres, "clip_c_thres")
        check_behaviour(self.rollout, self.log_prob_key)
        self.get_updated_action_log_probs()
        stream.log_prob_keys, stream.clips = (self.current_log_prob_key, self.log_prob_key), estimator.clips
        self.estimate(estimator)

    def metrics(self) -> dict[str, float]:
        """Return mean ``|ρ - 1|``, and the policy lag if versions are known."""
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
