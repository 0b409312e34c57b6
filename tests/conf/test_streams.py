"""What every `data=` option gives is learned from, with the models that it is meant for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate

from kit.runs import trainer
from torchrl_lightning import ReplayDataModule
from torchrl_lightning.keys import RESERVED

SMALL = ("data.num_envs=2", "data.eval_episodes=1", "data.eval_num_envs=1")
REPLAY = ("data.updates_per_epoch=6", "data.warmup_frames=40", "data.batch_size=8")
WINDOWS = ("torchrl_lightning/schema/sampler@data.buffer.sampler=sequence", "data.buffer.sampler.batch_length=5")


@pytest.fixture
def fit(compose_train: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
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
    ("option", "model", "env"),
    [
        ("uniform", "td3", "pendulum"),
        ("prioritized", "dqn", "cartpole"),
        ("sequence", "dqn_recurrent", "cartpole_hidden_velocity"),
        ("sequence", "sac_recurrent", "pendulum_hidden_velocity"),
        ("recurrent", "sac", "pendulum"),
        ("simple", "sac", "pendulum"),
    ],
)
def test_replay(fit, option, model, env):
    data, module, served = fit(f"data={option}", f"model={model}", f"env={env}", *REPLAY)
    assert isinstance(data, ReplayDataModule)
    assert (data.updates, module.updates, len(served)) == (6, 6, 6)
    # Of each environment the same number of steps, as many in all as were asked for before the sixth update.
    assert len(data.buffer) == data.frames == 46
    assert data.buffer.writer.positions.tolist() == [23, 23]
    for batch in served:
        assert batch.shape == ((8, 16) if option == "sequence" else (8,))
        assert ("priority_weight" in batch) == (option == "prioritized")
        if option == "simple":
            assert len(batch["index"].unique()) == 8


def test_branched(fit):
    settings = ("data.source.branches_per_fit=20", "model.dynamics.hidden_sizes=[8]", "model.dynamics.max_epochs=1")
    _, module, served = fit("data=branched", "model=mbpo", "env=pendulum", *settings, *REPLAY)
    assert module.updates == len(served) == 6
    assert module.errors.isfinite().all()
    # Of 48 rows, a twentieth is real.
    assert sum(int((batch["source"] == 0).sum()) for batch in served) in (2, 3)


@pytest.mark.parametrize("proportion", [0.0, 1.0])
def test_hindsight(fit, proportion):
    env = ("env=recipe", "data.env.id={_target_: kit.goals.Reach}")
    settings = (
        "data=hindsight",
        "data.buffer.storage.max_size=64",
        f"data.buffer.transform.her_proportion={proportion}",
    )
    data, module, served = fit(*settings, "model=ddpg", *env, *REPLAY)
    assert module.updates == len(served) == 6
    for batch in served:
        after = batch["next"]
        assert torch.equal(batch["desired_goal"], after["desired_goal"])
        stored = data.buffer.storage.get(batch["index"])
        assert (batch["desired_goal"] != stored["desired_goal"]).all() == bool(proportion)
        near = (after["achieved_goal"] - batch["desired_goal"]).norm(dim=-1, keepdim=True) < 0.05
        assert torch.equal(after["reward"], near.float() - 1)


def test_priorities_come_back(fit):
    data, _, served = fit("data=prioritized", "model=dqn", *REPLAY)
    priorities = data.buffer.sampler.state_dict()["priorities"]
    last = served[-1]
    for cell, priority in zip(last["index"].tolist(), priorities[last["index"]].tolist(), strict=True):
        assert priority in last["td_error"][last["index"] == cell].tolist()


@pytest.mark.parametrize("refresh", [True, False])
@pytest.mark.parametrize(
    ("model", "env"),
    [("dqn_recurrent", "cartpole_hidden_velocity"), ("sac_recurrent", "pendulum_hidden_velocity")],
)
def test_refreshed_states_come_back(fit, model, env, refresh):
    options = (f"model={model}", f"env={env}", f"model.refresh_states={refresh}")
    data, _, served = fit("data=sequence", *options, *REPLAY)
    # The warm-up acts at random and stores initial states, which nothing but a refresh changes.
    assert bool(data.buffer.storage.get(torch.arange(40))["recurrent_state"].any()) == refresh
    if not refresh:
        return
    batch = served[-1]
    cells, states = batch["index"][batch["mask"]], batch["recurrent_state"][batch["mask"]]
    stored = data.buffer.storage.get(cells)["recurrent_state"]
    # Windows that overlap give a cell several times; the last one stays.
    last = {int(cell): row for row, cell in enumerate(cells)}
    rows = torch.tensor(list(last.values()))
    assert torch.equal(stored[rows], states[rows])


def test_velora_buffer_gives_windows_too(fit):
    data, module, served = fit(
        "data=recurrent",
        "model=dqn_recurrent",
        "env=cartpole_hidden_velocity",
        *REPLAY,
        *WINDOWS,
        "data.buffer.sampler.episode_ends=pad",
    )
    assert [batch.shape for batch in served] == [torch.Size([8, 5])] * 6
    assert data.buffer.hidden_dim == module.network.hidden_size


def test_l2r_rollouts(fit):
    data, _, served = fit("data=ppo", "model=ppo", "data.frames_per_batch=32", "data.mini_batch_size=8")
    assert len(served) == 16
    assert all(batch["advantage"].isfinite().all() for batch in served)
    assert (data.buffer.obs_dim, data.buffer.size) == (None, 16)
