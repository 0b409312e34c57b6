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


def report(study, folder, gamma="0.5", **settings):
    return TrialReport(study.study_name, study._storage, ["+x=1", "~y", f"rate={gamma}"], folder, **settings)


def take(callback):
    callback.setup(SimpleNamespace(is_global_zero=True), None, "fit")


def test_evaluations_are_reported_to_the_trial_of_this_run(study, tmp_path):
    other, mine = ask(study, 0.25), ask(study, 0.5)
    fit(tmp_path, max_epochs=2, callbacks=[report(study, tmp_path)], **EVALUATED)
    trial = study.trials[mine.number]
    assert list(trial.intermediate_values) == [64, 128]
    assert trial.user_attrs["folder"] == str(tmp_path)
    assert trial.user_attrs["trained"]
    assert trial.state == optuna.trial.TrialState.RUNNING  # the sweeper tells the score
    assert study.trials[other.number].intermediate_values == {}


def test_runs_with_equal_settings_claim_separate_trials(study, tmp_path):
    ask(study, 0.5), ask(study, 0.5)
    for name in ("a", "b", "a"):
        take(report(study, tmp_path / name, "5e-1"))
    assert [trial.user_attrs["folder"] for trial in study.trials] == [str(tmp_path / "a"), str(tmp_path / "b")]
    with pytest.raises(UserError, match="study_name=mine"):
        take(report(study, tmp_path / "c"))


def test_run_without_a_trial_or_a_study_is_refused(study, tmp_path):
    ask(study, 0.5)
    with pytest.raises(UserError, match="running trial"):
        take(report(study, tmp_path, "0.25"))
    with pytest.raises(UserError, match="study_name=other"):
        take(TrialReport("other", study._storage, [], tmp_path))


class Ends(optuna.pruners.BasePruner):
    """Ends a trial at its second report."""

    def prune(self, study, trial):
        return len(trial.intermediate_values) == 2


def test_run_ends_if_the_pruner_rejects_it(study, tmp_path):
    ask(study, 0.5)
    _, trainer = fit(tmp_path, max_epochs=5, callbacks=[report(study, tmp_path, pruner=Ends())], **EVALUATED)
    assert trainer.current_epoch == 2
    assert list(study.trials[0].intermediate_values) == [64, 128]
