"""Updates without autograd: analytic gradients of DQN, SAC, TD3 and PPO for perceptrons.

NumPy computes the matrix products, and kernels compute the other operations. Parameters and gradients are not copied.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.objectives.common import AUTO_LOSS_MASK_KEYS

from torchrl_lightning._core.keys import REPLAYED
from torchrl_lightning.agents.analytic import kernels
from torchrl_lightning.agents.analytic.perceptrons import (
    Array,
    GradBuffers,
    Gradients,
    Memory,
    ModuleGuard,
    Perceptron,
    Unsupported,
    addresses,
    array_of,
    defining_class,
    perceptron_of,
    perceptrons_of,
    require_class,
)
from torchrl_lightning.kernels.compiled import jitted

_READ = ("action_log_prob", "advantage", "value_target")
_NOT_KNOWN = (*AUTO_LOSS_MASK_KEYS, REPLAYED)
"""``_READ`` are input entries of PPO's update; a batch with an entry in ``_NOT_KNOWN`` needs autograd."""
Seen = tuple[Array, Array]
"""Observations and next observations of a batch."""
DISTANCES = {"l1": kernels.L1, "l2": kernels.L2, "smooth_l1": kernels.SMOOTH_L1}


class AnalyticUpdate(ABC):
    """Analytic gradients of an agent's loss, written directly into the gradients of its optimizers.

    Args:
        agent: An agent with trainer and optimizers.

    Attributes:
        rows: The batch size.
        every: The indices of all rows.
        resting: The parameters without a gradient in this update.

    Raises:
        Unsupported: Autograd has to compute the gradients.
    """

    methods: ClassVar[tuple[str, ...]] = ("losses",)
    """The agent's methods that this class replaces; user code that overrides one needs autograd."""

    def __init__(self, agent: Any) -> None:
        _check_run(agent, self.methods)
        self.agent = agent
        self.resting: set[nn.Parameter] = set()
        self._is_supported = True
        self._build(1)

    def __call__(self, batch: Any) -> Any:
        """Write the same gradients as ``agent.losses`` and ``backward``, and return the same values as ``losses``.

        Return None and write nothing if autograd must compute the batch.
        """
        rows = self.count(batch) if self._is_supported else None
        if rows is None:
            return None
        if rows != self.rows or list(map(Tensor.data_ptr, self._parameters)) != self._addresses:
            try:
                self._build(rows)
            except Unsupported:
                self._is_supported = False
                return None
        if not self._guard.unchanged() or torch.is_anomaly_enabled():
            return None
        for parameter in self._learning:
            if not parameter.requires_grad or parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                return None
        terms = self.write(batch)
        for group in self.agent._groups.values():
            group.publish_gradients(self.resting)
        return terms

    def _build(self, rows: int) -> None:
        groups = self.agent._groups.values()
        gradients = {key: view for group in groups for key, view in group.gradients().items()}
        self._learning = [parameter for group in groups for parameter in group.parameters]
        if any(parameter not in gradients for parameter in self._learning):
            raise Unsupported("Not all parameters are flat.")
        self.rows, self.every = rows, np.arange(rows)
        watched = self.bind(gradients)
        self._guard = ModuleGuard(*watched)
        parts = (each for part in watched for each in part.parameters())
        self._parameters = list(dict.fromkeys([*self._learning, *parts]))
        self._addresses = addresses(self._parameters)

    @abstractmethod
    def bind(self, gradients: Gradients) -> list[nn.Module]:
        """Extract the networks and allocate memory for ``rows``; return the modules that must not change.

        Args:
            gradients: The tensor for the gradient of each parameter.

        Raises:
            Unsupported: The networks are not perceptrons, or the loss has unsupported terms.
        """

    @abstractmethod
    def count(self, batch: Any) -> int | None:
        """Return the number of rows of a batch, or None if the batch has unsupported entries."""

    @abstractmethod
    def write(self, batch: Any) -> Any:
        """Write the gradients of a batch of ``rows``; return the same values as the agent's ``losses``."""


