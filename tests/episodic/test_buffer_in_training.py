"""The documented buffer behind a DataModule, which names its environments in another way."""

from __future__ import annotations

import torch

from kit.runs import trainer
from torchrl_lightning import EpisodicReplayBuffer, MLPNetwork, ReplayDataModule, SACModule


def test_it_is_served_and_its_verbs_work(tmp_path):
    def buffer(num_envs: int) -> EpisodicReplayBuffer:
        return EpisodicReplayBuffer(None, num_envs, 250, recent_data_ratio=0.25, record_episodic_return=True)

    data = ReplayDataModule(
        "Pendulum-v1", buffer=buffer, num_envs=2, batch_size=8, updates_per_epoch=20, warmup_frames=440, seed=0
    )
    trainer(tmp_path, max_epochs=1, limit_val_batches=0).fit(module := SACModule(MLPNetwork([8])), datamodule=data)
    assert module.updates == 20
    windows, info = data.buffer.get_batch(4, 3)
    assert windows.shape == (4, 3)
    assert windows["discounted_return"].shape == (4, 3, 1)
    left = data.buffer.steps_to_episode_end(info.positions, info.env_ids)
    assert torch.equal(left, torch.where(info.positions < 200, 199, data.frames // 2 - 1) - info.positions)
