"""TorchRL's on-policy losses with a direct forward: one pass through each network, no TensorDict in between.

Losses are those of TorchRL's own forward to 1e-6, gradients to a relative 1e-5 (tested); the direct one also supports a
shared trunk, several critics and the intrinsic stream. Sequences ``[B, T]`` of recurrent networks are run as sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torch.nn import functional as F
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import A2CLoss, ClipPPOLoss, ReinforceLoss
from torchrl.objectives.common import AUTO_LOSS_MASK_KEYS

from torchrl_lightning.learn.actors import Actor
from torchrl_lightning.learn.critics import Critic

_DISTANCES = {"l1": F.l1_loss, "l2": F.mse_loss, "smooth_l1": F.smooth_l1_loss}
_TARGETS = {"state_value": "value_target", "intrinsic_state_value": "intrinsic_value_target"}


def target_key(value_key: NestedKey) -> NestedKey:
    """Return where the regression target of a value key lies.

    Example:
        >>> target_key("intrinsic_state_value"), target_key(("state_value", "critic_a"))
        ('intrinsic_value_target', ('value_target', 'critic_a'))
    """
    if isinstance(value_key, str):
        return _TARGETS[value_key]
    return (_TARGETS[value_key[0]], *value_key[1:])


def require(batch: TensorDictBase, key: NestedKey) -> Tensor:
    """Return an entry that the buffer must have written.

    Raises:
        KeyError: The entry is missing; the message says who writes it.
    """
    value = batch.get(key, None)
    if value is None:
        present = sorted(map(str, batch.keys(True, True)))
        raise KeyError(
            f"the batch has no {key!r}, only {present}; the buffer's before_gradients() writes values, targets and "
            "advantages: check that it ran, and that buffer and module name the same critics"
        )
    return value


def evaluate(actor: Actor, critic: Critic, batch: TensorDictBase) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return log-probabilities and entropies ``[*B]``, and each head's values ``[*B, 1]``; run a shared trunk once."""
    recurrent = actor.is_recurrent or critic.is_recurrent
    with set_recurrent_mode(batch.ndim > 1) if recurrent else nullcontext():
        features = actor.trunk.read(batch)
        values = critic.values_of(features) if critic.is_shared else critic.values(batch)
    log_prob, entropy = actor.head.evaluate(actor.head(features), batch.get("action"))
    return log_prob, entropy, values


def mixed_advantage(batch: TensorDictBase, extrinsic_coeff: float = 1.0, intrinsic_coeff: float = 0.0) -> Tensor:
    r"""Return the advantage ``[*B]`` to follow: \(c_e A + c_i A^{int}\); several critics' advantages are averaged."""
    advantage = require(batch, "advantage")
    if isinstance(advantage, TensorDictBase):
        advantage = torch.stack(list(advantage.values(True, True))).mean(0)
    if intrinsic_coeff:
        advantage = extrinsic_coeff * advantage + intrinsic_coeff * require(batch, "intrinsic_advantage")
    elif extrinsic_coeff != 1.0:
        advantage = extrinsic_coeff * advantage
    return advantage.squeeze(-1)


class _DirectTerms:
    """Common parts of the direct forwards; mixed into a TorchRL loss."""

    actor_network: Actor
    critic_network: Critic
    critic_coeff: Tensor | None
    clip_value: Tensor | None
    loss_critic_type: str
    loss_mask_key: Any
    extrinsic_coeff: float
    intrinsic_coeff: float

    def __init__(self, *args: Any, loss_critic_type: str, **kwargs: Any) -> None:
        if loss_critic_type not in _DISTANCES:
            raise ValueError(f"loss_critic_type is {loss_critic_type!r}; expected one of {', '.join(_DISTANCES)}.")
        super().__init__(*args, loss_critic_type=loss_critic_type, **kwargs)  # type: ignore[call-arg]

    def _set_streams(self, extrinsic_coeff: float, intrinsic_coeff: float) -> None:
        self.extrinsic_coeff, self.intrinsic_coeff = extrinsic_coeff, intrinsic_coeff

    def _refuse_masks(self, batch: TensorDictBase) -> None:
        wanted = self.loss_mask_key
        if wanted is None:
            return
        for key in AUTO_LOSS_MASK_KEYS if wanted == "auto" else (wanted,):
            if batch.get(key, None) is not None:
                raise ValueError(
                    f"the batch has the mask {key!r}: it was padded, or some of its steps do not count. The direct "
                    "losses average over every step. Hand them unpadded steps, use TorchRL's own loss, or set "
                    "`loss.loss_mask_key = None` where the mask means nothing"
                )

    def _critic_terms(self, batch: TensorDictBase, values: Sequence[Tensor]) -> dict[str, Tensor]:
        terms: dict[str, Tensor] = {}
        for key, value in zip(self.critic_network.out_keys, values, strict=True):
            name = "loss_intrinsic_critic" if key == "intrinsic_state_value" else "loss_critic"
            target, distance = require(batch, target_key(key)), _DISTANCES[self.loss_critic_type]
            if self.clip_value is None:
                loss = distance(value, target)
            else:
                old = require(batch, key)
                change = value - old
                clipped = torch.minimum(torch.maximum(change, -self.clip_value), self.clip_value)
                loss = torch.maximum(
                    distance(value, target, reduction="none"), distance(old + clipped, target, reduction="none")
                ).mean()
            terms[name] = terms[name] + loss if name in terms else loss
        if self.critic_coeff is not None:
            terms = {name: self.critic_coeff * loss for name, loss in terms.items()}
        return terms


