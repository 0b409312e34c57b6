"""TorchRL's off-policy losses with a direct forward: plain tensors, target networks bound once.

Losses and gradients are those of TorchRL's own forward to 1e-6 (tested). Each can have a recurrent memory in front of
it, which the critics' loss trains; the policy reads its features without a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase, TensorDictParams
from torch import Tensor
from torch.nn import functional as F
from torchrl.modules import ValueOperator
from torchrl.objectives import DQNLoss, SACLoss, TD3Loss, ValueEstimators

from torchrl_lightning.learn.actors import Actor
from torchrl_lightning.learn.memory import remember
from torchrl_lightning.learn.q_networks import CriticEnsemble, QNetwork
from torchrl_lightning.learn.squashed import DeterministicActor
from torchrl_lightning.learn.target_networks import on_parameters
from torchrl_lightning.learn.transitions import Transitions
from torchrl_lightning.learn.trunks import RecurrentTrunk

Terms = dict[str, Tensor]
_DISTANCES = {"l1": F.l1_loss, "l2": F.mse_loss, "smooth_l1": F.smooth_l1_loss}


class _DirectTerms:
    """Common parts of the direct forwards; mixed into a TorchRL loss."""

    memory_network: RecurrentTrunk
    memory_network_params: TensorDictParams
    target_memory_network_params: TensorDictParams
    loss_function: str
    has_memory = False

    def _set_memory(self: Any, memory: RecurrentTrunk | None) -> None:
        if memory is not None:
            self.has_memory = True
            self.convert_to_functional(memory, "memory_network", create_target_params=True)
            self.__dict__["target_memory"] = on_parameters(memory, self._targets_of("memory_network"))

    def _targets_of(self: Any, name: str) -> TensorDictParams:
        # Reading the attribute makes TorchRL warn until an updater exists.
        parameters: Any = dict(self.named_children())[f"target_{name}_params"]
        return parameters

    def _set_up(self: Any, gamma: float, loss_function: str) -> None:
        if loss_function not in _DISTANCES:
            raise ValueError(f"loss_function={loss_function!r} is unknown; known are {', '.join(_DISTANCES)}")
        self.loss_mask_key = "mask"
        # Made here: a loss that makes it at first use changes its state-dict keys then.
        self.make_value_estimator(ValueEstimators.TD0, gamma=gamma)

    def remember(self: Any, batch: Transitions) -> Transitions:
        """Replace observations by the memory's features, if there is one."""
        return remember(batch, self.memory_network, self.target_memory) if self.has_memory else batch

    def _critic_loss(self, batch: Transitions, values: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of critics ``[N, *B]``, and their greatest absolute errors ``[*B]``."""
        if batch.mask is not None:
            # Masked steps may hold NaN, which would make the gradient NaN even behind a selection.
            target = torch.where(batch.mask, target, values.detach()[0])
        loss = _DISTANCES[self.loss_function](values, target.expand_as(values), reduction="none").sum(0)
        error = (values.detach() - target).abs().amax(0)
        return batch.mean(loss), error if batch.mask is None else torch.where(batch.mask, error, 0.0)


class DirectDQNLoss(_DirectTerms, DQNLoss):
    r"""Deep Q-learning (Mnih et al., 2015), optionally double (van Hasselt et al., 2016).

    \((Q(s, a) - r - \gamma \bar Q(s', a^*))^2\), \(a^*\) the best action of the target network or, if double, of the
    online one.

    Args:
        network: The action values.
        memory: A recurrent memory in front of it.
        gamma: Discount of one step.
        double: Let the online network choose the successor's action.
        loss_function: ``"l2"``, ``"l1"`` or ``"smooth_l1"``.

    Raises:
        ValueError: ``loss_function`` is unknown.
    """

    def __init__(
        self,
        network: QNetwork,
        memory: RecurrentTrunk | None = None,
        *,
        gamma: float = 0.99,
        double: bool = True,
        loss_function: str = "smooth_l1",
    ) -> None:
        super().__init__(
            network, loss_function=loss_function, double_dqn=double, delay_value=True, action_space=network.action_space
        )
        self._set_memory(memory)
        self._set_up(gamma, loss_function)
        self.__dict__["target_network"] = on_parameters(network, self._targets_of("value_network"))

    def terms(self, batch: Transitions) -> tuple[Terms, Tensor]:
        """Return the loss and diagnostics, all scalars, and the absolute TD errors ``[*B]``."""
        batch = self.remember(batch)
        network: Any = self.value_network
        values = network.values(batch.now)
        if self.action_space == "categorical":
            chosen = values.gather(-1, batch.action.reshape(*values.shape[:-1], 1)).squeeze(-1)
        else:
            chosen = (values * batch.action).sum(-1)
        with torch.no_grad():
            after = self.target_network.values(batch.after_target)
            if self.double_dqn:
                best = network.values(batch.after).argmax(-1, keepdim=True)
                after = after.gather(-1, best).squeeze(-1)
            else:
                after = after.amax(-1)
            target = batch.target(after)
        loss, error = self._critic_loss(batch, chosen.unsqueeze(0), target)
        return {"loss_value": loss, "value": batch.mean(chosen.detach())}, error


class DirectSACLoss(_DirectTerms, SACLoss):
    r"""Soft actor-critic with a learnt temperature (Haarnoja et al., 2018).

    Critics: \((Q_i(s, a) - r - \gamma (\min_j \bar Q_j(s', a') - \alpha \log\pi(a'|s')))^2\); actor:
    \(\alpha \log\pi(a|s) - \min_i Q_i(s, a)\); temperature: \(-\log\alpha\,(\log\pi(a|s) + \bar H)\).

    Args:
        actor: A policy whose head is a ``SquashedHead``.
        critics: The critics, each with its own first weights.
        memory: A recurrent memory in front of both.
        gamma: Discount of one step.
        loss_function: ``"l2"``, ``"l1"`` or ``"smooth_l1"``.
        alpha_init: Initial temperature.
        fixed_alpha: Keep the temperature constant.
        target_entropy: Target entropy in nats; ``"auto"`` means minus the number of action dimensions.

    Raises:
        ValueError: ``loss_function`` is unknown.
    """

    def __init__(
        self,
        actor: Actor,
        critics: list[ValueOperator],
        memory: RecurrentTrunk | None = None,
        *,
        gamma: float = 0.99,
        loss_function: str = "l2",
        alpha_init: float = 1.0,
        fixed_alpha: bool = False,
        target_entropy: str | float = "auto",
    ) -> None:
        super().__init__(
            actor,
            critics,
            num_qvalue_nets=len(critics),
            loss_function=loss_function,
            alpha_init=alpha_init,
            fixed_alpha=fixed_alpha,
            target_entropy=target_entropy,
        )
        self._set_memory(memory)
        self._set_up(gamma, loss_function)
        # TorchRL makes it a buffer at the first read; after loading it would be too late for a strict state dict.
        assert self.target_entropy is not None
        self.__dict__["critics"] = CriticEnsemble(critics[0], self.qvalue_network_params)
        self.__dict__["target_critics"] = CriticEnsemble(critics[0], self._targets_of("qvalue_network"))

    def terms(self, batch: Transitions) -> tuple[Terms, Tensor]:
        """Return the parts of the loss and diagnostics, all scalars, and the greater absolute TD error ``[*B]``."""
        batch = self.remember(batch)
        actor: Any = self.actor_network
        encoder, head, alpha = actor.trunk.encoder, actor.head, self.log_alpha.detach().exp()
        with torch.no_grad():
            action, log_prob = head.rsample(head(encoder(*batch.after)))
            after = self.target_critics(batch.after_target, action).amin(0)
            target = batch.target(after - alpha * log_prob)
        values = self.critics(batch.now, batch.action)
        loss_qvalue, error = self._critic_loss(batch, values, target)
        now = [entry.detach() for entry in batch.now] if self.has_memory else batch.now
        action, log_prob = head.rsample(head(encoder(*now)))
        loss_actor = batch.mean(alpha * log_prob - self.critics(now, action, detached=True).amin(0))
        log_prob = log_prob.detach()
        terms = {"loss_qvalue": loss_qvalue, "loss_actor": loss_actor}
        if not self.fixed_alpha:
            terms["loss_alpha"] = batch.mean(-self.log_alpha * (log_prob + self.target_entropy))
        with torch.no_grad():
            terms |= {"value": batch.mean(values[0]), "entropy": -batch.mean(log_prob), "alpha": alpha}
        return terms, error


class DirectTD3Loss(_DirectTerms, TD3Loss):
    r"""Twin delayed deep deterministic policy gradient (Fujimoto et al., 2018).

    Critics: \((Q_i(s, a) - r - \gamma \min_j \bar Q_j(s', \bar\pi(s') + \epsilon))^2\) with clipped noise
    \(\epsilon\); actor: \(-Q_1(s, \pi(s))\).

    Args:
        actor: The policy.
        critics: The critics, each with its own first weights.
        memory: A recurrent memory in front of both.
        gamma: Discount of one step.
        loss_function: ``"l2"``, ``"l1"`` or ``"smooth_l1"``.
        policy_noise: Standard deviation of the noise on target actions, in units of half the action range.
        noise_clip: Bound of that noise, in the same units.

    Raises:
        ValueError: ``loss_function`` is unknown.
    """

    def __init__(
        self,
        actor: DeterministicActor,
        critics: list[ValueOperator],
        memory: RecurrentTrunk | None = None,
        *,
        gamma: float = 0.99,
        loss_function: str = "l2",
        policy_noise: float = 0.2,
        noise_clip: float = 0.5,
    ) -> None:
        head = actor.head
        center, half = head.center, head.half_range
        super().__init__(
            actor,
            critics,
            num_qvalue_nets=len(critics),
            loss_function=loss_function,
            bounds=(center - half, center + half),
        )
        # TorchRL expects both in units of the action.
        del self.policy_noise, self.noise_clip
        self.register_buffer("policy_noise", policy_noise * half, persistent=False)
        self.register_buffer("noise_clip", noise_clip * half, persistent=False)
        self._set_memory(memory)
        self._set_up(gamma, loss_function)
        self.__dict__["critics"] = CriticEnsemble(critics[0], self.qvalue_network_params)
        self.__dict__["target_critics"] = CriticEnsemble(critics[0], self._targets_of("qvalue_network"))
        self.__dict__["target_actor"] = _bound_actor(actor, self._targets_of("actor_network"))

    def terms(self, batch: Transitions, *, with_actor: bool = True) -> tuple[Terms, Tensor]:
        """Return the parts of the loss and diagnostics, all scalars, and the greater absolute TD error ``[*B]``."""
        batch = self.remember(batch)
        terms: Terms = {}
        with torch.no_grad():
            noise = torch.randn_like(batch.action) * self.policy_noise
            noise = torch.minimum(torch.maximum(noise, -self.noise_clip), self.noise_clip)
            encoder, head = self.target_actor
            action = head(encoder(*batch.after_target)) + noise
            action = torch.minimum(torch.maximum(action, self.min_action), self.max_action)
            target = batch.target(self.target_critics(batch.after_target, action).amin(0))
        values = self.critics(batch.now, batch.action)
        terms["loss_qvalue"], error = self._critic_loss(batch, values, target)
        if with_actor:
            now = [entry.detach() for entry in batch.now] if self.has_memory else batch.now
            actor: Any = self.actor_network
            action = actor.head(actor.trunk.encoder(*now))
            terms["loss_actor"] = batch.mean(-self.critics(now, action, detached=True)[0])
        terms["value"] = batch.mean(values[0].detach())
        return terms, error


def _bound_actor(actor: TensorDictModuleBase, parameters: TensorDictParams) -> tuple[Any, Any]:
    bound: Any = on_parameters(actor, parameters)
    return bound.trunk.encoder, bound.head
