"""Compiled acting: one kernel evaluates a small perceptron and selects actions, with fixed input tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor

from torchrl_lightning._core.torchrl_compat import buffers_of
from torchrl_lightning.agents.analytic import kernels
from torchrl_lightning.agents.analytic.perceptrons import (
    ModuleGuard,
    Unsupported,
    defining_class,
    is_plain,
    linear_layers,
    require_class,
)
from torchrl_lightning.kernels.compiled import jitted

MOST_PRODUCTS = 1 << 21  # limit of rows times weights; torch is faster above it


def bind_inputs(policy: Any, step: TensorDictBase) -> Callable[[], dict[Any, Tensor]] | None:
    """Return a compiled ``policy.compute_step`` of a CPU step ``[N]`` with fixed tensors that the caller overwrites.

    The call draws the same random numbers as the policy and equals it up to float error. It may return the same
    tensors each time. If the policy's modules change later, the call uses the policy itself.

    Returns:
        The call, or None if the policy is not one of ours with a small perceptron.
    """
    make = _POLICIES.get(defining_class(policy, "choose", "allowed") or defining_class(policy, "act"))
    try:
        if make is None:
            return None
        choice: Choice = make(policy, step)
    except Unsupported:
        return None
    layers, draw, outputs, write = choice.layers, choice.draw, choice.outputs, choice.write
    kernel, amount = jitted(choice.kernel), choice.amount
    arguments = (*choice.arguments, *(output.numpy() for output in outputs))

    def act() -> dict[Any, Tensor]:
        mode = interaction_type()
        deterministic = mode is InteractionType.DETERMINISTIC
        if not (deterministic or mode is None or mode is InteractionType.RANDOM) or not layers.refresh():
            own: dict[Any, Tensor] = policy.compute_step(step)
            return own
        if not deterministic:
            draw()
        kernel(*layers.arguments, 0.0 if deterministic else 1.0 if amount is None else amount(), *arguments)
        return {"action": outputs[0]} if write is None else write(outputs)

    return act


class CompiledLayers:
    """Linear layers, tanh and relu on the vectors of an observation, for a fixed number of rows.

    Each call reads the modules' parameters at their current addresses.

    Args:
        entries: The vectors, ``[N, F_i]``, with fixed memory that the caller overwrites.
        trunk: The module from vectors to features.
        head: The module from features to outputs.
        levels: Further parameters and buffers for the kernel, besides the linear layers.

    Raises:
        Unsupported: The modules contain other layers, or are too large.
    """

    def __init__(self, entries: Sequence[Tensor], trunk: Any, head: Any, *levels: dict[str, Any]) -> None:
        linear, activations = linear_layers(trunk, head)
        self.rows, weights = len(entries[0]), sum(layer.weight.numel() for layer in linear)
        if self.rows * weights > MOST_PRODUCTS or not all(entry.is_cpu and entry.ndim == 2 for entry in entries):
            raise Unsupported(f"{self.rows} rows of {weights} weights are not compiled.")
        widths, features = [entry.shape[1] for entry in entries], linear[0].in_features
        if sum(widths) != features:
            raise Unsupported(f"Vectors of {widths} numbers are not the {features} that are read.")
        x, self._copied = entries[0], list[tuple[Tensor, Tensor]]()
        if len(entries) > 1 or not is_plain(x):  # MuJoCo's observations are float64
            x = self.tensor(features)
            self._copied = list(zip(x.split(widths, 1), entries, strict=True))
        self._guard = ModuleGuard(trunk, head)
        self._levels = [*(layer._parameters for layer in linear), *levels]
        self._shapes = [value.shape for level in self._levels for value in level.values()]
        self._addresses: list[int] = []
        shapes = [[*layer.weight.shape[::-1], kind] for layer, kind in zip(linear, activations, strict=True)]
        self._table = np.zeros((len(linear) + 1, 5), np.int64)
        self._table[:-1, 2:] = shapes
        self.outputs = int(self._table[-2, 3])
        work = np.empty((2, self.rows * int(self._table[:, 3].max())), np.float32)
        self.arguments = x.numpy(), self._table, work, np.empty((self.rows, self.outputs), np.float32)
        """The first arguments of each ``choose_...`` kernel."""

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised tensor ``[N, *shape]``."""
        return torch.empty(self.rows, *shape, dtype=dtype)

    def refresh(self) -> bool:
        """Update addresses and copied inputs; return False if the modules have changed since construction."""
        found = [value for level in self._levels for value in level.values() if value is not None]
        places = list(map(Tensor.data_ptr, found))
        if places != self._addresses:
            if [parameter.shape for parameter in found] != self._shapes or not all(map(is_plain, found)):
                return False
            self._addresses = places
            layers = len(self._table) - 1
            self._table[:-1, :2] = np.reshape(places[: 2 * layers], (-1, 2))
            self._table[-1, : len(places) - 2 * layers] = places[2 * layers :]
        for place, entry in self._copied:
            place.copy_(entry)
        return self._guard.unchanged()