class DirectClipPPOLoss(_DirectTerms, ClipPPOLoss):
    r"""Clipped surrogate objective of PPO (Schulman et al., 2017), minus entropy bonus, plus critic losses.

    \(-\mathbb{E}\min(\rho A, \mathrm{clip}(\rho, 1-\epsilon, 1+\epsilon) A) - c_H H + c_V (V - \hat V)^2\),
    \(\rho = \pi(a|s) / \mu(a|s)\).

    Args:
        actor: Its log-probabilities are compared with the stored ``action_log_prob``.
        critic: Each of its heads regresses on its own target.
        extrinsic_coeff: Weight of ``advantage``.
        intrinsic_coeff: Weight of ``intrinsic_advantage``; 0 ignores it.
        clip_epsilon: Clipping range of the probability ratio around 1; a pair gives the range below and above.
        entropy_coeff: Weight of the entropy bonus.
        critic_coeff: Weight of the critics' losses.
        loss_critic_type: ``"l2"``, ``"smooth_l1"`` or ``"l1"``.
        clip_value: Clip the change of the value prediction to this; None does not clip.
        normalize_advantage: Standardise the advantage within each batch.
    """

    def __init__(
        self,
        actor: Actor,
        critic: Critic,
        *,
        extrinsic_coeff: float = 1.0,
        intrinsic_coeff: float = 0.0,
        clip_epsilon: float | tuple[float, float] = 0.2,
        entropy_coeff: float = 0.01,
        critic_coeff: float = 1.0,
        loss_critic_type: str = "smooth_l1",
        clip_value: float | None = None,
        normalize_advantage: bool = False,
    ) -> None:
        super().__init__(
            actor,
            critic,
            clip_epsilon=clip_epsilon,
            entropy_coeff=entropy_coeff,
            critic_coeff=critic_coeff,
            loss_critic_type=loss_critic_type,
            clip_value=clip_value,
            normalize_advantage=normalize_advantage,
            functional=False,
            log_explained_variance=False,
        )
        self._two_sided = isinstance(clip_epsilon, tuple | list)
        self._set_streams(extrinsic_coeff, intrinsic_coeff)

    @property
    def _clip_range(self) -> tuple[Tensor, Tensor]:
        if self._two_sided:
            return self.clip_epsilon_low, self.clip_epsilon_high
        return self.clip_epsilon, self.clip_epsilon

    def terms(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the parts of the loss (``loss_...``) and diagnostics, all scalars."""
        self._refuse_masks(batch)
        log_prob, entropy, values = evaluate(self.actor_network, self.critic_network, batch)
        advantage = mixed_advantage(batch, self.extrinsic_coeff, self.intrinsic_coeff)
        if self.normalize_advantage and advantage.numel() > 1:
            std, mean = torch.std_mean(advantage)
            advantage = (advantage - mean) / std.clamp_min(1e-6)
        log_weight = log_prob - require(batch, "action_log_prob")
        ratio = log_weight.exp()
        below, above = self._clip_range
        # min(r A, clip(r) A) = A min(r, 1 + e) where A >= 0, and A max(r, 1 - e) elsewhere.
        positive = advantage >= 0
        low = torch.where(positive, -torch.inf, 1.0 - below)
        high = torch.where(positive, 1.0 + above, torch.inf)
        gain = (ratio.clamp(low, high) * advantage).mean()
        entropy = entropy.mean()
        moved = ratio.detach() - 1.0
        diagnostics = {
            "entropy": entropy.detach(),
            "kl_approx": -log_weight.detach().mean(),
            "clip_fraction": ((moved > above) | (moved < -below)).float().mean(),
        }
        terms = {"loss_objective": -gain, "loss_entropy": -self.entropy_coeff * entropy}
        return terms | self._critic_terms(batch, values) | diagnostics

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return ``terms`` as a TensorDict, under TorchRL's names."""
        return TensorDict(self.terms(tensordict))


class DirectA2CLoss(_DirectTerms, A2CLoss):
    r"""Advantage actor-critic: \(-\mathbb{E}\,A \log\pi(a|s) - c_H H + c_V (V - \hat V)^2\) (Mnih et al., 2016).

    With the targets of ``VTraceBuffer`` it is the actor-critic of IMPALA (Espeholt et al., 2018).

    Args:
        actor: The policy.
        critic: Each of its heads regresses on its own target.
        normalize_advantage: Standardise the advantage within each batch.
        extrinsic_coeff: Weight of ``advantage``.
        intrinsic_coeff: Weight of ``intrinsic_advantage``; 0 ignores it.
        entropy_coeff: Weight of the entropy bonus.
        critic_coeff: Weight of the critics' losses.
        loss_critic_type: ``"l2"``, ``"smooth_l1"`` or ``"l1"``.
    """

    def __init__(
        self,
        actor: Actor,
        critic: Critic,
        *,
        normalize_advantage: bool = False,
        extrinsic_coeff: float = 1.0,
        intrinsic_coeff: float = 0.0,
        entropy_coeff: float = 0.01,
        critic_coeff: float = 1.0,
        loss_critic_type: str = "smooth_l1",
    ) -> None:
        super().__init__(
            actor,
            critic,
            entropy_coeff=entropy_coeff,
            critic_coeff=critic_coeff,
            loss_critic_type=loss_critic_type,
            functional=False,
        )
        self.normalize_advantage = normalize_advantage
        self._set_streams(extrinsic_coeff, intrinsic_coeff)

    def terms(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the parts of the loss (``loss_...``) and diagnostics, all scalars."""
        self._refuse_masks(batch)
        log_prob, entropy, values = evaluate(self.actor_network, self.critic_network, batch)
        advantage = mixed_advantage(batch, self.extrinsic_coeff, self.intrinsic_coeff)
        if self.normalize_advantage and advantage.numel() > 1:
            std, mean = torch.std_mean(advantage)
            advantage = (advantage - mean) / std.clamp_min(1e-6)
        entropy = entropy.mean()
        terms = {"loss_objective": -(log_prob * advantage).mean(), "loss_entropy": -self.entropy_coeff * entropy}
        diagnostics = {"entropy": entropy.detach()}
        behaviour = batch.get("action_log_prob", None)
        if behaviour is not None:
            # |rho - 1|: how far the policy is from the one that acted; zero on fresh data.
            diagnostics["ratio_deviation"] = (log_prob.detach() - behaviour).expm1().abs().mean()
        return terms | self._critic_terms(batch, values) | diagnostics

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return ``terms`` as a TensorDict, under TorchRL's names."""
        return TensorDict(self.terms(tensordict))


class DirectReinforceLoss(_DirectTerms, ReinforceLoss):
    r"""REINFORCE with a learnt baseline (Williams, 1992): \(-\mathbb{E}\,A \log\pi(a|s) + (V - \hat V)^2\).

    Args:
        actor: The policy.
        critic: The baseline.
        loss_critic_type: ``"l2"``, ``"smooth_l1"`` or ``"l1"``.
    """

    critic_coeff = None

    def __init__(self, actor: Actor, critic: Critic, *, loss_critic_type: str = "smooth_l1") -> None:
        super().__init__(actor, critic, loss_critic_type=loss_critic_type, functional=False)
        self._set_streams(1.0, 0.0)

    def terms(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the parts of the loss (``loss_...``) and diagnostics, all scalars."""
        self._refuse_masks(batch)
        log_prob, entropy, values = evaluate(self.actor_network, self.critic_network, batch)
        terms = {"loss_actor": -(log_prob * mixed_advantage(batch)).mean()}
        terms["loss_value"] = self._critic_terms(batch, values)["loss_critic"]
        return terms | {"entropy": entropy.detach().mean()}

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return ``terms`` as a TensorDict, under TorchRL's names."""
        return TensorDict(self.terms(tensordict))
