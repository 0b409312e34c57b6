"""A search gives each run its trial, fails running trials of dead processes, and counts failed trials."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from cli.sweeps.fake_tasks import sweep
from kit.forks import Forked, held_by_another
from kit.processes import members, survivors
from torchrl_lightning._core.errors import UserError
from torchrl_lightning.cli.run_folder.folder import locked
from torchrl_lightning.cli.sweeps.search import Search, open_search, this_machine

optuna = pytest.importorskip("optuna")
pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
# Hydra's sweeper requires Optuna 2, which uses deprecated functions of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore:Deprecated API features detected")

COMMAND = ["hparams_search=optuna", "hydra.sweeper.study_name=mine", "model.clip_epsilon=choice(0.1,0.2)"]
RUNNING, FAIL = optuna.trial.TrialState.RUNNING, optuna.trial.TrialState.FAIL
KEY = "torchrl_lightning:search:"


def study_of(folder: Path) -> Any:
    return optuna.load_study(study_name="mine", storage=f"sqlite:///{folder}/logs/train/mine/study.db")


def search(folder: Path, task: Any, *arguments: str, **options: Any) -> tuple[int, list[str]]:
    status, lines = sweep(folder, task, *COMMAND, *arguments, **options)
    return status, [line for line in lines if "A new study created" not in line]


@contextmanager
def opened(folder: Path, **settings: Any) -> Iterator[tuple[Search, Any]]:
    """Open a search without Hydra; yield the search and its study."""
    sweeper = SimpleNamespace(
        storage=f"sqlite:///{folder}/study.db", study_name="mine", n_trials=9, max_failure_rate=1.0, **settings
    )
    callback = {"trial": None, "run": None}
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(folder)}, "callbacks": {"search": callback}}})
    with open_search(sweeper, config) as process:
        yield process, optuna.create_study(storage=sweeper.storage, study_name="mine", load_if_exists=True)


def states(folder: Path) -> list[str]:
    study = optuna.load_study(study_name="mine", storage=f"sqlite:///{folder}/study.db")
    return [trial.state.name for trial in study.trials]


LAUNCHERS = [
    [],
    ["hydra.sweeper.n_jobs=2"],
    ["hydra.sweeper.n_jobs=2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    ["hydra.sweeper.n_jobs=2", "hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"],
]


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda value: " ".join(value))
def test_run_knows_its_trial_by_number(launcher: list[str], tmp_path: Path) -> None:
    def task(cfg: Any) -> float:
        hydra = HydraConfig.get()
        note = {
            "folder": hydra.runtime.output_dir,
            "clip_epsilon": cfg.model.clip_epsilon,
            "tasks": list(hydra.overrides.task),
            "report": cfg.callbacks.report.trial,
        }
        (tmp_path / f"trial-{hydra.callbacks.search.trial}").write_text(json.dumps(note))
        return float(hydra.callbacks.search.trial)

    if "submitit" in " ".join(launcher):
        pytest.importorskip("submitit")
    assert search(tmp_path, task, "hydra.sweeper.n_trials=3", *launcher) == (0, [])
    trials = study_of(tmp_path).trials
    notes = [json.loads((tmp_path / f"trial-{number}").read_text()) for number in range(3)]
    assert [trial.value for trial in trials] == [0.0, 1.0, 2.0]
    assert [trial.params for trial in trials] == [{"model.clip_epsilon": note["clip_epsilon"]} for note in notes]
    assert [note["report"] for note in notes] == [0, 1, 2]
    assert len({note["folder"] for note in notes}) == 3
    assert all(len(note["tasks"]) == 2 for note in notes)  # the setting and the group hparams_search
    assert list((tmp_path / "logs/train/mine/.hydra/searches").iterdir()) == []


def test_run_records_the_settings_that_are_sampled_on_a_logarithmic_scale(tmp_path: Path) -> None:
    records: list[list[str]] = []

    def task(cfg: Any) -> float:
        records.append(list(HydraConfig.get().callbacks.search.logarithmic))
        return 1.0

    spaces = [
        *("model.learning_rate=tag(log,interval(0.001,0.002))", "data.num_epochs=tag(log,int(interval(1,8)))"),
        "model.critic_coeff=interval(0.1,1)",
    ]
    assert search(tmp_path, task, *spaces, "hydra.sweeper.n_trials=1") == (0, [])
    (record,) = records
    assert sorted(record) == ["data.num_epochs", "model.learning_rate"]


def test_name_of_a_folder_is_unique_and_belongs_to_the_job(tmp_path: Path) -> None:
    with mock.patch("torchrl_lightning.cli.sweeps.search.datetime") as clock, opened(tmp_path) as (process, _):
        clock.now.return_value = datetime(2026, 11, 28)
        overrides = [process.overrides(3) for _ in range(50)]
    assert len({run for _, run in overrides}) == 50
    assert {trial for trial, _ in overrides} == {"hydra.callbacks.search.trial=3"}


def failing(*numbers: int) -> Callable[[Any], float]:
    """Return a task that fails for these trials: by NaN, by an exit or by an exception."""

    def task(cfg: Any) -> float:
        number: int = HydraConfig.get().callbacks.search.trial
        if number in numbers:
            if number % 3 == 0:
                return float("nan")
            if number % 3 == 1:
                sys.exit("error: refused.")
            raise UserError("diverged.")
        return 1.0

    return task


@pytest.mark.parametrize(
    ("rate", "failed", "trials", "status", "last"),
    [
        (None, (0, 1, 2), 4, 0, "3 of 4 trials failed."),
        (None, range(4), 4, 1, "error: 4 of 4 trials failed."),
        (0.5, (0, 1), 4, 0, "2 of 4 trials failed."),
        (0.5, (0, 1, 2), 3, 1, "error: 3 of 3 trials failed, more than max_failure_rate=0.5 allows."),
        (0.5, (0, 2, 3), 4, 1, "error: 3 of 4 trials failed, more than max_failure_rate=0.5 allows."),
        (0.0, (1,), 2, 1, "error: 1 of 2 trials failed, more than max_failure_rate=0 allows."),
    ],
)
def test_failed_trials_are_counted_for_the_command(
    rate: float | None, failed: Any, trials: int, status: int, last: str, tmp_path: Path
) -> None:
    arguments = ["hydra.sweeper.n_trials=4"] + ([] if rate is None else [f"hydra.sweeper.max_failure_rate={rate}"])
    code, lines = search(tmp_path, failing(*failed), *arguments)
    stored = [trial.state.name for trial in study_of(tmp_path).trials]
    assert stored == ["FAIL" if number in failed else "COMPLETE" for number in range(trials)]
    assert code == status
    assert lines[-1] == last
    assert len(lines) == sum(number in failed for number in range(trials)) + 1
    assert all(line.startswith("error: in trial ") for line in lines[:-1])


SCORES = [("maximize", None), ("maximize", torch.tensor(math.nan)), ("maximize", [1.0])]
SCORES += [("[maximize,minimize]", 1.0), ("[maximize,minimize]", [1.0, np.float32("nan")])]


@pytest.mark.parametrize(("directions", "score"), SCORES, ids=str)
def test_score_that_the_study_cannot_store_fails_its_trial(directions: str, score: Any, tmp_path: Path) -> None:
    valid: Any = 1.0 if directions == "maximize" else [1.0, 2.0]
    task = lambda cfg: score if HydraConfig.get().callbacks.search.trial == 0 else valid  # noqa: E731
    code, lines = search(tmp_path, task, "hydra.sweeper.n_trials=2", f"hydra.sweeper.direction={directions}")
    assert [trial.state.name for trial in study_of(tmp_path).trials] == ["FAIL", "COMPLETE"]
    assert (code, len(lines), lines[-1]) == (0, 2, "1 of 2 trials failed.")
    assert re.search(r"trial 0 .*(the score of the run must be a number|the run must return \d score)", lines[0])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("n_jobs=0", "hydra.sweeper.n_jobs=0: expected a positive whole number."),
        ("max_failure_rate=1.5", "hydra.sweeper.max_failure_rate=1.5: expected a number from 0 to 1."),
        ("max_failure_rate=nan", "hydra.sweeper.max_failure_rate=nan: expected a number from 0 to 1."),
        ("storage=foo:///study.db", "the search mine cannot continue: .*hydra.sweeper.storage."),
        ("study_name=other", "the search other cannot continue: .*direction.*hydra.sweeper.study_name or .*"),
    ],
)
def test_setting_that_the_search_cannot_use_is_refused_in_one_line(setting: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "logs/train/other").mkdir(parents=True)
    optuna.create_study(study_name="other", storage=f"sqlite:///{tmp_path}/logs/train/other/study.db")  # minimizes
    code, (line,) = search(tmp_path, lambda cfg: 1.0, f"hydra.sweeper.{setting}")
    assert code == 1
    assert re.fullmatch(f"error: {message}", line)


def test_error_of_the_study_after_a_trial_is_one_line(tmp_path: Path) -> None:
    assert search(tmp_path, lambda cfg: 1.0, "hydra.sweeper.n_trials=1") == (0, [])
    with pytest.warns(optuna.exceptions.ExperimentalWarning):
        study_of(tmp_path).enqueue_trial({"model.clip_epsilon": 7.0})
    code, (line,) = search(tmp_path, lambda cfg: 1.0)
    assert (code, line.partition(": V")[0]) == (1, "error: the search mine cannot continue")
    assert [trial.state.name for trial in study_of(tmp_path).trials] == ["COMPLETE", "FAIL"]


def test_every_sampler_of_the_sweeper_can_be_chosen(tmp_path: Path) -> None:
    assert search(tmp_path, lambda cfg: 1.0, "hydra/sweeper/sampler=grid") == (0, [])
    assert {trial.params["model.clip_epsilon"] for trial in study_of(tmp_path).trials} == {0.1, 0.2}


def test_earlier_failures_do_not_count(tmp_path: Path) -> None:
    assert search(tmp_path, failing(0, 1), "hydra.sweeper.n_trials=2")[0] == 1
    code, lines = search(tmp_path, failing(2), "hydra.sweeper.n_trials=2", "hydra.sweeper.max_failure_rate=0.5")
    assert (code, lines[-1]) == (0, "1 of 2 trials failed.")


def test_setting_without_a_valid_config_fails_its_trial(tmp_path: Path) -> None:
    settings = ["model/network=choice(mlp,gru)", "model.network.hidden_size=8", "hydra.sweeper.sampler.seed=1"]
    arguments = ["hparams_search=optuna", "hydra.sweeper.study_name=mine", "hydra.sweeper.n_trials=4", *settings]
    code, lines = sweep(tmp_path, lambda cfg: 1.0, *arguments)
    lines = [line for line in lines if "A new study created" not in line]
    stored = {(trial.state.name, trial.params["model/network"]) for trial in study_of(tmp_path).trials}
    assert stored == {("FAIL", "mlp"), ("COMPLETE", "gru")}
    assert code == 0
    for line in lines[:-1]:
        assert "(model/network=mlp): model.network.hidden_size: unknown setting" in line
    assert lines[-1] == f"{len(lines) - 1} of 4 trials failed."


def test_search_may_have_no_name_and_no_storage(tmp_path: Path) -> None:
    scores = iter([1.0, float("nan")])
    settings = ["hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1", "hydra.sweeper.max_failure_rate=0.5"]
    arguments = ["--multirun", "hydra/sweeper=optuna", *settings, "model.clip_epsilon=choice(0.1,0.2)"]
    code, lines = sweep(tmp_path, lambda cfg: next(scores), *arguments)
    assert code == 0
    assert lines[-1] == "1 of 2 trials failed."


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("launcher", [[], LAUNCHERS[2]], ids=["basic", "joblib"])
def test_signal_ends_the_search_and_its_processes(number: int, launcher: list[str], tmp_path: Path) -> None:
    def task(cfg: Any) -> float:
        (tmp_path / f"began-{HydraConfig.get().callbacks.search.trial}").touch()
        time.sleep(600)
        return 1.0

    def run() -> None:
        status, lines = search(tmp_path, task, *launcher)
        sys.stdout.write("\n".join([*lines, ""]))
        sys.exit(status)

    process = Forked(run, tmp_path, session=True)
    try:
        process.waits_for(lambda: len(list(tmp_path.glob("began-*"))) == (2 if launcher else 1))
        process.send(number)
        status = process.ends()
        assert survivors(process.pid) == []
    finally:
        for pid in members(process.pid):
            os.kill(pid, signal.SIGKILL)
    assert status in (128 + number, -number)
    assert "Traceback" not in process.said
    if status > 0:  # without a trainer, SIGTERM kills a process
        assert {trial.state for trial in study_of(tmp_path).trials} == {FAIL}
    assert search(tmp_path, lambda cfg: 1.0, "hydra.sweeper.n_trials=1")[0] == 0
    assert RUNNING not in {trial.state for trial in study_of(tmp_path).trials}


MOMENTS = ["optuna.trial.Trial.__init__", "optuna.trial.Trial._suggest", "hydra.core.utils.run_job", "task"]
MOMENTS += ["optuna.study.Study.tell", "optuna.storages.RDBStorage.set_study_directions"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_trial_of_a_killed_process_is_failed_at_the_next_start(moment: str, tmp_path: Path) -> None:
    def die(*_: Any, **__: Any) -> float:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0.0

    def run() -> None:
        target = "hydra._internal.core_plugins.basic_launcher.run_job" if moment.endswith("run_job") else moment
        if moment == "task":
            search(tmp_path, die)
        else:
            with mock.patch(target, die):
                search(tmp_path, lambda cfg: 1.0)

    assert Forked(run, tmp_path).ends() == -signal.SIGKILL
    count = 0 if "set_study_directions" in moment else 1
    assert [trial.state for trial in study_of(tmp_path).trials] == [RUNNING] * count
    assert search(tmp_path, lambda cfg: 1.0, "hydra.sweeper.n_trials=1") == (0, [])
    study = study_of(tmp_path)
    assert [trial.state.name for trial in study.trials] == [*["FAIL"] * count, "COMPLETE"]
    assert study.direction.name == "MAXIMIZE"
    assert list((tmp_path / "logs/train/mine/.hydra/searches").iterdir()) == []


def test_trials_of_a_living_process_stay_until_it_ends(tmp_path: Path) -> None:
    def hold() -> None:
        with opened(tmp_path) as (_, study):
            study.ask(), study.ask()
            sys.stdout.write("asked\n")
            time.sleep(600)

    holder = Forked(hold, tmp_path / "holder")
    try:
        holder.waits_for(lambda: "asked" in holder.said)
        for _ in range(2):
            with opened(tmp_path) as (_, study):
                study.tell(study.ask(), 1.0)
        assert states(tmp_path) == ["RUNNING", "RUNNING", "COMPLETE", "COMPLETE"]
    finally:
        holder.kill()
    with opened(tmp_path):
        assert states(tmp_path) == ["FAIL", "FAIL", "COMPLETE", "COMPLETE"]


def test_running_trials_fail_if_the_search_ends_by_an_error(tmp_path: Path) -> None:
    def interrupt() -> None:
        with opened(tmp_path) as (_, study):
            study.ask()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert states(tmp_path) == ["FAIL"]


HERE = this_machine()
ELSEWHERE, NAMESAKE = HERE | {"host": "elsewhere"}, HERE | {"boot": "another"}


@pytest.mark.parametrize(
    ("machine", "lock", "file", "expected"),
    [
        (HERE, "{folder}/.hydra/searches/a.lock", None, "FAIL"),  # the process has removed its file
        (HERE, "{folder}/.hydra/searches/a.lock", "free", "FAIL"),
        (HERE, "{folder}/.hydra/searches/a.lock", "held", "RUNNING"),
        (ELSEWHERE, "{folder}/.hydra/searches/a.lock", "free", "FAIL"),  # a shared folder
        (ELSEWHERE, "{folder}/.hydra/searches/a.lock", "held", "RUNNING"),
        (ELSEWHERE, "/mounted/elsewhere/searches/a.lock", "free", "FAIL"),
        (ELSEWHERE, "/mounted/elsewhere/searches/a.lock", "held", "RUNNING"),
        (ELSEWHERE, "/mounted/elsewhere/searches/a.lock", None, "RUNNING"),  # a folder that is not shared
        (NAMESAKE, "/mounted/elsewhere/searches/a.lock", None, "RUNNING"),
        (None, None, "free", "RUNNING"),  # a trial of another program
    ],
)
def test_running_trial_fails_if_its_process_has_ended(
    machine: dict[str, str] | None, lock: str | None, file: str | None, expected: str, tmp_path: Path
) -> None:
    storage, name = f"sqlite:///{tmp_path}/study.db", Path(".hydra/searches/a.lock")
    study = optuna.create_study(study_name="mine", storage=storage)
    trial = study.ask()
    if machine is not None and lock is not None:
        owner = {**machine, "lock": lock.format(folder=tmp_path)}
        study._storage.set_trial_system_attr(trial._trial_id, f"{KEY}a", owner)
    if file == "held":
        with held_by_another(tmp_path, tmp_path / "holder", name), opened(tmp_path):
            pass
    else:
        if file == "free":
            with locked(tmp_path, name):
                pass
        with opened(tmp_path):
            pass
    assert states(tmp_path) == [expected]


def test_trial_contains_its_process_from_the_moment_of_its_creation(tmp_path: Path) -> None:
    with opened(tmp_path) as (process, study), mock.patch("optuna.trial.Trial.__init__", side_effect=MemoryError):
        with pytest.raises(MemoryError):
            study.ask()
        (trial,) = optuna.load_study(study_name="mine", storage=f"sqlite:///{tmp_path}/study.db").trials
        assert [key.startswith(KEY) for key in trial.system_attrs] == [True]
        assert (trial.params, trial.user_attrs) == ({}, {})
        assert process.last_trials(1) == [0]


def test_enqueued_trial_gets_one_process(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    study = optuna.create_study(study_name="mine", storage=storage)
    with pytest.warns(optuna.exceptions.ExperimentalWarning):
        study.enqueue_trial({"x": 0.5})
    with opened(tmp_path) as (first, first_study), opened(tmp_path) as (second, second_study):
        assert len(first_study.trials) == len(second_study.trials) == 1  # both processes have loaded the waiting trial
        with mock.patch.object(type(second_study._storage), "read_trials_from_remote_storage"):
            trials = [first_study.ask(), second_study.ask()]
        assert [trial.number for trial in trials] == [0, 1]
        assert (first.last_trials(1), second.last_trials(1)) == ([0], [1])
        stored = optuna.load_study(study_name="mine", storage=storage).trials
        owners = [[value for key, value in trial.system_attrs.items() if key.startswith(KEY)] for trial in stored]
        assert [sum(owner is not None for owner in values) for values in owners] == [1, 1]
    assert states(tmp_path) == ["FAIL", "FAIL"]


def test_processes_that_start_together_share_one_study(tmp_path: Path) -> None:
    def run() -> None:
        while not (tmp_path / "go").exists():
            time.sleep(0.001)
        status, lines = search(tmp_path, lambda cfg: 1.0, "hydra.sweeper.n_trials=1")
        sys.stdout.write("\n".join([*lines, ""]))
        sys.exit(status)

    processes = [Forked(run, tmp_path, said=tmp_path / f"said-{number}") for number in range(3)]
    (tmp_path / "go").touch()
    assert [process.ends() for process in processes] == [0, 0, 0], [process.said for process in processes]
    assert [trial.state.name for trial in study_of(tmp_path).trials] == ["COMPLETE"] * 3
