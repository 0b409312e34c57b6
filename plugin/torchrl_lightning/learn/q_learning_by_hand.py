"""The gradients of DQN, SAC and TD3, written down."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning.kernels import perceptron_gradients as kernels
from torchrl_lightning.kernels.compiled import jitted
from torchrl_lightning.learn.by_hand import (
    DISTANCES,
    Array,
    Gradients,
    HandGradients,
    Memory,
    Perceptron,
    Slopes,
    array_of,
    of_modules,
    vectors_of,
)
from torchrl_lightning.learn.compiled_layers import activation_number
from torchrl_lightning.learn.q_networks import CriticEnsemble, QNetwork
from torchrl_lightning.learn.squashed import LOG_STD_RANGE, DeterministicHead, SquashedHead, furthest
from torchrl_lightning.learn.transitions import Transitions

Seen = tuple[Array, Array]
"""Observations of a batch, and their successors."""


def rows_of(batch: Transitions) -> int | None:
    """Return how many plain transitions a batch holds; None if it holds others."""
    for each in (batch.reward, batch.weight, batch.discount):
        if isinstance(each, Tensor) and each.dtype is not torch.float32:
            return None
    plain = batch.mask is None and batch.reward.ndim == 1 and batch.reward.is_cpu
    plain = plain and batch.action.dtype in (torch.int64, torch.float32)
    return len(batch.reward) if plain else None


def of_critics(critics: Any, gradients: Gradients | None = None) -> list[Perceptron]:
    """Return the critics of an ensemble as perceptrons; a ValueError if they are none."""
    pairs, kinds = list(zip(critics.weights, critics.biases, strict=True)), [0] * len(critics.weights)
    flat, place = getattr(critics, "flat", None), -1
    for layer in critics._layers:
        if isinstance(layer, tuple):
            place += 1
        else:
            kinds[place] = activation_number(layer)
    if flat is None or not flat.vectors:
        raise ValueError("Only critics of vectors and an action are perceptrons.")
    found = []
    for number in range(critics.size):
        layers = [
            (array_of(w)[number], array_of(b)[number, 0], kind) for (w, b), kind in zip(pairs, kinds, strict=True)
        ]
        to = (
            []
            if gradients is None
            else [(gradients[w][number].numpy(), gradients[b][number, 0].numpy()) for w, b in pairs]
        )
        found.append(Perceptron(layers, to))
    return found


class TransitionGradients(HandGradients):
    """The gradients of an agent's loss on batches of ``rows`` transitions.

    Args:
        module: The agent.
        gradients: Where they go.
        rows: B.
    """

    def __init__(self, module: Any, gradients: Gradients, rows: int) -> None:
        followed = [getattr(module, name) for name in module.followed]
        super().__init__(rows, module.policy.network, *followed, module.targets)
        self.module = module
        self.evenly = np.full(rows, 1.0 / rows, np.float32)
        self.constant = np.empty(rows, np.float32)
        self.kind = DISTANCES[module.loss_function]

    def __call__(self, batch: Transitions) -> tuple[dict[str, float], Tensor]:
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


class ChoiceGradients(TransitionGradients):
    """Those of DQN."""

    def __init__(self, module: Any, gradients: Gradients, rows: int) -> None:
        super().__init__(module, gradients, rows)
        online, target = module.q_network, module.targets.q_network
        if type(online) is not QNetwork or online.action_space != "categorical":
            raise ValueError("Only numbers of actions are known.")
        self.online = of_modules(online.trunk, [online.head], gradients)
        self.target = of_modules(target.trunk, [target.head])
        self.memory, self.after = self.online.memory(rows), self.online.memory(rows)
        self.chosen = self.online.memory(rows) if module.double_q else self.after
        self.d = np.empty_like(self.memory[-1])
        self._learn = jitted(kernels.learn_choices)

    def learn(self, seen: Seen, action: Array, step: Any, weight: Array, error: Array) -> dict[str, float]:
        """Write them."""
        now, then = seen
        after = self.target.forward(then, self.after)
        chooser = self.online.forward(then, self.chosen) if self.module.double_q else after
        values = self.online.forward(now, self.memory)
        loss, mean = self._learn(values, after, chooser, action.reshape(-1), step, weight, self.kind, self.d, error)
        self.online.backward(now, self.memory, self.d, self.every)
        return {"loss_value": loss, "value": mean}


class ActorCriticGradients(TransitionGradients):
    """What those of SAC and TD3 share: critics of an observation and an action, and an actor that is judged by them."""

    def __init__(self, module: Any, gradients: Gradients, rows: int) -> None:
        super().__init__(module, gradients, rows)
        actor, targets = module.actor_network, module.targets
        if any(type(each) is not CriticEnsemble for each in (module.critics, targets.critics)):
            raise ValueError("Only the ensemble of our own is known.")
        self.critics, self.targets = of_critics(module.critics, gradients), of_critics(targets.critics)
        self.actor = of_modules(actor.trunk, actor.head.stack, gradients)
        self.center, self.half = array_of(actor.head.center), array_of(actor.head.half_range)
        self.features, self.actions = len(self.actor.layers[0][0]), len(self.center)
        # Little memory, for all of it wanders through the caches with each update: only what the actor's loss reads
        # again outlasts the next forward pass.
        slopes: Slopes = {}
        self.acting = self.actor.memory(rows, slopes)
        self.memories = [each.memory(rows, slopes) for each in self.critics]
        self.passing = self.memories[:1] * len(self.critics)
        self.x, self.other = np.empty((2, rows, self.features + self.actions), np.float32)
        self.chosen = self.other[:, self.features :]
        self.values = np.empty((len(self.critics), rows), np.float32)
        self.d, self.slopes = np.empty_like(self.values), np.empty((rows, self.actions), np.float32)
        self.target, self.log_prob = np.zeros((2, rows), np.float32)
        self.noise = torch.empty(rows, self.actions)

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
        found = jitted(kernels.learn_values)(values, self.target, weight, self.kind, d, error)
        critic.backward(self.x, memory, d[:, None], self.every)
        return found

    def slopes_of(self, number: int, rows: Array, weight: Array) -> None:
        """Write by how much less a critic's values, times their weights, become by each action of some rows."""
        d = -weight[rows, None]
        self.slopes[rows] = self.critics[number].backward_to(self.memories[number], rows, d, self.actions)


