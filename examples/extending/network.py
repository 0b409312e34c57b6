"""A custom network: random Fourier features (Tancik et al., 2020) as the input of a multi-layer perceptron.

Run, in this folder: torchrl-lightning-train --config-dir . model/network=fourier data.total_frames=50000
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrl.data import Unbounded

from torchrl_lightning import MLPNetwork


class FourierEncoder(nn.Module):
    """Map observations ``[*B, F]`` to features ``[*B, H]`` with sines, cosines and the layers after them."""

    def __init__(self, frequencies: Tensor, layers: Any) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies)
        self.layers, self.features = layers, layers.features

    def forward(self, observation: Tensor) -> Tensor:
        """Return the features of the observations."""
        angle = observation @ self.get_buffer("frequencies")
        return self.layers(torch.cat([angle.sin(), angle.cos()], -1))


@dataclass
class FourierNetwork(MLPNetwork):
    """Random Fourier features, followed by a multi-layer perceptron.

    Args:
        width: Number of random frequencies.
        scale: Standard deviation of the frequencies.
        hidden_sizes: See :class:`~torchrl_lightning.MLPNetwork` for this and all other arguments.
    """

    width: int = 64
    scale: float = 1.0

    def encoder(self, specs: Sequence[Any]) -> Any:
        """Build the encoder for the observation specs of an environment."""
        if len(specs) != 1 or len(specs[0].shape) != 1:
            raise ValueError(f"FourierNetwork reads one vector, got shapes {[list(spec.shape) for spec in specs]}.")
        frequencies = self.scale * torch.randn(specs[0].shape[0], self.width)
        return FourierEncoder(frequencies, super().encoder([Unbounded(2 * self.width)]))
