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
from torch import Tensor, nn

from torchrl_lightning._core.modules import owner_of
from torchrl_lightning._core.torchrl_compat import has_global_hooks
from torchrl_lightning.agents.analytic import kernels
from torchrl_lightning.kernels.compiled import jitted

Array = NDArray[Any]
Memory = list[Array]
GradBuffers = dict[tuple[int, int], Array]
"""Memory for gradients between layers. It is unused after a backward pass, so networks share it."""
Gradients = Mapping[Any, Tensor]
LEARN = __name__.partition(".analytic")[0]
_ACTIVATIONS: dict[type, int] = {nn.ReLU: kernels.RELU, nn.Tanh: kernels.TANH}
# The attributes with the layers of our modules, in order of execution.
_PARTS = {
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


def class_name(thing: object) -> str:
    """Return the class name of an object if the class is one of ours, else an empty string."""
    return type(thing).__name__ if _is_ours(type(thing)) else ""


def require_class(thing: object, *names: str) -> str:
    """Return the class name of an object; raise Unsupported if it is not one of ``names``."""
    if class_name(thing) not in names:
        raise Unsupported(f"{type(thing).__name__} is not {' or '.join(names)}.")
    return class_name(thing)


def defining_class(thing: object, *methods: str) -> str:
    """Return the name of our class that defines the first method; empty if other code defines any of the methods."""
    owners = [owner_of(thing, method) for method in methods]
    names = [owner.__name__ if owner is not None and _is_ours(owner) else "" for owner in owners]
    return names[0] if all(names) else ""


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith(LEARN)


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Return the memory addresses of tensors; they change when a module moves or a state dict is assigned."""
    return list(map(Tensor.data_ptr, tensors))


def is_plain(tensor: Tensor) -> bool:
    """Return True if kernels can read a tensor."""
    return tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous()


def array_of(parameter: Tensor) -> Array:
    """Return a parameter as an array that shares its memory; raise Unsupported if kernels cannot read it."""
    if not is_plain(parameter):
        raise Unsupported("Only contiguous float32 on the CPU is read.")
    return parameter.detach().numpy()


class ModuleGuard:
    """Detect changes of modules since construction: other children, or hooks."""

    def __init__(self, *modules: nn.Module) -> None:
        parts = [part for module in modules for part in module.modules()]
        self._hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self._children = [part._modules for part in parts]
        self._known = [dict(children) for children in self._children]

    def unchanged(self) -> bool:
        """Return True if the modules still compute the same as at construction, without autocast or global hooks."""
        if any(self._hooks) or self._children != self._known:
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
        raise Unsupported("There is no linear layer.")
    return linear, activations


def activation_number(module: nn.Module) -> int:
    """Return the kernels' number of an activation; raise Unsupported for other activations."""
    if type(module) not in _ACTIVATIONS:
        raise Unsupported(f"{type(module).__name__} is not compiled.")
    return _ACTIVATIONS[type(module)]


def _leaves(module: Any) -> Iterator[nn.Module]:
    name = class_name(module)
    if name == "MLPEncoder" and not module.flat.vectors:
        raise Unsupported("Only vectors are read.")
    if name in _PARTS:
        children = [getattr(module, part) for part in _PARTS[name]]
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
        self._finish, self._pull_back = jitted(kernels.add_and_activate), jitted(kernels.backward_activation)
        self._grads: Memory = []  # gradients of the layers' inputs

    def memory(self, rows: int, buffers: GradBuffers | None = None) -> Memory:
        """Return memory for the outputs of the layers; ``buffers`` with the same rows stores gradients between them."""
        shared: GradBuffers = {} if buffers is None else buffers
        # Two buffers alternate: each layer reads the gradient from the layer above and writes its own.
        places = [(number % 2, len(weight)) for number, (weight, _, _) in enumerate(self.layers)]
        self._grads = [shared.setdefault(place, np.empty((rows, place[1]), np.float32)) for place in places]
        return [np.empty((rows, len(bias)), np.float32) for _, bias, _ in self.layers]

    def forward(self, x: Array, memory: Memory) -> Array:
        """Compute the outputs of all layers for inputs ``[B, F]`` into ``memory``; return the last output."""
        for (weight, bias, activation), out in zip(self.layers, memory, strict=True):
            np.dot(x, weight, out=out)
            self._finish(out, bias, activation)
            x = out
        return x

    def backward(self, x: Array, memory: Memory, d: Array, every: Array) -> None:
        """Write the parameter gradients from the output gradient ``d`` ``[B, O]``; ``every`` are all row indices."""
        for number in reversed(range(len(self.layers))):
            (weight, _, activation), (to_weight, to_bias) = self.layers[number], self.gradients[number]
            self._pull_back(d, memory[number], every, activation, to_bias)
            below = memory[number - 1] if number else x
            if to_weight.flags.c_contiguous:
                np.dot(below.T, d, out=to_weight)
            else:  # the memory layout is [out, in]
                np.dot(d.T, below, out=to_weight.T)
            if number:
                d = np.dot(d, weight.T, out=self._grads[number])

    def backward_to(self, memory: Memory, rows: Array, d: Array, last: int) -> Array:
        """Return the gradient of the ``last`` inputs for ``rows`` ``[n]``, from the output gradient ``[n, O]``."""
        for number in reversed(range(len(self.layers))):
            weight, _, activation = self.layers[number]
            self._pull_back(d, memory[number], rows, activation, _NO_SUMS)
            if not number:
                return np.dot(d, weight[-last:].T)
            d = np.dot(d, weight.T, out=self._grads[number][: len(d)])
        return d


_NO_SUMS = np.empty(0, np.float32)


def perceptron_of(trunk: Any, head: Any, gradients: Gradients | None = None) -> Perceptron:
    """Return a trunk and a head as a perceptron; raise Unsupported if they have other layers."""
    linear, activations = linear_layers(trunk, head)
    layers = [
        (array_of(layer.weight).T, array_of(layer.bias), kind) for layer, kind in zip(linear, activations, strict=True)
    ]
    if gradients is None:
        return Perceptron(layers, [])
    return Perceptron(layers, [(gradients[each.weight].numpy().T, gradients[each.bias].numpy()) for each in linear])


def perceptrons_of(critics: Any, gradients: Gradients | None = None) -> list[Perceptron]:
    """Return the critics of an ensemble as perceptrons; raise Unsupported if they have other layers."""
    require_class(critics, "CriticEnsemble")
    if critics.critics is not None or not critics.flat.vectors:
        raise Unsupported("Only critics of vectors and an action are perceptrons.")
    pairs, kinds = list(zip(critics.weights, critics.biases, strict=True)), list[int]()
    for layer in critics._layers:
        if isinstance(layer, tuple):
            kinds.append(kernels.NONE)
        else:
            kinds[-1] = activation_number(layer)
    return [
        Perceptron(
            [(array_of(w)[number], array_of(b)[number, 0], kind) for (w, b), kind in zip(pairs, kinds, strict=True)],
            [(gradients[w][number].numpy(), gradients[b][number, 0].numpy()) for w, b in pairs] if gradients else [],
        )
        for number in range(critics.size)
    ]
