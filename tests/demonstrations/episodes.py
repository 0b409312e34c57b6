"""Short episodes of CartPole, and of other environments, to write into files."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Composite, Unbounded

from torchrl_lightning import EnvironmentSpecs
from torchrl_lightning.demonstrations import Demonstration

CARTPOLE = EnvironmentSpecs(Composite(observation=Unbounded((4,))), Categorical(2), 1)
IMAGES = EnvironmentSpecs(
    Composite(observation=Bounded(0, 255, (3, 5, 5), dtype=torch.uint8)), Categorical(3, dtype=torch.int64), 1
)


def steps_of(length: int = 3, reward: float = 1.0) -> TensorDict:
    steps = TensorDict({"observation": torch.randn(length, 4), "action": torch.arange(length) % 2}, [length])
    steps["next", "reward"] = torch.full((length, 1), reward)
    return steps


def episode(length: int = 3, reward: float = 1.0, **fields) -> Demonstration:
    return Demonstration(steps_of(length, reward), **fields)
