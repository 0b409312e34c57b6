"""What a module logs by ``self.log`` stands over environment frames, beside our rows."""

from __future__ import annotations

import csv

import pytest
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger

from kit.actor_critic import TinyActorCritic, Unlucky, fit, rollouts
from kit.runs import trainer
from torchrl_lightning import ExperienceLog
from torchrl_lightning.cli.curves import read_source

pytestmark = pytest.mark.filterwarnings("ignore:The number of training batches")


class Logging(TinyActorCritic):
    """Somebody's module that logs wherever Lightning lets it."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("mine/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("mine/longest", batch["episode_length"].float().max(), on_step=True, on_epoch=True)


def filled(path, column):
    """The steps of the rows in which a column of a file is filled."""
    with path.open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row.get(column)]


FRAMES = [64, 128, 192]


def test_steps_epochs_and_validation_are_logged_over_frames(tmp_path):
    loggers = [CSVLogger(tmp_path, "csv", ""), TensorBoardLogger(tmp_path, "board", "")]
    settings = {"logger": loggers, "log_every_n_steps": 2, "limit_val_batches": 1}
    fit(tmp_path, None, Logging(), max_epochs=3, callbacks=[ExperienceLog()], **settings)
    path = tmp_path / "csv" / "metrics.csv"
    for column in ("frames_per_second", "frames", "train/return"):
        assert filled(path, column) == FRAMES, column
    # An epoch has four updates of one rollout, of which every second one is logged.
    assert filled(path, "mine/loss_step") == [64, 64, 128, 128, 192, 192]
    for column in ("mine/loss_epoch", "mine/longest_step", "mine/longest_epoch", "eval/return"):
        assert filled(path, column) == FRAMES, column
    (curve,) = read_source(path, "mine/loss_step", "step")
    assert curve.unit == "environment frames"
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [event.step for event in board.Scalars("mine/loss_epoch")] == FRAMES
    assert {event.step for event in board.Scalars("mine/loss_step")} == set(FRAMES)


def test_a_step_of_ones_own_stays(tmp_path):
    class Stepping(Logging):
        def validation_step(self, batch, batch_idx):
            self.log_dict({"mine/return": batch["episode_return"].mean(), "step": 7.0}, batch_size=len(batch))

    rows = []

    class Rows(DummyLogger):
        def log_metrics(self, metrics, step=None):
            rows.append((step, set(metrics)))

    fit(tmp_path, None, Stepping(), max_epochs=1, callbacks=[ExperienceLog()], logger=Rows(), limit_val_batches=1)
    assert (7, {"mine/return"}) in rows


def test_without_frames_lightning_counts(tmp_path):
    class Plain(BoringModel):
        def training_step(self, batch, batch_idx):
            self.log("mine/loss", 1.0)
            return super().training_step(batch, batch_idx)

    run = trainer(tmp_path, max_epochs=1, callbacks=[ExperienceLog()], logger=CSVLogger(tmp_path, "plain", ""))
    run.fit(Plain(), datamodule=BoringDataModule())
    path = tmp_path / "plain" / "metrics.csv"
    assert filled(path, "mine/loss")[:3] == [0, 1, 2]
    (curve,) = read_source(path, "mine/loss", "step")
    assert curve.unit == "updates"


def test_a_trainer_is_left_as_it_was(tmp_path):
    run = trainer(tmp_path, max_epochs=1, limit_val_batches=0, callbacks=[ExperienceLog()])
    before = {*vars(run._logger_connector)}
    with pytest.raises(RuntimeError, match="out of luck"):
        run.fit(Unlucky(), datamodule=rollouts())
    assert {*vars(run._logger_connector)} == before
    run.fit(Logging(), datamodule=rollouts())
    assert {*vars(run._logger_connector)} == before


def test_only_rows_cost_a_call(tmp_path, monkeypatch):
    asked = []
    for module in ("_logging", "callbacks.experience_log"):
        name = f"torchrl_lightning.{module}.clock_of"
        monkeypatch.setattr(name, lambda data: asked.append(1) or (64, "frames"))
    settings = {"callbacks": [ExperienceLog()], "logger": DummyLogger(), "log_every_n_steps": 8}
    fit(tmp_path, rollouts(num_epochs=8), Logging(), max_epochs=1, **settings)
    # Of 16 updates two are logged, and the epoch; besides the callback asks when training begins and for its own row.
    assert len(asked) == 5
