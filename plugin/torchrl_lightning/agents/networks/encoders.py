"""Layers, observation encoders, and the configuration objects that build encoders from an environment's specs."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.nn import functional as F
from torchrl.data import Binary, Categorical
from torchrl.data import MultiCategorical as MultiCategoricalSpec
from torchrl.modules import BatchRenorm1d

from torchrl_lightning._core.images import channels_are_last
from torchrl_lightning._core.trust import ConfigSafe
from torchrl_lightning._core.validators import integer, one_of
from torchrl_lightning.agents.networks.network_protocol import Network
from torchrl_lightning.agents.networks.trunks import RecurrentTrunk

logger = logging.getLogger(__name__)
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}
_CONVOLUTIONS = (
    (36, (32, 64, 64), (8, 4, 3), (4, 2, 1)),
    (12, (32, 64, 64), (4, 3, 2), (2, 2, 1)),
    (4, (16, 32, 64), (2, 2, 2), (1, 1, 1)),
)
"""Each row contains the smallest side of an image in pixels, then channels, kernels and strides."""
_MAX_USUAL_WEIGHTS = 4_000_000
# These activations have no options. MLP calls any other layer as a module.
_ACTIVATION_FUNCTIONS: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {nn.ReLU: torch.relu, nn.Tanh: torch.tanh}


def orthogonal(layer: nn.Module, gain: float = math.sqrt(2.0)) -> nn.Module:
    """Initialize a linear or convolutional layer with orthogonal weights and zero biases (Saxe et al., 2014)."""
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    if isinstance(weight, Tensor):
        nn.init.orthogonal_(weight, gain)
    if isinstance(bias, Tensor):
        nn.init.zeros_(bias)
    return layer


INITIALIZATIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "orthogonal": orthogonal,
    "uniform": lambda layer: layer,  # PyTorch's default
}


class MLP(nn.Sequential):
    """``nn.Sequential`` that computes plain linear layers, tanh and relu without a module call for each layer.

    On a few rows, a module call costs as much as the arithmetic. Replaced or parametrized layers and layers with hooks
    are still called as modules. Process-wide hooks run only for the whole network.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[*B, F]`` to ``[*B, H]``."""
        for layer in self._modules.values():
            if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
                input = layer(input)
            elif type(layer) is nn.Linear:
                input = F.linear(input, layer.weight, layer.bias)
            else:
                input = _ACTIVATION_FUNCTIONS.get(type(layer), layer)(input)
        return input


def check_layer_widths(value: Any, name: str) -> None:
    """Validate the widths of layers; raise an error with the setting's name if a width is invalid."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must list the width of each layer, such as [64, 64], got {value!r}.")
    for width in value:
        integer(width, f"Each width in {name}={list(value)}")


def check_layers(network: Any) -> None:
    """Validate a network's layer settings; raise an error if the layers cannot be built."""
    for name in ("hidden_sizes", "head_sizes"):
        check_layer_widths(getattr(network, name, ()), name)
    one_of(network.activation, "activation", ACTIVATIONS)
    one_of(getattr(network, "initialization", "orthogonal"), "initialization", INITIALIZATIONS)


def mlp(
    in_features: int,
    hidden_sizes: Sequence[int],
    activation: str = "tanh",
    initialization: str = "orthogonal",
    layer_norm: bool = False,
) -> MLP:
    """Build hidden layers as in :class:`MLPNetwork`; without hidden sizes the module is the identity."""
    check_layer_widths(hidden_sizes, "hidden_sizes")
    activation_class, layers = ACTIVATIONS[one_of(activation, "activation", ACTIVATIONS)], []
    initialize = INITIALIZATIONS[one_of(initialization, "initialization", INITIALIZATIONS)]
    for width in hidden_sizes:
        in_features, inputs = int(width), in_features
        # The norm has no scale and shift, because the critics of an ensemble share this layer and stack only their
        # weights.
        norm = [nn.LayerNorm(in_features, elementwise_affine=False)] if layer_norm else []
        layers += [initialize(nn.Linear(inputs, in_features)), *norm, activation_class()]
    return MLP(*layers)


