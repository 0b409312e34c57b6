"""Observations with entries of all kinds, from the environment to the networks of each family."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from torchrl_lightning import EnvironmentRecipe, GymnasiumCollector
from torchrl_lightning.agents import CNNNetwork, DQNModule, MLPNetwork, PPOModule, SACModule

SMALL = CNNNetwork([4, 4, 4], [2, 2, 2], [1, 1, 1], [8])


class Mixed(gymnasium.Env[Any, Any]):
    """Returns random observations; ``image`` is the shape of their image."""

    def __init__(self, image: tuple[int, ...], action_space: spaces.Space[Any]) -> None:
        self.action_space = action_space
        self.observation_space = spaces.Dict(
            image=spaces.Box(0, 255, image, np.uint8),
            position=spaces.Box(-1, 1, (2,)),
            height=spaces.Box(-1, 1, ()),
            kind=spaces.Discrete(4, start=1),
            parts=spaces.MultiDiscrete([3, 5]),
            same=spaces.MultiDiscrete([4, 4]),
            bits=spaces.MultiBinary(3),
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        return self.observation_space.sample(), 1.0, False, False, {}


@pytest.mark.parametrize("network", [SMALL, MLPNetwork([8])], ids=["cnn", "mlp"])
@pytest.mark.parametrize(("image", "channels"), [((7, 7, 3), 9), ((3, 7, 7), 9), ((7, 7), 3)])
@pytest.mark.parametrize(
    ("module", "action_space"),
    [
        (PPOModule, spaces.Discrete(3)),
        (PPOModule, spaces.MultiDiscrete([2, 3])),
        (PPOModule, spaces.MultiBinary(2)),
        (DQNModule, spaces.Discrete(3)),
        (SACModule, spaces.Box(-1, 1, (2,))),
    ],
)
def test_policy_acts_on_mixed_observations(
    module: Any, action_space: Any, image: tuple[int, ...], channels: int, network: Any
) -> None:
    env = EnvironmentRecipe(partial(Mixed, image, action_space), frame_stack=3)
    collector = GymnasiumCollector(env, num_envs=2, frames_per_batch=6, seed=0)
    collector.policy = module(network=network).build(collector.specs).policy
    rollout = collector.rollout()
    assert rollout["image"].shape == (2, 3, *collector.specs.observation["image"].shape)
    assert len(set(rollout["position"].flatten().tolist())) > 6
    if network is SMALL:
        assert network.encoder(list(collector.specs.observation.values())).convolutions[0].in_channels == channels
    collector.shutdown()
