"""Logged rows count environment frames, and callbacks find Lightning's step and epoch and our metrics."""

from __future__ import annotations

import csv
import json
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from tensordict import TensorDict

from kit.actor_critic import TinyActorCritic, Unlucky, rollouts
from kit.demonstrated_runs import ppo
from kit.dynamics import model_data
from kit.fake_data import FakeData, Loader
from kit.learners import learner
from kit.ranks import Report, fit_ranks, reports, run_ranks
from kit.replay import dqn, replay_data
from kit.runs import trainer
from torchrl_lightning import DynamicsEnsemble, MLPNetwork, PPOModule, RolloutMetricsLogger
from torchrl_lightning._core.protocols import DataApi
from torchrl_lightning._core.torchrl_compat import logger_connector
from torchrl_lightning.plotting.curves import read_source

pytestmark = [
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
]
RESERVED = {"step", "epoch"}
METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def replay() -> Any:
    return replay_data(updates_per_epoch=4, updates_per_step=1, eval_episodes=1)


def one_update() -> Any:
    return rollouts(updates_per_step=1)


CASES: dict[str, tuple[Any, Any]] = {
    "rollouts": (ppo, one_update),
    "own module": (TinyActorCritic, one_update),
    "replay": (dqn, replay),
    "model": (partial(DynamicsEnsemble, [8]), partial(model_data, eval_episodes=1)),
}


