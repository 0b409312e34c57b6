"""Encoders of observations as users write them: one without a fault, and one for each fault."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchrl_lightning import MLPNetwork
from torchrl_lightning.agents import Network


class Encoder(nn.Module):
    """An encoder of one vector without a fault. Each faulty encoder differs from it in one method."""

    def __init__(self, inputs: int, width: int = 6) -> None:
        super().__init__()
        self.features, self.layer = width, nn.Linear(inputs, width)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.layer(observation).relu()


@dataclass
class EncodedBy(MLPNetwork):
    """A network with a user's encoder."""

    kind: Any = Encoder

    def encoder(self, specs: Any) -> nn.Module:
        assert all(spec.shape in ((4,), (3,)) for spec in specs)
        return self.kind(sum(spec.shape[-1] for spec in specs))


class Plain:
    """An object with only the method ``encoder``."""

    def encoder(self, specs: Any) -> nn.Module:
        return Encoder(specs[0].shape[-1])


class Inherited(Network):
    """The smallest subclass of ``Network``."""

    def encoder(self, specs: Any) -> nn.Module:
        return Encoder(specs[0].shape[-1])


class NoFeatures(Encoder):
    def __init__(self, inputs: int) -> None:
        super().__init__(inputs)
        del self.features


class WrongFeatures(Encoder):
    def __init__(self, inputs: int) -> None:
        super().__init__(inputs)
        self.features = 7


class FloatFeatures(Encoder):
    def __init__(self, inputs: int) -> None:
        super().__init__(inputs)
        self.features = 6.0


class NotBuilt(Encoder):
    def __init__(self, inputs: int) -> None:
        super().__init__(inputs)
        _ = [][inputs]


class ExtraDimension(Encoder):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return super().forward(observation).unsqueeze(-2)


class Tuple(Encoder):
    def forward(self, observation: torch.Tensor) -> Any:
        return super().forward(observation), None


class Raises(Encoder):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such layer\nat all")


class OneRow(Encoder):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return super().forward(observation.reshape(self.layer.in_features))


class NoRows(Encoder):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return super().forward(observation).flatten()


class Double(Encoder):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return super().forward(observation).double()


class DoubleWeights(Encoder):
    def __init__(self, inputs: int) -> None:
        super().__init__(inputs)
        self.double()


class InPlace(Encoder):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return super().forward(observation.div_(2.0))


class InPlaceBehind(Encoder):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        observation.data.add_(1.0)
        return super().forward(observation)


class NoGradient(Encoder):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return super().forward(observation).detach()


class NoBackward(Encoder):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        features = super().forward(observation)
        features.register_hook(self.fail)
        return features

    @staticmethod
    def fail(gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no way back")