class SquashedGradients(ActorCriticGradients):
    """Those of SAC."""

    def __init__(self, module: Any, gradients: Gradients, rows: int) -> None:
        super().__init__(module, gradients, rows)
        head = module.actor_network.head
        if type(head) is not SquashedHead:
            raise ValueError(f"{type(head).__name__} is not known.")
        self.limits = tuple(map(np.float32, (*LOG_STD_RANGE, furthest(self.noise))))
        self.log_range, self.best = float(head.log_range), np.empty(rows, np.int64)
        self.pulled = np.empty((rows, 2 * self.actions), np.float32)
        self.to_alpha = gradients.get(module.log_alpha)

    def learn(self, seen: Seen, action: Array, step: Any, weight: Array, error: Array) -> dict[str, float]:
        """Write them."""
        now, then = seen
        log_alpha = self.module.log_alpha.item()
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
            slope = -(mean + (self.module.target_entropy or 0.0))
            self.to_alpha.fill_(slope)
            terms["loss_alpha"] = slope * log_alpha
        return {**terms, "entropy": -mean, "alpha": alpha}

    def _sample(self, observation: Array) -> Array:
        out, noise = self.actor.forward(observation, self.acting), self.noise.normal_().numpy()
        arguments = self.limits, self.log_range, self.chosen, self.log_prob
        jitted(kernels.sample_squashed)(out, noise, *arguments)
        return out


class NoisyGradients(ActorCriticGradients):
    """Those of TD3."""

    def __init__(self, module: Any, gradients: Gradients, rows: int) -> None:
        super().__init__(module, gradients, rows)
        target = module.targets.actor_network
        if any(type(each.head) is not DeterministicHead for each in (module.actor_network, target)):
            raise ValueError(f"{type(target.head).__name__} is not known.")
        self.target_actor = of_modules(target.trunk, target.head.stack)

    def learn(self, seen: Seen, action: Array, step: Any, weight: Array, error: Array) -> dict[str, float]:
        """Write them."""
        module, (now, then) = self.module, seen
        out, noise = self.target_actor.forward(then, self.acting), self.noise.normal_().numpy()
        jitted(kernels.smooth)(out, noise, module.policy_noise, module.noise_clip, self.chosen)
        terms = self.learn_critics(seen, action, step, 0.0, weight, error)
        self.resting = set() if module.take_turn() else set(module.actor_network.parameters())
        if not self.resting:
            chosen = np.tanh(self.actor.forward(now, self.acting), out=self.chosen)
            values = self.evaluate(self.critics[:1], self.memories, now, self.other)[0]
            self.slopes_of(0, self.every, weight)
            self.actor.backward(now, self.acting, self.slopes * (1.0 - chosen * chosen), self.every)
            terms["loss_actor"] = -float(weight.dot(values))
        return terms