class Seen(L.Callback):
    """Store the names of all metrics in each hook that may write a checkpoint."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def look(self, run: L.Trainer, *_: Any) -> None:
        for metrics in METRICS:
            self.names |= set(getattr(run, metrics))

    on_train_batch_end = on_train_epoch_end = on_validation_end = on_train_end = on_test_end = look


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("filename", [None, "{step}", "{epoch}-{step}-{frames}"])
def test_checkpoints_are_named_by_lightnings_step(case: str, filename: str | None, tmp_path: Path) -> None:
    module, data = (make() for make in CASES[case])
    save = ModelCheckpoint(tmp_path / "kept", filename, save_top_k=-1, every_n_train_steps=2)
    seen = Seen()
    run = trainer(tmp_path, max_epochs=3, callbacks=[save, seen], limit_val_batches=1, logger=CSVLogger(tmp_path))
    run.fit(module, datamodule=data)
    paths = sorted((tmp_path / "kept").iterdir(), key=step_in)
    steps = [torch.load(path, weights_only=True)["global_step"] for path in paths]
    assert steps == list(range(2, run.global_step + 1, 2))
    assert [step_in(path) for path in paths] == steps
    assert not RESERVED & seen.names


def step_in(path: Path) -> int:
    return int(path.stem.partition("step=")[2].partition("-")[0])


@pytest.mark.parametrize("call", ["validate", "test"])
def test_evaluations_return_no_reserved_name(call: str, tmp_path: Path) -> None:
    run, data = trainer(tmp_path, max_epochs=1, limit_val_batches=1, logger=CSVLogger(tmp_path, "", "")), rollouts()
    module = ppo()
    run.fit(module, datamodule=data)
    (returned,) = getattr(run, call)(module, datamodule=data, verbose=False)
    assert "eval/return" in returned
    assert not RESERVED & set(returned)
    assert not RESERVED & set(run.callback_metrics)
    assert steps_of(tmp_path / "metrics.csv", "eval/return")[-1] == 64


def steps_of(path: Path, column: str) -> list[int]:
    with path.open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row.get(column)]


@pytest.mark.parametrize("call", ["validate", "test"])
def test_evaluations_are_means_over_their_episodes(call: str) -> None:
    data = FakeData()
    episodes = {"episode_return": torch.tensor([0.0, 1.0, 8.0]), "episode_length": torch.tensor([1, 3, 8])}
    loader = Loader(1, lambda: iter([TensorDict(episodes, [3])]))
    data.val_dataloader = data.test_dataloader = lambda: loader  # type: ignore[method-assign]
    run = trainer()
    getattr(run, call)(learner("ppo"), datamodule=data, verbose=False)
    found = {name: float(value) for name, value in run.callback_metrics.items()}
    deviation = ((9.0 + 4.0 + 25.0) / 3) ** 0.5
    assert found == pytest.approx({"eval/return": 3.0, "eval/return_std": deviation, "eval/length": 4.0})


class Logging(PPOModule):
    """Call ``self.log`` in training steps, in validation steps and at the end of an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        self.log("mine/update", float(batch_idx), on_step=True, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("mine/longest", batch["episode_length"].float().max(), on_step=True, on_epoch=True, batch_size=1)

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("mine/late", 1.0)


@pytest.mark.parametrize("callbacks", [(), (RolloutMetricsLogger,)])
@pytest.mark.parametrize("every", [1, 3, 50])
def test_logged_rows_count_frames_in_a_user_trainer(callbacks: Any, every: int, tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, "csv", ""), TensorBoardLogger(tmp_path, "board", "")]
    settings: dict[str, Any] = {"logger": loggers, "log_every_n_steps": every, "limit_val_batches": 1}
    run = trainer(tmp_path, max_epochs=3, callbacks=[make() for make in callbacks], **settings)
    run.fit(Logging(MLPNetwork([8])), datamodule=one_update())
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "board")).Reload()
    columns = ["train/entropy", "eval/return", "mine/longest_epoch", "mine/update_epoch", "mine/late"]
    for column in columns + ["train/return", "frames", "frames_per_second"] * len(callbacks):
        assert steps_of(tmp_path / "csv" / "metrics.csv", column) == [64, 128, 192], column
        assert [event.step for event in board.Scalars(column)] == [64, 128, 192], column
    (curve,) = read_source(tmp_path / "csv" / "metrics.csv", "mine/late", "step")
    assert curve.unit == "environment frames"
    rows = steps_of(tmp_path / "csv" / "metrics.csv", "mine/update_step")
    # Every first, third or fiftieth of the 12 updates is logged with the frames that were collected before it.
    assert rows == [64 * (1 + update // 4) for update in range(12) if (update + 1) % every == 0]


@pytest.mark.parametrize("callbacks", [(), (RolloutMetricsLogger,)])
@pytest.mark.parametrize("stop", ["end", "fail"])
def test_trainer_is_left_as_it_was(stop: str, callbacks: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"callbacks": [make() for make in callbacks], "logger": CSVLogger(tmp_path)}
    run = trainer(tmp_path, max_epochs=1, limit_val_batches=1, **settings)
    before = set(vars(logger_connector(run)))
    if stop == "fail":
        with pytest.raises(RuntimeError, match="out of luck"):
            run.fit(Unlucky(), datamodule=rollouts())
    else:
        run.fit(ppo(), datamodule=rollouts())
    assert set(vars(logger_connector(run))) == before


def test_frames_of_a_foreign_datamodule_are_the_x_axis(tmp_path: Path) -> None:
    module, data = learner("ppo"), FakeData(3)
    run = trainer(tmp_path, max_epochs=2, limit_val_batches=1, logger=CSVLogger(tmp_path, "", ""))
    run.fit(module, datamodule=data)
    assert "step" not in run.callback_metrics
    assert steps_of(tmp_path / "metrics.csv", "eval/return")[-1] == data.frames
    assert steps_of(tmp_path / "metrics.csv", "train/entropy")[-1] == data.frames


def test_step_that_a_module_logs_is_not_changed(tmp_path: Path) -> None:
    class Stepping(TinyActorCritic):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log_dict({"mine": 1.0, "step": 7.0}, batch_size=1)

    run = trainer(tmp_path, max_epochs=1, limit_val_batches=1, logger=CSVLogger(tmp_path, "", ""))
    run.fit(Stepping(), datamodule=rollouts())
    assert steps_of(tmp_path / "metrics.csv", "mine") == [7]
    assert run.callback_metrics["step"] == 7.0


def test_lightning_step_is_used_without_frames(tmp_path: Path) -> None:
    class Plain(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("mine", 1.0)
            return super().training_step(batch, batch_idx)

    run = trainer(tmp_path, max_epochs=1, callbacks=[RolloutMetricsLogger()], logger=CSVLogger(tmp_path, "", ""))
    run.fit(Plain(), datamodule=BoringDataModule())
    assert steps_of(tmp_path / "metrics.csv", "mine")[:3] == [0, 1, 2]
    (curve,) = read_source(tmp_path / "metrics.csv", "mine", "step")
    assert curve.unit == "updates"


def test_clock_is_read_only_for_logged_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Logging(TinyActorCritic):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("mine/loss", loss, on_step=True, on_epoch=True)
            return loss

    asked: list[None] = []
    monkeypatch.setattr(DataApi, "clock", property(lambda data: asked.append(None) or (64, "frames")))
    settings: dict[str, Any] = {"callbacks": [RolloutMetricsLogger()], "logger": DummyLogger(), "log_every_n_steps": 8}
    run = trainer(tmp_path, max_epochs=1, limit_val_batches=0, **settings)
    run.fit(Logging(), datamodule=rollouts(num_epochs=8, updates_per_step=1))
    # Two of 16 updates and the epoch read the clock; the callback reads it at the start and for its row.
    assert len(asked) == 5


def tell(module: Any, data: Any) -> dict[str, Any]:
    metrics = {name: float(value) for name, value in module.trainer.callback_metrics.items()}
    return {"metrics": metrics, "own": data.metrics(), "frames": data.frames}


def on_two_ranks(folder: Path) -> None:
    loggers = [CSVLogger(folder, "csv", ""), TensorBoardLogger(folder, "board", "")]
    data = rollouts(num_envs=2, frames_per_batch=32, mini_batch_size=16, eval_episodes=1)
    save = ModelCheckpoint(folder / "kept", save_top_k=-1, every_n_train_steps=2, monitor="train/entropy")
    best = ModelCheckpoint(folder / "best", monitor="train/return", mode="max", save_on_train_epoch_end=True)
    fit_ranks(ppo(), data, Report(folder, "told", tell), save, best, max_epochs=3, limit_val_batches=1, logger=loggers)


def test_ranks_monitor_the_same_numbers_and_name_the_same_files(tmp_path: Path) -> None:
    run_ranks(on_two_ranks, tmp_path)
    first, second = reports(tmp_path, "told")
    assert not RESERVED & set(first["metrics"])
    assert first["frames"] == 192
    names = ("train/return", "train/entropy", "eval/return", "frames")
    assert [first["metrics"][name] for name in names] == [second["metrics"][name] for name in names]
    assert steps_of(tmp_path / "csv" / "metrics.csv", "eval/return") == [64, 128, 192]
    assert (tmp_path / "best").exists()
    json.dumps(first)