def vectors_of(entries: list[Tensor]) -> Array:
    """Return the vectors ``[B, F_i]`` of an observation as the network input: concatenated, float32, ``[B, F]``."""
    found = [entry.to(torch.float32) for entry in entries]
    return (torch.cat(found, -1) if len(found) > 1 else found[0].contiguous()).numpy()


def _check_run(agent: Any, methods: Sequence[str]) -> None:
    """Raise Unsupported for custom updates, backward hooks, compilation, several ranks, a GPU or other precision."""
    trainer, hooks = agent.trainer, ("on_before_backward", "on_after_backward")
    if (
        any(is_overridden(hook, each) for each in (agent, *trainer.callbacks) for hook in hooks)
        or agent.compiled
        or not defining_class(agent, *methods, "training_step", "compute", "minimise", "update")
        or type(trainer.strategy) is not SingleDeviceStrategy
        or trainer.strategy.root_device.type != "cpu"
        or trainer.precision != "32-true"
    ):
        raise Unsupported("The run needs autograd.")


class TransitionUpdate(AnalyticUpdate):
    """Base of updates on transitions ``[B]``."""

    def bind(self, gradients: Gradients) -> list[nn.Module]:
        """Allocate the weights and return the modules; see :meth:`AnalyticUpdate.bind`."""
        agent, rows = self.agent, self.rows
        if agent.memory is not None:
            raise Unsupported("No memories are known.")
        self.evenly = np.full(rows, 1.0 / rows, np.float32)
        self.constant = np.empty(rows, np.float32)
        self.distance = DISTANCES[agent.loss_function]
        return [agent.policy.network, *(getattr(agent, name) for name in agent.followed), agent.targets]

    def count(self, batch: Any) -> int | None:
        """Return the number of transitions of a batch; None with a mask, sequences or unsupported dtypes."""
        for each in (batch.reward, batch.weight, batch.discount):
            if isinstance(each, Tensor) and each.dtype is not torch.float32:
                return None
        plain = batch.mask is None and batch.reward.ndim == 1 and batch.reward.is_cpu
        plain = plain and batch.action.dtype in (torch.int64, torch.float32)
        return len(batch.reward) if plain else None

    def write(self, batch: Any) -> tuple[dict[str, float], Tensor]:
        """Write the gradients; return the loss terms and diagnostics, and the absolute errors ``[B]``."""
        discount = batch.discount
        if isinstance(discount, Tensor):
            factor: Array = discount.numpy()
        else:
            factor = self.constant
            factor.fill(discount)
        seen = vectors_of(batch.now), vectors_of(batch.after)
        step = batch.reward.numpy(), batch.terminated.numpy(), factor
        weight = self.evenly if batch.weight is None else jitted(kernels.shares)(batch.weight.numpy())
        error = torch.empty(self.rows)
        return self.learn(seen, batch.action.numpy(), step, weight, error.numpy()), error

    @abstractmethod
    def learn(self, seen: Seen, action: Array, step: Any, weight: Array, error: Array) -> dict[str, float]:
        """Write the gradients and the absolute errors; return the loss terms and diagnostics.

        ``seen`` are observations and next observations. ``step`` are reward, terminated and discount. ``weight`` is
        each row's weight in a mean.
        """


