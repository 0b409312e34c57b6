"""Lightning's callbacks monitor every logged metric, also if it is logged from the first finished episode on."""

from __future__ import annotations

import logging
import math
import re
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import lightning as L
import numpy as np
import pytest
import torch
from gymnasium import spaces
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger

from kit.actor_critic import TinyActorCritic, rollouts
from kit.demonstrated_runs import ppo
from kit.dynamics import model_data
from kit.replay import dqn, replay_data
from kit.runs import trainer
from torchrl_lightning import (
    BestCheckpoint,
    DynamicsEnsemble,
    GAEBuffer,
    MLPNetwork,
    OnPolicyDataModule,
    PPOModule,
    RolloutMetricsLogger,
)
from torchrl_lightning._core.errors import UserError

pytestmark = [
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
]


class Long(gym.Env[Any, Any]):
    """Episodes of 40 steps with reward 1."""

    observation_space, action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)
    limit = 40

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.zeros(2, np.float32), 1.0, False, self.steps == self.limit, {}


class Endless(Long):
    limit = 10**9


class Rows(DummyLogger):
    """A logger that stores the names of the logged metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.names |= set(metrics)


def long(env: Any = Long, **settings: Any) -> OnPolicyDataModule:
    """Return data with rollouts of 16 steps, so the first episodes end in the third rollout."""
    sizes = {"num_envs": 2, "frames_per_batch": 32, "num_mini_batch": 1, "num_epochs": 2, "eval_env": Long}
    return OnPolicyDataModule(env, **{**sizes, "eval_episodes": 1, "seed": 0, "updates_per_step": 1, **settings})


CASES: dict[str, Any] = {
    "rollouts": (ppo, partial(rollouts, updates_per_step=1)),
    "several updates a step": (ppo, partial(rollouts, updates_per_step=4)),
    "own module": (TinyActorCritic, rollouts),
    "replay": (dqn, partial(replay_data, updates_per_epoch=40)),
    "model": (partial(DynamicsEnsemble, [8]), model_data),
}


@pytest.mark.parametrize("case", CASES)
def test_logged_metrics_are_available_to_callbacks(case: str, tmp_path: Path) -> None:
    make, data = CASES[case]
    rows = Rows()
    run = trainer(tmp_path, max_epochs=3, limit_val_batches=1, logger=rows, callbacks=[RolloutMetricsLogger()])
    run.fit(make(), datamodule=data())
    assert any(name.startswith("train/") for name in rows.names) or case == "own module"
    assert {"frames", "frames_per_second"} <= rows.names
    assert rows.names - set(run.callback_metrics) == set()
    assert all(value.ndim == 0 for value in run.callback_metrics.values())


MONITORS = ["train/return", "train/length", "train/entropy", "train/grad_norm", "eval/return", "frames"]


class Watching(EarlyStopping):
    """Store the monitored values."""

    def __init__(self, monitor: str, **settings: Any) -> None:
        super().__init__(monitor, patience=100, mode="max", **settings)
        self.seen: list[float] = []

    def _evaluate_stopping_criteria(self, current: Any) -> Any:
        self.seen.append(float(current))
        return super()._evaluate_stopping_criteria(current)


@pytest.mark.parametrize("at_epoch_end", [True, False])
@pytest.mark.parametrize("logs", [(), (RolloutMetricsLogger,)])
@pytest.mark.parametrize("monitor", MONITORS)
def test_early_stopping_and_checkpoints_find_the_metric_in_the_first_epoch(
    monitor: str, logs: Any, at_epoch_end: bool, tmp_path: Path
) -> None:
    stop = Watching(monitor, check_on_train_epoch_end=at_epoch_end)
    settings: dict[str, Any] = {"monitor": monitor, "mode": "max", "save_on_train_epoch_end": at_epoch_end}
    save = ModelCheckpoint(tmp_path / "kept", save_top_k=-1, filename="{epoch}", **settings)
    callbacks = [stop, save, *(make() for make in logs)]
    run = trainer(tmp_path, max_epochs=3, callbacks=callbacks, limit_val_batches=1)
    module = ppo()
    run.fit(module, datamodule=rollouts())
    assert len(stop.seen) == 3
    assert len(save.best_k_models) == 3
    assert all(math.isfinite(value) for value in stop.seen)
    assert stop.seen[-1] == float(run.callback_metrics[monitor])
    if monitor in module.last_epoch_metrics:
        assert stop.seen[-1] == module.last_epoch_metrics[monitor]


def test_early_stopping_ends_training_by_the_returns_of_training(tmp_path: Path) -> None:
    stop = EarlyStopping("train/return", mode="max", stopping_threshold=5.0, check_on_train_epoch_end=True)
    run = trainer(tmp_path, max_epochs=9, callbacks=[stop])
    run.fit(ppo(), datamodule=rollouts())
    assert run.current_epoch == 1


@pytest.mark.parametrize("at_epoch_end", [True, False])
@pytest.mark.parametrize("kind", [ModelCheckpoint, BestCheckpoint])
def test_callbacks_wait_for_the_first_finished_episode(kind: Any, at_epoch_end: bool, tmp_path: Path) -> None:
    stop = Watching("train/return", check_on_train_epoch_end=at_epoch_end)
    settings: dict[str, Any] = {"mode": "max", "save_on_train_epoch_end": at_epoch_end}
    save = kind(tmp_path / "kept", monitor="train/return", **settings)
    run = trainer(tmp_path, max_epochs=4, callbacks=[stop, save], limit_val_batches=1)
    run.fit(ppo(), datamodule=long())
    assert stop.seen == [40.0, 40.0]
    assert stop.strict
    assert save.save_top_k == 1
    assert save.best_model_score == 40.0


def test_early_stopping_waits_for_the_first_evaluation(tmp_path: Path) -> None:
    stop = Watching("eval/return", check_on_train_epoch_end=True)
    run = trainer(tmp_path, max_epochs=4, callbacks=[stop], limit_val_batches=1, check_val_every_n_epoch=2)
    run.fit(ppo(), datamodule=long())
    assert stop.seen == [40.0] * 3


@pytest.mark.parametrize("metric", ["train/nothing", "eval/success"])
def test_metric_that_is_never_logged_is_refused_by_lightning(metric: str, tmp_path: Path) -> None:
    run = trainer(tmp_path, max_epochs=2, callbacks=[EarlyStopping(metric)], limit_val_batches=1)
    with pytest.raises(RuntimeError, match=metric):
        run.fit(ppo(), datamodule=rollouts())


def test_run_without_a_finished_episode_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stop = EarlyStopping("train/return", check_on_train_epoch_end=True)
    run = trainer(tmp_path, max_epochs=2, callbacks=[stop])
    with caplog.at_level(logging.WARNING, "torchrl_lightning"):
        run.fit(ppo(), datamodule=long(Endless))
    told = [record.message for record in caplog.records if "monitor=" in record.message]
    assert len(told) == 1
    assert told[0].startswith("monitor=train/return of EarlyStopping had no value")
    assert stop.strict


@pytest.mark.parametrize("monitor", ["train/retrun", "train/lenght"])
def test_misspelt_monitor_of_episodes_is_refused_before_training(monitor: str, tmp_path: Path) -> None:
    run = trainer(tmp_path, max_epochs=1, callbacks=[BestCheckpoint(tmp_path, monitor=monitor)])
    with pytest.raises(UserError, match=rf"monitor={monitor}.*train/"):
        run.fit(ppo(), datamodule=rollouts())


def test_checkpoint_within_an_epoch_waits_for_a_metric_of_its_end(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, "{step}", monitor="train/entropy", save_top_k=-1, every_n_train_steps=2)
    run = trainer(tmp_path, max_epochs=2, callbacks=[save])
    run.fit(ppo(), datamodule=rollouts(updates_per_step=1))
    assert sorted(path.name for path in tmp_path.glob("step=*")) == ["step=6.ckpt", "step=8.ckpt"]
    torch.load(tmp_path / "step=8.ckpt", weights_only=True)


def monitored(tmp_path: Path, monitor: str, module: Any, data: Any, *callbacks: Any) -> None:
    """Fit without batches, with a checkpoint callback that monitors a metric."""
    best = BestCheckpoint(tmp_path, monitor=monitor)
    run = trainer(tmp_path, max_epochs=1, callbacks=[best, *callbacks], limit_train_batches=0, limit_val_batches=0)
    run.fit(module, datamodule=data)


@pytest.mark.parametrize("settings", [{"every_n_train_steps": 1}, {"train_time_interval": timedelta(0)}])
def test_checkpoint_is_written_as_soon_as_its_metric_exists(settings: Any, tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, "{step}", monitor="train/return", mode="max", save_top_k=-1, **settings)
    run = trainer(tmp_path, max_epochs=4, callbacks=[save], limit_val_batches=0)
    run.fit(ppo(), datamodule=long())
    assert sorted(path.name for path in tmp_path.glob("step=*")) == [f"step={step}.ckpt" for step in (5, 6, 7, 8)]


@pytest.mark.parametrize("settings", [{"every_n_train_steps": 1}, {"train_time_interval": timedelta(0)}])
def test_evaluation_within_an_epoch_stops_no_checkpoint(settings: Any, tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, "{step}", monitor="train/return", mode="max", save_top_k=-1, **settings)
    run = trainer(tmp_path, max_epochs=3, callbacks=[save], val_check_interval=1)
    run.fit(ppo(), datamodule=long())
    assert sorted(path.name for path in tmp_path.glob("step=*")) == ["step=5.ckpt", "step=6.ckpt"]


@pytest.mark.parametrize(
    ("settings", "callback"),
    [
        ({"check_val_every_n_epoch": 10}, partial(EarlyStopping, "eval/return")),
        ({"check_val_every_n_epoch": 10}, partial(ModelCheckpoint, monitor="eval/return")),
        ({}, partial(ModelCheckpoint, monitor="nothing", every_n_train_steps=1)),
        ({}, partial(EarlyStopping, "nothing", strict=False)),
    ],
)
def test_callback_that_never_got_its_metric_warns(
    settings: Any, callback: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part = callback()
    run = trainer(tmp_path, callbacks=[part, EarlyStopping("train/entropy", patience=9)], **settings)
    with caplog.at_level(logging.WARNING, "torchrl_lightning"):
        run.fit(ppo(), datamodule=rollouts())
    (message,) = [record.message for record in caplog.records if "monitor=" in record.message]
    assert message.startswith(f"monitor={part.monitor} of {type(part).__name__} had no value")


@pytest.mark.parametrize("callback", [EarlyStopping, lambda monitor: ModelCheckpoint(monitor=monitor)])
def test_fit_of_a_world_model_warns_of_metrics_of_episodes(
    callback: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(tmp_path, max_epochs=2, callbacks=[callback("eval/return")], limit_val_batches=1)
    run.fit(DynamicsEnsemble([8]), datamodule=model_data())
    assert sum("monitor=eval/return of" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("monitor", ["train/foo", "train/loss_qvalue", "train/", "train/eval"])
@pytest.mark.parametrize("case", ["rollouts", "several updates a step"])
def test_unknown_metric_of_training_is_refused_before_training(case: str, monitor: str, tmp_path: Path) -> None:
    make, data = CASES[case]
    with pytest.raises(UserError, match=rf"^monitor={monitor}") as error:
        monitored(tmp_path, monitor, make(), data(), RolloutMetricsLogger())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("monitor", "meant"),
    [
        ("train/entrpy", "did you mean train/entropy?"),
        ("train/kl_aprox", "did you mean train/kl_approx?"),
        ("train/foo", "known are train/clip_fraction, train/critic_grad_norm, train/entropy, train/episodes, "),
    ],
)
def test_error_names_the_similar_metric_or_all_metrics(monitor: str, meant: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(meant)):
        monitored(tmp_path, monitor, ppo(), rollouts())


class OwnPPO(PPOModule):
    """A module that logs an additional metric."""

    def epoch_metrics(self) -> dict[str, float]:
        return {**super().epoch_metrics(), "mine": 1.0}


class OwnBuffer(GAEBuffer):
    """A buffer that logs an additional metric."""

    def metrics(self, policy_version: int | None = None) -> dict[str, float]:
        return {**super().metrics(policy_version), "train/mine": 1.0}


class OwnCallback(L.Callback):
    """A callback that logs an additional metric."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.callback_metrics["train/mine"] = torch.tensor(1.0)


