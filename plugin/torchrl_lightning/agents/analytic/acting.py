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
    BLOCK_ROWS,
    ModuleGuard,
    Perceptron,
    Unsupported,
    defining_class,
    is_plain,
    linear_layers,
    perceptron_from_layers,
    require_class,
)
from torchrl_lightning.kernels.compiled import jitted

MAX_PRODUCTS = 1 << 21
"""The largest number of rows times weights that one kernel computes. NumPy's matrix products are faster for more."""


def compiled_call(policy: Any, step: TensorDictBase) -> Callable[[], dict[Any, Tensor]] | None:
    """Return a compiled ``policy.compute_step`` for a CPU step ``[N]``; the caller overwrites the step's tensors.

    The call draws the same random numbers as the policy. The results are equal up to float error. Each call may
    return the same tensors. If the policy's modules change later, the call uses the policy itself.

    Returns:
        The call, or None if the policy is not a policy of this package with a small perceptron.
    """
    build = _POLICIES.get(defining_class(policy, "select_action", "apply_mask") or defining_class(policy, "act"))
    try:
        if build is None:
            return None
        selection: ActionSelection = build(policy, step)
    except Unsupported:
        return None
    layers, draw_noise, outputs, to_dict = selection.layers, selection.draw_noise, selection.outputs, selection.to_dict
    kernel, amount = jitted(selection.kernel), selection.amount
    arguments = (*selection.arguments, *(output.numpy() for output in outputs))

    def act() -> dict[Any, Tensor]:
        mode = interaction_type()
        deterministic = mode is InteractionType.DETERMINISTIC
        if not (deterministic or mode is None or mode is InteractionType.RANDOM) or not layers.refresh():
            uncompiled: dict[Any, Tensor] = policy.compute_step(step)
            return uncompiled
        if not deterministic:
            draw_noise()
        kernel(*layers.arguments, 0.0 if deterministic else 1.0 if amount is None else amount(), *arguments)
        return {"action": outputs[0]} if to_dict is None else to_dict(outputs)

    return act