class DQNUpdate(TransitionUpdate):
    """Update of DQN with one value for each action."""

    def bind(self, gradients: Gradients) -> list[nn.Module]:
        """Extract the network and its target network."""
        watched, agent = super().bind(gradients), self.agent
        online, target = agent.q_network, agent.targets.q_network
        require_class(online, "QNetwork")
        if agent.masked or agent.margin_coeff or online.action_space != "categorical":
            raise Unsupported("Neither masks, margins nor one-hot actions are known.")
        self.online = perceptron_of(online.trunk, online.head, gradients)
        self.target = perceptron_of(target.trunk, target.head)
        self.memory, self.after = self.online.memory(self.rows), self.online.memory(self.rows)
        self.chosen = self.online.memory(self.rows) if agent.double_q else self.after
        self.d = np.empty_like(self.memory[-1])
        self._learn = jitted(kernels.dqn_loss)
        return watched

    def learn(self, seen: Seen, action: Array, step: Any, weight: Array, error: Array) -> dict[str, float]:
        """Write the gradients of the network."""
        now, then = seen
        after = self.target.forward(then, self.after)
        chooser = self.online.forward(then, self.chosen) if self.agent.double_q else after
        values = self.online.forward(now, self.memory)
        loss, mean = self._learn(values, after, chooser, action.reshape(-1), step, weight, self.distance, self.d, error)
        self.online.backward(now, self.memory, self.d, self.every)
        return {"loss_value": loss, "value": mean}


class ActorCriticUpdate(TransitionUpdate):
    """Base of SAC and TD3: critics of an observation and an action, and an actor trained on their values."""

    def bind(self, gradients: Gradients) -> list[nn.Module]:
        """Extract actor and critics."""
        watched, agent, rows = super().bind(gradients), self.agent, self.rows
        actor = agent.actor_network
        self.critics, self.targets = perceptrons_of(agent.critics, gradients), perceptrons_of(agent.targets.critics)
        self.actor = perceptron_of(actor.trunk, actor.head, gradients)
        self.center, self.half = array_of(actor.head.center), array_of(actor.head.half_range)
        self.features, self.actions = len(self.actor.layers[0][0]), len(self.center)
        # Each update moves this memory through the caches, so allocate little: only outputs that the actor's loss
        # reads again have their own memory.
        buffers: GradBuffers = {}
        self.acting = self.actor.memory(rows, buffers)
        self.memories = [each.memory(rows, buffers) for each in self.critics]
        self.passing = self.memories[:1] * len(self.critics)
        self.x, self.other = np.empty((2, rows, self.features + self.actions), np.float32)
        self.chosen = self.other[:, self.features :]
        self.values = np.empty((len(self.critics), rows), np.float32)
        self.d, self.slopes = np.empty_like(self.values), np.empty((rows, self.actions), np.float32)
        self.target, self.log_prob = np.zeros((2, rows), np.float32)
        self.noise = torch.empty(rows, self.actions)
        return watched

    def evaluate(self, critics: list[Perceptron], memories: list[Memory], observation: Array, x: Array) -> Array:
        """Return the values ``[N, B]`` of the actions already stored in ``x``."""
        x[:, : self.features] = observation
        for critic, memory, values in zip(critics, memories, self.values, strict=False):
            values[:] = critic.forward(x, memory)[:, 0]
        return self.values

    def learn_critics(
        self, seen: Seen, action: Array, step: Any, alpha: float, weight: Array, error: Array
    ) -> dict[str, float]:
        """Write the critics' gradients, from the next actions already stored in ``chosen``."""
        values = self.evaluate(self.targets, self.passing, seen[1], self.other)
        jitted(kernels.target_of)(values, self.log_prob, alpha, step, self.target)
        self.x[:, : self.features] = seen[0]
        np.divide(action - self.center, self.half, out=self.x[:, self.features :])
        error.fill(0.0)
        found = [
            self._learn_critic(*each, weight, error) for each in zip(self.critics, self.passing, self.d, strict=True)
        ]
        return {"loss_qvalue": sum(loss for loss, _ in found), "value": found[0][1]}

    def _learn_critic(self, critic: Perceptron, memory: Memory, d: Array, weight: Array, error: Array) -> Any:
        values = critic.forward(self.x, memory)[:, 0]
        found = jitted(kernels.learn_values)(values, self.target, weight, self.distance, d, error)
        critic.backward(self.x, memory, d[:, None], self.every)
        return found

    def slopes_of(self, number: int, rows: Array, weight: Array) -> None:
        """Write the gradient of a critic's negative weighted values with respect to the actions of some rows."""
        d = -weight[rows, None]
        self.slopes[rows] = self.critics[number].backward_to(self.memories[number], rows, d, self.actions)


