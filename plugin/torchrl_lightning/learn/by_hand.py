"""Updates of perceptrons without autograd: the gradients of DQN, SAC and TD3, written down.

Forward and backward run over the parameters where they lie, products by numpy, and what lies between them by kernels.
What makes an update is the module as long as it is more than that: another network, loss or strategy, or a hook.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from numpy.typing import NDArray
from torch import Tensor, nn

from torchrl_lightning.kernels import perceptron_gradients as kernels
from torchrl_lightning.kernels.compiled import PACKAGE, jitted
from torchrl_lightning.learn.compiled_layers import Watch, activation_number, defines_both, is_plain, linear_layers
from torchrl_lightning.learn.flat_parameters import addresses
from torchrl_lightning.learn.q_networks import CriticEnsemble, QNetwork
from torchrl_lightning.learn.squashed import LOG_STD_RANGE, DeterministicHead, SquashedHead, furthest
from torchrl_lightning.learn.transitions import Transitions

Array = NDArray[Any]
Memory = list[Array]
Gradients = Mapping[Any, Tensor]
Seen = tuple[Array, Array]
"""Observations of a batch, and their successors."""
DISTANCES = {"l1": kernels.L1, "l2": kernels.L2, "smooth_l1": kernels.SMOOTH_L1}
_NO_SUMS = np.empty(0, np.float32)


class Perceptron:
    """A perceptron over the memory of its parameters.

    Args:
        layers: Weight ``[in, out]``, bias ``[out]`` and number of the activation of each.
        gradients: Where those of weight and bias go, in the same shapes; none for a network that does not learn.
    """

    def __init__(self, layers: Sequence[tuple[Array, Array, int]], gradients: Sequence[tuple[Array, Array]]) -> None:
        self.layers, self.gradients = list(layers), list(gradients)
        self._finish, self._pull_back = jitted(kernels.add_and_activate), jitted(kernels.pull_back)
        self._slopes: Memory = []  # of what the layers read

    def memory(self, rows: int) -> Memory:
        """Return memory for what the layers return."""
        self._slopes = [np.empty((rows, len(weight)), np.float32) for weight, _, _ in self.layers]
        return [np.empty((rows, len(bias)), np.float32) for _, bias, _ in self.layers]

    def forward(self, x: Array, memory: Memory) -> Array:
        """Compute what the layers return of ``[B, F]``, into memory; return that of the last one."""
        for (weight, bias, activation), out in zip(self.layers, memory, strict=True):
            np.dot(x, weight, out=out)
            self._finish(out, bias, activation)
            x = out
        return x

    def backward(self, x: Array, memory: Memory, d: Array, every: Array) -> None:
        """Write the gradients of the parameters, by that ``[B, O]`` of what was returned; ``every`` are all rows."""
        for number in reversed(range(len(self.layers))):
            (weight, _, activation), (to_weight, to_bias) = self.layers[number], self.gradients[number]
            self._pull_back(d, memory[number], every, activation, to_bias)
            below = memory[number - 1] if number else x
            if to_weight.flags.c_contiguous:
                np.dot(below.T, d, out=to_weight)
            else:  # it lies as [out, in]
                np.dot(d.T, below, out=to_weight.T)
            if number:
                d = np.dot(d, weight.T, out=self._slopes[number])

    def backward_to(self, memory: Memory, rows: Array, d: Array, last: int) -> Array:
        """Return the gradient of the last inputs of some rows ``[n]``, by that ``[n, O]`` of what was returned."""
        for number in reversed(range(len(self.layers))):
            weight, _, activation = self.layers[number]
            self._pull_back(d, memory[number], rows, activation, _NO_SUMS)
            if not number:
                return np.dot(d, weight[-last:].T)
            d = np.dot(d, weight.T, out=self._slopes[number][: len(d)])
        return d


def of_modules(trunk: Any, modules: Sequence[nn.Module | None], gradients: Gradients | None = None) -> Perceptron:
    """Return a trunk, and what lies behind it, as a perceptron; a ValueError if it is none."""
    linear, activations = linear_layers(trunk, modules)
    layers = [
        (_array(layer.weight).T, _array(layer.bias), kind) for layer, kind in zip(linear, activations, strict=True)
    ]
    if gradients is None:
        return Perceptron(layers, [])
    return Perceptron(layers, [(gradients[each.weight].numpy().T, gradients[each.bias].numpy()) for each in linear])


def of_critics(critics: Any, gradients: Gradients | None = None) -> list[Perceptron]:
    """Return the critics of an ensemble as perceptrons; a ValueError if they are none."""
    pairs, kinds = list(zip(critics.weights, critics.biases, strict=True)), [0] * len(critics.weights)
    flat, place = getattr(critics, "flat", None), -1
    for layer in critics._layers:
        if isinstance(layer, tuple):
            place += 1
        else:
            kinds[place] = activation_number(layer)
    if flat is None or flat.event_dims != [1, 1] or any(flat.classes):
        raise ValueError("Only critics of one vector and an action are perceptrons.")
    found = []
    for number in range(critics.size):
        layers = [(_array(w)[number], _array(b)[number, 0], kind) for (w, b), kind in zip(pairs, kinds, strict=True)]
        to = (
            []
            if gradients is None
            else [(gradients[w][number].numpy(), gradients[b][number, 0].numpy()) for w, b in pairs]
        )
        found.append(Perceptron(layers, to))
    return found


def _array(parameter: Tensor) -> Array:
    if not is_plain(parameter):
        raise ValueError("Only contiguous float32 on the CPU is read.")
    return parameter.detach().numpy()


class HandGradients(ABC):
    """The gradients of an agent's loss on batches of ``rows`` transitions.

    Args:
        module: The agent.
        gradients: Where they go.
        rows: B.

    Attributes:
        resting: The parameters without a gradient.
    """

    def __init__(self, module: Any, gradients: Gradients, rows: int) -> None:
        self.module, self.rows = module, rows
        self.resting: set[nn.Parameter] = set()
        self.every = np.arange(rows)
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
        seen = batch.now[0].contiguous().numpy(), batch.after[0].contiguous().numpy()
        step = batch.reward.numpy(), batch.terminated.numpy(), factor
        weight = self.evenly if batch.weight is None else jitted(kernels.shares)(batch.weight.numpy())
        error = torch.empty(self.rows)
        return self.learn(seen, batch.action.numpy(), step, weight, error.numpy()), error

    @abstractmethod
    def learn(self, seen: Seen, action: Array, step: Any, weight: Array, error: Array) -> dict[str, float]:
        """Write gradients and errors by observation and successor, action, reward, end and discount of each row.

        ``weight`` is its share of a mean.
        """


class ChoiceGradients(HandGradients):
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


class ActorCriticGradients(HandGradients):
    """What those of SAC and TD3 share: critics of an observation and an action, and an actor that is judged by them."""

    def __init__(self, module: Any, gradients: Gradients, rows: int) -> None:
        super().__init__(module, gradients, rows)
        actor, targets = module.actor_network, module.targets
        if any(type(each) is not CriticEnsemble for each in (module.critics, targets.critics)):
            raise ValueError("Only the ensemble of our own is known.")
        self.critics, self.targets = of_critics(module.critics, gradients), of_critics(targets.critics)
        self.actor = of_modules(actor.trunk, actor.head.stack, gradients)
        self.center, self.half = _array(actor.head.center), _array(actor.head.half_range)
        self.features, self.actions = len(self.actor.layers[0][0]), len(self.center)
        # Of all that is computed, only what has a gradient must outlast the next forward pass.
        self.memories, self.acting = [each.memory(rows) for each in self.critics], self.actor.memory(rows)
        self.x, self.other = np.empty((2, rows, self.features + self.actions), np.float32)
        self.chosen = self.other[:, self.features :]
        self.values = np.empty((len(self.critics), rows), np.float32)
        self.d, self.slopes = np.empty_like(self.values), np.empty((rows, self.actions), np.float32)
        self.target, self.log_prob = np.zeros((2, rows), np.float32)
        self.noise = torch.empty(rows, self.actions)

    def evaluate(self, critics: list[Perceptron], observation: Array, x: Array) -> Array:
        """Return the values ``[N, B]`` of actions that lie in ``x`` already."""
        x[:, : self.features] = observation
        for critic, memory, values in zip(critics, self.memories, self.values, strict=False):
            values[:] = critic.forward(x, memory)[:, 0]
        return self.values

    def learn_critics(
        self, seen: Seen, action: Array, step: Any, alpha: float, weight: Array, error: Array
    ) -> dict[str, float]:
        """Write the critics' gradients, by actions at the successors that lie in ``chosen``."""
        values = self.evaluate(self.targets, seen[1], self.other)
        jitted(kernels.target_of)(values, self.log_prob, alpha, step, self.target)
        np.divide(action - self.center, self.half, out=self.x[:, self.features :])
        values = self.evaluate(self.critics, seen[0], self.x)
        loss, mean = jitted(kernels.learn_values)(values, self.target, weight, self.kind, self.d, error)
        for critic, memory, d in zip(self.critics, self.memories, self.d, strict=True):
            critic.backward(self.x, memory, d[:, None], self.every)
        return {"loss_qvalue": loss, "value": mean}

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
        judged = self.evaluate(self.critics, now, self.other)
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
            values = self.evaluate(self.critics[:1], now, self.other)[0]
            self.slopes_of(0, self.every, weight)
            self.actor.backward(now, self.acting, self.slopes * (1.0 - chosen * chosen), self.every)
            terms["loss_actor"] = -float(weight.dot(values))
        return terms


