from __future__ import annotations

from types import SimpleNamespace

import lightning as L
import pytest
import torch

from kit.runs import trainer
from torchrl_lightning import BestCheckpoint


class Scored(L.LightningModule):
    """A module that logs given scores and counts the epochs in its weight."""

    def __init__(self, scores):
        super().__init__()
        self.scores, self.weight = scores, torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.weight.data += 1
        return self.weight * 0

    def validation_step(self, batch, batch_idx):
        self.log("eval/return", self.scores[self.current_epoch], batch_size=1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize(
    ("scores", "expected"), [([1.0, 3.0, 2.0], 2), ([5.0, 5.0, 4.0], 2), ([5.0, 4.0, 5.0], 3), ([1.0, 2.0, 3.0], 3)]
)
def test_latest_of_the_best_is_kept(scores, expected, tmp_path):
    checkpoint = BestCheckpoint(tmp_path, "best", monitor="eval/return", mode="max", enable_version_counter=False)
    run = trainer(tmp_path, max_epochs=3, callbacks=[checkpoint], limit_val_batches=1)
    run.fit(Scored(scores), train_dataloaders=[0], val_dataloaders=[0])
    stored = torch.load(checkpoint.best_model_path, weights_only=True)
    assert stored["state_dict"]["weight"] == expected
    assert [path.name for path in tmp_path.iterdir()] == ["best.ckpt"]


def test_monitor_other_than_a_string_is_refused_before_training(tmp_path):
    run = trainer(tmp_path, max_epochs=1, callbacks=[BestCheckpoint(tmp_path, monitor=3)])
    with pytest.raises(ValueError, match=r"monitor=3.*eval/return"):
        run.fit(Scored([1.0]), train_dataloaders=[0], val_dataloaders=[0])


class Telling(Scored):
    evaluation_metrics = ("eval/return", "eval/length")


@pytest.mark.parametrize("monitor", ["eval/retrun", "evl/return"])
def test_misspelt_monitor_is_refused_before_training(monitor, tmp_path):
    module = Telling([1.0])
    run = trainer(tmp_path, max_epochs=1, callbacks=[BestCheckpoint(tmp_path, monitor=monitor)])
    with pytest.raises(ValueError, match=rf"monitor={monitor}.*eval/return"):
        run.fit(module, train_dataloaders=[0], val_dataloaders=[0])
    assert not module.weight


def test_user_metric_is_monitored(tmp_path):
    class Own(Telling):
        def validation_step(self, batch, batch_idx):
            self.log("mine", 1.0, batch_size=1)

    best = BestCheckpoint(tmp_path, "best", monitor="mine", save_on_train_epoch_end=False)
    run = trainer(tmp_path, max_epochs=1, callbacks=[best], limit_val_batches=1)
    run.fit(Own([1.0]), train_dataloaders=[0], val_dataloaders=[0])
    assert best.best_model_score == 1.0


def test_validations_without_episodes_are_skipped(tmp_path):
    class Fitted(Scored):
        def validation_step(self, batch, batch_idx):
            self.log("val/error", 1.0, batch_size=1)

    checkpoint = BestCheckpoint(tmp_path, "best", monitor="eval/return", mode="max", save_on_train_epoch_end=False)
    run = trainer(tmp_path, max_epochs=3, callbacks=[checkpoint], limit_val_batches=1)
    run.fit(Fitted([]), train_dataloaders=[0], val_dataloaders=[0])
    assert checkpoint.best_model_path == ""


@pytest.mark.parametrize(("score", "other", "expected"), [(5.0, True, True), (5.0, False, False), (4.0, True, False)])
def test_ranks_decide_together_about_equal_scores(score, other, expected, tmp_path):
    decisions = []

    def reduce(decision, all=True):
        decisions.append(decision)
        return decision and other

    checkpoint = BestCheckpoint(tmp_path, "best", monitor="eval/return", mode="max")
    checkpoint.best_k_models, checkpoint.kth_best_model_path = {"best": torch.tensor(5.0)}, "best"
    run = SimpleNamespace(strategy=SimpleNamespace(reduce_boolean_decision=reduce))
    assert checkpoint.check_monitor_top_k(run, torch.tensor(score)) is expected
    assert decisions == [False, score == 5.0]  # each rank makes the same number of reductions