class FlatEntries:
    """Flatten and concatenate observation entries; vectors and bits are unchanged, categories become one-hot."""

    def __init__(self, specs: Sequence[Any]) -> None:
        self.classes = [category_counts(spec) for spec in specs]
        self.event_dims = [len(spec.shape) for spec in specs]
        self.features = sum(
            sum(counts) or math.prod(spec.shape) for spec, counts in zip(specs, self.classes, strict=True)
        )
        self.only_vectors = set(self.event_dims) == {1} and not any(self.classes)
        self.is_single_vector = self.only_vectors and len(specs) == 1

    def __call__(self, *entries: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Map entries ``[*B, *F_i]`` to ``[*B, F]`` of the dtype."""
        if self.is_single_vector and entries[0].dtype is dtype:
            return entries[0]
        flat = []
        for entry, classes, dims in zip(entries, self.classes, self.event_dims, strict=True):
            if len(set(classes)) == 1:
                entry, dims = F.one_hot(entry.long(), classes[0]), dims + 1
            elif classes:
                elements = entry.long().flatten(-dims).unbind(-1)
                one_hot = [F.one_hot(element, count) for element, count in zip(elements, classes, strict=True)]
                entry = torch.cat(one_hot, -1)
                dims = 1
            entry = entry.to(dtype)
            flat.append(entry.flatten(-dims) if dims else entry.unsqueeze(-1))
        return torch.cat(flat, -1) if len(flat) > 1 else flat[0]


def category_counts(spec: Any) -> list[int]:
    """Return the number of categories of each element of an entry; an empty list if the entry is not categorical."""
    if isinstance(spec, MultiCategoricalSpec):
        return [int(n) for n in spec.nvec.flatten()]
    if isinstance(spec, Binary) or not isinstance(spec, Categorical):
        return []
    return [int(spec.space.n)] * math.prod(spec.shape)


class Encoder(nn.Module):
    """A module that converts observation entries to the dtype of its parameters and encodes them.

    Attributes:
        dtype: Dtype of the parameters; ``double()``, ``to(dtype)`` and similar calls change it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.get_default_dtype()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return super()._apply(fn, recurse)


class MLPEncoder(Encoder):
    """A multi-layer perceptron over the concatenated observation entries."""

    def __init__(
        self,
        specs: Sequence[Any],
        hidden_sizes: Sequence[int],
        activation: str,
        initialization: str = "orthogonal",
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.flat = FlatEntries(specs)
        self.layers = mlp(self.flat.features, hidden_sizes, activation, initialization, layer_norm)
        self.features = int(hidden_sizes[-1]) if len(hidden_sizes) else self.flat.features

    def forward(self, *entries: Tensor) -> Tensor:
        """Map entries ``[*B, *F_i]`` to features ``[*B, H]``."""
        return self.layers(self.flat(*entries, dtype=self.dtype))


class BatchRenormEncoder(Encoder):
    """A perceptron over the concatenated observation entries with batch renormalisation before each layer."""

    def __init__(self, specs: Sequence[Any], network: BatchRenormNetwork) -> None:
        super().__init__()
        self.flat = FlatEntries(specs)
        activation_class = ACTIVATIONS[network.activation]
        widths = [self.flat.features, *map(int, network.hidden_sizes)]

        def renorm(width: int) -> nn.Module:
            return BatchRenorm1d(width, momentum=network.momentum, warmup_steps=network.warmup_steps)

        layers = [renorm(widths[0])]
        for inputs, outputs in itertools.pairwise(widths):
            layers += [orthogonal(nn.Linear(inputs, outputs)), activation_class(), renorm(outputs)]
        self.layers, self.features = nn.Sequential(*layers), widths[-1]

    def forward(self, *entries: Tensor) -> Tensor:
        """Map entries ``[*B, *F_i]`` to features ``[*B, H]``."""
        flat = self.flat(*entries, dtype=self.dtype)
        return self.layers(flat.reshape(-1, flat.shape[-1])).reshape(*flat.shape[:-1], -1)


class CNNEncoder(Encoder):
    """Encode one pixel entry by convolutions (uint8 is divided by 255) and append the other entries as vectors.

    Images have shape ``[C, H, W]`` or ``[H, W, C]``; ``_core/images.py`` describes how they are distinguished.
    An entry ``[H, W]`` is an image only if no entry has three dimensions.
    """

    def __init__(self, specs: Sequence[Any], network: CNNNetwork) -> None:
        super().__init__()
        dims = [len(spec.shape) for spec in specs]
        image_indices = [i for i, ndim in enumerate(dims) if ndim == (3 if 3 in dims else 2)]
        if len(image_indices) != 1:
            shapes = [tuple(spec.shape) for spec in specs]
            raise ValueError(
                "the observation of a CNN must have exactly one image entry ([C, H, W], [H, W, C] or [H, W]), got "
                f"shapes {shapes}. Use MLPNetwork for vectors, and EnvironmentRecipe(drop=...) for additional images."
            )
        self.pixels = image_indices[0]
        shape = list(specs[self.pixels].shape)
        self.two_dimensional = len(shape) == 2
        self.channels_last = channels_are_last(shape)
        if self.two_dimensional:
            shape = [1, *shape]
        elif self.channels_last:
            shape = [shape[-1], *shape[:-1]]
        activation_class = ACTIVATIONS[one_of(network.activation, "activation", ACTIVATIONS)]
        layers, channels, size = [], shape[0], shape[1:]
        outputs, kernels, strides = network.convolutions(min(size))
        for out, kernel, stride in zip(outputs, kernels, strides, strict=True):
            size = [(edge - kernel) // stride + 1 for edge in size]
            if min(size) < 1:
                count = len(kernels)
                remedy = (
                    f"kernels={[2] * count} with strides={[1] * count}, as in model/network=cnn_small"
                    if min(shape[1:]) > count
                    else "an MLPNetwork"
                )
                raise ValueError(
                    f"kernels and strides must fit images of {shape[1]} x {shape[2]}, got kernels {list(kernels)} with "
                    f"strides {list(strides)}. Use {remedy}."
                )
            layers += [orthogonal(nn.Conv2d(channels, out, kernel, stride)), activation_class()]
            channels = out
        self.convolutions = nn.Sequential(*layers)
        others = [spec for i, spec in enumerate(specs) if i != self.pixels]
        self.flat = FlatEntries(others) if others else None
        width = channels * math.prod(size) + (self.flat.features if self.flat else 0)
        if network.hidden_sizes and (weights := width * int(network.hidden_sizes[0])) > _MAX_USUAL_WEIGHTS:
            logger.warning(
                "The layer after the convolutions has %d weights, because images of %d x %d become %d features. Use "
                "larger strides, or select model/network=cnn, which chooses them by the size of the image.",
                weights, *shape[1:], width,
            )  # fmt: skip
        self.layers = mlp(width, network.hidden_sizes, network.activation)
        self.features = int(network.hidden_sizes[-1]) if len(network.hidden_sizes) else width

    def forward(self, *entries: Tensor) -> Tensor:
        """Map entries ``[*B, *F_i]`` to features ``[*B, H]``."""
        image = entries[self.pixels]
        if self.two_dimensional:
            image = image.unsqueeze(-1)
        elif not self.channels_last:
            image = image.movedim(-3, -1)
        batch = image.shape[:-3]
        # If the channels of a pixel are adjacent in memory, 256 images take up to a third less time on a CPU.
        image = image.contiguous().reshape(-1, *image.shape[-3:])
        image = image.to(self.dtype).div_(255.0) if image.dtype is torch.uint8 else image.to(self.dtype)
        features = self.convolutions(image.movedim(-1, -3)).reshape(*batch, -1)
        if self.flat is not None:
            others = [entry for i, entry in enumerate(entries) if i != self.pixels]
            features = torch.cat([features, self.flat(*others, dtype=self.dtype)], -1)
        return self.layers(features)


@dataclass
class MLPNetwork(Network, ConfigSafe):
    """A multi-layer perceptron over flat observations.

    Args:
        hidden_sizes: Width of each hidden layer.
        activation: Name of the activation: elu, gelu, leaky_relu, relu, silu or tanh.
        shared: Whether actor and critic share the hidden layers.
        head_sizes: Width of the layers between features and outputs; actor and critic do not share them.
        initialization: Initial weights of hidden layers. ``"orthogonal"`` uses gain sqrt(2) and zero biases.
            ``"uniform"`` is PyTorch's default: it draws weights and biases within 1 / sqrt(inputs), so that initial
            values are closer to zero. The last layer is always orthogonal, with a gain of 0.01 for actions and 1 for
            values.
        layer_norm: Normalise the output of each hidden layer before its activation (Ba et al., 2016), without scale and
            shift. This reduces the critics' overestimation of actions outside the data (Ball et al., 2023).

    Raises:
        ValueError: A width is not positive, or the activation or initialization is unknown.

    Examples:
        >>> from torchrl.data import Unbounded
        >>> MLPNetwork([16]).encoder([Unbounded(3)]).features
        16
    """

    hidden_sizes: Sequence[int] = field(default_factory=lambda: [64, 64])
    activation: str = "tanh"
    shared: bool = False
    head_sizes: Sequence[int] = ()
    initialization: str = "orthogonal"
    layer_norm: bool = False

    def __post_init__(self) -> None:
        check_layers(self)

    def encoder(self, specs: Sequence[Any]) -> nn.Module:
        """Build the encoder of these entries."""
        return MLPEncoder(specs, list(self.hidden_sizes), self.activation, self.initialization, self.layer_norm)

    def action_encoder(self, specs: Sequence[Any], action: Any) -> nn.Module:
        """Build the encoder of these entries and an action, which is an additional input vector."""
        return self.encoder([*specs, action])


@dataclass
class BatchRenormNetwork(Network, ConfigSafe):
    """A perceptron over flat observations with TorchRL's batch renormalisation, ``BatchRenorm1d`` (Ioffe, 2017).

    Args:
        hidden_sizes: Width of each hidden layer.
        activation: Name of the activation: elu, gelu, leaky_relu, relu, silu or tanh.
        momentum: Weight of a batch in the running moments.
        warmup_steps: Number of batches after which training uses the running moments.
        shared: Whether actor and critic share the hidden layers.

    Examples:
        >>> from torchrl.data import Unbounded
        >>> BatchRenormNetwork([16]).encoder([Unbounded(3)])(torch.zeros(2, 3)).shape
        torch.Size([2, 16])
    """

    hidden_sizes: Sequence[int] = field(default_factory=lambda: [256, 256])
    activation: str = "relu"
    momentum: float = 0.01
    warmup_steps: int = 100_000
    shared: bool = False
    head_sizes: Sequence[int] = field(default=(), init=False)

    def __post_init__(self) -> None:
        check_layers(self)

    def encoder(self, specs: Sequence[Any]) -> nn.Module:
        """Build the encoder of these entries."""
        return BatchRenormEncoder(specs, self)

    def action_encoder(self, specs: Sequence[Any], action: Any) -> nn.Module:
        """Build the encoder of these entries and an action, which is an additional input vector."""
        return self.encoder([*specs, action])


@dataclass
class CNNNetwork(Network, ConfigSafe):
    """Convolutions over pixels, shared by actor and critic.

    The default convolutions depend on the shorter side of the image. With at least 36 pixels they equal the
    convolutions of Mnih et al. (2015). With at least 12 pixels the kernels are 4, 3, 2 with strides 2, 2, 1. Smaller
    images use three kernels of size 2 with stride 1.

    Args:
        channels: Output channels of each convolution; None selects them by the image size.
        kernels: Kernel size of each convolution; None selects them by the image size.
        strides: Stride of each convolution; None selects them by the image size.
        hidden_sizes: Width of each hidden layer after the convolutions.
        activation: Name of the activation: elu, gelu, leaky_relu, relu, silu or tanh.
        shared: Whether actor and critic share all layers before ``head_sizes``.
        head_sizes: Width of the layers between features and outputs; actor and critic do not share them.

    Raises:
        ValueError: channels, kernels and strides have different lengths, or an activation is unknown.

    Examples:
        >>> from torchrl.data import Unbounded
        >>> CNNNetwork().encoder([Unbounded((4, 84, 84), dtype=torch.uint8)]).features
        512
    """

    costly: ClassVar[bool] = True

    channels: Sequence[int] | None = None
    kernels: Sequence[int] | None = None
    strides: Sequence[int] | None = None
    hidden_sizes: Sequence[int] = field(default_factory=lambda: [512])
    activation: str = "relu"
    shared: bool = True
    head_sizes: Sequence[int] = ()

    def __post_init__(self) -> None:
        check_layers(self)
        self.convolutions(_CONVOLUTIONS[0][0])

    def convolutions(self, side: int) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Return channels, kernels and strides for images with this shorter side in pixels."""
        _, *defaults = next(row for row in _CONVOLUTIONS if side >= row[0] or row is _CONVOLUTIONS[-1])
        settings = self.channels, self.kernels, self.strides
        channels, kernels, strides = (
            default if value is None else value for value, default in zip(settings, defaults, strict=True)
        )
        if not len(channels) == len(kernels) == len(strides):
            raise ValueError(
                f"channels, kernels and strides must have equal lengths, got {list(channels)}, {list(kernels)}, "
                f"{list(strides)}. Set all three."
            )
        return channels, kernels, strides

    def encoder(self, specs: Sequence[Any]) -> nn.Module:
        """Build the encoder of these entries."""
        return CNNEncoder(specs, self)

    def action_encoder(self, specs: Sequence[Any], action: Any) -> nn.Module:
        """Build the encoder of these entries and an action, which is an additional input vector."""
        return self.encoder([*specs, action])


@dataclass
class RecurrentNetwork(Network, ConfigSafe):
    """A GRU or an LSTM over another network's features; actor and critic always share it.

    Because of the shared memory, the critic needs only the recorded observation and ``recurrent_state`` of a row. The
    critic does not keep a separate recurrent state.

    Args:
        cell: ``"gru"`` or ``"lstm"``.
        hidden_size: Width of the recurrent state.
        num_layers: Number of recurrent layers.
        encoder_network: Network in front of the cell; one layer of ``hidden_size`` by default.
        head_sizes: Width of the layers between features and outputs; actor and critic do not share them.
        activation: Name of the activation of the ``head_sizes`` layers.

    Examples:
        >>> from torchrl.data import Unbounded
        >>> trunk = RecurrentNetwork(hidden_size=8).trunk(["observation"], [Unbounded(3)])
        >>> trunk.in_keys, trunk.state_keys
        (['observation', 'recurrent_state', 'is_init'], ['recurrent_state'])
    """

    recurrent: ClassVar[bool] = True

    cell: str = "gru"
    hidden_size: int = 64
    num_layers: int = 1
    encoder_network: MLPNetwork | CNNNetwork | None = None
    head_sizes: Sequence[int] = field(default_factory=lambda: [64])
    activation: str = "tanh"
    shared: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        check_layers(self)

    def encoder(self, specs: Sequence[Any]) -> nn.Module:
        """Build the encoder in front of the recurrent layers."""
        return (self.encoder_network or MLPNetwork([self.hidden_size])).encoder(specs)

    def trunk(self, keys: Sequence[Any], specs: Sequence[Any]) -> TensorDictModuleBase:
        """Build the TensorDict module that maps observations and recurrent states to features."""
        return RecurrentTrunk(self.encoder(specs), keys, self.cell, self.hidden_size, self.num_layers)
