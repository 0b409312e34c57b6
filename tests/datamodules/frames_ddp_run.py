"""Run by test_frames.py in a process of its own: two ranks of which each replays another share of its steps."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from datamodules.replay_parts import trainer
from datamodules.test_demonstrations import shown
from torchrl_lightning import OnPolicyDataModule, PPODBuffer, write_demonstration
from torchrl_lightning.learn import MLPNetwork, PPOModule

FOLDER = Path(sys.argv[1])


class Counting(PPOModule):
    """Writes down how many of its rank's steps were replayed."""

    own = other = 0

    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        mask = self.trainer.datamodule.buffer.rollout["demo", "mask"]
        self.own, self.other = self.own + int((~mask).sum()), self.other + int(mask.sum())

    def on_train_end(self):
        data = self.trainer.datamodule
        report = {
            "own": self.own,
            "other": self.other,
            "frames": data.frames,
            "replayed": data.metrics()["frames/replayed"],
            "epochs": self.trainer.current_epoch,
            "progress": self.progress,
        }
        (FOLDER / f"{dist.get_rank()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    (FOLDER / "human").mkdir()
    write_demonstration(FOLDER / "human" / "shown.safetensors", shown(7))
    torch.manual_seed(0)
    data = OnPolicyDataModule(
        "CartPole-v1",
        buffer=partial(PPODBuffer, rho=0.6, phi=0.0, initial_human_demos_dir=str(FOLDER / "human")),
        num_envs=2,
        frames_per_batch=128,
        mini_batch_size=64,
        num_epochs=1,
        total_frames=600,
        seed=0,
    )
    run = trainer(FOLDER, devices=2, strategy="ddp_fork", max_epochs=-1)
    run.fit(Counting(MLPNetwork([8])), datamodule=data)
