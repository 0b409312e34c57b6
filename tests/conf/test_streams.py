"""Each `data=` option trains a model that it supports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate

from kit.runs import trainer
from torchrl_lightning._core.keys import RESERVED

SMALL = ("data.num_envs=2", "data.eval_episodes=1", "data.eval_num_envs=1")
REPLAY = ("data.updates_per_epoch=6", "data.warmup_frames=40", "data.batch_size=8")
WINDOWS = ("torchrl_lightning/schema/sampler@data.buffer.sampler=sequence", "data.buffer.sampler.batch_length=5")
WORLD = ("data.source.branches_per_fit=20", "model.dynamics.hidden_sizes=[8]", "model.dynamics.max_epochs=1")
GOALS = ("env=recipe", "data.env.id={_target_: kit.goals.Reach}", "data.buffer.storage.max_size=64")


@pytest.fixture
def fit(compose_train: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Return a function that trains for one epoch, checks all batches, and returns data, module and batches."""

    def run(*overrides: str) -> tuple[Any, Any, list[Any]]:
        cfg = compose_train("~experiment", *overrides, *SMALL)
        data, module, served = instantiate(cfg.data), instantiate(cfg.model), []
        step = module.training_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            served.append(batch)
            return step(batch, batch_idx)

        module.training_step = training_step
        trainer(tmp_path, max_epochs=1, limit_val_batches=0).fit(module, datamodule=data)
        for batch in served:
            own = {*batch.keys(), *batch.get("next", {}).keys()} - set(data.specs.observation.keys())
            assert own <= RESERVED
        return data, module, served

    return run


@pytest.mark.parametrize(
    ("option", "settings", "shape", "entries"),
    [
        ("uniform", ("model=td3", "env=pendulum"), (8,), set()),
        ("prioritized", ("model=dqn", "env=cartpole"), (8,), {"priority_weight"}),
        ("sequence", ("model=dqn_recurrent", "env=cartpole_hidden_velocity"), (8, 16), {"recurrent_state"}),
        ("sequence", ("model=sac_recurrent", "env=pendulum_hidden_velocity"), (8, 16), {"recurrent_state"}),
        ("recurrent", ("model=sac", "env=pendulum"), (8,), set()),
        (
            "recurrent",
            ("model=dqn_recurrent", "env=cartpole_hidden_velocity", *WINDOWS, "data.buffer.sampler.episode_ends=pad"),
            (8, 5),
            {"recurrent_state"},
        ),
        ("simple", ("model=sac", "env=pendulum"), (8,), set()),
    ],
)
def test_replay(fit, option, settings, shape, entries):
    data, module, served = fit(f"data={option}", *settings, *REPLAY)
    assert (data.updates, module.updates, len(served)) == (6, 6, 6)
    # The sixth update follows 46 frames, and both environments have stored half of them.
    assert len(data.buffer) == data.frames == 46
    assert data.buffer.writer.positions.tolist() == [23, 23]
    for batch in served:
        assert batch.shape == shape
        assert {"priority_weight", "recurrent_state"} & set(batch.keys()) == entries


def test_branched(fit):
    _, module, served = fit("data=branched", "model=mbpo", "env=pendulum", *WORLD, *REPLAY)
    assert module.updates == len(served) == 6
    assert module.errors.isfinite().all()
    # The six batches contain 48 rows, and one in twenty is real.
    assert sum(int((batch["source"] == 0).sum()) for batch in served) in (2, 3)


def test_hindsight(fit):
    settings = ("data.buffer.transform.her_proportion=1.0", "model=ddpg")
    data, module, served = fit("data=hindsight", *settings, *GOALS, *REPLAY)
    assert module.updates == len(served) == 6
    for batch in served:
        after = batch["next"]
        assert torch.equal(batch["desired_goal"], after["desired_goal"])
        stored = data.buffer.storage.get(batch["index"])
        assert (batch["desired_goal"] != stored["desired_goal"]).all()
        near = (after["achieved_goal"] - batch["desired_goal"]).norm(dim=-1, keepdim=True) < 0.05
        assert torch.equal(after["reward"], near.float() - 1)


def test_hindsight_of_returns_of_several_steps(fit):
    settings = ("data.buffer.transform={her_proportion: 1.0, strategy: final}", "data.buffer.n_steps=3", "model=ddpg")
    _, module, served = fit("data=hindsight", *settings, *GOALS, *REPLAY)
    assert module.updates == len(served) == 6
    assert all(set(batch["steps_to_next_obs"].tolist()) >= {3} for batch in served)
    assert all((batch["desired_goal"] == batch["next", "desired_goal"]).all() for batch in served)


def test_l2r_rollouts(fit):
    data, _, served = fit("data=ppo", "model=ppo", "data.frames_per_batch=32", "data.mini_batch_size=8")
    assert len(served) == 16
    assert all(batch["advantage"].isfinite().all() for batch in served)
    assert (data.buffer.obs_dim, data.buffer.size) == (None, 16)
