"""Perceptrons: extract linear layers with tanh or relu from torch modules, and compute with their weights.

Our own classes are identified by name, because their modules import this package. Subclasses are not supported,
because they may compute something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_lightning._core.modules import owner_of
from torchrl_lightning._core.torchrl_compat import has_global_hooks, is_transformed
from torchrl_lightning.agents.analytic import kernels
from torchrl_lightning.kernels.compiled import jitted

Array = NDArray[Any]
LayerOutputs = list[Array]
GradBuffers = dict[tuple[int, int], Array]
"""Buffers for gradients between layers. They are unused after a backward pass, so networks share them."""
Gradients = Mapping[Any, Tensor]
BLOCK_ROWS = 256
"""The largest number of rows that a perceptron computes at a time in large batches, to fit into the CPU's cache."""
MIN_ROWS = 1024
"""The lowest number of rows of compiled values. For fewer rows, torch is about as fast."""
_AGENTS_PACKAGE = __name__.partition(".analytic")[0]
_ACTIVATIONS: dict[type, int] = {nn.ReLU: kernels.RELU, nn.Tanh: kernels.TANH}
# The attributes with the layers of our modules, in order of execution.
_CHILD_NAMES = {
    "Trunk": ("encoder",),
    "MLPEncoder": ("layers",),
    "CategoricalHead": ("hidden", "layers"),
    "ClippedNormalHead": ("hidden", "layers"),
    "GaussianLayer": ("mean",),
    "SquashedHead": ("layers",),
    "_MeanAndLogStd": ("linear",),
    "DeterministicHead": ("layers",),
}


class Unsupported(Exception):
    """Raised if only torch can compute a module or a run."""


def class_name(instance: object) -> str:
    """Return the class name of an object if the class is one of ours, else an empty string."""
    return type(instance).__name__ if _is_ours(type(instance)) else ""


def require_class(instance: object, *names: str) -> str:
    """Return the class name of an object; raise Unsupported if it is not one of ``names``."""
    if class_name(instance) not in names:
        raise Unsupported(f"{type(instance).__name__} must be {' or '.join(names)}.")
    return class_name(instance)


