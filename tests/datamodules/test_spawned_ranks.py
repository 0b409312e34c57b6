"""DataModules travel to the processes that ``ddp_spawn`` starts, and train there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from kit.actor_critic import rollouts
from kit.ranks import Report, reports
from kit.replay import dqn, replay_data
from kit.runs import parameters, trainer
from torchrl_lightning.learn import MLPNetwork, PPOModule


def on_policy() -> tuple[Any, Any]:
    data = rollouts(num_envs=2, frames_per_batch=16, mini_batch_size=8, num_epochs=1)
    return PPOModule(MLPNetwork([8])), data


def replay() -> tuple[Any, Any]:
    """A replay DataModule whose environment and buffer come from functions that no other process can import."""
    data = replay_data(env=lambda: gym.make("CartPole-v1"), updates_per_epoch=4, warmup_frames=8)
    return dqn(), data


def met(module: Any, data: Any) -> dict[str, Any]:
    return {"frames": data.frames, "parameters": parameters(module).tolist(), "seed": data.collector.seed}


@pytest.mark.parametrize(("make", "frames"), [(on_policy, 2 * 16), (replay, 2 * 8 + 2 * 4)])
def test_two_spawned_ranks_train(make: Callable[[], tuple[Any, Any]], frames: int, tmp_path: Path) -> None:
    module, data = make()
    limits = {"max_epochs": 1, "limit_val_batches": 0, "callbacks": [Report(tmp_path, "fit", met)]}
    trainer(tmp_path, devices=2, strategy="ddp_spawn", **limits).fit(module, datamodule=data)
    first, second = reports(tmp_path, "fit")
    assert first["frames"] == second["frames"] >= frames
    assert first["parameters"] == second["parameters"]
    assert first["seed"] != second["seed"]
    assert data.frames == 0  # copies were trained
