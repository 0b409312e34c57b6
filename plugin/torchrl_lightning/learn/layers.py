"""Hidden layers: orthogonal weights, activations by name, and a multi-layer perceptron with little overhead."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchrl_lightning.ranges import one_of

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}
# Only activations without options; any other module is called as a module.
_FUNCTIONS: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {nn.ReLU: torch.relu, nn.Tanh: torch.tanh}


def orthogonal(layer: nn.Module, gain: float = math.sqrt(2.0)) -> nn.Module:
    """Give a linear or convolutional layer orthogonal weights and zero biases (Saxe et al., 2014); return it."""
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    if isinstance(weight, Tensor):
        nn.init.orthogonal_(weight, gain)
    if isinstance(bias, Tensor):
        nn.init.zeros_(bias)
    return layer


class MLP(nn.Sequential):
    """``nn.Sequential`` that computes plain linear layers, tanh and relu without calling a module for each.

    On a handful of rows the calls cost as much as the arithmetic. Layers that were replaced, parametrized or given
    hooks of their own are called as modules; of the process-wide hooks only those on the whole network run.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[*B, F]`` to ``[*B, H]``."""
        for layer in self._modules.values():
            if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
                input = layer(input)
            elif type(layer) is nn.Linear:
                input = F.linear(input, layer.weight, layer.bias)
            else:
                input = _FUNCTIONS.get(type(layer), layer)(input)
        return input


def mlp(in_features: int, hidden_sizes: Sequence[int], activation: str = "tanh") -> MLP:
    """Build hidden layers with orthogonal weights of gain sqrt(2); without hidden sizes it is the identity."""
    if any(width < 1 for width in hidden_sizes):
        raise ValueError(f"hidden_sizes is {list(hidden_sizes)}; every layer must have at least 1 unit.")
    act, layers = ACTIVATIONS[one_of(activation, "activation", ACTIVATIONS)], []
    for width in hidden_sizes:
        layers += [orthogonal(nn.Linear(in_features, int(width))), act()]
        in_features = int(width)
    return MLP(*layers)
