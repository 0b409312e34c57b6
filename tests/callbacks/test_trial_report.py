"""What a search hears of a run, and which trial a run takes for its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kit.actor_critic import fit
from torchrl_lightning import TrialReport
from torchrl_lightning._core.errors import UserError

optuna = pytest.importorskip("optuna")
EVALUATED = {"limit_val_batches": 1, "check_val_every_n_epoch": 1}


@pytest.fixture
def study():
    return optuna.create_study(direction="maximize", study_name="mine")


def ask(study, rate):
    return study.ask({"rate": optuna.distributions.UniformDistribution(rate, rate)})


def report(study, folder, told="0.5", **settings):
    return TrialReport(study.study_name, study._storage, ["+x=1", "~y", f"rate={told}"], folder, **settings)


def take(callback):
    callback.setup(SimpleNamespace(is_global_zero=True), None, "fit")


def test_each_evaluation_is_reported_to_the_trial_of_this_run(study, tmp_path):
    other, mine = ask(study, 0.25), ask(study, 0.5)
    fit(tmp_path, max_epochs=2, callbacks=[report(study, tmp_path)], **EVALUATED)
    there = study.trials[mine.number]
    assert list(there.intermediate_values) == [64, 128]
    assert there.user_attrs["folder"] == str(tmp_path)
    assert there.user_attrs["trained"]
    assert there.state == optuna.trial.TrialState.RUNNING  # the sweeper tells the score
    assert study.trials[other.number].intermediate_values == {}


def test_runs_of_the_same_settings_take_a_trial_each_and_a_run_that_begins_again_its_own(study, tmp_path):
    ask(study, 0.5), ask(study, 0.5)
    for name in ("a", "b", "a"):
        take(report(study, tmp_path / name, "5e-1"))
    assert [trial.user_attrs["folder"] for trial in study.trials] == [str(tmp_path / "a"), str(tmp_path / "b")]
    with pytest.raises(UserError, match="no running trial of the study mine has the settings of this run"):
        take(report(study, tmp_path / "c"))


def test_run_without_a_trial_or_a_study_is_refused(study, tmp_path):
    ask(study, 0.5)
    with pytest.raises(UserError, match="no running trial"):
        take(report(study, tmp_path, "0.25"))
    with pytest.raises(UserError, match="there is no study other in "):
        take(TrialReport("other", study._storage, [], tmp_path))


class Ends(optuna.pruners.BasePruner):
    """Ends a trial at its second report."""

    def prune(self, study, trial):
        return len(trial.intermediate_values) == 2


def test_run_is_ended_where_the_pruner_says_so(study, tmp_path):
    ask(study, 0.5)
    _, trainer = fit(tmp_path, max_epochs=5, callbacks=[report(study, tmp_path, pruner=Ends())], **EVALUATED)
    assert trainer.current_epoch == 2
    assert list(study.trials[0].intermediate_values) == [64, 128]
