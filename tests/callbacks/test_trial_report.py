"""Reports of a run to its search, and the trial that a run claims."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from kit.actor_critic import fit
from torchrl_lightning import TrialReport
from torchrl_lightning._core.errors import UserError

optuna = pytest.importorskip("optuna")
EVALUATED = {"limit_val_batches": 1, "check_val_every_n_epoch": 1}


@pytest.fixture
def study():
    return optuna.create_study(direction="maximize", study_name="mine")


def report(study, trial, folder, **settings):
    return TrialReport(study.study_name, study._storage, trial.number, folder, **settings)


def take(callback):
    callback.setup(SimpleNamespace(is_global_zero=True), None, "fit")


def test_evaluations_are_reported_to_the_trial_of_this_run(study, tmp_path):
    other, mine = study.ask(), study.ask()
    fit(tmp_path, max_epochs=2, callbacks=[report(study, mine, tmp_path)], **EVALUATED)
    trial = study.trials[mine.number]
    assert list(trial.intermediate_values) == [64, 128]
    assert trial.user_attrs == {"folder": str(tmp_path)}
    assert trial.params == {}
    assert trial.state == optuna.trial.TrialState.RUNNING  # the sweeper reports the score later
    assert study.trials[other.number].intermediate_values == {}


def test_trial_of_a_dead_process_with_equal_settings_gets_no_reports(study, tmp_path):
    rate = {"rate": optuna.distributions.UniformDistribution(0.5, 0.5)}
    dead, mine = study.ask(rate), study.ask(rate)
    take(report(study, mine, tmp_path))
    assert study.trials[dead.number].user_attrs == {}
    assert study.trials[mine.number].user_attrs == {"folder": str(tmp_path)}


def test_run_without_a_running_trial_or_a_study_is_refused(study, tmp_path):
    trial = study.ask()
    with pytest.raises(UserError, match="study_name=other"):
        take(TrialReport("other", study._storage, trial.number, tmp_path))
    with pytest.raises(UserError, match=r"^trial must be .*got 7"):
        take(TrialReport("mine", study._storage, 7, tmp_path))
    for state, values in (("FAIL", None), ("COMPLETE", 1.0)):
        trial = study.ask()
        study.tell(trial, values, optuna.trial.TrialState[state])
        with pytest.raises(UserError, match=f"trial={trial.number} .* must be running, got the state {state}"):
            take(report(study, trial, tmp_path))


class Fails(Callback):
    """Mark a trial as failed during the run, as the next start of the search does."""

    def __init__(self, study, trial):
        self.study, self.trial = study, trial

    def on_train_start(self, *_):
        self.study.tell(self.trial.number, state=optuna.trial.TrialState.FAIL)


def test_run_whose_trial_has_ended_meanwhile_ends_with_one_line(study, tmp_path):
    trial = study.ask()
    with pytest.raises(UserError, match=r"trial=0 .* must be running, got the state FAIL"):
        fit(tmp_path, max_epochs=2, callbacks=[Fails(study, trial), report(study, trial, tmp_path)], **EVALUATED)


def test_score_of_nan_is_not_reported(tmp_path, monkeypatch):
    def scores(trainer):
        return {"eval/return": torch.tensor(1.0 if trainer.current_epoch else float("nan"))}

    study = optuna.create_study(storage=f"sqlite:///{tmp_path / 'study.db'}", study_name="mine")
    callback = report(study, study.ask(), tmp_path, pruner=optuna.pruners.MedianPruner())
    monkeypatch.setattr(Trainer, "callback_metrics", property(scores))
    fit(tmp_path, max_epochs=2, callbacks=[callback], **EVALUATED)
    assert study.trials[0].intermediate_values == {128: 1.0}


class Ends(optuna.pruners.BasePruner):
    """A pruner that ends a trial at its second report."""

    def prune(self, study, trial):
        return len(trial.intermediate_values) == 2


def test_run_ends_if_the_pruner_rejects_it(study, tmp_path):
    trial = study.ask()
    _, trainer = fit(tmp_path, max_epochs=5, callbacks=[report(study, trial, tmp_path, pruner=Ends())], **EVALUATED)
    assert trainer.current_epoch == 2
    assert list(study.trials[0].intermediate_values) == [64, 128]


@pytest.mark.parametrize("metrics", [{}, {"eval/return": torch.tensor(2.0)}])
def test_rank_without_the_metric_reduces_as_the_others(metrics, study, tmp_path):
    decisions = []

    def reduce(decision, all):
        decisions.append((decision, all))
        return True  # rank 0 ends the run

    run = SimpleNamespace(
        state=SimpleNamespace(fn=TrainerFn.FITTING),
        sanity_checking=False,
        should_stop=False,
        global_step=7,
        loggers=[],
        callback_metrics=metrics,
        strategy=SimpleNamespace(reduce_boolean_decision=reduce),
    )
    report(study, study.ask(), tmp_path).on_validation_end(run, None)
    assert decisions == [(False, False)]
    assert run.should_stop
