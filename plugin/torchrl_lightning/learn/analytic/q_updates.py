"""The gradients of DQN, SAC and TD3."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchrl_lightning.kernels.compiled import jitted
from torchrl_lightning.learn.analytic import kernels
from torchrl_lightning.learn.analytic.perceptrons import (
    Array,
    GradBuffers,
    Gradients,
    Memory,
    Perceptron,
    Unsupported,
    array_of,
    perceptron_of,
    perceptrons_of,
    require_class,
)
from torchrl_lightning.learn.analytic.updates import DISTANCES, AnalyticUpdate, vectors_of

Seen = tuple[Array, Array]
"""Observations of a batch, and their successors."""


class TransitionUpdate(AnalyticUpdate):
    """A loss of transitions ``[B]``."""

    def bind(self, gradients: Gradients) -> list[nn.Module]:
        """Find the networks."""
        agent, rows = self.agent, self.rows
        if agent.memory is not None:
            raise Unsupported("No memories are known.")
        self.evenly = np.full(rows, 1.0 / rows, np.float32)
        self.constant = np.empty(rows, np.float32)
        self.distance = DISTANCES[agent.loss_function]
        return [agent.policy.network, *(getattr(agent, name) for name in agent.followed), agent.targets]

    def count(self, batch: Any) -> int | None:
        """Return the number of transitions of a batch; None if some are masked, or parts of sequences."""
        for each in (batch.reward, batch.weight, batch.discount):
            if isinstance(each, Tensor) and each.dtype is not torch.float32:
                return None
        plain = batch.mask is None and batch.reward.ndim == 1 and batch.reward.is_cpu
        plain = plain and batch.action.dtype in (torch.int64, torch.float32)
        return len(batch.reward) if plain else None

    def write(self, batch: Any) -> tuple[dict[str, float], Tensor]:
        """Write the gradients; return the parts of the loss and diagnostics, and the absolute errors ``[B]``."""
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
        """Write gradients and errors by observation and successor, action, reward, end and discount of each row.

        ``weight`` is its share of a mean.
        """


class DQNUpdate(TransitionUpdate):
    """DQN over one number for each action."""

    def bind(self, gradients: Gradients) -> list[nn.Module]:
        """Find the network and its target."""
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
        self._learn = jitted(kernels.learn_choices)
        return watched

    def learn(self, seen: Seen, action: Array, step: Any, weight: Array, error: Array) -> dict[str, float]:
        """Write them."""
        now, then = seen
        after = self.target.forward(then, self.after)
        chooser = self.online.forward(then, self.chosen) if self.agent.double_q else after
        values = self.online.forward(now, self.memory)
        loss, mean = self._learn(values, after, chooser, action.reshape(-1), step, weight, self.distance, self.d, error)
        self.online.backward(now, self.memory, self.d, self.every)
        return {"loss_value": loss, "value": mean}


class ActorCriticUpdate(TransitionUpdate):
    """Critics of an observation and an action, and an actor that they judge: the parts that SAC and TD3 share."""

    def bind(self, gradients: Gradients) -> list[nn.Module]:
        """Find actor and critics."""
        watched, agent, rows = super().bind(gradients), self.agent, self.rows
        actor = agent.actor_network
        self.critics, self.targets = perceptrons_of(agent.critics, gradients), perceptrons_of(agent.targets.critics)
        self.actor = perceptron_of(actor.trunk, actor.head, gradients)
        self.center, self.half = array_of(actor.head.center), array_of(actor.head.half_range)
        self.features, self.actions = len(self.actor.layers[0][0]), len(self.center)
        # Little memory, for all of it wanders through the caches with each update: only what the actor's loss reads
        # again outlasts the next forward pass.
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
        """Return the values ``[N, B]`` of actions that lie in ``x`` already."""
        x[:, : self.features] = observation
        for critic, memory, values in zip(critics, memories, self.values, strict=False):
            values[:] = critic.forward(x, memory)[:, 0]
        return self.values

    def learn_critics(
        self, seen: Seen, action: Array, step: Any, alpha: float, weight: Array, error: Array
    ) -> dict[str, float]:
        """Write the critics' gradients, by actions at the successors that lie in ``chosen``."""
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
        """Write by how much less a critic's values, times their weights, become by each action of some rows."""
        d = -weight[rows, None]
        self.slopes[rows] = self.critics[number].backward_to(self.memories[number], rows, d, self.actions)


class SACUpdate(ActorCriticUpdate):
    """SAC over a Normal behind a tanh."""

    def bind(self, gradients: Gradients) -> list[nn.Module]:
        """Find the networks."""
        watched, head = super().bind(gradients), self.agent.actor_network.head
        require_class(head, "SquashedHead")
        self.limits = tuple(map(np.float32, head.limits))
        self.log_range, self.best = float(head.log_range), np.empty(self.rows, np.int64)
        self.pulled = np.empty((self.rows, 2 * self.actions), np.float32)
        self.to_alpha = gradients.get(self.agent.log_alpha)
        return watched

    def learn(self, seen: Seen, action: Array, step: Any, weight: Array, error: Array) -> dict[str, float]:
        """Write them."""
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
    """TD3 over a deterministic actor."""

    def bind(self, gradients: Gradients) -> list[nn.Module]:
        """Find the networks."""
        watched, target = super().bind(gradients), self.agent.targets.actor_network
        require_class(self.agent.actor_network.head, "DeterministicHead")
        self.target_actor = perceptron_of(target.trunk, target.head)
        return watched

    def learn(self, seen: Seen, action: Array, step: Any, weight: Array, error: Array) -> dict[str, float]:
        """Write them."""
        agent, (now, then) = self.agent, seen
        out, noise = self.target_actor.forward(then, self.acting), self.noise.normal_().numpy()
        jitted(kernels.smooth)(out, noise, agent.policy_noise, agent.noise_clip, self.chosen)
        terms = self.learn_critics(seen, action, step, 0.0, weight, error)
        self.resting = set() if agent.take_turn() else set(agent.actor_network.parameters())
        if not self.resting:
            chosen = np.tanh(self.actor.forward(now, self.acting), out=self.chosen)
            values = self.evaluate(self.critics[:1], self.memories, now, self.other)[0]
            self.slopes_of(0, self.every, weight)
            self.actor.backward(now, self.acting, self.slopes * (1.0 - chosen * chosen), self.every)
            terms["loss_actor"] = -float(weight.dot(values))
        return terms