OWN: dict[str, Any] = {
    "module": (partial(OwnPPO, MLPNetwork([8])), rollouts, ()),
    "module from scratch": (TinyActorCritic, rollouts, ()),
    "buffer": (ppo, partial(rollouts, buffer=OwnBuffer), ()),
    "collector": (ppo, partial(rollouts, collector=lambda *_, **__: None), ()),
    "callback": (ppo, rollouts, (OwnCallback(),)),
}


@pytest.mark.parametrize("case", OWN)
def test_metric_that_user_code_may_log_gives_a_warning(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, data, callbacks = OWN[case]
    with caplog.at_level(logging.WARNING, "torchrl_lightning"):
        monitored(tmp_path, "train/mine", make(), data(), *callbacks)
    (said,) = [record.message for record in caplog.records if "monitor=" in record.message]
    assert said.startswith("monitor=train/mine is not a metric of torchrl-lightning; known are ")


@pytest.mark.parametrize("case", [case for case in OWN if case not in ("collector", "module from scratch")])
def test_metric_that_user_code_logs_is_monitored(case: str, tmp_path: Path) -> None:
    make, data, callbacks = OWN[case]
    best = BestCheckpoint(tmp_path, monitor="train/mine", save_on_train_epoch_end=True)
    trainer(tmp_path, max_epochs=1, callbacks=[*callbacks, best], limit_val_batches=1).fit(make(), datamodule=data())
    assert best.best_model_score == 1.0


def test_known_metric_of_training_is_accepted_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "torchrl_lightning"):
        for name in (*PPOModule.training_metrics, "train/return", "train/episodes"):
            monitored(tmp_path, name, ppo(), rollouts())
    assert not [record.message for record in caplog.records if "monitor=" in record.message]
