"""Run by test_ddp.py in a process of its own: two ranks on the CPU, and their resuming."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from datamodules.conftest import TinyActorCritic
from datamodules.replay_parts import trainer
from kit.normalized import recording
from torchrl_lightning import LastCheckpoint, OnPolicyDataModule

FOLDER = Path(sys.argv[1])


class Reporting(TinyActorCritic):
    """Writes down what its rank met."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def training_step(self, batch, batch_idx):
        if not hasattr(self, "first"):
            self.first = batch["observation"].sum().item()
        return super().training_step(batch, batch_idx)

    def on_train_end(self):
        data = self.trainer.datamodule
        normalization = data.state_dict()["normalization"]  # which all ranks return together
        (observed,) = normalization["observation"]["entries"]
        report = {
            "seed": data.collector.seed,
            "observations": self.first,
            "updates": self.updates,
            "frames": data.frames,
            "parameters": torch.cat([p.detach().flatten() for p in self.parameters()]).tolist(),
            "count": observed["moments"]["count"],
            "mean": observed["moments"]["mean"].tolist(),
            "spread": observed["moments"]["spread"].tolist(),
            "rewards": normalization["reward"]["count"],
            "seen": [row for each in data.collector.recorded for row in each["observation"].flatten(0, 1).tolist()],
        }
        (FOLDER / f"{self.name}_{dist.get_rank()}.json").write_text(json.dumps(report))


def fit(name, epochs, ckpt_path=None):
    torch.manual_seed(0)
    data = OnPolicyDataModule(
        "CartPole-v1",
        num_envs=2,
        frames_per_batch=32,
        mini_batch_size=16,
        num_epochs=2,
        eval_episodes=1,
        seed=0,
        collector=recording(2, 32),
        normalize_observation=True,
        normalize_reward=True,
        reset_at_each_batch=True,
    )
    run = trainer(
        FOLDER,
        devices=2,
        strategy="ddp_fork",
        max_epochs=epochs,
        callbacks=[LastCheckpoint(FOLDER, name)],
        enable_checkpointing=True,
        # The end is no multiple of it, so that all ranks have to evaluate and save it together.
        limit_val_batches=1,
        check_val_every_n_epoch=5,
    )
    run.fit(Reporting(name), datamodule=data, ckpt_path=ckpt_path)


if __name__ == "__main__":
    fit("whole", 3)
    fit("half", 2)
    fit("resumed", 3, FOLDER / "half.ckpt")
