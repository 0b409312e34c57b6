"""A network of your own: random Fourier features (Tancik et al., 2020) in front of a multi-layer perceptron.

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
    """Map observations ``[*B, F]`` to features ``[*B, H]``: waves of random frequencies, and layers behind them."""

    def __init__(self, frequencies: Tensor, layers: Any) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies)
        self.layers, self.features = layers, layers.features

    def forward(self, observation: Tensor) -> Tensor:
        """Compute the features."""
        angle = observation @ self.get_buffer("frequencies")
        return self.layers(torch.cat([angle.sin(), angle.cos()], -1))


@dataclass
class FourierNetwork(MLPNetwork):
    """Random waves, and a multi-layer perceptron over them.

    Args:
        width: Number of frequencies.
        scale: Their standard deviation.
        hidden_sizes: As in :class:`~torchrl_lightning.MLPNetwork`, like everything that is not named here.
    """

    width: int = 64
    scale: float = 1.0

    def encoder(self, specs: Sequence[Any]) -> Any:
        """Build the encoder of an environment's entries."""
        if len(specs) != 1 or len(specs[0].shape) != 1:
            raise ValueError(f"FourierNetwork reads one vector, got shapes {[list(spec.shape) for spec in specs]}.")
        frequencies = self.scale * torch.randn(specs[0].shape[0], self.width)
        return FourierEncoder(frequencies, super().encoder([Unbounded(2 * self.width)]))
