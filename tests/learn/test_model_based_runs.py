"""Whole runs of an ensemble over a DynamicsDataModule: collecting by planning, resuming, loading, evaluating."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import CEMPlanner

from kit.runs import SaveAt, trainer
from torchrl_lightning import DynamicsDataModule, MBReplayBuffer, load_policy
from torchrl_lightning.collectors import spawn_seed
from torchrl_lightning.learn import CrossEntropyPlanner, DynamicsEnsemble, RandomShootingPlanner

TINY = partial(CrossEntropyPlanner, horizon=2, candidates=8, elites=2, iterations=2)


def data(**kwargs: Any) -> DynamicsDataModule:
    settings: dict[str, Any] = {
        "buffer": partial(MBReplayBuffer, 1000),
        "batch_size": 16,
        "num_members": 3,
        "warmup_frames": 40,
        "frames_per_fit": 10,
        "max_epochs_per_fit": 4,
        "total_frames": 60,
        # An unfinished episode is lost in a resumed run.
        "reset_at_each_batch": True,
        "eval_episodes": 1,
        "seed": 0,
    }
    return DynamicsDataModule("Pendulum-v1", **(settings | kwargs))


def module(**kwargs: Any) -> DynamicsEnsemble:
    torch.manual_seed(0)
    settings = {"planner": TINY, "learning_rate": 0.01, "patience": 2, "num_elites": 2}
    return DynamicsEnsemble([8], **(settings | kwargs))


def fit(agent: DynamicsEnsemble, stream: DynamicsDataModule, epochs: int = -1, **kwargs: Any) -> L.Trainer:
    run = trainer(max_epochs=epochs, callbacks=kwargs.pop("callbacks", []))
    run.fit(agent, datamodule=stream, **kwargs)
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
def test_a_run_collects_by_planning_and_fits_what_it_finds(planner: Any) -> None:
    agent, stream = module(planner=planner), data(num_envs=2)
    run = fit(agent, stream)
    assert stream.frames == 60
    assert stream.fits == 3
    assert run.callback_metrics["val/error"] > 0.0
    assert agent.best_errors.isfinite().all()
    torch.testing.assert_close(agent.ensemble.input_mean.double(), stream.targets.input_scaler.mean, atol=1e-6, rtol=0)
    assert torch.equal(agent.world_model.ensemble.input_std, agent.ensemble.input_std)
    stream.close()


def test_a_reward_function_is_not_learnt() -> None:
    stream = data(reward=lambda observation, action, following: following[..., 0])
    agent = module()
    fit(agent, stream, epochs=1)
    assert agent.ensemble.outputs == 3


@pytest.mark.parametrize(
    ("hook", "count"), [("on_train_batch_end", 2), ("on_validation_end", 1), ("on_train_epoch_end", 1)]
)
@pytest.mark.parametrize("epoch", [1, 3, 4])
def test_resuming_in_the_middle_of_a_fit_is_exact(tmp_path: Path, hook: str, count: int, epoch: int) -> None:
    # Fits begin in epochs 0, 4 and later; the members are judged in each.
    whole, stream = module(), data()
    fit(whole, stream, 9)
    part = module()
    fit(part, data(), 9, callbacks=[SaveAt(tmp_path / "part.ckpt", hook, count, epoch=epoch)])
    resumed, again = module(), data()
    fit(resumed, again, 9, ckpt_path=tmp_path / "part.ckpt")
    assert (again.frames, again.fits) == (stream.frames, stream.fits) == (60, 3)
    expected, actual = whole.state_dict(), resumed.state_dict()
    assert [name for name in expected if not torch.equal(expected[name], actual[name])] == []
    assert torch.equal(resumed.policy.generator.get_state(), whole.policy.generator.get_state())
    assert resumed.epochs_waited == whole.epochs_waited
    assert not torch.equal(part.best_errors, whole.best_errors)


def test_a_checkpoint_is_all_that_acting_needs(tmp_path: Path) -> None:
    agent, stream = module(), data()
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
    policy = load_policy(tmp_path / "earlier.ckpt", module(planner=TINY))
    assert torch.equal(policy(start.clone())["action"], policy(start.clone())["action"])
    assert spawn_seed(0, "planner") == agent.policy.generator.initial_seed()
    run.validate(agent, datamodule=stream, verbose=False)
    assert run.callback_metrics["eval/return"] < 0.0
    stream.close()
