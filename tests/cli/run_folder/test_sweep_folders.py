"""A search by Optuna: its study stays, goes on, and ends what does badly."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import yaml

from cli.commands import TINY
from torchrl_lightning.plotting.trials import read_trials, table

optuna = pytest.importorskip("optuna")
pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
# Optuna 2, which Hydra's sweeper asks for, speaks to SQLAlchemy 1.
pytestmark = pytest.mark.filterwarnings("ignore:Deprecated API features detected")

# Nobody falls within six steps: the return is the limit of time.
SEARCH = ["hparams_search=optuna", "hydra.sweeper.study_name=limits", "data.env.time_limit=range(1,6)"]
SEARCH += ["env=recipe", "data.env.id=CartPole-v1", "callbacks.report.pruner.n_startup_trials=1", *TINY]
STEPS = (256, 512)


def ends(limits: list[int]) -> list[int | None]:
    """Say after how many frames the median rule ends each trial; not where it ends by itself."""
    found: list[int | None] = []
    for number, limit in enumerate(limits):
        reached = [
            [other for other, end in zip(limits[:number], found, strict=True) if (end or STEPS[-1]) >= step]
            for step in STEPS[:-1]
        ]
        bad = [step for step, others in zip(STEPS, reached, strict=False) if others and limit < np.median(others)]
        found.append(bad[0] if bad else None)
    return found


def test_search_continues_with_the_same_command_and_ends_bad_runs_early(run, tmp_path):
    folder = tmp_path / "logs" / "train" / "limits"
    for count, seed in ((3, 1), (1, 2)):
        run("train", *SEARCH, f"hydra.sweeper.n_trials={count}", f"hydra.sweeper.sampler.seed={seed}")
    study = optuna.load_study(study_name="limits", storage=f"sqlite:///{folder / 'study.db'}")
    limits = [trial.params["data.env.time_limit"] for trial in study.trials]
    assert [trial.value for trial in study.trials] == limits
    ended = ends(limits)
    assert None in ended
    assert any(ended)
    for trial, limit, end in zip(study.trials, limits, ended, strict=True):
        reports = {step: float(limit) for step in STEPS if step <= (end or STEPS[-1])}
        assert trial.intermediate_values == reports
        with open(f"{trial.user_attrs['folder']}/csv/metrics.csv", newline="") as file:
            rows = [
                float(row[name]) for row in csv.DictReader(file) if (name := "final/ended_early") in row and row[name]
            ]
        assert rows == ([] if end is None else [end])
    assert yaml.safe_load((folder / "optimization_results.yaml").read_text())["best_value"] == max(limits)
    told = table(read_trials([folder])).splitlines()
    assert told[0].split() == ["data.env.time_limit", "final/return", "ended", "early"]
    assert {tuple(line.split()) for line in told[1:]} == {
        (str(limit), f"{limit:.1f}", "-" if end is None else str(end)) for limit, end in zip(limits, ended, strict=True)
    }
