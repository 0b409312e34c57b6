"""An Optuna search stores its study, continues it in a second command, and ends bad runs early."""

from __future__ import annotations

import contextlib
import csv

import numpy as np
import pytest
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from cli.commands import TINY, unchanged_process
from cli.test_terminated import JOB
from kit.store import only_our_schemas
from torchrl_lightning._core.run_names import register_run_name
from torchrl_lightning._hydra.compat import initialized
from torchrl_lightning._hydra.paths import CONF_DIR
from torchrl_lightning.cli.config.compose import CommandLoader
from torchrl_lightning.plotting.trials import read_trials, table

optuna = pytest.importorskip("optuna")
pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
# Hydra's sweeper requires Optuna 2, which uses deprecated functions of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore:Deprecated API features detected")

# The pole cannot fall within six steps, so the return of an episode is its time limit.
SEARCH = ["hparams_search=optuna", "hydra.sweeper.study_name=limits", "data.env.time_limit=range(1,6)"]
SEARCH += ["env=recipe", "data.env.id=CartPole-v1", "callbacks.report.pruner.n_startup_trials=1", *TINY]
STEPS = (256, 512)


def ends(limits: list[int]) -> list[int | None]:
    """Return the frames after which the median rule ends each trial, or None for a complete trial."""
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


def test_requeued_job_of_a_search_keeps_its_folder(run, tmp_path, monkeypatch):
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "logs" / "train" / "limits"
    run("train", *SEARCH, "hydra.sweeper.n_trials=1", "data.total_frames=128")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    (record,) = folder.glob("*-job_4242/seed_0/*/.hydra/hydra.yaml")
    overrides = OmegaConf.load(record).hydra.overrides
    searched = [line for line in overrides.hydra if line.startswith("hydra.callbacks.search")]
    assert len(searched) == 2
    with only_our_schemas(), unchanged_process(), contextlib.chdir(tmp_path):
        register_run_name()
        with initialized(str(CONF_DIR), "train") as hydra:
            loader = CommandLoader(hydra.config_loader, resumes=True)
            sweep = loader.load_configuration("train", [*SEARCH, "hydra.mode=MULTIRUN"], RunMode.MULTIRUN)
            sweep.hydra.job.config_name = "train"
            config = loader.load_sweep_config(sweep, [*overrides.task, *searched])
            HydraConfig.instance().set_config(config)
            assert tmp_path / config.hydra.sweep.dir / config.hydra.sweep.subdir == record.parents[1]