class SACUpdate(ActorCriticUpdate):
    """Update of SAC with a tanh-squashed Normal."""

    def bind(self, gradients: Gradients) -> list[nn.Module]:
        """Extract the networks."""
        watched, head = super().bind(gradients), self.agent.actor_network.head
        require_class(head, "SquashedHead")
        self.limits = tuple(map(np.float32, head.limits))
        self.log_range, self.best = float(head.log_range), np.empty(self.rows, np.int64)
        self.pulled = np.empty((self.rows, 2 * self.actions), np.float32)
        self.to_alpha = gradients.get(self.agent.log_alpha)
        return watched

    def learn(self, seen: Seen, action: Array, step: Any, weight: Array, error: Array) -> dict[str, float]:
        """Write the gradients of critics, actor and temperature."""
        now, then = seen
        log_alpha = self.agent.log_alpha.item()
        alpha = math.exp(log_alpha)
        self._sample(then)
        terms = self.learn_critics(seen, action, step, alpha, weight, error)
        out = self._sample(now)
        judged = self.evaluate(self.critics, self.memories, now, self.other)
        gain, mean = jitted(kernels.judge)(judged, self.log_prob, alpha, weight, self.best)
        for number in range(len(self.critics)):
            self.slopes_of(number, np.flatnonzero(self.best == number), weight)
        noise = self.noise.numpy()
        jitted(kernels.pull_back_squashed)(out, noise, self.limits, alpha, weight, self.slopes, self.pulled)
        self.actor.backward(now, self.acting, self.pulled, self.every)
        terms["loss_actor"] = -gain
        if self.to_alpha is not None:
            slope = -(mean + (self.agent.target_entropy or 0.0))
            self.to_alpha.fill_(slope)
            terms["loss_alpha"] = slope * log_alpha
        return {**terms, "entropy": -mean, "alpha": alpha}

    def _sample(self, observation: Array) -> Array:
        out, noise = self.actor.forward(observation, self.acting), self.noise.normal_().numpy()
        arguments = self.limits, self.log_range, self.chosen, self.log_prob
        jitted(kernels.sample_squashed)(out, noise, *arguments)
        return out


class TD3Update(ActorCriticUpdate):
    """Update of TD3 with a deterministic actor."""

    def bind(self, gradients: Gradients) -> list[nn.Module]:
        """Extract the networks."""
        watched, target = super().bind(gradients), self.agent.targets.actor_network
        require_class(self.agent.actor_network.head, "DeterministicHead")
        self.target_actor = perceptron_of(target.trunk, target.head)
        return watched

    def learn(self, seen: Seen, action: Array, step: Any, weight: Array, error: Array) -> dict[str, float]:
        """Write the gradients of the critics, and of the actor if this update includes it."""
        agent, (now, then) = self.agent, seen
        out, noise = self.target_actor.forward(then, self.acting), self.noise.normal_().numpy()
        jitted(kernels.smooth)(out, noise, agent.policy_noise, agent.noise_clip, self.chosen)
        terms = self.learn_critics(seen, action, step, 0.0, weight, error)
        self.resting = set() if agent.is_actor_update() else set(agent.actor_network.parameters())
        if not self.resting:
            chosen = np.tanh(self.actor.forward(now, self.acting), out=self.chosen)
            values = self.evaluate(self.critics[:1], self.memories, now, self.other)[0]
            self.slopes_of(0, self.every, weight)
            self.actor.backward(now, self.acting, self.slopes * (1.0 - chosen * chosen), self.every)
            terms["loss_actor"] = -float(weight.dot(values))
        return terms