class UpdatesByHand:
    """Writes the gradients of a module's updates as long as the module makes nothing else of them.

    Args:
        module: The agent; its method ``by_hand(gradients, rows)`` gives the :class:`HandGradients`.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._known: HandGradients | None = None
        self._watch: Watch | None = None
        self._parameters: list[nn.Parameter] = []
        self._learning: list[nn.Parameter] = []
        self._addresses: list[int] = []
        self._refused = not _is_ours(module)

    def __call__(self, batch: Transitions) -> tuple[dict[str, float], Tensor] | None:
        """Write the gradients on a batch, as ``module.terms`` and ``backward`` do, and return what ``terms`` does.

        None, and nothing is written, where autograd must.
        """
        if self._refused or not _fits(batch):
            return None
        rows = len(batch.reward)
        if self._known is None or self._known.rows != rows or addresses(self._parameters) != self._addresses:
            self._build(rows)
        found = self._known
        if found is None or (self._watch is not None and not self._watch.holds()) or torch.is_anomaly_enabled():
            return None
        for each in self._learning:
            if not each.requires_grad or each._backward_hooks or each._post_accumulate_grad_hooks:
                return None
        terms = found(batch)
        for group in self._module._groups.values():
            group.offer(found.resting)
        return terms

    def _build(self, rows: int) -> None:
        module, self._known = self._module, None
        gradients = {key: view for group in module._groups.values() for key, view in group.memory().items()}
        followed = [getattr(module, name) for name in module.followed]
        self._learning = [parameter for group in module._groups.values() for parameter in group.parameters]
        try:
            if any(parameter not in gradients for parameter in self._learning):
                raise ValueError("Not all parameters lie flat.")
            self._known = module.by_hand(gradients, rows)
        except ValueError:
            self._refused = True
            return
        self._watch = Watch(module.policy.network, *followed, module.targets)
        self._parameters = [*self._learning, *module.targets.parameters()]
        self._addresses = addresses(self._parameters)


def _fits(batch: Transitions) -> bool:
    """Return whether a batch is one of plain transitions."""
    for each in (*batch.now, *batch.after, batch.reward, batch.weight, batch.discount):
        if isinstance(each, Tensor) and not (each.dtype is torch.float32 and each.is_cpu):
            return False
    return (
        len(batch.now) == 1
        and batch.mask is None
        and batch.reward.ndim == 1
        and batch.action.dtype in (torch.int64, torch.float32)
    )


def _is_ours(module: Any) -> bool:
    """Return whether all that makes an update is known, and nobody is to be told of a backward pass."""
    trainer = module.trainer
    makes = [getattr(type(module), name).__module__ for name in ("training_step", "compute", "minimise", "update")]
    told = ("on_before_backward", "on_after_backward")
    listening = [
        name in vars(each) or getattr(type(each), name) not in (None, getattr(kind, name))
        for each, kind in [(module, LightningModule), *((callback, Callback) for callback in trainer.callbacks)]
        for name in told
    ]
    return (
        defines_both(module, "by_hand", "terms")
        and all(made.partition(".")[0] == PACKAGE for made in makes)
        and module.memory is None
        and not module.compiled
        and type(trainer.strategy) is SingleDeviceStrategy
        and trainer.strategy.root_device.type == "cpu"
        and trainer.precision == "32-true"
        and not any(listening)
    )
