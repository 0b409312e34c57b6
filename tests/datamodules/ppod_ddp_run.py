"""Run by test_demonstrations.py in a process of its own: two ranks that mine demonstrations, and their resuming."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from datamodules.replay_parts import trainer
from kit.runs import parameters
from torchrl_lightning import LastCheckpoint, OnPolicyDataModule, PPODBuffer
from torchrl_lightning.learn import MLPNetwork, PPOModule

FOLDER, SHARED = Path(sys.argv[1]), sys.argv[2] == "shared"


class Reporting(PPOModule):
    """Writes down what its rank met."""

    def __init__(self, name: str) -> None:
        super().__init__(MLPNetwork([8]))
        self.name = name

    def on_train_end(self):
        data = self.trainer.datamodule
        report = {
            "parameters": parameters(self).tolist(),
            "observations": data.buffer.rollout["observation"].sum().item(),
            "value": [(each.value, each.total_reward) for each in data.buffer.value_demos],
            "saved": sorted(path.name for path in (FOLDER / self.name).glob("[!.]*")),
        }
        (FOLDER / f"{self.name}_{dist.get_rank()}.json").write_text(json.dumps(report))


def fit(name, epochs, ckpt_path=None):
    torch.manual_seed(0)
    buffer = partial(
        PPODBuffer,
        rho=0.3,
        phi=0.4,
        shared_demos=SHARED,
        initial_reward_threshold=30.0,
        target_agent_demos_dir=str(FOLDER / name),
        save_demos_every=1,
        num_agent_demos_to_save=1,
    )
    data = OnPolicyDataModule(
        "CartPole-v1",
        buffer=buffer,
        num_envs=2,
        frames_per_batch=128,
        mini_batch_size=64,
        num_epochs=1,
        seed=0,
        reset_at_each_batch=True,
    )
    run = trainer(
        FOLDER,
        devices=2,
        strategy="ddp_fork",
        max_epochs=epochs,
        callbacks=[LastCheckpoint(FOLDER, name)],
        enable_checkpointing=True,
    )
    run.fit(Reporting(name), datamodule=data, ckpt_path=ckpt_path)


if __name__ == "__main__":
    fit("whole", 4)
    fit("half", 2)
    fit("resumed", 4, FOLDER / "half.ckpt")
