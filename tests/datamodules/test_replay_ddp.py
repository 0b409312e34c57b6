"""Replay on two CPU ranks with separate experience, and resumed runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kit.ranks import Report, fit_ranks, reports, run_ranks
from kit.replay import cells, experience, fit, prioritized, replay_data
from kit.runs import SaveAt, trainer
from torchrl_lightning.agents import DQNModule, MLPNetwork, TD3Module
from torchrl_lightning.environments import spawn_seed

EXACT = {
    "normalize_observation": True,
    "normalize_reward": True,
    "reset_at_each_batch": True,
    "frames_per_batch": 8,
    "frames_per_update": 0.7,
}


def stream(name, folder):
    return {
        "memory": {"buffer": experience(prioritized, n_steps=3)},
        "files": {"buffer": experience(prioritized, folder / "cells", n_steps=3)},
        "delayed": {"env": "Pendulum-v1", "updates_per_epoch": 7, "updates_per_step": 3},
    }[name]


def flat(module):
    """Return all numbers of a module, including its target networks."""
    return torch.cat([value.detach().flatten().double() for value in module.state_dict().values()]).tolist()


class OwnStart:
    """Build different networks on each rank, as without a common seed."""

    def configure_model(self):
        torch.manual_seed(self.global_rank)
        super().configure_model()

    def on_train_epoch_start(self):
        super().on_train_epoch_start()
        self.__dict__.setdefault("started", flat(self))


class DQN(OwnStart, DQNModule):
    """DQN with different networks on each rank."""


class TD3(OwnStart, TD3Module):
    """TD3, with a policy that has a gradient only in every second update."""


def tell(module, data):
    return {
        "started": module.started,
        "seed": data.collector.seed,
        "updates": [module.updates, data.updates],
        "frames": data.frames,
        "ended": flat(module),
        "moments": str(data.state_dict()["normalization"]),
        "cells": cells(data)["observation"].flatten().tolist(),
        "next_sample": data.buffer.sample(16)["index"].tolist(),
    }


def made(name, folder):
    module = (TD3 if name == "delayed" else DQN)(MLPNetwork([8], "relu"), learning_rate=0.01)
    return module, replay_data(**EXACT, **stream(name, folder))


def learn(folder, name, part, *callbacks, resume=None):
    module, data = made(name, folder)
    if resume is not None:  # our command checks the state before a trainer knows the ranks
        data.check_state(torch.load(resume, weights_only=True)["ReplayDataModule"])
        data.close()
    fit_ranks(module, data, Report(folder, f"{name}_{part}", tell), *callbacks, resume=resume, max_epochs=4)


def learn_all(folder):
    learn(folder, "memory", "whole")
    for name in ("memory", "files"):
        half = folder / f"{name}_half.ckpt"
        learn(folder, name, "half", SaveAt(half, "on_train_batch_end", 15))
        learn(folder, name, "resumed", resume=half)
    learn(folder, "delayed", "whole")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder with the reports of all runs."""
    return run_ranks(learn_all, tmp_path_factory.mktemp("replay_ddp"))


@pytest.mark.parametrize(("name", "updates", "frames"), [("memory_whole", 40, 2 * 72), ("delayed_whole", 28, 2 * 64)])
def test_ranks_learn_equal_weights_from_their_own_experience(folder, name, updates, frames):
    first, second = reports(folder, name)
    assert [first["seed"], second["seed"]] == [spawn_seed(0, "collector", rank) for rank in range(2)]
    assert first["cells"] != second["cells"]
    assert first["next_sample"] != second["next_sample"]
    # Each rank built different networks, but all ranks use rank 0's networks, including target networks.
    assert first["started"] == second["started"]
    assert first["ended"] == second["ended"] != first["started"]
    assert first["moments"] == second["moments"]  # of all ranks
    assert first["updates"] == second["updates"] == [updates, updates]
    assert first["frames"] == second["frames"] == frames


@pytest.mark.parametrize("kept", ["memory", "files"])
def test_two_ranks_resume_as_an_uninterrupted_run(folder, kept):
    for whole, resumed in zip(reports(folder, "memory_whole"), reports(folder, f"{kept}_resumed"), strict=True):
        for name in ("updates", "frames", "ended", "cells", "next_sample", "moments"):
            assert resumed[name] == whole[name], name
        assert resumed["started"] != whole["started"]


@pytest.mark.parametrize("kept", ["memory", "files"])
def test_ranks_store_their_buffers_beside_the_checkpoint(folder, kept):
    states = torch.load(folder / f"{kept}_half.ckpt", weights_only=True)["ReplayDataModule"]["ranks"]
    snapshots = [state["snapshot"] for state in states]
    assert [Path(snapshot["folder"]).name for snapshot in snapshots] == ["rank_0", "rank_1"]
    assert snapshots[0]["run"] == snapshots[1]["run"]
    assert all((Path(snapshot["folder"]) / snapshot["name"]).is_dir() for snapshot in snapshots)
    assert not any("buffer" in state for state in states)


def test_resuming_on_one_rank_is_refused_but_evaluating_is_not(folder):
    half = folder / "memory_half.ckpt"
    module, data = made("memory", folder)
    remedy = r"Resume with 2 device\(s\), or .* build\(specs\)\.load_state_dict\(\.\.\.\) of the module in a script"
    with pytest.raises(ValueError, match=rf"of 2 rank\(s\), but this run has 1. {remedy}"):
        fit(folder, data, module, half)
    module, data = made("memory", folder)
    module.build(data.specs).load_state_dict(torch.load(half, weights_only=True)["state_dict"])
    loaded = flat(module)
    fit(folder, data, module, max_epochs=1)
    assert module.started == loaded != flat(module)
    module, data = made("memory", folder)
    (scores,) = trainer(folder, limit_val_batches=1).validate(module, data, ckpt_path=half, verbose=False)
    assert data.frames == torch.load(half, weights_only=True)["ReplayDataModule"]["ranks"][0]["frames"]
    assert scores["eval/length"] > 5
