"""A DQN that learns from frames kept once is the one that learns from whole stacks."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from kit.runs import trainer
from torchrl_lightning import (
    CNNNetwork,
    DQNModule,
    EnvironmentRecipe,
    ExperienceBuffer,
    FrameStorage,
    PrioritizedSampler,
    ReplayDataModule,
    RingStorage,
    UniformSampler,
)


class Dot(gym.Env):
    """A dot that is to be kept from falling to either side."""

    observation_space = gym.spaces.Box(0, 255, (12, 12), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(3, 9))
        return self._image(), {}

    def step(self, action):
        self.place += 2 * int(action) - 1
        out = not 0 < self.place < 11
        return self._image(), float(not out), out, bool(self.np_random.random() < 0.05), {}

    def _image(self):
        image = np.zeros((12, 12), np.uint8)
        image[6, self.place] = 255
        return image


def trained(storage, sampler, folder):
    torch.manual_seed(0)
    data = ReplayDataModule(
        EnvironmentRecipe(Dot, frame_stack=3),
        buffer=lambda num_envs: ExperienceBuffer(storage=storage, sampler=sampler, num_envs=num_envs),
        num_envs=2,
        batch_size=8,
        updates_per_epoch=8,
        warmup_frames=60,
        seed=0,
    )
    module = DQNModule(CNNNetwork([4, 4], [2, 2], [2, 1], [8]), epsilon_frames=50)
    trainer(folder, max_epochs=1, limit_val_batches=0).fit(module, datamodule=data)
    return data.buffer, module.state_dict()


@pytest.mark.parametrize("sampler", [UniformSampler, lambda: PrioritizedSampler(50, 0.7, 0.5)])
def test_a_run_over_frames_equals_one_over_stacks(sampler, tmp_path):
    frames, weights = trained(FrameStorage(50, 3), sampler(), tmp_path)
    stacks, expected = trained(RingStorage(50), sampler(), tmp_path)
    assert len(frames) == 50
    assert (frames[:] == stacks[:]).all()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
