"""Run by test_replay_ddp.py in a process of its own: replay on two ranks of the CPU, and what they resume."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist

from datamodules.replay_parts import experience, in_files, prioritized, replay_data, trainer
from torchrl_lightning.learn import DQNModule, MLPNetwork, TD3Module

FOLDER = Path(sys.argv[1])
EXACT = {
    "normalize_observation": True,
    "normalize_reward": True,
    "reset_at_each_batch": True,
    "frames_per_batch": 8,
    "frames_per_update": 0.7,
}
STREAMS = {
    "memory": {"buffer": experience(prioritized, n_steps=3)},
    "files": {"buffer": in_files(FOLDER / "cells", prioritized, n_steps=3)},
    "delayed": {"env": "Pendulum-v1", "buffer": "uniform", "updates_per_epoch": 7, "updates_per_step": 3},
}


class Reporting(L.Callback):
    """Writes down what a rank met and ended with; saves after so many updates, in every rank."""

    def __init__(self, name: str, save_after: int | None = None) -> None:
        self.name, self.save_after = name, save_after
        self.started: list[float] = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if not self.started:
            self.started = flat(module)
            self.first = trainer.datamodule._served["observation"].flatten().tolist()

    def on_train_batch_end(self, trainer, module, *args):
        if module.updates == self.save_after:
            trainer.save_checkpoint(FOLDER / f"{self.name}.ckpt")
            trainer.should_stop = True

    def on_train_end(self, trainer, module):
        data = trainer.datamodule
        data.take_back()
        cells = data.buffer.storage.get(torch.arange(len(data.buffer)))
        report = {
            "started": self.started,
            "first": self.first,
            "seed": data.collector.seed,
            "updates": [module.updates, data.updates],
            "frames": data.frames,
            "ended": flat(module),
            "moments": str(data.state_dict()["normalization"]),
            "cells": cells["observation"].flatten().tolist(),
            "next_sample": data.buffer.sample(16)["index"].tolist(),
        }
        (FOLDER / f"{self.name}_{dist.get_rank()}.json").write_text(json.dumps(report))


def flat(module):
    """All parameters, those of the target networks included."""
    return torch.cat([value.detach().flatten().double() for value in module.state_dict().values()]).tolist()


class OwnStart:
    """Each rank builds other networks, as without a common seed."""

    def configure_model(self) -> None:
        torch.manual_seed(self.global_rank)
        super().configure_model()


class DQN(OwnStart, DQNModule):
    """On two ranks."""


class TD3(OwnStart, TD3Module):
    """Its policy has no gradient in every other update."""


def fit(stream, name, devices=2, save_after=None, ckpt_path=None):
    make = TD3 if stream == "delayed" else DQN
    run = trainer(
        FOLDER,
        devices=devices,
        strategy="ddp_fork" if devices > 1 else "auto",
        max_epochs=4,
        callbacks=[Reporting(f"{stream}_{name}", save_after)],
    )
    module = make(MLPNetwork([8], "relu"), learning_rate=0.01)
    data = replay_data(**EXACT, **STREAMS[stream])
    if ckpt_path is not None:  # as our command does, before there is a trainer that knows the ranks
        data.check_state(torch.load(ckpt_path, weights_only=True)["ReplayDataModule"])
        data.close()
    run.fit(module, datamodule=data, ckpt_path=ckpt_path)


if __name__ == "__main__":
    fit("memory", "whole")
    for stream in ("memory", "files"):
        fit(stream, "half", save_after=15)
        fit(stream, "resumed", ckpt_path=FOLDER / f"{stream}_half.ckpt")
    fit("delayed", "whole")
    try:
        fit("memory", "alone", devices=1, ckpt_path=FOLDER / "memory_half.ckpt")
    except ValueError as error:
        (FOLDER / "alone.txt").write_text(str(error))
    data = replay_data(**EXACT, **STREAMS["memory"])
    run = trainer(FOLDER, devices=1, limit_val_batches=1)
    (scores,) = run.validate(DQN(MLPNetwork([8], "relu")), data, ckpt_path=FOLDER / "memory_half.ckpt")
    (FOLDER / "validated.json").write_text(json.dumps({"length": scores["eval/length"], "frames": data.frames}))