class PPOUpdate(AnalyticUpdate):
    """Update of PPO's clipped objective with a categorical or clipped Normal actor, and a critic with its own trunk."""

    methods = ("losses", "evaluate", "entropy_terms", "critic_terms")

    def bind(self, gradients: Gradients) -> list[nn.Module]:
        """Extract actor and critic."""
        agent, actor, critic = self.agent, self.agent.policy, self.agent.critic
        kind = require_class(actor.head, "CategoricalHead", "ClippedNormalHead")
        if critic.is_shared or critic.out_keys != ["state_value"] or critic.trunks[0].in_keys != actor.trunk.in_keys:
            raise Unsupported("Only one critic is known, over the actor's observation and with its own trunk.")
        if actor.masked or agent.clip_value is not None or agent.intrinsic is not None:
            raise Unsupported("Neither masks, clipped values nor intrinsic rewards are known.")
        self._keys, self._distance = actor.trunk.in_keys, DISTANCES[agent.loss_critic_type]
        self._actor = perceptron_of(actor.trunk, actor.head, gradients)
        self._critic = perceptron_of(critic.trunks[0], critic.module[0], gradients)
        self._acting, self._valuing = self._actor.memory(self.rows), self._critic.memory(self.rows)
        self._d_out, self._d_values = np.empty_like(self._acting[-1]), np.empty_like(self._valuing[-1])
        self._arguments: tuple[Any, ...] = (self._d_out,)
        if kind == "CategoricalHead":
            self._learn = jitted(kernels.learn_choices_clipped)
        else:
            head, layer = actor.head, actor.head.layers
            box = tuple(map(array_of, (layer.center, layer.half_range, layer.log_std, head.low, head.high)))
            self._learn = jitted(kernels.learn_normals_clipped)
            self._arguments = box, self._d_out, gradients[layer.log_std].numpy()
        return [actor, critic]

    def count(self, batch: TensorDictBase) -> int | None:
        """Return the number of steps of a mini-batch; None with replayed steps, masks, sequences or other dtypes."""
        if batch.ndim != 1 or any(batch.get(key, None) is not None for key in _NOT_KNOWN):
            return None
        entries = [batch.get(key, None) for key in (*_READ, "action", *self._keys)]
        if not all(isinstance(entry, Tensor) and entry.is_cpu for entry in entries):
            return None
        *read, action = (entry.dtype for entry in entries[: len(_READ) + 1])
        return len(batch) if set(read) == {torch.float32} and action in (torch.int64, torch.float32) else None

    def write(self, batch: TensorDictBase) -> dict[str, float]:
        """Write the gradients; return the loss terms and diagnostics."""
        agent, x = self.agent, vectors_of([batch.get(key) for key in self._keys])
        entropy_coeff, out = float(agent.entropy_coeff), self._actor.forward(x, self._acting)
        action, behaviour = (batch.get(key).numpy() for key in ("action", "action_log_prob"))
        steps, clip = (out, action, behaviour, agent.advantage(batch).numpy()), float(agent.clip_epsilon)
        objective, entropy, kl, moved, clipped = self._learn(*steps, clip, entropy_coeff, *self._arguments)
        values, target = self._critic.forward(x, self._valuing), batch.get("value_target").numpy()
        arguments = values, target, agent.critic_coeff, self._distance, self._d_values
        far = jitted(kernels.learn_returns)(*arguments)
        if kl == math.inf:  # the gradients are not finite either; suppress NumPy's warnings
            with np.errstate(invalid="ignore", over="ignore"):
                self._backward(x)
        else:
            self._backward(x)
        return {
            "loss_objective": objective,
            "loss_entropy": -entropy_coeff * entropy,
            "entropy": entropy,
            "loss_critic": far,
            "kl_approx": kl,
            "kl_approx_k1": -moved,
            "clip_fraction": clipped,
        }

    def _backward(self, x: Array) -> None:
        self._actor.backward(x, self._acting, self._d_out, self.every)
        self._critic.backward(x, self._valuing, self._d_values, self.every)
