"""What the tests of the replay DataModule are made of."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch

from kit.forks import Forked, as_script
from kit.runs import trainer as quiet_trainer
from torchrl_lightning import RecentSampler, RecurrentReplayBuffer, ReplayDataModule, SimpleReplayBuffer
from torchrl_lightning.learn import DQNModule, MLPNetwork, RecurrentNetwork
from torchrl_lightning.replay import (
    ExperienceBuffer,
    PrioritizedSampler,
    RingStorage,
    SequenceSampler,
    UniformSampler,
)

SIZE = 400


def experience(sampler, **kwargs):
    """Factory of a buffer over RAM."""
    return lambda num_envs: ExperienceBuffer(storage=RingStorage(SIZE), sampler=sampler(), num_envs=num_envs, **kwargs)


def prioritized():
    return PrioritizedSampler(SIZE, alpha=0.7, beta=0.5)


def recent():
    prioritized = PrioritizedSampler(SIZE, alpha=0.7, beta=0.5, batch_length=1)
    return RecentSampler(recent_data_steps=4, recent_data_ratio=0.25, prioritized=prioritized)


BUFFERS = {
    "uniform": experience(UniformSampler),
    "prioritized": experience(prioritized),
    "three steps": experience(UniformSampler, n_steps=3),
    "prioritized, three steps": experience(prioritized, n_steps=3),
    "sequence": experience(lambda: SequenceSampler(4)),
    "recent, prioritized": experience(recent),
    "simple": lambda num_envs: SimpleReplayBuffer(4, None, SIZE, 8, num_envs=num_envs),
}


def recurrent(num_envs):
    return RecurrentReplayBuffer(SIZE, 4, None, None, num_envs=num_envs)


def in_files(folder, sampler=UniformSampler, **kwargs):
    """Factory of a buffer over memory-mapped files."""
    return lambda num_envs: ExperienceBuffer(
        storage=RingStorage(SIZE, scratch_dir=folder), sampler=sampler(), num_envs=num_envs, **kwargs
    )


def dqn(cls=DQNModule, seed=0, recurrent=False, **kwargs):
    torch.manual_seed(seed)
    kwargs.setdefault("epsilon_frames", 100)
    return cls(RecurrentNetwork("gru", 8) if recurrent else MLPNetwork([8], "relu"), **kwargs)


def replay_data(buffer="uniform", **kwargs):
    settings = {
        "env": "CartPole-v1",
        "buffer": BUFFERS.get(buffer, buffer) if isinstance(buffer, str) else buffer,
        "num_envs": 2,
        "batch_size": 8,
        "updates_per_epoch": 10,
        "warmup_frames": 40,
        "eval_episodes": 2,
        "seed": 0,
    }
    return ReplayDataModule(**{**settings, **kwargs})


trainer = partial(quiet_trainer, limit_val_batches=0, max_epochs=3)


def fit(folder, data, module=None, ckpt_path=None, **kwargs):
    module = dqn() if module is None else module
    run = trainer(folder, **{"max_epochs": 2, **kwargs})
    run.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module, run


def stored(data):
    rows = data.buffer.storage.get(torch.arange(len(data.buffer)))
    return torch.cat([leaf.reshape(-1).double() for _, leaf in sorted(rows.flatten_keys().items())])


def run_ranks(script, folder, *arguments):
    """Run a script of this folder in a process of its own; it writes into another one, and ends well."""
    process = Forked(as_script(Path(__file__).with_name(script), str(folder), *arguments), folder)
    status = process.ends(600)
    assert status == 0, process.said
    return folder


def reports(folder, name):
    """Return what each of two ranks wrote down."""
    return [json.loads((folder / f"{name}_{rank}.json").read_text()) for rank in range(2)]