class CompiledLayers:
    """Linear layers, tanh and relu on the vectors of an observation, for a fixed number of rows.

    Each call reads the modules' parameters at their current addresses.

    Args:
        entries: The vectors, ``[N, F_i]``, with fixed memory that the caller overwrites.
        trunk: The module from vectors to features.
        head: The module from features to outputs.
        head_vectors: Additional parameters and buffers for the kernel.

    Raises:
        Unsupported: The modules contain other layers.
    """

    def __init__(self, entries: Sequence[Tensor], trunk: Any, head: Any, *head_vectors: dict[str, Any]) -> None:
        linear, activations = linear_layers(trunk, head)
        self.rows, weights = len(entries[0]), sum(layer.weight.numel() for layer in linear)
        if not all(entry.is_cpu and entry.ndim == 2 for entry in entries):
            raise Unsupported("Observations must be vectors on the CPU.")
        widths, features = [entry.shape[1] for entry in entries], linear[0].in_features
        if sum(widths) != features:
            raise Unsupported(f"observation vectors must have {features} elements in total, got {widths}.")
        x, self._copied_inputs = entries[0], list[tuple[Tensor, Tensor]]()
        if len(entries) > 1 or not is_plain(x):  # MuJoCo's observations are float64
            x = self.tensor(features)
            self._copied_inputs = list(zip(x.split(widths, 1), entries, strict=True))
        self._guard = ModuleGuard(trunk, head)
        self._tensor_dicts = [*(layer._parameters for layer in linear), *head_vectors]
        self._shapes = [tensor.shape for tensors in self._tensor_dicts for tensor in tensors.values()]
        self._addresses: list[int] = []
        shapes = [
            [*layer.weight.shape[::-1], activation] for layer, activation in zip(linear, activations, strict=True)
        ]
        self._table = np.zeros((len(linear) + 1, 5), np.int64)
        self._table[:-1, 2:] = shapes
        self.outputs = int(self._table[-2, 3])
        self._linear, self._activations = linear, activations
        self._perceptron: Perceptron | None = None
        self._is_large = self.rows * weights > MAX_PRODUCTS
        # The kernels of a large network get a table without layers, because the outputs are computed before.
        table, width = (self._table[-1:], 0) if self._is_large else (self._table, int(self._table[:, 3].max()))
        work, out = np.empty((2, self.rows * width), np.float32), np.empty((self.rows, self.outputs), np.float32)
        self.arguments = x.numpy(), table, work, out
        """The first arguments of each ``act_...`` kernel."""

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised tensor ``[N, *shape]``."""
        return torch.empty(self.rows, *shape, dtype=dtype)

    def refresh(self) -> bool:
        """Update addresses, copied inputs and outputs; return False if the modules have changed since construction.

        The outputs are only updated for a large network; otherwise the kernel computes them.
        """
        current = [tensor for tensors in self._tensor_dicts for tensor in tensors.values() if tensor is not None]
        addresses = list(map(Tensor.data_ptr, current))
        if addresses != self._addresses:
            if [tensor.shape for tensor in current] != self._shapes or not all(map(is_plain, current)):
                return False
            self._addresses = addresses
            layers = len(self._table) - 1
            self._table[:-1, :2] = np.reshape(addresses[: 2 * layers], (-1, 2))
            self._table[-1, : len(addresses) - 2 * layers] = addresses[2 * layers :]
            if self._is_large:
                self._perceptron = perceptron_from_layers(self._linear, self._activations)
                self._outputs = self._perceptron.allocate(min(self.rows, BLOCK_ROWS))
        for columns, entry in self._copied_inputs:
            columns.copy_(entry)
        if not self._guard.unchanged():
            return False
        if self._perceptron is not None:
            x, _, _, out = self.arguments
            self._perceptron.forward_blocks(x, self._outputs, out)
        return True


@dataclass
class ActionSelection:
    """The selection of actions from the outputs of the layers.

    Attributes:
        kernel: The compiled kernel. It takes the arguments of ``layers``, the amount of noise, ``arguments`` and
            ``outputs``. The amount is 0 for deterministic actions.
        draw_noise: A function that draws the noise in ``arguments``.
        outputs: The output tensors, the action first.
        amount: A function that returns the amount of noise; None means an amount of 1.
        to_dict: A function that converts the outputs to a dict; by default the dict contains only the action.
    """

    layers: CompiledLayers
    kernel: Callable[..., None]
    draw_noise: Callable[[], object]
    arguments: Sequence[Any]
    outputs: tuple[Tensor, ...]
    amount: Callable[[], float] | None = None
    to_dict: Callable[[tuple[Tensor, ...]], dict[Any, Tensor]] | None = None


def _actor_selection(policy: Any, step: TensorDictBase) -> ActionSelection:
    head = policy.head
    head_class = require_class(head, "CategoricalHead", "ClippedNormalHead")
    if policy.masked:
        raise Unsupported("action masks are not compiled.")
    is_box, entries = head_class == "ClippedNormalHead", [step.get(key) for key in policy.trunk.in_keys]
    head_vectors = [buffers_of(head.layers), head.layers._parameters, buffers_of(head)] if is_box else []
    layers = CompiledLayers(entries, policy.trunk, head, *head_vectors)
    noise, log_prob = layers.tensor(layers.outputs), layers.tensor()
    if is_box:
        outputs = layers.tensor(layers.outputs), log_prob
        return ActionSelection(
            layers, kernels.act_clipped_normal, noise.normal_, [noise.numpy()], outputs, to_dict=policy._to_outputs
        )
    kernel, outputs = kernels.act_categorical, (layers.tensor(dtype=torch.int64), log_prob)
    return ActionSelection(layers, kernel, noise.exponential_, [noise.numpy()], outputs, to_dict=policy._to_outputs)


def _layers_of(policy: Any, step: TensorDictBase, head: Any) -> CompiledLayers:
    if policy.memory is not None or policy._mask_keys:
        raise Unsupported("recurrent policies and action masks are not compiled.")
    return CompiledLayers([step.get(key) for key in policy.entry_keys], policy.network.trunk, head, buffers_of(head))


def _noise_amount(policy: Any) -> Callable[[], float]:
    buffers = buffers_of(policy)
    return lambda: buffers["amount"].item() ** policy.exponent


def _greedy_selection(policy: Any, step: TensorDictBase) -> ActionSelection:
    require_class(policy.network, "QNetwork")
    if policy.network.action_space != "categorical":
        raise Unsupported("one-hot actions are not compiled.")
    layers = _layers_of(policy, step, policy.network.head)
    uniform, random_action = layers.tensor().zero_(), layers.tensor(dtype=torch.int64)
    action = layers.tensor(dtype=torch.int64)

    def draw_noise() -> None:
        uniform.uniform_()
        random_action.random_(0, layers.outputs)

    noise = [uniform.numpy(), random_action.numpy()]
    return ActionSelection(layers, kernels.act_epsilon_greedy, draw_noise, noise, (action,), _noise_amount(policy))


def _stochastic_selection(policy: Any, step: TensorDictBase) -> ActionSelection:
    head = policy.network.head
    require_class(head, "SquashedHead")
    layers = _layers_of(policy, step, head)
    noise, action = layers.tensor(layers.outputs // 2), layers.tensor(layers.outputs // 2)
    arguments = [tuple(map(np.float32, head.limits)), noise.numpy()]
    return ActionSelection(layers, kernels.act_tanh_normal, noise.normal_, arguments, (action,))


def _noisy_selection(policy: Any, step: TensorDictBase) -> ActionSelection:
    require_class(policy.network.head, "DeterministicHead")
    layers = _layers_of(policy, step, policy.network.head)
    noise, action = layers.tensor(layers.outputs), layers.tensor(layers.outputs)
    return ActionSelection(
        layers, kernels.act_noisy_tanh, noise.normal_, [noise.numpy()], (action,), _noise_amount(policy)
    )


_POLICIES: dict[str, Callable[[Any, TensorDictBase], ActionSelection]] = {
    "Actor": _actor_selection,
    "EpsilonGreedyPolicy": _greedy_selection,
    "StochasticPolicy": _stochastic_selection,
    "NoisyPolicy": _noisy_selection,
}
