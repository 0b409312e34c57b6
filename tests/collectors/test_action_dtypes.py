"""Actions are single precision in what is collected, and of the space's type where the environment is stepped."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.envs import GymWrapper

from torchrl_lightning import GymnasiumCollector, play_episodes
from torchrl_lightning.collectors import TorchRLCollector


class Precise(gym.Env):
    """Takes double precision alone."""

    observation_space = gym.spaces.Box(-10, 10, (2,))
    action_space = gym.spaces.Box(-1, 1, (2,), np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        assert action.dtype == np.float64
        return action.astype(np.float32), float(action[0]), False, True, {}


@pytest.mark.filterwarnings("ignore")  # TorchRL warns about classes of its own
@pytest.mark.parametrize("kind", [GymnasiumCollector, TorchRLCollector])
def test_environment_gets_its_own_type(kind):
    policy = TensorDictModule(lambda seen: seen / 2 + 0.25, in_keys=["observation"], out_keys=["action"])
    env = Precise if kind is GymnasiumCollector else GymWrapper(Precise())
    collector = kind(env, policy, frames_per_batch=4, init_random_frames=4, seed=0)
    for _ in range(2):
        rollout = collector.rollout()
        assert rollout["action"].dtype == torch.float32 == collector.specs.action.dtype
        assert torch.equal(rollout["next", "observation"], rollout["action"])
    collector.shutdown()
    assert play_episodes(env if kind is GymnasiumCollector else lambda: GymWrapper(Precise()), policy, 2, seed=0)[
        "episode_return"
    ].tolist() == [0.25, 0.25]
