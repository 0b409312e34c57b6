"""Runs of an ensemble with a DynamicsDataModule: collection by planning, loading, evaluation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import FlattenObservation
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import CEMPlanner

from kit.counting import ContinuousEnv
from kit.dynamics import model_data
from kit.lines import Line
from kit.runs import trainer
from torchrl_lightning import (
    BranchedReplay,
    EnvironmentRecipe,
    ExperienceBuffer,
    MBPOModule,
    ReplayDataModule,
    WorldModelFit,
    load_policy,
)
from torchrl_lightning._core.errors import IncompatibleError
from torchrl_lightning.agents import CrossEntropyPlanner, DynamicsEnsemble, RandomShootingPlanner
from torchrl_lightning.environments import spawn_seed

TINY = partial(CrossEntropyPlanner, horizon=2, candidates=8, elites=2, iterations=2)


def module(**kwargs: Any) -> DynamicsEnsemble:
    torch.manual_seed(0)
    settings = {"planner": TINY, "learning_rate": 0.01, "patience": 2, "num_elites": 2}
    return DynamicsEnsemble([8], **(settings | kwargs))


def fit(agent: L.LightningModule, stream: L.LightningDataModule, epochs: int = -1) -> L.Trainer:
    run = trainer(max_epochs=epochs)
    run.fit(agent, datamodule=stream)
    stream.close()
    return run


@pytest.mark.parametrize(
    "planner",
    [
        TINY,
        partial(RandomShootingPlanner, horizon=2, candidates=8),
        partial(CEMPlanner, planning_horizon=2, optim_steps=2, num_candidates=8, top_k=2),
    ],
)
def test_run_collects_by_planning_and_fits(planner: Any) -> None:
    agent, stream = module(planner=planner), model_data(num_envs=2)
    run = fit(agent, stream)
    assert stream.frames == 60
    assert stream.fits == 3
    assert run.callback_metrics["val/error"] > 0.0
    assert agent.best_errors.isfinite().all()
    torch.testing.assert_close(agent.ensemble.input_mean.double(), stream.targets.input_scaler.mean, atol=1e-6, rtol=0)
    assert torch.equal(agent.world_model.ensemble.input_std, agent.ensemble.input_std)
    stream.close()


def test_reward_function_is_not_learnt() -> None:
    stream = model_data(reward=lambda observation, action, next_observation: next_observation[..., 0])
    agent = module()
    fit(agent, stream, epochs=1)
    assert agent.ensemble.outputs == 3


class Ledge(Line):
    """Move by the action, and terminate outside [-1, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space, self.position = spaces.Box(-1.0, 1.0, (1,), np.float32), 0.0

    def reset(self, **kwargs: Any) -> Any:
        self.position = 0.0
        return np.zeros(1, np.float32), super().reset(**kwargs)[1]

    def step(self, action: Any) -> Any:
        self.position += float(action[0])
        return np.full(1, self.position, np.float32), 1.0, abs(self.position) > 1.0, False, {}


def test_terminations_are_learnt_in_a_few_hundred_steps() -> None:
    fits = {"warmup_frames": 240, "frames_per_fit": 20, "total_frames": 260, "max_epochs_per_fit": 12}
    stream = model_data(env=Ledge, terminated=True, reset_at_each_batch=False, **fits)
    agent = module(learning_rate=0.03, patience=12)
    run = fit(agent, stream)
    assert 150 < run.global_step < 350
    position, action = torch.rand(500, 1) * 2.0 - 1.0, torch.rand(500, 1) * 2.0 - 1.0
    ended = agent.world_model.step(position, action)[2]
    is_outside = ((position + action).abs() > 1.0).squeeze(1)
    assert 30 < int(is_outside.sum()) < 200
    assert (ended == is_outside).float().mean() > 0.95


def test_checkpoint_restores_the_policy(tmp_path: Path) -> None:
    agent, stream = module(), model_data()
    run = fit(agent, stream, 2)
    run.save_checkpoint(tmp_path / "last.ckpt")
    policy = load_policy(tmp_path / "last.ckpt", module(planner=TINY))
    start = stream.specs.observation.rand([3])
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        expected = agent.policy(start.clone())["action"]
    for _ in range(2):
        assert torch.equal(policy(start.clone())["action"], expected)
    assert len(list(policy.parameters())) == len(list(agent.world_model.parameters()))
    copied = load_policy(tmp_path / "last.ckpt", module(planner=TINY))
    for parameter in copied.parameters():
        parameter.data.add_(0.1)
    assert not torch.equal(copied(start.clone())["action"], expected)
    copied.load_state_dict(policy.state_dict())
    assert torch.equal(copied(start.clone())["action"], expected)
    earlier = torch.load(tmp_path / "last.ckpt", weights_only=True)
    del earlier["dynamics_ensemble"]["planner"]
    torch.save(earlier, tmp_path / "earlier.ckpt")
    with pytest.raises(ValueError, match="planner"):
        load_policy(tmp_path / "earlier.ckpt", module(planner=TINY))
    assert spawn_seed(0, "planner") == agent.policy.generator.initial_seed()
    run.validate(agent, datamodule=stream, verbose=False)
    assert run.callback_metrics["eval/return"] < 0.0
    stream.close()


# ---------------------------------------------------------------------- observations of all kinds


def planning(env: Any) -> tuple[Any, Any]:
    return module(), model_data(env=env)


def imagining(env: Any) -> tuple[Any, Any]:
    source = partial(BranchedReplay, branches_per_fit=20, frames_per_fit=20)
    frames = {"warmup_frames": 20, "total_frames": 40, "frames_per_batch": 2, "batch_size": 8, "num_envs": 2}
    agent = MBPOModule(dynamics=WorldModelFit([8], num_members=2, num_elites=2, max_epochs=2))
    return agent, ReplayDataModule(env, buffer=ExperienceBuffer, source=source, eval_episodes=1, **frames)


def observing(kind: str) -> Any:
    return partial(ContinuousEnv, kind=kind, length=1000, limit=5)


@pytest.mark.parametrize("run", [planning, imagining])
@pytest.mark.parametrize(("kind", "key"), [("discrete", "'observation'"), ("dict", r"\('inner', 'count'\)")])
def test_discrete_observations_raise_before_collection(run: Any, kind: str, key: str) -> None:
    agent, stream = run(observing(kind))
    with pytest.raises(IncompatibleError, match=rf"{key}.*FlattenObservation"):
        fit(agent, stream)
    assert stream.frames == 0
    stream.close()


@pytest.mark.parametrize("run", [planning, imagining])
@pytest.mark.parametrize(
    "env",
    [
        observing("scalar"),
        lambda: FlattenObservation(observing("discrete")()),
        lambda: FlattenObservation(observing("dict")()),
        EnvironmentRecipe(observing("dict"), drop=["inner"]),
    ],
    ids=["scalar", "one-hot", "flattened", "dropped"],
)
def test_observations_of_any_shape_and_dtype_are_learnt(run: Any, env: Any) -> None:
    agent, stream = run(env)
    fit(agent, stream)
    assert stream.frames == stream.total_frames
