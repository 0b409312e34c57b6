from __future__ import annotations

import math
import pickle
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import yaml
from hydra.utils import instantiate
from lightning.pytorch.trainer.states import TrainerFn

from kit.runs import trainer
from torchrl_lightning import StopAtScore
from torchrl_lightning._hydra.paths import CONF_DIR


class Scored(L.LightningModule):
    """A module that logs given scores, one for each epoch."""

    evaluation_metrics = ("eval/return", "eval/length")

    def __init__(self, scores, name="eval/return"):
        super().__init__()
        self.scores, self.name, self.weight = scores, name, torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        return self.weight * 0

    def validation_step(self, batch, batch_idx):
        self.log(self.name, self.scores[min(self.current_epoch, len(self.scores) - 1)], batch_size=1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def configured(**settings):
    described = yaml.safe_load((CONF_DIR / "callbacks" / "stop_at_score.yaml").read_text())["stop"]
    return instantiate({**described, **settings})


def epochs_until_the_end(stop, module, folder, **settings):
    run = trainer(folder, max_epochs=4, callbacks=[stop], limit_val_batches=1, **settings)
    run.fit(module, train_dataloaders=[0], val_dataloaders=[0])
    return run.current_epoch


def test_training_ends_at_the_first_evaluation_that_reaches_a_score(tmp_path):
    assert epochs_until_the_end(configured(stopping_threshold=4.0), Scored([3.0, 2.0, 5.0, 9.0]), tmp_path) == 3


@pytest.mark.parametrize("threshold", [500, 0.7, 0.07, 1e-7, 0.0, -0.3, -200.0, 123456.789])
def test_training_ends_at_a_score_that_equals_the_threshold(threshold, tmp_path):
    scores = [threshold - 1.0, torch.tensor(threshold, dtype=torch.float32), threshold - 1.0]
    assert epochs_until_the_end(configured(stopping_threshold=threshold), Scored(scores), tmp_path) == 2


@pytest.mark.parametrize(("threshold", "expected"), [(math.inf, 4), (-math.inf, 1), (0.5 + 2e-6, 4), (0.5 + 5e-7, 1)])
def test_training_continues_below_the_threshold(threshold, expected, tmp_path):
    assert epochs_until_the_end(StopAtScore(threshold), Scored([0.5]), tmp_path) == expected


def test_sanity_check_and_evaluations_without_episodes_do_not_end_training(tmp_path):
    assert epochs_until_the_end(StopAtScore(1.0), Scored([5.0]), tmp_path, num_sanity_val_steps=1) == 1
    assert epochs_until_the_end(StopAtScore(1.0), Scored([5.0], "val/error"), tmp_path) == 4


@pytest.mark.parametrize("threshold", [math.nan, "high", None])
def test_threshold_other_than_a_number_is_refused(threshold):
    with pytest.raises(ValueError, match="stopping_threshold"):
        StopAtScore(threshold)


def test_misspelt_monitor_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"monitor=eval/retrun.*eval/return"):
        epochs_until_the_end(StopAtScore(1.0, monitor="eval/retrun"), Scored([1.0]), tmp_path)


def test_monitor_that_no_evaluation_logs_is_refused_at_the_first_one(tmp_path):
    with pytest.raises(ValueError, match="monitor=mine"):
        epochs_until_the_end(StopAtScore(1.0, monitor="mine"), Scored([1.0]), tmp_path)


def test_user_metric_is_monitored(tmp_path):
    assert epochs_until_the_end(StopAtScore(1.0, monitor="mine"), Scored([0.0, 1.0], "mine"), tmp_path) == 2


@pytest.mark.parametrize("metrics", [{}, {"train/return": 3.0}, {"mine": 0.0}, {"mine": math.nan}, {"mine": 2.0}])
def test_rank_without_the_score_reduces_as_the_others(metrics):
    decisions = []

    def reduce(decision, all):
        decisions.append((decision, all))
        return True  # another rank reaches the score

    run = SimpleNamespace(
        state=SimpleNamespace(fn=TrainerFn.FITTING),
        sanity_checking=False,
        should_stop=False,
        callback_metrics={name: torch.tensor(value) for name, value in metrics.items()},
        strategy=SimpleNamespace(reduce_boolean_decision=reduce),
    )
    StopAtScore(1.0, monitor="mine").on_validation_end(run, None)
    assert decisions == [(metrics.get("mine") == 2.0, False)]
    assert run.should_stop


def test_callback_can_be_pickled():
    stop = pickle.loads(pickle.dumps(StopAtScore(3, monitor="mine")))
    assert (stop.stopping_threshold, stop.monitor) == (3.0, "mine")
