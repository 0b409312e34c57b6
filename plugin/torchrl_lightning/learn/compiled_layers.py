"""A perceptron that a kernel computes from a torch module's own weights, as long as the module is what it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchrl_lightning._compat import has_global_hooks
from torchrl_lightning.kernels.perceptron import NONE, RELU, TANH
from torchrl_lightning.learn.networks import MLP, MLPEncoder
from torchrl_lightning.learn.trunks import Trunk

_ACTIVATIONS = {nn.ReLU: RELU, nn.Tanh: TANH}
MOST_PRODUCTS = 1 << 21  # of rows and weights: beyond it torch's own products are faster


class Watch:
    """Tells whether modules are what they were: the same children, and no hooks that run with them."""

    def __init__(self, *modules: nn.Module) -> None:
        parts = [part for module in modules for part in module.modules()]
        self._hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self._children = [part._modules for part in parts]
        self._known = [dict(children) for children in self._children]

    def holds(self) -> bool:
        """Return whether they are, and nothing else changes what they compute."""
        if any(self._hooks) or self._children != self._known:
            return False
        return not (torch.is_autocast_enabled("cpu") or has_global_hooks())


def linear_layers(trunk: Any, modules: Sequence[nn.Module | None]) -> tuple[list[nn.Linear], list[int]]:
    """Return the linear layers of a trunk and what lies behind it, and the numbers of the activations behind each.

    Raises:
        ValueError: There is something else to compute.
    """
    if type(trunk) is not Trunk or type(trunk.encoder) is not MLPEncoder or not trunk.encoder.flat.vectors:
        raise ValueError(f"{type(trunk).__name__} is not compiled.")
    linear: list[nn.Linear] = []
    activations: list[int] = []
    for leaf in (leaf for module in (trunk.encoder.layers, *modules) for leaf in _leaves(module)):
        if type(leaf) is nn.Linear and leaf.bias is not None:
            linear.append(leaf)
            activations.append(NONE)
        elif activations and activations[-1] == NONE:
            activations[-1] = activation_number(leaf)
        else:
            raise ValueError(f"{type(leaf).__name__} is not compiled.")
    if not linear:
        raise ValueError("There is no linear layer.")
    return linear, activations


def activation_number(module: nn.Module) -> int:
    """Return the number by which kernels know an activation; a ValueError if they do not."""
    if type(module) not in _ACTIVATIONS:
        raise ValueError(f"{type(module).__name__} is not compiled.")
    return _ACTIVATIONS[type(module)]


class CompiledLayers:
    """Linear layers, tanh and relu over the vectors of an observation, for a fixed number of rows.

    What lies in the modules' parameters is read at each call, wherever they have been moved.

    Args:
        entries: The vectors, ``[N, F_i]``: their memory stays where it is, and is overwritten.
        trunk: What computes features of it.
        head: What comes behind it.
        modules: What the head computes of the features, in order; of those with children, these are.

    Raises:
        ValueError: There is something else to compute, or too much.
    """

    def __init__(
        self, entries: Sequence[Tensor], trunk: Any, head: nn.Module, modules: Sequence[nn.Module | None]
    ) -> None:
        linear, activations = linear_layers(trunk, modules)
        rows, weights = len(entries[0]), sum(layer.weight.numel() for layer in linear)
        if rows * weights > MOST_PRODUCTS or not all(entry.is_cpu and entry.ndim == 2 for entry in entries):
            raise ValueError(f"{rows} rows of {weights} weights are not compiled.")
        widths, features = [entry.shape[1] for entry in entries], linear[0].in_features
        if sum(widths) != features:
            raise ValueError(f"Vectors of {widths} numbers are not the {features} that are read.")
        x, self._copied = entries[0], list[tuple[Tensor, Tensor]]()
        if len(entries) > 1 or not is_plain(x):  # MuJoCo's are float64
            x = torch.empty(rows, features, dtype=torch.float32)
            self._copied = list(zip(x.split(widths, 1), entries, strict=True))
        self._watch = Watch(trunk, head)
        self._levels = [layer._parameters for layer in linear]
        self._shapes = [parameter.shape for parameter in self._found()]
        self._addresses: list[int] = []
        shapes = [[*layer.weight.shape[::-1], kind] for layer, kind in zip(linear, activations, strict=True)]
        self._table = np.zeros((len(linear), 5), np.int64)
        self._table[:, 2:] = shapes
        self.outputs = int(self._table[-1, 3])
        work = np.empty((2, rows * int(self._table[:, 3].max())), np.float32)
        self.arguments = x.numpy(), self._table, work, np.empty((rows, self.outputs), np.float32)
        """What a kernel of :mod:`torchrl_lightning.kernels.perceptron` takes first."""

    def _found(self) -> list[Tensor]:
        return [parameter for level in self._levels for parameter in level.values() if parameter is not None]

    def hold(self) -> bool:
        """Return whether the modules are what they were; see to what they read, and to where their parameters lie."""
        found = self._found()
        addresses = list(map(Tensor.data_ptr, found))
        if addresses != self._addresses:
            if [parameter.shape for parameter in found] != self._shapes or not all(map(is_plain, found)):
                return False
            self._addresses = addresses
            self._table[:, :2] = np.reshape(addresses, (-1, 2))
        for place, entry in self._copied:
            place.copy_(entry)
        return self._watch.holds()


def _leaves(module: nn.Module | None) -> Iterator[nn.Module]:
    if module is not None and type(module) in (nn.Sequential, MLP):
        for child in module.children():
            yield from _leaves(child)
    elif module is not None:
        yield module


def is_plain(tensor: Tensor) -> bool:
    """Return whether kernels can read a tensor."""
    return tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous()


def defines_both(thing: object, name: str, beside: str) -> bool:
    """Return whether the class that says ``beside`` says ``name``, too: a subclass may have changed the former."""
    for kind in type(thing).__mro__:
        if name in vars(kind) or beside in vars(kind):
            return name in vars(kind) and beside in vars(kind) and beside not in vars(thing)
    return False
