"""A DQN that learns from frames stored once equals a DQN that learns from full stacks."""

from __future__ import annotations

import torch

from kit.images import RandomImages
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
)


def trained(storage, folder):
    torch.manual_seed(0)
    sampler = PrioritizedSampler(50, 0.7, 0.5)
    data = ReplayDataModule(
        EnvironmentRecipe(RandomImages, {"shape": (12, 12)}, frame_stack=3),
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


def test_run_with_frame_storage_equals_run_with_stacks(tmp_path):
    frames, weights = trained(FrameStorage(50, 3), tmp_path)
    stacks, expected = trained(RingStorage(50), tmp_path)
    assert len(frames) == 50
    assert (frames[:] == stacks[:]).all()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