def defining_class(instance: object, *methods: str) -> str:
    """Return the name of our class that defines the first method; empty if other code defines any of the methods."""
    owners = [owner_of(instance, method) for method in methods]
    names = [owner.__name__ if owner is not None and _is_ours(owner) else "" for owner in owners]
    return names[0] if all(names) else ""


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith(_AGENTS_PACKAGE)


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Return the memory addresses of tensors; they change when a module moves or a state dict is assigned."""
    return list(map(Tensor.data_ptr, tensors))


def is_plain(tensor: Tensor) -> bool:
    """Return True if kernels can read a tensor."""
    return tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous()


def array_of(parameter: Tensor) -> Array:
    """Return a parameter as an array that shares its memory; raise Unsupported if kernels cannot read it."""
    if not is_plain(parameter):
        raise Unsupported("Parameters must be contiguous float32 tensors on the CPU.")
    return parameter.detach().numpy()


def to_vector_array(entries: list[Tensor]) -> Array:
    """Concatenate the vectors ``[B, F_i]`` of an observation to the network input ``[B, F]`` in float32."""
    vectors = [entry.to(torch.float32) for entry in entries]
    return (torch.cat(vectors, -1) if len(vectors) > 1 else vectors[0].contiguous()).numpy()


class ModuleGuard:
    """Detect modules with other children or other hooks than at construction."""

    def __init__(self, *modules: nn.Module) -> None:
        submodules = [submodule for module in modules for submodule in module.modules()]
        self._hooks = [hooks for module in submodules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._children = [module._modules for module in submodules]
        self._initial_children = [dict(children) for children in self._children]

    def unchanged(self) -> bool:
        """Return True if the modules still compute the same as at construction, without autocast or global hooks."""
        if any(self._hooks) or self._children != self._initial_children:
            return False
        return not (torch.is_autocast_enabled("cpu") or has_global_hooks())


def linear_layers(trunk: Any, head: Any) -> tuple[list[nn.Linear], list[int]]:
    """Return the linear layers of a trunk and a head, and the activation number after each layer.

    Raises:
        Unsupported: The modules contain other layers.
    """
    require_class(trunk, "Trunk")
    linear: list[nn.Linear] = []
    activations: list[int] = []
    for leaf in (*_leaves(trunk), *_leaves(head)):
        if type(leaf) is nn.Linear and leaf.bias is not None:
            linear.append(leaf)
            activations.append(kernels.NONE)
        elif activations and activations[-1] == kernels.NONE:
            activations[-1] = activation_number(leaf)
        else:
            raise Unsupported(f"{type(leaf).__name__} is not compiled.")
    if not linear:
        raise Unsupported("The modules contain no linear layer.")
    return linear, activations


def activation_number(module: nn.Module) -> int:
    """Return the number of an activation in the kernels; raise Unsupported for other activations."""
    if type(module) not in _ACTIVATIONS:
        raise Unsupported(f"{type(module).__name__} is not compiled.")
    return _ACTIVATIONS[type(module)]


def _leaves(module: Any) -> Iterator[nn.Module]:
    name = class_name(module)
    if name == "MLPEncoder" and not module.flat.only_vectors:
        raise Unsupported("Observation entries must be vectors.")
    if name in _CHILD_NAMES:
        children = [getattr(module, child) for child in _CHILD_NAMES[name]]
    elif type(module) is nn.Sequential or name == "MLP":
        children = list(module.children())
    else:
        children = []
        if module is not None:
            yield module
    for child in children:
        yield from _leaves(child)


class Perceptron:
    """A perceptron that computes on the memory of its torch parameters.

    Args:
        layers: Weight ``[in, out]``, bias ``[out]`` and activation number of each layer.
        gradients: Arrays for the gradients of weight and bias, in the same shapes; empty without training.
    """

    def __init__(self, layers: Sequence[tuple[Array, Array, int]], gradients: Sequence[tuple[Array, Array]]) -> None:
        self.layers, self.gradients = list(layers), list(gradients)
        self._add_and_activate = jitted(kernels.add_and_activate)
        self._backward_activation = jitted(kernels.backward_activation)
        self._backward_activation_of_rows = jitted(kernels.backward_activation_of_rows)
        self._input_grads: list[Array] = []  # gradients of the layers' inputs
        self._block_gradients = [(np.empty_like(weight), np.empty_like(bias)) for weight, bias in self.gradients]

    def allocate(self, rows: int, buffers: GradBuffers | None = None) -> LayerOutputs:
        """Allocate the outputs of the layers and, in ``buffers``, the gradients between layers; return the outputs."""
        shared: GradBuffers = {} if buffers is None else buffers
        # Two buffers alternate. Each layer reads its output gradient from one buffer and writes its input gradient into
        # the other buffer.
        keys = [(number % 2, len(weight)) for number, (weight, _, _) in enumerate(self.layers)]
        self._input_grads = [shared.setdefault(key, np.empty((rows, key[1]), np.float32)) for key in keys]
        return [np.empty((rows, len(bias)), np.float32) for _, bias, _ in self.layers]

    def forward(self, x: Array, outputs: LayerOutputs) -> Array:
        """Compute the outputs of all layers for inputs ``[B, F]`` into ``outputs``; return the last output."""
        for (weight, bias, activation), out in zip(self.layers, outputs, strict=True):
            np.dot(x, weight, out=out)
            self._add_and_activate(out, bias, activation)
            x = out
        return x

    def forward_blocks(self, x: Array, outputs: LayerOutputs, out: Array) -> None:
        """Compute ``out`` ``[B, O]`` for inputs ``[B, F]``, as many rows at a time as ``outputs`` has."""
        size = len(outputs[0])
        for start in range(0, len(x), size):
            block = x[start : start + size]
            out[start : start + size] = self.forward(block, [output[: len(block)] for output in outputs])

    def backward(self, x: Array, outputs: LayerOutputs, grad: Array, accumulate: bool = False) -> None:
        """Write the parameter gradients from the gradient ``[B, O]`` of the last output.

        Args:
            x: The inputs of ``forward``, ``[B, F]``.
            outputs: The outputs that ``forward`` computed.
            grad: The gradient of the last output; it is overwritten.
            accumulate: Add the gradients of these rows to the gradients of earlier rows.
        """
        targets = self._block_gradients if accumulate else self.gradients
        for number in reversed(range(len(self.layers))):
            (weight, _, activation), (weight_grad, bias_grad) = self.layers[number], targets[number]
            self._backward_activation(grad, outputs[number], activation, bias_grad)
            layer_input = outputs[number - 1] if number else x
            if weight_grad.flags.c_contiguous:
                np.dot(layer_input.T, grad, out=weight_grad)
            else:  # the memory layout is [out, in]
                np.dot(grad.T, layer_input, out=weight_grad.T)
            if number:
                grad = np.dot(grad, weight.T, out=self._input_grads[number][: len(grad)])
        if accumulate:
            for totals, gradients in zip(self.gradients, self._block_gradients, strict=True):
                for total, gradient in zip(totals, gradients, strict=True):
                    total += gradient

    def input_gradient(self, outputs: LayerOutputs, rows: Array, grad: Array, columns: int) -> Array:
        """Return the last ``columns`` of the input gradient, for the output gradient ``[n, O]`` of ``rows`` ``[n]``."""
        for number in reversed(range(len(self.layers))):
            weight, _, activation = self.layers[number]
            self._backward_activation_of_rows(grad, outputs[number], rows, activation)
            if not number:
                return np.dot(grad, weight[-columns:].T)
            grad = np.dot(grad, weight.T, out=self._input_grads[number][: len(grad)])
        return grad


def perceptron_from_modules(trunk: Any, head: Any, gradients: Gradients | None = None) -> Perceptron:
    """Return a trunk and a head as a perceptron; raise Unsupported if they have other layers."""
    return perceptron_from_layers(*linear_layers(trunk, head), gradients)


def perceptron_from_layers(
    linear: Sequence[nn.Linear], activations: Sequence[int], gradients: Gradients | None = None
) -> Perceptron:
    """Return linear layers and their activations as a perceptron on the memory of the layers."""
    layers = [
        (array_of(layer.weight).T, array_of(layer.bias), activation)
        for layer, activation in zip(linear, activations, strict=True)
    ]
    if gradients is None:
        return Perceptron(layers, [])
    return Perceptron(layers, [(gradients[layer.weight].numpy().T, gradients[layer.bias].numpy()) for layer in linear])


def perceptrons_from_ensemble(critics: Any, gradients: Gradients | None = None) -> list[Perceptron]:
    """Return the critics of an ensemble as perceptrons; raise Unsupported if they have other layers."""
    require_class(critics, "CriticEnsemble")
    if critics.critics is not None or not critics.flat.only_vectors:
        raise Unsupported("Critics must be perceptrons of observation vectors and an action.")
    activations: list[int] = []
    for layer in critics._layers:
        if isinstance(layer, tuple):
            activations.append(kernels.NONE)
        else:
            activations[-1] = activation_number(layer)
    pairs = list(zip(critics.weights, critics.biases, strict=True))
    arrays = [(array_of(weight), array_of(bias)) for weight, bias in pairs]
    grads = [(gradients[weight].numpy(), gradients[bias].numpy()) for weight, bias in pairs] if gradients else []
    return [
        Perceptron(
            [(weight[i], bias[i, 0], kind) for (weight, bias), kind in zip(arrays, activations, strict=True)],
            [(weight_grad[i], bias_grad[i, 0]) for weight_grad, bias_grad in grads],
        )
        for i in range(critics.size)
    ]


def compiled_values(critic: Any, data: TensorDictBase) -> list[Tensor] | None:
    """Return ``critic.values(data)`` up to float error; None with gradients, few rows or other networks."""
    if data.numel() < MIN_ROWS or torch.is_grad_enabled() or is_transformed():
        return None
    if defining_class(critic, "values", "values_of") != "Critic":
        return None
    trunks = critic.trunks if len(critic.trunks) > 1 else critic.trunks * len(critic.module)
    try:
        return [_values(trunk, head, data) for trunk, head in zip(trunks, critic.module, strict=True)]
    except Unsupported:
        return None


def _values(trunk: Any, head: Any, data: TensorDictBase) -> Tensor:
    if not ModuleGuard(trunk, head).unchanged():
        raise Unsupported("Hooks and autocast need torch.")
    perceptron = perceptron_from_modules(trunk, head)
    (features, _), bias = perceptron.layers[0][0].shape, perceptron.layers[-1][1]
    shape, entries = data.batch_size, [data.get(key) for key in trunk.in_keys]
    if not all(isinstance(entry, Tensor) and entry.is_cpu and entry.shape[:-1] == shape for entry in entries):
        raise Unsupported("Observations must be vectors on the CPU.")
    x = to_vector_array([entry.reshape(-1, entry.shape[-1]) for entry in entries])
    if x.shape[1] != features:
        raise Unsupported("Torch explains a wrong number of elements.")
    out = np.empty((len(x), len(bias)), np.float32)
    perceptron.forward_blocks(x, perceptron.allocate(BLOCK_ROWS), out)
    return torch.from_numpy(out).view(*shape, len(bias))