@dataclass
class Choice:
    """The selection of actions from the outputs of the layers.

    Attributes:
        kernel: The compiled kernel. Its arguments are the arguments of the layers, the amount of noise (0 for the mode
            or the mean), ``arguments`` and ``outputs``.
        draw: Draws the noise in ``arguments``.
        outputs: The output tensors, the action first.
        amount: Returns the amount of noise; 1 if None.
        write: Converts the outputs to a dict; by default the dict contains only the action.
    """

    layers: CompiledLayers
    kernel: Callable[..., None]
    draw: Callable[[], object]
    arguments: Sequence[Any]
    outputs: tuple[Tensor, ...]
    amount: Callable[[], float] | None = None
    write: Callable[[tuple[Tensor, ...]], dict[Any, Tensor]] | None = None


def _actor(policy: Any, step: TensorDictBase) -> Choice:
    head = policy.head
    kind = require_class(head, "CategoricalHead", "ClippedNormalHead")
    if policy.masked:
        raise Unsupported("No masks are known.")
    is_box, entries = kind == "ClippedNormalHead", [step.get(key) for key in policy.trunk.in_keys]
    levels = [buffers_of(head.layers), head.layers._parameters, buffers_of(head)] if is_box else []
    layers = CompiledLayers(entries, policy.trunk, head, *levels)
    noise, log_prob = layers.tensor(layers.outputs), layers.tensor()
    if is_box:
        outputs = layers.tensor(layers.outputs), log_prob
        return Choice(layers, kernels.choose_clipped, noise.normal_, [noise.numpy()], outputs, write=policy._written)
    kernel, outputs = kernels.choose_categorically, (layers.tensor(dtype=torch.int64), log_prob)
    return Choice(layers, kernel, noise.exponential_, [noise.numpy()], outputs, write=policy._written)


def _exploring(policy: Any, step: TensorDictBase, head: Any) -> CompiledLayers:
    if policy.memory is not None or policy._masks:
        raise Unsupported("Neither memories nor masks are known.")
    return CompiledLayers([step.get(key) for key in policy.keys], policy.network.trunk, head, buffers_of(head))


def _amount(policy: Any) -> Callable[[], float]:
    buffers = buffers_of(policy)
    return lambda: buffers["amount"].item() ** policy.exponent


def _greedy(policy: Any, step: TensorDictBase) -> Choice:
    require_class(policy.network, "QNetwork")
    if policy.network.action_space != "categorical":
        raise Unsupported("Only numbers of actions are compiled.")
    layers = _exploring(policy, step, policy.network.head)
    chance, other, action = layers.tensor().zero_(), layers.tensor(dtype=torch.int64), layers.tensor(dtype=torch.int64)

    def draw() -> None:
        chance.uniform_()
        other.random_(0, layers.outputs)

    noise = [chance.numpy(), other.numpy()]
    return Choice(layers, kernels.choose_greedily, draw, noise, (action,), _amount(policy))


def _stochastic(policy: Any, step: TensorDictBase) -> Choice:
    head = policy.network.head
    require_class(head, "SquashedHead")
    layers = _exploring(policy, step, head)
    noise, action = layers.tensor(layers.outputs // 2), layers.tensor(layers.outputs // 2)
    arguments = [tuple(map(np.float32, head.limits)), noise.numpy()]
    return Choice(layers, kernels.choose_squashed, noise.normal_, arguments, (action,))


def _noisy(policy: Any, step: TensorDictBase) -> Choice:
    require_class(policy.network.head, "DeterministicHead")
    layers = _exploring(policy, step, policy.network.head)
    noise, action = layers.tensor(layers.outputs), layers.tensor(layers.outputs)
    return Choice(layers, kernels.choose_noisily, noise.normal_, [noise.numpy()], (action,), _amount(policy))


_POLICIES: dict[str, Callable[[Any, TensorDictBase], Choice]] = {
    "Actor": _actor,
    "EpsilonGreedyPolicy": _greedy,
    "StochasticPolicy": _stochastic,
    "NoisyPolicy": _noisy,
}
